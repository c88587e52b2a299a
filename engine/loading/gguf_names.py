"""How GGUF files of each family name and lay out their tensors.

Names: `gguf.constants` of llama.cpp. Differences from the canonical layout: experts lie stacked in one
tensor, Phi-3's projections fused, and some families' query and key rows interleaved.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from engine.loading.names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ROPE_FACTORS,
    ROPE_LONG_FACTORS,
    ROPE_SHORT_FACTORS,
    layer_prefix,
)
from engine.models.config import ModelConfig

_TOP = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": HEAD,
    "rope_freqs.weight": ROPE_FACTORS,
    "rope_factors_short.weight": ROPE_SHORT_FACTORS,
    "rope_factors_long.weight": ROPE_LONG_FACTORS,
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# The norm in front of gpt-oss' feed-forward layer bears the name of the norm behind others' attention.
_LAYER_GPT_OSS = _LAYER | {"post_attention_norm": "post_attention_layernorm"}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
# Before experts were stacked, each had a tensor of its own: blk.0.ffn_up.3.weight.
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+?)(?:\.(\d+))?\.(weight|bias)")
_INTERLEAVED_FAMILIES = frozenset({"llama", "smollm3", "granite"})


@dataclass(frozen=True, slots=True)
class View:
    """A canonical tensor inside a stored one: whole rows of it, from its `start`-th number on."""

    name: str
    start: int
    shape: tuple[int, ...]


def canonical_views(gguf_name: str, shape: tuple[int, ...], config: ModelConfig) -> list[View]:
    """The canonical tensors that a stored one of that shape holds; empty for one no supported decoder has."""
    if gguf_name in _TOP:
        return [View(_TOP[gguf_name], 0, shape)]
    match = _LAYER_NAME.fullmatch(gguf_name)
    if match is None or not shape:
        return []
    prefix, stem, expert, kind = layer_prefix(int(match[1])), match[2], match[3], match[4]
    if stem == "attn_sinks" and kind == "weight":
        return [View(f"{prefix}self_attn.sinks", 0, shape)]
    if stem in _EXPERTS:
        # Another number than the model says it has could be any: it costs an entry each.
        if len(shape) != (3 if kind == "weight" else 2) or shape[0] != config.num_experts:
            return []
        names = (f"{prefix}mlp.experts.{index}.{_EXPERTS[stem]}.{kind}" for index in range(shape[0]))
        return [View(name, index * math.prod(shape[1:]), shape[1:]) for index, name in enumerate(names)]
    if expert is not None:
        stacked = _EXPERTS.get(f"{stem}_exps")
        return [View(f"{prefix}mlp.experts.{expert}.{stacked}.{kind}", 0, shape)] if stacked else []
    if stem == "attn_qkv":
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return _fused(prefix, kind, shape, {f"self_attn.{n}_proj": q_rows if n == "q" else kv_rows for n in "qkv"})
    if stem == "ffn_up" and shape[0] == 2 * config.intermediate_size:
        return _fused(prefix, kind, shape, dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), config.intermediate_size))
    names_of_layer = _LAYER_GPT_OSS if config.architecture == "gpt-oss" else _LAYER
    return [View(f"{prefix}{names_of_layer[stem]}.{kind}", 0, shape)] if stem in names_of_layer else []


def _fused(prefix: str, kind: str, shape: tuple[int, ...], rows: dict[str, int]) -> list[View]:
    if sum(rows.values()) != shape[0]:
        return []
    views, start = [], 0
    for name, num_rows in rows.items():
        views.append(View(f"{prefix}{name}.{kind}", start, (num_rows, *shape[1:])))
        start += num_rows * math.prod(shape[1:])
    return views


def interleaved_heads(name: str, config: ModelConfig) -> int | None:
    """Number of heads whose rows llama.cpp interleaves in this tensor; None where it leaves them alone."""
    if config.architecture not in _INTERLEAVED_FAMILIES:
        return None
    if ".self_attn.q_proj." in name:
        return config.num_heads
    if ".self_attn.k_proj." in name:
        return config.num_kv_heads
    return None


def deinterleave_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's interleaving of the two halves of each head: [num_heads * head_dim, row_bytes], copied.

    It stores the pair (j, j + head_dim / 2) as neighbours (2j, 2j + 1).
    """
    # In torch all its threads would take part, and wait for each other beside those that pack and read meanwhile.
    return rows.reshape(num_heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
