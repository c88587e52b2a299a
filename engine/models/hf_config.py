"""Reads a decoder's shape from a Hugging Face `config.json`, of transformers 4 or 5.

A row of `_FAMILIES` for each `model_type`: what transformers takes for settings that a file leaves out, and
what the family computes that no setting says (transformers, `models/*/configuration_*.py` and `modeling_*.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.models.config import Activation, ModelConfig, ModelError, UnsupportedModelError, checked_layers
from engine.models.hf_rope import FULL, SLIDING, read_ropes
from engine.models.hf_values import HFValues

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class _Family:
    """`defaults` are settings. `read` gives the fields of ModelConfig that are the family's own.

    `text_config`: the decoder is a part of a model for text and images, its settings a section of that name.
    """

    read: Callable[[HFValues, int], dict[str, Any]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    text_config: bool = False


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration of the decoder in a folder, from its `config.json`.

    Of a model for text and images, that of its decoder for text.
    Raises UnsupportedModelError naming an unknown architecture or variant, ModelError for bad values.
    """
    name = values.get("model_type")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        supported = ", ".join(HF_ARCHITECTURES)
        raise UnsupportedModelError(f"the architecture {name!r} is not supported; supported in folders: {supported}")
    if family.text_config:
        tied = {"tie_word_embeddings": values.get("tie_word_embeddings")}
        values = tied | dict(HFValues(values, {}).section("text_config"))
    return _read(str(name), HFValues(values, {**_COMMON_DEFAULTS, **family.defaults}), family)


def _read(name: str, values: HFValues, family: _Family) -> ModelConfig:
    if values.get("use_bidirectional_attention"):
        raise UnsupportedModelError("attention that sees later tokens (use_bidirectional_attention) is not supported")
    hidden_size = values.integer("hidden_size")
    num_heads = values.integer("num_attention_heads")
    if num_heads < 1:
        raise ModelError(f"config.json: num_attention_heads is {num_heads}; it must be positive")
    num_layers = checked_layers(values.integer("num_hidden_layers"))
    head_dim = values.integer("head_dim", hidden_size // num_heads)
    rope, local_rope = read_ropes(values, head_dim)
    no_kv_heads = values.values.get("num_key_value_heads", num_heads) is None
    fields: dict[str, Any] = {
        "architecture": name,
        "vocab_size": values.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": values.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads if no_kv_heads else values.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "max_context": values.integer("max_position_embeddings"),
        "norm_eps": values.number("rms_norm_eps"),
        "rope": rope,
        "local_rope": local_rope,
        "activation": _activation(values),
        "qkv_bias": values.flag("attention_bias"),
        "attention_output_bias": values.flag("attention_bias"),
        "tie_word_embeddings": values.flag("tie_word_embeddings"),
    }
    if rope.scaling in ("dynamic", "yarn"):  # which exist to go beyond the trained context
        fields["max_context"] = max(fields["max_context"], int(rope.factor * rope.original_max_position))
    return ModelConfig(**(fields | family.read(values, num_layers)))


def _activation(values: HFValues) -> Activation:
    name = values.text("hidden_activation" if values.get("hidden_activation") is not None else "hidden_act")
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"the activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


# ---------------------------------------------------------------- which layers have a window


def _windows(values: HFValues, num_layers: int, is_local: Callable[[int], bool]) -> tuple[int | None, ...]:
    """By layer: `layer_types` where the file has them, else what `is_local` says."""
    window = values.integer("sliding_window", 0)
    types = values.get("layer_types")
    if types is None:
        types = [SLIDING if is_local(layer) else FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(f"config.json: layer_types do not name the types of {num_layers} layers; download it again")
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise UnsupportedModelError(f"layers of the type {kind!r} are not supported")
    if SLIDING not in types:
        return ()
    if not window:
        raise ModelError("config.json: sliding_window is missing, which layer_types ask for; download it again")
    return tuple(window if kind == SLIDING else None for kind in types)


def _same_window(values: HFValues, num_layers: int) -> tuple[int | None, ...]:
    window = values.optional_number("sliding_window")
    return (values.integer("sliding_window"),) * num_layers if window else ()


def _switched_windows(values: HFValues, num_layers: int, is_local: Callable[[int], bool]) -> tuple[int | None, ...]:
    """As `_windows` for the families that have windows only with `use_sliding_window`."""
    if values.flag("use_sliding_window") and values.optional_number("sliding_window"):
        return _windows(values, num_layers, is_local)
    return ()


# ---------------------------------------------------------------- families


def _llama(values: HFValues, num_layers: int) -> dict[str, Any]:
    return {"mlp_bias": values.flag("mlp_bias")}


def _mistral(values: HFValues, num_layers: int) -> dict[str, Any]:
    no_bias = {"qkv_bias": False, "attention_output_bias": False}
    return {"sliding_windows": _same_window(values, num_layers)} | no_bias


def _smollm3(values: HFValues, num_layers: int) -> dict[str, Any]:
    rope_layers = _rope_layers(values, num_layers)
    windows = _switched_windows(values, num_layers, lambda layer: not rope_layers[layer])
    return _llama(values, num_layers) | {"rope_layers": rope_layers, "sliding_windows": windows}


def _rope_layers(values: HFValues, num_layers: int) -> tuple[bool, ...]:
    """One flag for each layer, or every `no_rope_layer_interval`-th has no positions."""
    flags = values.get("no_rope_layers")
    if flags is None:
        interval = values.integer("no_rope_layer_interval")
        if interval < 1:
            raise ModelError(f"config.json: no_rope_layer_interval is {interval}; it must be positive")
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise values.bad("no_rope_layers", flags, f"not 0 or 1 for each of {num_layers} layers")
    return tuple(bool(flag) for flag in flags[:num_layers])


def _qwen2(values: HFValues, num_layers: int) -> dict[str, Any]:
    first_local = values.integer("max_window_layers")
    windows = _switched_windows(values, num_layers, lambda layer: layer >= first_local)
    return {"qkv_bias": True, "attention_output_bias": False, "sliding_windows": windows}


def _qwen3(values: HFValues, num_layers: int) -> dict[str, Any]:
    return {"sliding_windows": _qwen2(values, num_layers)["sliding_windows"], "qk_norm": "per_head"}


def _gemma(values: HFValues, num_layers: int) -> dict[str, Any]:
    scalar = values.number("query_pre_attn_scalar")
    if scalar <= 0:
        raise values.bad("query_pre_attn_scalar", scalar, "not positive")
    return {
        "norm_placement": "before_and_after",
        "norm_weight_offset": 1.0,
        "embedding_scale": max(0, values.integer("hidden_size")) ** 0.5,
        "attention_scale": scalar**-0.5,
        "attention_soft_cap": values.optional_number("attn_logit_softcapping"),
        "logits_soft_cap": values.optional_number("final_logit_softcapping"),
    }


def _gemma2(values: HFValues, num_layers: int) -> dict[str, Any]:
    return _gemma(values, num_layers) | {"sliding_windows": _windows(values, num_layers, lambda layer: layer % 2 == 0)}


def _gemma3(values: HFValues, num_layers: int) -> dict[str, Any]:
    # Transformers 5 writes the pattern down under its private name.
    pattern = values.integer("sliding_window_pattern", values.integer("_sliding_window_pattern", 6))
    if pattern < 1:
        raise ModelError(f"config.json: sliding_window_pattern is {pattern}; it must be positive")
    windows = _windows(values, num_layers, lambda layer: (layer + 1) % pattern != 0)
    return _gemma(values, num_layers) | {"qk_norm": "per_head", "sliding_windows": windows}


def _granite(values: HFValues, num_layers: int) -> dict[str, Any]:
    logits_scaling = values.number("logits_scaling")
    if logits_scaling <= 0:
        raise values.bad("logits_scaling", logits_scaling, "not positive")
    return _llama(values, num_layers) | {
        "embedding_scale": values.number("embedding_multiplier"),
        "residual_scale": values.number("residual_multiplier"),
        "attention_scale": values.number("attention_multiplier"),
        "logits_scale": 1.0 / logits_scaling,
    }


def _olmo2(values: HFValues, num_layers: int) -> dict[str, Any]:
    return {"qk_norm": "full_width", "norm_placement": "after"}


def _experts(values: HFValues, inner_size: str) -> dict[str, Any]:
    # Transformers 4 and 5 differ in the name.
    name = "num_experts" if values.values.get("num_experts") is not None else "num_local_experts"
    if values.integer(name) < 1:
        raise values.bad(name, values.integer(name), "not positive")
    return {
        "num_experts": values.integer(name),
        "num_experts_per_token": values.integer("num_experts_per_tok"),
        "expert_intermediate_size": values.integer(inner_size),
    }


def _mixtral(values: HFValues, num_layers: int) -> dict[str, Any]:
    return _mistral(values, num_layers) | _experts(values, "intermediate_size")


def _qwen3_moe(values: HFValues, num_layers: int) -> dict[str, Any]:
    step = values.integer("decoder_sparse_step")
    dense = set(values.numbers("mlp_only_layers"))
    if step < 1:
        raise ModelError(f"config.json: decoder_sparse_step is {step}; it must be positive")
    windows = _same_window(values, num_layers) if values.flag("use_sliding_window") else ()
    return _experts(values, "moe_intermediate_size") | {
        "qk_norm": "per_head",
        "sliding_windows": windows,
        "expert_layers": tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        "normalize_expert_weights": values.flag("norm_topk_prob"),
    }


def _gpt_oss(values: HFValues, num_layers: int) -> dict[str, Any]:
    return _experts(values, "intermediate_size") | {
        "activation": "clamped_swiglu",
        "swiglu_alpha": values.number("swiglu_alpha"),
        "swiglu_limit": values.number("swiglu_limit"),
        "attention_sinks": True,
        "router_bias": True,
        "expert_bias": True,
        "sliding_windows": _windows(values, num_layers, lambda layer: layer % 2 == 0),
    }


_COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
_WINDOWS_OF_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA3_DEFAULTS = _GEMMA_DEFAULTS | {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}

_FAMILIES = {
    "llama": _Family(_llama),
    "mistral": _Family(
        _mistral, {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "smollm3": _Family(
        _smollm3,
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": _Family(_qwen2, _WINDOWS_OF_QWEN),
    "qwen3": _Family(_qwen3, _WINDOWS_OF_QWEN | {"head_dim": 128}),
    "phi3": _Family(_mistral, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
    "gemma2": _Family(
        _gemma2,
        _GEMMA_DEFAULTS
        | {"max_position_embeddings": 8192, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    ),
    "gemma3_text": _Family(_gemma3, _GEMMA3_DEFAULTS),
    "gemma3": _Family(_gemma3, _GEMMA3_DEFAULTS, text_config=True),
    "granite": _Family(
        _granite,
        dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0),
    ),
    "olmo2": _Family(_olmo2, {"rms_norm_eps": 1e-5}),
    "mixtral": _Family(
        _mixtral,
        {
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe": _Family(
        _qwen3_moe,
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "gpt_oss": _Family(
        _gpt_oss,
        {
            "max_position_embeddings": 131_072,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": _GPT_OSS_ROPE,
            "sliding_window": 128,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    ),
}

HF_ARCHITECTURES = tuple(_FAMILIES)
"""The values of `model_type` that are understood."""
