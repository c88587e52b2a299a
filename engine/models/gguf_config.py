"""Reads a decoder's shape from GGUF metadata.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.config import ModelConfig, ModelError, RopeConfig, UnsupportedModelError, checked_layers

# Every key of the family that is understood. A key beyond these may change what the model computes,
# so a file that has one is refused rather than answered wrongly.
_LLAMA_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "expert_used_count",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "tensor_data_layout",
        "vocab_size",
    }
)


def llama_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelConfig:
    """Llama, and what llama.cpp stores under that name (Mistral, SmolLM ...)."""
    keys = _Keys(metadata, "llama")
    keys.refuse_unknown(_LLAMA_KEYS)
    if keys.integer("expert_count", 0):
        raise UnsupportedModelError("mixture-of-experts models (Mixtral) are not supported yet")
    layout = keys.get("tensor_data_layout", None)
    if layout not in (None, "Meta AI original pth"):
        raise UnsupportedModelError(f"the tensor layout {layout!r} is not supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError("the tensor 'token_embd.weight' is missing; the file is incomplete")
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    if num_heads < 1:
        raise ModelError(f"llama.attention.head_count is {num_heads}; the model's metadata is damaged")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("keys and values of different lengths are not supported")
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError("rotary embedding of a part of each head is not supported in llama files")
    num_layers = checked_layers(keys.integer("block_count"))
    window = keys.integer("attention.sliding_window", 0)
    return ModelConfig(
        architecture="llama",
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_context=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, head_dim),
        sliding_windows=(window,) * num_layers if window else (),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        attention_output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        tie_word_embeddings="output.weight" not in tensors,
    )


def _rope(keys: _Keys, head_dim: int) -> RopeConfig:
    base = keys.number("rope.freq_base", 10000.0)
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 1.0)
    scaling = keys.get("rope.scaling.type", "linear")
    if scaling == "none" or factor == 1.0:
        return RopeConfig(base, head_dim)
    if scaling != "linear":
        raise UnsupportedModelError(f"rope scaling {scaling!r} is not supported yet")
    if factor <= 0:
        raise ModelError(f"llama.rope.scaling.factor is {factor}; the model's metadata is damaged")
    return RopeConfig(base, head_dim, scaling="linear", factor=factor)


class _Keys:
    """The metadata of one family, its prefix left out, with the types checked."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str) -> None:
        self._metadata = metadata
        self._prefix = prefix

    def refuse_unknown(self, known: frozenset[str]) -> None:
        dot = f"{self._prefix}."
        unknown = sorted(key for key in self._metadata if key.startswith(dot) and key.removeprefix(dot) not in known)
        if unknown:
            raise UnsupportedModelError(f"the model has settings that are not understood: {', '.join(unknown[:5])}")

    def get(self, name: str, default: Any) -> Any:
        return self._metadata.get(f"{self._prefix}.{name}", default)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedModelError(f"{self._prefix}.{name} differs from layer to layer, which is not supported")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._bad(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._bad(name, value)
        return float(value)

    def _bad(self, name: str, value: Any) -> ModelError:
        fault = "missing" if value is None else f"{value!r}, not a number"
        return ModelError(f"{self._prefix}.{name} is {fault}; the model's metadata is damaged")
