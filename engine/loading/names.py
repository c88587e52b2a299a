"""Tensor names: the canonical ones and their shapes.

Canonical names are those of Hugging Face's Llama, whatever the family and the file. In each layer:
`input_layernorm` and `post_attention_layernorm` normalise what goes into attention and into the feed-forward
layer, `post_self_attn_layernorm` and `post_mlp_layernorm` what comes out of them; `self_attn.{q,k}_norm`
and `self_attn.sinks` where there are any. A mixture of experts has its router in `mlp.gate` and expert E in
`mlp.experts.E.{gate,up,down}_proj`, each a matrix [out, in] of its own, with a bias where it has one.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
ROPE_FACTORS = "model.rope_frequency_factors"
"""Only in GGUF files: divisors of the rope frequencies [rotary_dim / 2], float32."""
ROPE_SHORT_FACTORS = "model.rope_short_factors"
ROPE_LONG_FACTORS = "model.rope_long_factors"
"""Only in GGUF files, where the configuration reads them: `RopeConfig.short_factors` and `long_factors`."""
OPTIONAL_TENSORS = frozenset({ROPE_FACTORS, ROPE_SHORT_FACTORS, ROPE_LONG_FACTORS})


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape (torch's order) of every tensor the decoder needs."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        shapes |= {f"{prefix}{name}": shape for name, shape in _layer_tensors(config, layer)}
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_tensors(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config.hidden_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.norm_placement != "after":
        yield "input_layernorm.weight", (hidden,)
        yield "post_attention_layernorm.weight", (hidden,)
    if config.norm_placement != "before":
        yield "post_self_attn_layernorm.weight", (hidden,)
        yield "post_mlp_layernorm.weight", (hidden,)
    if config.qk_norm != "none":
        per_head = config.qk_norm == "per_head"
        yield "self_attn.q_norm.weight", (config.head_dim if per_head else q_rows,)
        yield "self_attn.k_norm.weight", (config.head_dim if per_head else kv_rows,)
    if config.attention_sinks:
        yield "self_attn.sinks", (config.num_heads,)
    linears = [
        ("self_attn.q_proj", q_rows, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_rows, config.attention_output_bias),
    ]
    if config.has_experts(layer):
        linears.append(("mlp.gate", config.num_experts, hidden, config.router_bias))
        prefixes = [f"mlp.experts.{expert}." for expert in range(config.num_experts)]
        inner, has_bias = config.expert_intermediate_size, config.expert_bias
    else:
        prefixes, inner, has_bias = ["mlp."], config.intermediate_size, config.mlp_bias
    for prefix in prefixes:
        linears.append((f"{prefix}gate_proj", inner, hidden, has_bias))
        linears.append((f"{prefix}up_proj", inner, hidden, has_bias))
        linears.append((f"{prefix}down_proj", hidden, inner, has_bias))
    for name, rows, columns, has_bias in linears:
        yield f"{name}.weight", (rows, columns)
        if has_bias:
            yield f"{name}.bias", (rows,)
