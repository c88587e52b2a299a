"""The draw from what the filters kept, and the distribution that was drawn from."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling_filters import (
    LOG2E,
    fixed_point,
    is_drawn,
    row_filters,
    row_maximum,
    split_masses,
    weigh,
)
from kernels.triton.sampling_search import keep, load_survivors


@triton.jit
def target_of(uniform, mass):
    """What the sum from the first token on has to exceed: below `mass` whatever rounding does."""
    return tl.minimum((uniform * mass.to(tl.float64)).to(tl.int64), mass - 1)


@triton.jit
def split_of(each, target):
    """(the split in which the sum exceeds the target, the sum before it)."""
    split = tl.sum((tl.cumsum(each, 0) <= target).to(tl.int32), 0)
    return split, tl.sum(tl.where(tl.arange(0, each.shape[0]) < split, each, 0), 0)


@triton.jit
def _draw_of_all(row_logits, start, end, before, target, maximum, scale, BLOCK: tl.constexpr):
    """The first token of [start, end) up to which the sum exceeds the target; `before` is the sum before it."""
    token = start
    while start < end:
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(row_logits + ids, mask=ids < end, other=float("-inf"))
        sums = before + tl.cumsum(fixed_point(weigh(values, maximum, scale)), 0)
        before = tl.max(sums, 0)
        token = start + tl.sum((sums <= target).to(tl.int32), 0)
        start = tl.where(before > target, end, start + BLOCK)
    # A compiler that rounds weights otherwise here than where they were summed must not name what is none.
    return tl.minimum(token, end - 1)


@triton.jit
def _draw_of_survivors(tokens, length, row_logits, target, maximum, scale, threshold, final_scale, BLOCK: tl.constexpr):
    before = tl.full([], 0, tl.int64)
    start = 0
    place = 0
    while start < length:
        values = load_survivors(tokens, start, length, row_logits, BLOCK)
        sums = before + tl.cumsum(fixed_point(keep(values, maximum, scale, threshold, final_scale)), 0)
        before = tl.max(sums, 0)
        place = start + tl.sum((sums <= target).to(tl.int32), 0)
        start = tl.where(before > target, length, start + BLOCK)
    return tl.load(tokens + tl.minimum(place, length - 1))


@triton.jit
def draw_kernel(
    token_ids,
    healthy,
    thresholds,
    drawn_masses,
    survivors,
    lengths,
    masses,
    maxima,
    likeliest,
    logits,
    temperature,
    min_p,
    top_k,
    top_p,
    temperature_last,
    uniforms,
    vocab_size,
    stride,
    num_splits,
    DRAWS: tl.constexpr,
    FILTERS: tl.constexpr,
    PASSES: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows). Without DRAWS every row takes its likeliest token.

    What `search_kernel` has left alone it writes too: a threshold of 0, and mass 0 where nothing was drawn.
    """
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    maximum = row_maximum(maxima, row, num_splits, SPLITS)
    is_healthy = tl.abs(maximum) < float("inf")
    tl.store(healthy + row, is_healthy)
    tops = tl.load(maxima + row * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
    firsts = tl.load(likeliest + row * num_splits + splits, mask=splits < num_splits, other=vocab_size)
    token = tl.where(is_healthy, tl.min(tl.where(tops == maximum, firsts, vocab_size), 0), 0)
    if DRAWS:
        if is_drawn(maximum, row, temperature):
            scale, floor, _count, _share = row_filters(
                row, temperature, min_p, top_k, top_p, temperature_last, vocab_size, FILTERS
            )
            final_scale = LOG2E / tl.load(temperature + row)
            row_logits = logits + row * stride
            if floor == 0:
                each = split_masses(masses, row, num_splits, PASSES - 1, PASSES, SPLITS)
                mass = tl.sum(each, 0)
                target = target_of(tl.load(uniforms + row), mass)
                split, before = split_of(each, target)
                end = tl.minimum(split * SPLIT + SPLIT, vocab_size)
                token = _draw_of_all(row_logits, split * SPLIT, end, before, target, maximum, final_scale, BLOCK)
                tl.store(thresholds + row, 0)
                tl.store(drawn_masses + row, mass)
            elif FILTERS:
                target = target_of(tl.load(uniforms + row), tl.load(drawn_masses + row))
                token = _draw_of_survivors(
                    survivors + row * vocab_size,
                    tl.load(lengths + row),
                    row_logits,
                    target,
                    maximum,
                    scale,
                    tl.load(thresholds + row),
                    final_scale,
                    BLOCK,
                )
        else:
            tl.store(drawn_masses + row, tl.full([], 0, tl.int64))
    tl.store(token_ids + row, token.to(tl.int64))


@triton.jit
def probabilities_kernel(
    probs,
    token_ids,
    thresholds,
    drawn_masses,
    maxima,
    logits,
    temperature,
    min_p,
    top_k,
    top_p,
    temperature_last,
    vocab_size,
    stride,
    stride_probs,
    num_splits,
    FILTERS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (rows, splits): what `draw_kernel` drew from, one-hot where it took the likeliest token."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * SPLIT + tl.arange(0, SPLIT)
    mass = tl.load(drawn_masses + row)
    out = probs + row * stride_probs + ids
    if mass == 0:
        token = tl.load(token_ids + row)
        tl.store(out, (ids == token).to(tl.float32), mask=ids < vocab_size)
    else:
        maximum = row_maximum(maxima, row, num_splits, SPLITS)
        scale, _floor, _count, _share = row_filters(
            row, temperature, min_p, top_k, top_p, temperature_last, vocab_size, FILTERS
        )
        values = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=float("-inf"))
        weights = keep(values, maximum, scale, tl.load(thresholds + row), LOG2E / tl.load(temperature + row))
        total = (mass.to(tl.float64) * 2.2737367544323206e-13).to(tl.float32)  # 2**-42
        tl.store(out, weights / total, mask=ids < vocab_size)
