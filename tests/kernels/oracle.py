"""Ragged paged batches, and attention over them one query at a time in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.kv import KVLayer
from kernels.metadata import AttentionMetadata


@dataclass
class PagedBatch:
    """Random sequences scattered over a cache; `keys[s]`, `values[s]` are [seq_len, num_kv_heads, head_dim]."""

    q: torch.Tensor
    kv_cache: KVLayer
    metadata: AttentionMetadata
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def paged_batch(
    query_lens: list[int],
    seq_lens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    seed: int = 0,
) -> PagedBatch:
    """Every block a sequence does not own, and every row past its end, holds NaN: reading one shows."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    kv_cache = torch.full((num_blocks, block_size, 2, num_kv_heads, head_dim), float("nan"))
    tables, keys, values = [], [], []
    for seq_len, count in zip(seq_lens, needed):
        table, order = order[:count], order[count:]
        kv = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=generator)
        for position in range(seq_len):
            kv_cache[table[position // block_size], position % block_size] = kv[:, position]
        tables.append(table)
        keys.append(kv[0])
        values.append(kv[1])
    q = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator)
    metadata = AttentionMetadata.build(tables, query_lens, seq_lens, block_size)
    return PagedBatch(q, KVLayer(kv_cache), metadata, keys, values)


def attention_by_hand(
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = []
    row = 0
    group = batch.q.shape[1] // batch.kv_cache.num_kv_heads
    for keys, values, query_len in zip(batch.keys, batch.values, batch.metadata.query_lens):
        seq_len = keys.shape[0]
        for position in range(seq_len - query_len, seq_len):
            first = 0 if window is None else max(0, position - window + 1)
            seen_keys = keys[first : position + 1].double().repeat_interleave(group, dim=1)
            seen_values = values[first : position + 1].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,khd->hk", batch.q[row].double(), seen_keys) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            weights = scores.exp()
            total = weights.sum(-1) if sinks is None else weights.sum(-1) + sinks.double().exp()
            rows.append(torch.einsum("hk,khd->hd", weights / total[:, None], seen_values))
            row += 1
    return torch.stack(rows).float()
