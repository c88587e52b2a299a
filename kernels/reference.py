"""Every operation in plain torch: the portable path, and what the fast ones are tested against.

Signatures and docstrings are those of `kernels.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import ggml
from kernels.kv import KVLayer
from kernels.metadata import AttentionMetadata

# Up to this many rows a CPU matmul is bound by reading the weights, and computing it transposed is
# up to three times as fast: the library then shares the weight's rows out among the threads.
_MAX_TRANSPOSED_ROWS = 32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    if residual is not None:
        x = residual.add_(x)
    return F.rms_norm(x, weight.shape, weight, eps)


def rope_and_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: KVLayer,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    num_kv_heads = kv_cache.num_kv_heads
    num_rotated = qkv.shape[1] - num_kv_heads
    num_heads = num_rotated - num_kv_heads
    queries_and_keys = qkv[:, :num_rotated]
    if q_norm is not None and k_norm is not None:
        queries, keys = queries_and_keys.split((num_heads, num_kv_heads), dim=1)
        queries_and_keys = torch.cat((rms_norm(queries, q_norm, eps), rms_norm(keys, k_norm, eps)), dim=1)
    rotated = rotate(queries_and_keys, cos, sin)
    kv_cache.write(slot_mapping, torch.cat((rotated[:, num_heads:], qkv[:, num_rotated:]), dim=1))
    return rotated[:, :num_heads]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first `cos.shape[-1]` dimensions of every head of x [num_tokens, heads, head_dim]."""
    rotary_dim = cos.shape[-1]
    if rotary_dim == 0:
        return x
    first, second, rest = x.split((rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim), dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    rotated = torch.addcmul(x[..., :rotary_dim] * cos.unsqueeze(1), swapped, sin.unsqueeze(1))
    return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)


def paged_attention(
    q: torch.Tensor,
    kv_cache: KVLayer,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.num_kv_heads
    # A query head and the heads that share its keys are neighbours: [KV heads, group, tokens, head_dim].
    grouped = q.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    grouped_out = out.view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    for part in _sequence_parts(metadata, window, q):
        keys, values = kv_cache.read(part.slots, q.dtype).permute(1, 2, 0, 3)
        queries = grouped[:, :, part.first_row : part.end_row]
        if soft_cap is None and sinks is None:
            attended = _attend(queries, keys, values, part.mask, scale)
        else:
            attended = _attend_with_extras(queries, keys, values, part.mask, scale, soft_cap, sinks)
        grouped_out[:, :, part.first_row : part.end_row] = attended
    return out


@dataclass(frozen=True, slots=True)
class _SequencePart:
    """The query rows of one sequence, where the keys they may see lie, and which of those each sees."""

    first_row: int
    end_row: int
    slots: torch.Tensor
    mask: torch.Tensor | None
    """Added to the scores, [rows, keys]; None where every row sees every key."""


def _sequence_parts(metadata: AttentionMetadata, window: int | None, q: torch.Tensor) -> list[_SequencePart]:
    key = ("reference", window)
    if key not in metadata.plans:
        parts = []
        first_row = 0
        offsets = torch.arange(metadata.block_size, device=q.device)
        for table, query_len, seq_len in zip(metadata.block_tables, metadata.query_lens, metadata.seq_lens_list):
            if query_len == 0:
                continue
            start = seq_len - query_len
            # Keys before the window of the first query are seen by none.
            first_key = 0 if window is None else max(0, start - window + 1)
            blocks = torch.tensor(table, device=q.device)
            slots = (blocks[:, None] * metadata.block_size + offsets).flatten()[first_key:seq_len]
            mask = None
            if query_len > 1:
                query_positions = torch.arange(start, seq_len, device=q.device)[:, None]
                key_positions = torch.arange(first_key, seq_len, device=q.device)
                hidden = key_positions > query_positions
                if window is not None:
                    hidden |= key_positions <= query_positions - window
                mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
            parts.append(_SequencePart(first_row, first_row + query_len, slots, mask))
            first_row += query_len
        metadata.plans[key] = parts
    return metadata.plans[key]


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """queries [KV heads, group, rows, head_dim], keys and values [KV heads, keys, head_dim]."""
    if queries.shape[2] == 1:
        # One row for each head: the heads of a group become the rows of one small matmul.
        scores = torch.bmm(queries.squeeze(2), keys.transpose(1, 2)).mul_(scale)
        return torch.bmm(scores.softmax(dim=-1), values).unsqueeze(2)
    shape = (-1, queries.shape[1], -1, -1)
    return F.scaled_dot_product_attention(
        queries, keys.unsqueeze(1).expand(shape), values.unsqueeze(1).expand(shape), attn_mask=mask, scale=scale
    )


def _attend_with_extras(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    scores = torch.matmul(queries, keys.unsqueeze(1).transpose(2, 3)).mul_(scale)
    if soft_cap is not None:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if mask is not None:
        scores += mask
    if sinks is None:
        return torch.matmul(scores.softmax(dim=-1), values.unsqueeze(1))
    sink_scores = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, sink_scores), dim=-1).softmax(dim=-1)
    return torch.matmul(weights[..., :-1], values.unsqueeze(1))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return gate.mul(torch.sigmoid(gate * alpha)).mul_(up.clamp(-limit, limit).add_(1))


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    num_rows = x.shape[0]
    if x.device.type != "cpu" or num_rows > _MAX_TRANSPOSED_ROWS or num_rows == 0:
        return F.linear(x, weight)
    # Powers of two are the sizes the library is fast at: 2 rows cost no more than 1, 16 less than 12.
    padded_rows = max(2, 1 << (num_rows - 1).bit_length())
    if padded_rows != num_rows:
        x = F.pad(x, (0, 0, 0, padded_rows - num_rows))
    return torch.mm(weight, x.t()).t()[:num_rows]


def dequantize(packed: torch.Tensor, tensor_type: str, out: torch.Tensor) -> torch.Tensor:
    return ggml.dequantize(packed, tensor_type, out)


def quantized_linear(x: torch.Tensor, packed: torch.Tensor, tensor_type: str) -> torch.Tensor:
    weight = torch.empty(packed.shape[0], x.shape[-1], dtype=x.dtype, device=x.device)
    return linear(x, dequantize(packed, tensor_type, weight))
