"""Reads a decoder's shape from GGUF metadata, for the families llama.cpp writes.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What a file leaves unsaid (which layers
have a window, Gemma's scales) is what llama.cpp and its converter take for granted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.models.config import (
    Activation,
    ModelConfig,
    ModelError,
    NormPlacement,
    QKNorm,
    RopeConfig,
    UnsupportedModelError,
    checked_layers,
)

if TYPE_CHECKING:
    from engine.loading.gguf import GGUFFile

# Every key that is understood, of all families and of some. A key beyond these may change what the
# model computes, so a file that has one is refused rather than answered wrongly.
_COMMON_KEYS = frozenset(
    {
        "attention.causal",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "pooling_type",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_log_multiplier",
        "tensor_data_layout",
        "vocab_size",
    }
)
_WINDOW_KEYS = frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"})
_EXPERT_KEYS = frozenset(
    {
        "expert_count",
        "expert_feed_forward_length",
        "expert_gating_func",
        "expert_group_count",
        "expert_group_used_count",
        "expert_shared_count",
        "expert_used_count",
        "expert_weights_norm",
        "expert_weights_scale",
    }
)
_SOFTMAX_GATING = 1
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"


@dataclass(frozen=True, slots=True)
class _Family:
    """What a family computes beyond what its files say, as llama.cpp knows it from the family's name.

    `window_period`: each so manieth layer sees everything, the others through the window; 0 where all have it.
    `default_window`: where the file gives none. `rope_period`: each so manieth layer has no positions.
    `plain_local_rope`: layers with a window are rotated without scaling, and with the base that stands in
    `rope.freq_base_swa`, or else `local_base`, or else the same.
    `wide_head_layers`: models with so many layers scale attention by hidden_size / num_heads instead of head_dim.
    """

    keys: frozenset[str] = frozenset()
    activation: Activation = "silu"
    qk_norm: QKNorm = "none"
    norm_placement: NormPlacement = "before"
    scaled_embedding: bool = False
    partial_rope: bool = True
    yarn_truncate: bool = True
    window_period: int = 0
    default_window: int = 0
    rope_period: int = 0
    plain_local_rope: bool = False
    local_base: float | None = None
    wide_head_layers: int = 0


_FAMILIES = {
    "llama": _Family(_WINDOW_KEYS | _EXPERT_KEYS, partial_rope=False),
    "smollm3": _Family(rope_period=4),
    "qwen2": _Family(),
    "qwen3": _Family(qk_norm="per_head"),
    "qwen3moe": _Family(_EXPERT_KEYS, qk_norm="per_head"),
    "phi3": _Family(_WINDOW_KEYS),
    "gemma2": _Family(
        _WINDOW_KEYS | {"attn_logit_softcapping", "final_logit_softcapping"},
        activation="gelu_tanh",
        norm_placement="before_and_after",
        scaled_embedding=True,
        window_period=2,
        default_window=4096,
        wide_head_layers=46,
    ),
    "gemma3": _Family(
        _WINDOW_KEYS | {"final_logit_softcapping"},
        activation="gelu_tanh",
        qk_norm="per_head",
        norm_placement="before_and_after",
        scaled_embedding=True,
        window_period=6,
        plain_local_rope=True,
        local_base=10000.0,
        wide_head_layers=62,
    ),
    "granite": _Family(frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})),
    "olmo2": _Family(
        _WINDOW_KEYS, qk_norm="full_width", norm_placement="after", window_period=4, plain_local_rope=True
    ),
    "gpt-oss": _Family(_WINDOW_KEYS | _EXPERT_KEYS, activation="clamped_swiglu", window_period=2, yarn_truncate=False),
}

GGUF_ARCHITECTURES = tuple(_FAMILIES)
"""The values of `general.architecture` that are understood."""


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The configuration of the decoder in an open GGUF file.

    Raises UnsupportedModelError naming an unknown architecture or variant, ModelError for bad values.
    """
    name = file.metadata.get("general.architecture")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        supported = ", ".join(GGUF_ARCHITECTURES)
        raise UnsupportedModelError(f"the architecture {name!r} is not supported; supported in GGUF files: {supported}")
    keys = _Keys(file.metadata, str(name))
    keys.refuse_unknown(_COMMON_KEYS | family.keys)
    _refuse_variants(keys)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError("the tensor 'token_embd.weight' is missing; the file is incomplete")
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    for key, value in (("embedding_length", hidden_size), ("attention.head_count", num_heads)):
        if value < 1:
            raise ModelError(f"{keys.prefix}{key} is {value}; the model's metadata is damaged")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("keys and values of different lengths are not supported")
    num_layers = checked_layers(keys.integer("block_count"))
    rope = _rope(keys, file, family, head_dim)
    windows = _windows(keys, family, num_layers)
    return ModelConfig(
        architecture=str(name),
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_context=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        local_rope=_local_rope(keys, family, rope) if windows else None,
        rope_layers=_every_nth_false(family.rope_period, num_layers),
        activation=family.activation,
        qkv_bias="blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=family.qk_norm,
        norm_placement=family.norm_placement,
        attention_scale=_attention_scale(keys, family, num_layers, hidden_size // num_heads),
        attention_soft_cap=keys.optional_number("attn_logit_softcapping"),
        attention_sinks="blk.0.attn_sinks.weight" in file.tensors,
        logits_soft_cap=keys.optional_number("final_logit_softcapping"),
        sliding_windows=windows,
        tie_word_embeddings="output.weight" not in file.tensors,
        embedding_scale=math.sqrt(hidden_size) if family.scaled_embedding else keys.scale("embedding_scale"),
        residual_scale=keys.scale("residual_scale"),
        logits_scale=1 / keys.scale("logit_scale"),
        **_experts(keys, file, num_layers),
    )


def _refuse_variants(keys: _Keys) -> None:
    """Settings of known keys that the decoder does not compute."""
    layout = keys.get("tensor_data_layout", None)
    if layout not in (None, "Meta AI original pth"):
        raise UnsupportedModelError(f"the tensor layout {layout!r} is not supported")
    if keys.get("attention.causal", True) is not True or keys.get("pooling_type", 0) != 0:
        raise UnsupportedModelError("models that compute embeddings or scores instead of text are not supported")
    gating = keys.get("expert_gating_func", _SOFTMAX_GATING)
    if gating != _SOFTMAX_GATING:
        raise UnsupportedModelError(f"{keys.prefix}expert_gating_func {gating!r} is not supported, only softmax is")
    for name, neutral in (
        ("expert_shared_count", (0,)),
        ("expert_group_count", (0, 1)),
        ("expert_group_used_count", (0, 1)),
        ("expert_weights_scale", (0, 1)),
        ("rope.scaling.yarn_ext_factor", (-1, 1)),
    ):
        value = keys.get(name, neutral[-1])
        if value not in neutral:
            raise UnsupportedModelError(f"{keys.prefix}{name} = {value!r} is not supported")


def _windows(keys: _Keys, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    window = keys.integer("attention.sliding_window", family.default_window)
    if not window:
        return ()
    pattern = keys.get("attention.sliding_window_pattern", family.window_period)
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise ModelError(
                f"{keys.prefix}attention.sliding_window_pattern covers {len(pattern)} of {num_layers} layers"
            )
        return tuple(window if item else None for item in pattern)
    if not isinstance(pattern, int) or pattern < 0:
        raise ModelError(
            f"{keys.prefix}attention.sliding_window_pattern is {pattern!r}; the model's metadata is damaged"
        )
    if pattern == 0:
        return (window,) * num_layers
    return tuple(window if layer % pattern < pattern - 1 else None for layer in range(num_layers))


def _every_nth_false(period: int, num_layers: int) -> tuple[bool, ...]:
    return tuple((layer + 1) % period != 0 for layer in range(num_layers)) if period else ()


def _attention_scale(keys: _Keys, family: _Family, num_layers: int, head_width: int) -> float | None:
    if num_layers == family.wide_head_layers and head_width > 0:
        return head_width**-0.5
    # Zero is how llama.cpp spells the usual scale.
    return keys.optional_number("attention.scale") or None


def _experts(keys: _Keys, file: GGUFFile, num_layers: int) -> dict[str, Any]:
    num_experts = keys.integer("expert_count", 0)
    if not num_experts:
        return {}
    layers = tuple(f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in range(num_layers))
    return {
        "num_experts": num_experts,
        "num_experts_per_token": keys.integer("expert_used_count"),
        "expert_intermediate_size": keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length")),
        "expert_layers": () if all(layers) else layers,
        "normalize_expert_weights": bool(keys.get("expert_weights_norm", True)),
        "router_bias": "blk.0.ffn_gate_inp.bias" in file.tensors,
        "expert_bias": "blk.0.ffn_down_exps.bias" in file.tensors,
    }


def _rope(keys: _Keys, file: GGUFFile, family: _Family, head_dim: int) -> RopeConfig:
    base = keys.number("rope.freq_base", 10000.0)
    dim = keys.integer("rope.dimension_count", head_dim)
    if dim != head_dim and not family.partial_rope:
        raise UnsupportedModelError(f"rotary embedding of a part of each head is not supported in {keys.family} files")
    context = keys.integer("context_length")
    original = keys.integer("rope.scaling.original_context_length", context)
    if LONG_FACTORS in file.tensors:
        return RopeConfig(
            base,
            dim,
            scaling="longrope",
            original_max_position=original,
            short_factors=_factors(file, SHORT_FACTORS),
            long_factors=_factors(file, LONG_FACTORS),
            attention_factor=keys.number("rope.scaling.attn_factor", _longrope_attention(context, original)),
        )
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 1.0)
    scaling = keys.get("rope.scaling.type", "linear")
    if scaling == "none" or factor == 1.0:
        return RopeConfig(base, dim)
    if factor <= 0:
        raise ModelError(f"{keys.prefix}rope.scaling.factor is {factor}; the model's metadata is damaged")
    if scaling == "linear":
        return RopeConfig(base, dim, scaling="linear", factor=factor)
    if scaling == "yarn":
        return RopeConfig(
            base,
            dim,
            scaling="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
            truncate=family.yarn_truncate,
            attention_factor=_yarn_attention(keys, factor),
        )
    raise UnsupportedModelError(f"rope scaling {scaling!r} is not supported")


def _local_rope(keys: _Keys, family: _Family, rope: RopeConfig) -> RopeConfig | None:
    """The rotation in layers with a window; None where it is the same as in the others."""
    if not family.plain_local_rope:
        if keys.number("rope.freq_base_swa", rope.base) != rope.base:
            raise UnsupportedModelError(f"{keys.prefix}rope.freq_base_swa is not supported in {keys.family} files")
        return None
    local = RopeConfig(keys.number("rope.freq_base_swa", family.local_base or rope.base), rope.dim)
    return None if local == rope else local


def _yarn_attention(keys: _Keys, factor: float) -> float:
    """What yarn multiplies cosine and sine by (Peng et al. 2023, https://arxiv.org/abs/2309.00071, 3.4)."""
    given = keys.optional_number("rope.scaling.yarn_attn_factor")
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    usual = _log_scale(factor, 1.0) / (_log_scale(factor, multiplier) or math.nan)  # which the configuration refuses
    return (usual if given is None else given) * keys.number("rope.scaling.attn_factor", 1.0)


def _log_scale(factor: float, multiplier: float) -> float:
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope_attention(context: int, original: int) -> float:
    if context <= original or original <= 1:
        return 1.0
    return math.sqrt(1 + math.log(context / original) / math.log(original))


def _factors(file: GGUFFile, name: str) -> tuple[float, ...]:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise ModelError(f"the tensor {name!r} is missing; the file is incomplete")
    if tensor.type != "F32" or len(tensor.shape) != 1:
        raise ModelError(f"the tensor {name!r} is {tensor.type} of shape {list(tensor.shape)}, not a list of floats")
    return tuple(file.read(name).view("<f4").tolist())


class _Keys:
    """The metadata of one family, its prefix left out, with the types checked."""

    def __init__(self, metadata: Mapping[str, Any], family: str) -> None:
        self._metadata = metadata
        self.family = family
        self.prefix = f"{family}."

    def refuse_unknown(self, known: frozenset[str]) -> None:
        ours = (key.removeprefix(self.prefix) for key in self._metadata if key.startswith(self.prefix))
        unknown = [self.prefix + key for key in sorted(ours) if key not in known]
        if unknown:
            raise UnsupportedModelError(f"the model has settings that are not understood: {', '.join(unknown[:5])}")

    def get(self, name: str, default: Any) -> Any:
        return self._metadata.get(self.prefix + name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedModelError(f"{self.prefix}{name} differs from layer to layer, which is not supported")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._bad(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._bad(name, value)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name, None) is None else self.number(name)

    def scale(self, name: str) -> float:
        """A multiplier, 1 where the file has none."""
        value = self.number(name, 1.0)
        if not math.isfinite(value) or value == 0:
            raise ModelError(f"{self.prefix}{name} is {value}; the model's metadata is damaged")
        return value

    def _bad(self, name: str, value: Any) -> ModelError:
        fault = "missing" if value is None else f"{value!r}, not a number"
        return ModelError(f"{self.prefix}{name} is {fault}; the model's metadata is damaged")
