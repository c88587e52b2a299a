"""Paged attention: one ragged kernel for prefill chunks, decode and the verification of drafts.

Kwon et al. 2023 (https://arxiv.org/abs/2309.06180) for the pages, Dao et al. 2023 (FlashAttention-2,
https://arxiv.org/abs/2307.08691) for the running softmax, Shah et al. 2023 (Flash-Decoding) for the split.

Tiles and splits of a sequence follow from its own lengths alone: sequences that compute one token, a few, and many
are launches of their own. So a row's result does not depend on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.kv import KVLayer
from kernels.metadata import AttentionMetadata
from kernels.triton.launch import compute_capability, launch
from kernels.triton.tuning import AttentionTiles, attention_tiles, padded

MOST_SHORT_QUERIES = 16
"""Sequences that compute more tokens reuse each key often enough to be whole; the keys of others are split."""
LEAST_SPLIT_KEYS = 256
MOST_SPLITS = 32
"""Of a sequence and each of four KV heads; fewer heads have more splits, so that as many programs share the work."""
COMBINED_AT_ONCE = 32

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
def _splits_of(
    seq_len,
    query_len,
    window,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST_SPLIT_KEYS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """The first key that a sequence's queries see, and how many keys belong to each of its splits, in whole tiles."""
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(0, seq_len - query_len - window + 1) // BLOCK_N * BLOCK_N
    split_keys = tl.cdiv(tl.cdiv(seq_len - first_key, MOST_SPLITS), BLOCK_N) * BLOCK_N
    return first_key, tl.maximum(split_keys, LEAST_SPLIT_KEYS)


@triton.jit
def _attend_tile(
    query,
    highest,
    total,
    accumulator,
    tile,
    end_key,
    positions,
    dims,
    is_dim,
    kv_head,
    kv,
    kv_scales,
    table,
    scale,
    soft_cap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """The running softmax of a block's rows, one tile of keys further. Without a mask, all rows see all of them."""
    slot_stride: tl.constexpr = 2 * NUM_KV_HEADS * HEAD_DIM
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_key = keys < end_key if IS_MASKED else tl.full([BLOCK_N], True, tl.int1)
    blocks = tl.load(table + keys // KV_BLOCK, mask=is_key, other=0)
    slots = blocks.to(tl.int64) * KV_BLOCK + keys % KV_BLOCK
    key_at = kv + slots * slot_stride + kv_head * HEAD_DIM
    key = tl.load(key_at[None, :] + dims[:, None], mask=is_dim[:, None] & is_key[None, :], other=0)
    # Scores are powers of two, not of e.
    scores = tl.dot(query, key.to(query.dtype), input_precision="ieee")
    scale_at = kv_scales + slots * (2 * NUM_KV_HEADS) + kv_head
    if IS_INT8:
        scores *= tl.load(scale_at, mask=is_key, other=0.0)[None, :]
    if HAS_SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which neither end overflows
        scores = soft_cap * LOG2E * (1.0 - 2.0 / (tl.exp2(scores * (scale * 2.0 / soft_cap * LOG2E)) + 1.0))
    else:
        scores *= scale * LOG2E
    if IS_MASKED:
        is_seen = (keys[None, :] <= positions[:, None]) & is_key[None, :]
        if HAS_WINDOW:
            is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))

    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # A row that has seen no key yet keeps -inf; subtracting 0 from it leaves weights of 0.
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(highest - shift)
    total = total * fade + tl.sum(weights, 1)
    value_at = key_at + NUM_KV_HEADS * HEAD_DIM
    value = tl.load(value_at[:, None] + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0)
    if IS_INT8:
        weights *= tl.load(scale_at + NUM_KV_HEADS, mask=is_key, other=0.0)[None, :]
    accumulator = tl.dot(
        weights.to(query.dtype), value.to(query.dtype), accumulator * fade[:, None], input_precision="ieee"
    )
    return new_highest, total, accumulator


# Numbers of a batch are not specialised: a kernel would be compiled anew in the midst of answers.
@triton.jit(do_not_specialize=["num_seqs", "num_splits", "most_queries", "blocks_each"])
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
    most_queries,
    blocks_each,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST_QUERIES: tl.constexpr,
    LEAST_SPLIT_KEYS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    IS_LONG: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """Grid (blocks of queries, KV heads, splits). A block's rows are the query heads of a group, token by token.

    It computes the sequences of LEAST_QUERIES to most_queries tokens, which have `blocks_each` blocks; those that
    are long have as many as they need, and no splits.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_PADDED
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if IS_LONG:
        # The last blocks see the most keys: they start first.
        query_block = tl.num_programs(0) - 1 - tl.program_id(0)
        seq = _sequence_of(query_block, cu_seqlens_q, num_seqs, BLOCK_Q)
        first_row = tl.load(cu_seqlens_q + seq)
        first_query = (query_block - (first_row // BLOCK_Q + seq)) * BLOCK_Q
    else:
        seq = tl.program_id(0) // blocks_each
        first_row = tl.load(cu_seqlens_q + seq)
        first_query = tl.program_id(0) % blocks_each * BLOCK_Q
    query_len = tl.load(cu_seqlens_q + seq + 1) - first_row
    if (first_query >= query_len) | (query_len < LEAST_QUERIES) | (query_len > most_queries):
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
    end_key = context_len + tl.minimum(first_query + BLOCK_Q, query_len)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(0, context_len + first_query - window + 1)
    if IS_SPLIT:
        of_splits, split_keys = _splits_of(  # pyright: ignore[reportGeneralTypeIssues]
            seq_len, query_len, window, HAS_WINDOW, BLOCK_N, LEAST_SPLIT_KEYS, MOST_SPLITS
        )
        of_splits += split * split_keys
        if of_splits >= end_key:
            return
        first_key = tl.maximum(first_key, of_splits)
        end_key = tl.minimum(end_key, of_splits + split_keys)
    tile = first_key // BLOCK_N
    end_tile = tl.cdiv(end_key, BLOCK_N)

    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SINKS and split == 0:
        # A sink is one more score in the sum, without a value; it belongs to the first split.
        highest = tl.load(sinks + heads, mask=is_row, other=float("-inf")).to(tl.float32) * LOG2E
        total = tl.where(is_row, 1.0, 0.0)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], dtype=tl.float32)

    table = block_table + seq * stride_table
    if IS_LONG and not HAS_WINDOW:
        # Tiles before the first query are seen whole by every row.
        for whole_tile in range(tile, (context_len + first_query + 1) // BLOCK_N):
            highest, total, accumulator = _attend_tile(
                query, highest, total, accumulator, whole_tile, end_key, positions, dims, is_dim, kv_head, kv,
                kv_scales, table, scale, soft_cap, window, NUM_KV_HEADS, HEAD_DIM, KV_BLOCK, BLOCK_N, False,
                HAS_WINDOW, HAS_SOFT_CAP, IS_INT8,
            )  # fmt: skip
        tile = (context_len + first_query + 1) // BLOCK_N
    for masked_tile in range(tile, end_tile):
        highest, total, accumulator = _attend_tile(
            query, highest, total, accumulator, masked_tile, end_key, positions, dims, is_dim, kv_head, kv,
            kv_scales, table, scale, soft_cap, window, NUM_KV_HEADS, HEAD_DIM, KV_BLOCK, BLOCK_N, True,
            HAS_WINDOW, HAS_SOFT_CAP, IS_INT8,
        )  # fmt: skip

    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    if IS_SPLIT:
        at = ((seq * most_queries + queries).to(tl.int64) * num_heads + heads) * num_splits + split
        tl.store(partial_max + at, highest, mask=is_row)
        tl.store(partial_sum + at, total, mask=is_row)
        tl.store(
            partial_out + at[:, None] * HEAD_DIM + dims[None, :], accumulator, mask=is_row[:, None] & is_dim[None, :]
        )
    else:
        # A row that pads a captured step may have no key at all.
        attended = accumulator / tl.where(total > 0.0, total, 1.0)[:, None]
        at = (tokens * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out + at, attended.to(out.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["num_splits", "most_queries"])
def combine_kernel(
    out,
    partial_out,
    partial_max,
    partial_sum,
    cu_seqlens_q,
    seq_lens,
    window,
    num_splits,
    most_queries,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST_QUERIES: tl.constexpr,
    LEAST_SPLIT_KEYS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Joins the splits of one head of one token. Grid (sequences * most_queries, heads)."""
    seq = tl.program_id(0) // most_queries
    query = tl.program_id(0) % most_queries
    head = tl.program_id(1)
    first_row = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - first_row
    if (query >= query_len) | (query_len < LEAST_QUERIES) | (query_len > most_queries):
        return
    seq_len = tl.load(seq_lens + seq)
    first_key, split_keys = _splits_of(  # pyright: ignore[reportGeneralTypeIssues]
        seq_len, query_len, window, HAS_WINDOW, BLOCK_N, LEAST_SPLIT_KEYS, MOST_SPLITS
    )
    used = tl.cdiv(seq_len - query_len + query + 1 - first_key, split_keys)
    first = (tl.program_id(0).to(tl.int64) * NUM_HEADS + head) * num_splits

    splits = tl.arange(0, MOST_SPLITS)
    maxima = tl.load(partial_max + first + splits, mask=splits < used, other=float("-inf"))
    highest = tl.max(maxima, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    sums = tl.load(partial_sum + first + splits, mask=splits < used, other=0.0)
    total = tl.sum(tl.exp2(maxima - shift) * sums, 0)

    dims = tl.arange(0, HEAD_DIM_PADDED)
    is_dim = dims < HEAD_DIM
    accumulator = tl.zeros([HEAD_DIM_PADDED], dtype=tl.float32)
    for start in range(0, used, AT_ONCE):
        chosen = start + tl.arange(0, AT_ONCE)
        weights = tl.exp2(tl.load(partial_max + first + chosen, mask=chosen < used, other=float("-inf")) - shift)
        parts = tl.load(
            partial_out + (first + chosen)[:, None] * HEAD_DIM + dims[None, :],
            mask=(chosen < used)[:, None] & is_dim[None, :],
            other=0.0,
        )
        accumulator += tl.sum(parts * weights[:, None], 0)
    attended = accumulator / tl.where(total > 0.0, total, 1.0)
    at = ((first_row + query).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(out + at, attended.to(out.dtype.element_ty), mask=is_dim)


@dataclass(frozen=True, slots=True)
class _Share:
    """The sequences of a batch that compute `least_queries` to `most_queries` tokens each."""

    least_queries: int
    most_queries: int

    @property
    def is_long(self) -> bool:
        return self.least_queries > MOST_SHORT_QUERIES


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
    assert kv_cache.data.is_contiguous()
    group = num_heads // kv_cache.num_kv_heads
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    capability, is_int8 = compute_capability(q.device), kv_cache.scales is not None
    for share in _shares(metadata):
        tiles = attention_tiles(capability, head_dim, group, share.least_queries, is_int8)
        _attend_share(out, q, kv_cache, metadata, scale, window, soft_cap, sinks, share, tiles)
    return out


def _shares(metadata: AttentionMetadata) -> list[_Share]:
    key = ("triton", "shares")
    if key not in metadata.plans:
        longest = metadata.max_query_len
        # A captured step has sequences of any length up to its bound.
        lengths = range(1, longest + 1) if metadata.query_len_bound else metadata.query_lens
        shares = []
        for least, most in ((1, 1), (2, MOST_SHORT_QUERIES), (MOST_SHORT_QUERIES + 1, longest)):
            within = [length for length in lengths if least <= length <= most]
            if within:
                shares.append(_Share(least, max(within)))
        metadata.plans[key] = shares
    return metadata.plans[key]


def _attend_share(
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: KVLayer,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    share: _Share,
    tiles: AttentionTiles,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_seqs = kv_cache.num_kv_heads, metadata.seq_lens.shape[0]
    block_q = tiles.block_m // tiles.group_padded
    most_splits = max(MOST_SPLITS, 4 * MOST_SPLITS // padded(num_kv_heads))
    num_splits, blocks_each = 1, 1
    if share.is_long:
        num_blocks = num_tokens // block_q + num_seqs
    else:
        blocks_each = -(-share.most_queries // block_q)
        num_blocks = num_seqs * blocks_each
        num_keys = metadata.max_seq_len
        if window is not None:
            num_keys = min(num_keys, window + share.most_queries + tiles.block_n)
        num_splits = min(most_splits, -(-num_keys // LEAST_SPLIT_KEYS))
    partial_out = partial_max = partial_sum = out
    if num_splits > 1:
        shape = (num_seqs * share.most_queries, num_heads, num_splits)
        partial_out = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
        partial_max, partial_sum = torch.empty(2, *shape, dtype=torch.float32, device=q.device)
    constants: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": tiles.head_dim_padded,
        "BLOCK_N": tiles.block_n,
        "LEAST_QUERIES": share.least_queries,
        "LEAST_SPLIT_KEYS": LEAST_SPLIT_KEYS,
        "MOST_SPLITS": most_splits,
        "HAS_WINDOW": window is not None,
    }
    launch(
        attention_kernel,
        (num_blocks, num_kv_heads, num_splits),
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
        num_seqs,
        scale,
        soft_cap or 1.0,
        window or 0,
        q.stride(0),
        metadata.block_table.stride(0),
        num_splits,
        share.most_queries,
        blocks_each,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        GROUP_PADDED=tiles.group_padded,
        KV_BLOCK=metadata.block_size,
        BLOCK_M=tiles.block_m,
        IS_LONG=share.is_long,
        IS_SPLIT=num_splits > 1,
        HAS_SOFT_CAP=soft_cap is not None,
        HAS_SINKS=sinks is not None,
        IS_INT8=kv_cache.scales is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **constants,
    )
    if num_splits > 1:
        launch(
            combine_kernel,
            (num_seqs * share.most_queries, num_heads),
            out,
            partial_out,
            partial_max,
            partial_sum,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            window or 0,
            num_splits,
            share.most_queries,
            NUM_HEADS=num_heads,
            AT_ONCE=COMBINED_AT_ONCE,
            num_warps=4,
            **constants,
        )
