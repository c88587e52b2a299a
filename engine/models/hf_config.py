"""Reads a decoder's shape from a Hugging Face `config.json`, of transformers 4 or 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.config import ModelConfig, ModelError, RopeConfig, UnsupportedModelError, checked_layers


def llama_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Llama and Mistral: the same decoder, the latter with an optional window.

    Defaults are those of `transformers.LlamaConfig`.
    """
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(f"weights quantised as {method!r} are not supported yet")
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"the activation {activation!r} is not supported for this architecture")
    hidden_size = _integer(values, "hidden_size")
    num_heads = _integer(values, "num_attention_heads")
    if num_heads < 1:
        raise ModelError(f"config.json: num_attention_heads is {num_heads}; it must be positive")
    num_layers = checked_layers(_integer(values, "num_hidden_layers"))
    head_dim = _integer(values, "head_dim", hidden_size // num_heads)
    window = _integer(values, "sliding_window", 0)
    attention_bias = bool(values.get("attention_bias", False))
    return ModelConfig(
        architecture=str(values["model_type"]),
        vocab_size=_integer(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(values, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_integer(values, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_context=_integer(values, "max_position_embeddings", 2048),
        norm_eps=_number(values, "rms_norm_eps", 1e-6),
        rope=_rope(values, head_dim),
        sliding_windows=(window,) * num_layers if window else (),
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=bool(values.get("mlp_bias", False)),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
    )


def _rope(values: Mapping[str, Any], head_dim: int) -> RopeConfig:
    # transformers 5 keeps everything in rope_parameters; 4 had rope_theta beside rope_scaling.
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    base = _number(parameters, "rope_theta", _number(values, "rope_theta", 10000.0))
    partial = _number(parameters, "partial_rotary_factor", _number(values, "partial_rotary_factor", 1.0))
    dim = int(head_dim * partial)
    scaling = parameters.get("rope_type", parameters.get("type", "default"))
    if scaling == "default":
        return RopeConfig(base, dim)
    if scaling == "linear":
        return RopeConfig(base, dim, scaling="linear", factor=_number(parameters, "factor"))
    if scaling == "llama3":
        return RopeConfig(
            base,
            dim,
            scaling="llama3",
            factor=_number(parameters, "factor"),
            original_max_position=_integer(parameters, "original_max_position_embeddings"),
            low_freq_factor=_number(parameters, "low_freq_factor"),
            high_freq_factor=_number(parameters, "high_freq_factor"),
        )
    raise UnsupportedModelError(f"rope scaling {scaling!r} is not supported yet")


def _integer(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise _bad(name, value)
    return value


def _number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _bad(name, value)
    return float(value)


def _bad(name: str, value: Any) -> ModelError:
    fault = "missing" if value is None else f"{value!r}, not a number"
    return ModelError(f"config.json: {name} is {fault}; download it again")
