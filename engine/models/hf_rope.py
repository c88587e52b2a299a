"""Reads rotary embedding from a Hugging Face `config.json`.

Transformers 5 keeps everything in `rope_parameters`, once or once for each type of layer; 4 had `rope_theta`
beside `rope_scaling`, which still wins where a file has both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.models.config import ModelError, RopeConfig, UnsupportedModelError
from engine.models.hf_values import HFValues

FULL, SLIDING = "full_attention", "sliding_attention"


def read_ropes(values: HFValues, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Rope of all layers, and of those with a window where it is another one.

    Raises UnsupportedModelError naming an unknown kind, ModelError for bad values.
    """
    parameters = values.section("rope_scaling") or values.section("rope_parameters")
    local_base = values.optional_number("rope_local_base_freq")
    if FULL in parameters or SLIDING in parameters:
        by_type = HFValues(parameters, {}, "rope_parameters.")
        rope = _rope(values, by_type.section(FULL), values.number("rope_theta"), head_dim)
        base = values.number("rope_theta") if local_base is None else local_base
        local = _rope(values, by_type.section(SLIDING), base, head_dim)
    else:
        rope = _rope(values, parameters, values.number("rope_theta"), head_dim)
        local = rope if local_base is None else _rope(values, {}, local_base, head_dim)
    return rope, None if local == rope else local


def _rope(values: HFValues, section: Mapping[str, Any], base: float, head_dim: int) -> RopeConfig:
    parameters = HFValues(section, {"rope_type": section.get("type") or "default"}, "rope_parameters.")
    base = parameters.number("rope_theta", base)
    partial = parameters.number("partial_rotary_factor", values.number("partial_rotary_factor", 1.0))
    dim = int(head_dim * partial)
    scaling = parameters.text("rope_type")
    if scaling in ("su", "yarn") and "long_factor" in section:
        scaling = "longrope"  # by which names Phi-3's first files call it
    if scaling == "default":
        return RopeConfig(base, dim)
    if scaling == "linear":
        return RopeConfig(base, dim, "linear", parameters.number("factor"))
    context = values.integer("max_position_embeddings")
    if scaling == "dynamic":
        return RopeConfig(base, dim, "dynamic", parameters.number("factor"), context)
    original = parameters.integer("original_max_position_embeddings", context)
    original = values.integer("original_max_position_embeddings", original)
    if original < 2:
        raise ModelError(f"config.json: original_max_position_embeddings is {original}; download it again")
    factor = parameters.optional_number("factor")
    if scaling == "llama3":
        return RopeConfig(
            base,
            dim,
            "llama3",
            parameters.number("factor"),
            original,
            low_freq_factor=parameters.number("low_freq_factor"),
            high_freq_factor=parameters.number("high_freq_factor"),
        )
    if scaling == "yarn":
        factor = context / original if factor is None else factor
        return RopeConfig(
            base,
            dim,
            "yarn",
            factor,
            original,
            beta_fast=parameters.optional_number("beta_fast") or 32.0,
            beta_slow=parameters.optional_number("beta_slow") or 1.0,
            truncate=section.get("truncate") is not False,
            attention_factor=_yarn_attention(parameters, factor),
        )
    if scaling == "longrope":
        factor = context / original if factor is None else factor
        attention = parameters.optional_number("attention_factor")
        if attention is None:
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return RopeConfig(
            base,
            dim,
            "longrope",
            factor,
            original,
            short_factors=parameters.numbers("short_factor"),
            long_factors=parameters.numbers("long_factor"),
            attention_factor=attention,
        )
    raise UnsupportedModelError(f"rope scaling {scaling!r} is not supported")


def _yarn_attention(parameters: HFValues, factor: float) -> float:
    """What cosine and sine are multiplied by: 0.1 ln(factor) + 1, or what the file says instead."""
    given = parameters.optional_number("attention_factor")
    if given is not None:
        return given
    multiplier = parameters.optional_number("mscale")
    divisor = parameters.optional_number("mscale_all_dim")

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if multiplier and divisor:
        return magnitude(multiplier) / (magnitude(divisor) or math.nan)  # which the configuration refuses
    return magnitude(1.0)
