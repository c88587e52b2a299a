"""What a step takes besides weights and cache, as arithmetic: activations, scratch, captured graphs. In bytes."""

from __future__ import annotations

from engine.memory.shape import ModelShape

# Rows of logits that the native decoder computes at once.
_NATIVE_HEAD_ROWS = 32
# Device memory of one kernel in a captured CUDA graph, and kernels that a layer launches: usual figures, not measured
# here, rather too high than too low.
_GRAPH_NODE_BYTES = 32 << 10
_KERNELS_IN_LAYER = 12


def workspace_bytes(shape: ModelShape, max_batched_tokens: int, num_rows: int, itemsize: int = 4) -> int:
    """Activations of one step: residual, norm, q/k/v, attention output and both MLP halves for each token in numbers
    of `itemsize` bytes, and logits, probabilities and a sorted copy in float32 for each row that is sampled."""
    return itemsize * max_batched_tokens * _numbers_per_token(shape) + 3 * 4 * num_rows * shape.vocab_size


def graph_bytes(shape: ModelShape, num_rows: int, num_graphs: int, itemsize: int = 2) -> int:
    """An allowance for captured CUDA graphs, made before there are any: they share one pool for the activations and
    logits of the largest, of `num_rows` tokens, and each keeps what its kernels are launched with."""
    pool = num_rows * (itemsize * _numbers_per_token(shape) + (itemsize + 4) * shape.vocab_size)
    return pool + num_graphs * shape.num_layers * _KERNELS_IN_LAYER * _GRAPH_NODE_BYTES


def _numbers_per_token(shape: ModelShape) -> int:
    attention = 2 * max(shape.kv_heads, default=0) * (shape.key_dim + shape.value_dim)
    return 4 * shape.hidden_size + attention + 3 * shape.intermediate_size


def native_workspace_bytes(shape: ModelShape, max_batched_tokens: int, four_bit: bool, eight_bit: bool) -> int:
    """Buffers of the native decoder: residual, q/k/v, attention output and MLP in float32 and once more as inputs of
    matrix products, for each token; logits for a few rows.

    Inputs of plain matrices stay float32; of `eight_bit` ones they have 16 bits, of `four_bit` ones 8 or 16, and a
    scale and a sum for each 32.
    """
    kv_heads = max(shape.kv_heads, default=0)
    attended = shape.num_heads * shape.value_dim
    qkv = (shape.num_heads + kv_heads) * shape.key_dim + kv_heads * shape.value_dim
    floats = 4 * (shape.hidden_size + qkv + attended + shape.intermediate_size)
    widths = shape.hidden_size + (0 if attended == shape.hidden_size else attended) + shape.intermediate_size
    inputs = 2.25 * widths if four_bit or eight_bit else 4 * widths
    if four_bit:
        inputs += 1.25 * shape.hidden_size
    if shape.has_norms_after:
        floats += 4 * shape.hidden_size
    if shape.experts_per_token:  # the router's input twice, and a row in and one out for each expert's share
        a_share = 4 + (2.25 if four_bit or eight_bit else 4)
        floats += int(shape.hidden_size * (2 * 4 + shape.experts_per_token * a_share))
    head = _NATIVE_HEAD_ROWS * 4 * (2 * shape.hidden_size + shape.vocab_size)
    return int(max_batched_tokens * (floats + inputs)) + head
