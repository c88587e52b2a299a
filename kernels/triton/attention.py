"""Paged attention: one ragged kernel for prefill chunks, decode and the verification of drafts.

Kwon et al. 2023 (https://arxiv.org/abs/2309.06180) for the pages, Dao et al. 2023 (FlashAttention-2,
https://arxiv.org/abs/2307.08691) for the running softmax, Shah et al. 2023 (Flash-Decoding) for the split.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.kv import KVLayer
from kernels.metadata import AttentionMetadata
from kernels.triton.launch import compute_capability, launch
from kernels.triton.tuning import AttentionTiles, attention_tiles

SPLIT_KEYS = 512
"""Keys of one split. It is fixed, so that a row's result does not depend on what else is in the batch."""

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sequence_of(block, cu_seqlens_q, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence whose first block of queries is not behind `block`.

    Sequence s owns the blocks from cu_seqlens_q[s] // BLOCK_Q + s on: at least as many as it needs.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def attention_kernel(
    out,
    partial_out,
    partial_max,
    partial_sum,
    q,
    kv,
    kv_scales,
    sinks,
    block_table,
    cu_seqlens_q,
    seq_lens,
    num_seqs,
    scale,
    soft_cap,
    window,
    stride_q_token,
    stride_table,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """Grid (blocks of queries, KV heads, splits). A block's rows are the query heads of a group, token by token."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_PADDED
    query_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    seq = _sequence_of(query_block, cu_seqlens_q, num_seqs, BLOCK_Q)
    first_row = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - first_row
    first_query = (query_block - (first_row // BLOCK_Q + seq)) * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens + seq)
    context_len = seq_len - query_len

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP_PADDED
    heads = kv_head * GROUP + rows % GROUP_PADDED
    is_row = (queries < query_len) & (rows % GROUP_PADDED < GROUP)
    positions = context_len + queries
    dims = tl.arange(0, HEAD_DIM_PADDED)
    is_dim = dims < HEAD_DIM
    tokens = (first_row + queries).to(tl.int64)
    query = tl.load(
        q + tokens[:, None] * stride_q_token + heads[:, None] * HEAD_DIM + dims[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )

    # The keys that any row of this block sees, of those this split looks at.
    end_key = tl.minimum(context_len + tl.minimum(first_query + BLOCK_Q, query_len), seq_len)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(0, context_len + first_query - window + 1)
    if IS_SPLIT:
        if split * SPLIT_KEYS >= end_key:
            return
        first_key = tl.maximum(first_key, split * SPLIT_KEYS)
        end_key = tl.minimum(end_key, (split + 1) * SPLIT_KEYS)
    first_tile = first_key // BLOCK_N
    end_tile = tl.cdiv(end_key, BLOCK_N)

    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SINKS and split == 0:
        # A sink is one more score in the sum, without a value; it belongs to the first split.
        highest = tl.load(sinks + heads, mask=is_row, other=float("-inf")).to(tl.float32) * LOG2E
        total = tl.where(is_row, 1.0, 0.0)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], dtype=tl.float32)

    slot_stride: tl.constexpr = 2 * NUM_KV_HEADS * HEAD_DIM
    for tile in range(first_tile, end_tile):
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_key = keys < end_key
        blocks = tl.load(block_table + seq * stride_table + keys // KV_BLOCK, mask=is_key, other=0)
        slots = blocks.to(tl.int64) * KV_BLOCK + keys % KV_BLOCK
        key_at = kv + slots * slot_stride + kv_head * HEAD_DIM
        key = tl.load(key_at[None, :] + dims[:, None], mask=is_dim[:, None] & is_key[None, :], other=0)
        scores = tl.dot(query, key.to(query.dtype), input_precision="ieee") * scale
        if IS_INT8:
            scale_at = kv_scales + slots * (2 * NUM_KV_HEADS) + kv_head
            scores *= tl.load(scale_at, mask=is_key, other=0.0)[None, :]
        if HAS_SOFT_CAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), which neither end overflows
            scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / soft_cap) * LOG2E) + 1.0))
        scores *= LOG2E
        is_seen = (keys[None, :] <= positions[:, None]) & is_key[None, :]
        if IS_SPLIT:
            is_seen = is_seen & (keys[None, :] >= split * SPLIT_KEYS)
        if HAS_WINDOW:
            is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))

        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen no key yet keeps -inf; subtracting 0 from it leaves weights of 0.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(highest - shift)
        total = total * fade + tl.sum(weights, 1)
        highest = new_highest
        value_at = key_at + NUM_KV_HEADS * HEAD_DIM
        value = tl.load(value_at[:, None] + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0)
        if IS_INT8:
            weights *= tl.load(scale_at + NUM_KV_HEADS, mask=is_key, other=0.0)[None, :]
        accumulator = tl.dot(
            weights.to(query.dtype), value.to(query.dtype), accumulator * fade[:, None], input_precision="ieee"
        )

    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    if IS_SPLIT:
        at = (tokens * num_heads + heads) * num_splits + split
        tl.store(partial_max + at, highest, mask=is_row)
        tl.store(partial_sum + at, total, mask=is_row)
        tl.store(
            partial_out + at[:, None] * HEAD_DIM + dims[None, :], accumulator, mask=is_row[:, None] & is_dim[None, :]
        )
    else:
        attended = accumulator / tl.where(is_row, total, 1.0)[:, None]
        at = (tokens * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out + at, attended.to(out.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])


@triton.jit
def combine_kernel(
    out,
    partial_out,
    partial_max,
    partial_sum,
    row_lens,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):
    """Joins the splits of one head of one token. Grid (tokens, heads); `row_lens` are the keys each token sees."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = token * NUM_HEADS + head
    dims = tl.arange(0, HEAD_DIM_PADDED)
    is_dim = dims < HEAD_DIM
    used = tl.cdiv(tl.load(row_lens + token), SPLIT_KEYS)
    highest = float("-inf")
    total = 0.0
    accumulator = tl.zeros([HEAD_DIM_PADDED], dtype=tl.float32)
    for split in range(used):
        at = row * num_splits + split
        split_highest = tl.load(partial_max + at)
        new_highest = tl.maximum(highest, split_highest)
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        fade = tl.exp2(highest - shift)
        weight = tl.exp2(split_highest - shift)
        part = tl.load(partial_out + at * HEAD_DIM + dims, mask=is_dim, other=0.0)
        accumulator = accumulator * fade + part * weight
        total = total * fade + tl.load(partial_sum + at) * weight
        highest = new_highest
    tl.store(out + row * HEAD_DIM + dims, (accumulator / total).to(out.dtype.element_ty), mask=is_dim)


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
    assert q.stride(1) == head_dim and q.stride(2) == 1, "the heads of a token lie one after another"
    group = num_heads // kv_cache.num_kv_heads
    tiles = attention_tiles(compute_capability(q.device), head_dim, group, metadata.max_query_len)
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    num_splits = -(-metadata.max_seq_len // SPLIT_KEYS) if metadata.max_query_len <= tiles.most_split_queries else 1
    partial_out = partial_max = partial_sum = out
    if num_splits > 1:
        partial_out = torch.empty(num_tokens, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
        partial_max, partial_sum = torch.empty(2, num_tokens, num_heads, num_splits, device=q.device)
    block_q = tiles.block_m // tiles.group_padded
    grid = (num_tokens // block_q + len(metadata.query_lens), kv_cache.num_kv_heads, num_splits)
    launch(
        attention_kernel,
        grid,
        out,
        partial_out,
        partial_max,
        partial_sum,
        q,
        kv_cache.data,
        out if kv_cache.scales is None else kv_cache.scales,
        out if sinks is None else sinks,
        metadata.block_table,
        metadata.cu_seqlens_q,
        metadata.seq_lens,
        len(metadata.query_lens),
        scale,
        soft_cap or 1.0,
        window or 0,
        q.stride(0),
        metadata.block_table.stride(0),
        num_splits,
        NUM_KV_HEADS=kv_cache.num_kv_heads,
        GROUP=group,
        GROUP_PADDED=tiles.group_padded,
        KV_BLOCK=metadata.block_size,
        SPLIT_KEYS=SPLIT_KEYS,
        IS_SPLIT=num_splits > 1,
        HAS_WINDOW=window is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        HAS_SINKS=sinks is not None,
        IS_INT8=kv_cache.scales is not None,
        **_head_and_tiles(head_dim, tiles),
    )
    if num_splits > 1:
        launch(
            combine_kernel,
            (num_tokens, num_heads),
            out,
            partial_out,
            partial_max,
            partial_sum,
            _row_lens(metadata),
            num_splits,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEAD_DIM_PADDED=tiles.head_dim_padded,
            SPLIT_KEYS=SPLIT_KEYS,
            num_warps=2,
        )
    return out


def _head_and_tiles(head_dim: int, tiles: AttentionTiles) -> dict[str, Any]:
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": tiles.head_dim_padded,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _row_lens(metadata: AttentionMetadata) -> torch.Tensor:
    """int32 [num_tokens]: keys each token sees, itself included."""
    key = ("triton", "row_lens")
    if key not in metadata.plans:
        cu, lens = metadata.cu_seqlens_q, metadata.seq_lens
        query_lens = cu[1:] - cu[:-1]
        starts = (lens - query_lens - cu[:-1] + 1).repeat_interleave(query_lens, output_size=metadata.num_tokens)
        metadata.plans[key] = torch.arange(metadata.num_tokens, dtype=torch.int32, device=cu.device) + starts
    return metadata.plans[key]
