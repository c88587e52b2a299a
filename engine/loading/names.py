"""Tensor names: canonical ones (as Hugging Face writes them), their shapes, and how GGUF spells them."""

from __future__ import annotations

import re

import torch

from engine.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
ROPE_FACTORS = "model.rope_frequency_factors"
"""Only in GGUF files: divisors of the rope frequencies [rotary_dim / 2], float32."""

_GGUF_TOP = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": HEAD,
    "rope_freqs.weight": ROPE_FACTORS,
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def canonical_name(gguf_name: str) -> str | None:
    """The canonical spelling of a GGUF tensor name; None for a tensor no supported decoder has."""
    if gguf_name in _GGUF_TOP:
        return _GGUF_TOP[gguf_name]
    match = _GGUF_LAYER_NAME.fullmatch(gguf_name)
    if match is None or match[2] not in _GGUF_LAYER:
        return None
    return f"{layer_prefix(int(match[1]))}{_GGUF_LAYER[match[2]]}.{match[3]}"


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape (torch's order) of every tensor the decoder needs."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears: list[tuple[str, int, int, bool]] = [
        ("self_attn.q_proj", q_rows, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_rows, config.attention_output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ]
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns, has_bias in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def permuted_heads(name: str, config: ModelConfig) -> int | None:
    """Number of heads whose rows llama.cpp interleaves in this tensor; None where it leaves them alone."""
    if ".self_attn.q_proj." in name:
        return config.num_heads
    if ".self_attn.k_proj." in name:
        return config.num_kv_heads
    return None


def unpermute_rows(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes llama.cpp's interleaving of the two halves of each head: [num_heads * head_dim, ...].

    It stores the pair (j, j + head_dim / 2) as neighbours (2j, 2j + 1).
    """
    return rows.view(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
