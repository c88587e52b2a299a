"""The end of a threshold's search: one program a row, among the few tokens that survived."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling_filters import (
    DIGIT_BITS,
    FIRST_SHIFT,
    LOG2E,
    MOST_CANDIDATES,
    SMALLEST,
    TOP_SHIFT,
    fixed_point,
    highest_reached,
    is_drawn,
    least_mass,
    row_filters,
    row_maximum,
    split_masses,
    tally,
    weigh,
)


@triton.jit
def load_survivors(tokens, start, length, row_logits, BLOCK: tl.constexpr):
    """Their logits, minus infinity past the end."""
    places = start + tl.arange(0, BLOCK)
    ids = tl.load(tokens + places, mask=places < length, other=0)
    return tl.load(row_logits + ids, mask=places < length, other=float("-inf"))


@triton.jit
def keep(values, maximum, scale, threshold, final_scale):
    """Final weights of the logits whose weight reaches the threshold, 0 of the others."""
    is_kept = weigh(values, maximum, scale).to(tl.int32, bitcast=True) >= threshold
    return tl.where(is_kept, weigh(values, maximum, final_scale), 0.0)


@triton.jit
def _mass_of(tokens, length, row_logits, maximum, scale, threshold, final_scale, BLOCK: tl.constexpr):
    mass = tl.full([], 0, tl.int64)
    for start in range(0, length, BLOCK):
        values = load_survivors(tokens, start, length, row_logits, BLOCK)
        mass += tl.sum(fixed_point(keep(values, maximum, scale, threshold, final_scale)), 0)
    return mass


@triton.jit
def _search(
    tokens,
    length,
    row_logits,
    maximum,
    scale,
    floor,
    prefix,
    shift,
    count,
    goal,
    BLOCK: tl.constexpr,
):
    """Bits of the highest threshold that `count` survivors reach and `goal` of their mass.

    Only survivors from `floor` up are looked at. `prefix` holds the digits above `shift`.
    """
    digits = tl.arange(0, MOST_CANDIDATES)
    above = 0
    while shift >= 0:
        candidates = tl.maximum(prefix + (digits << shift), SMALLEST)
        reaching = tl.zeros([MOST_CANDIDATES], dtype=tl.int32)
        mass = tl.zeros([MOST_CANDIDATES], dtype=tl.int64)
        for start in range(0, length, BLOCK):
            values = load_survivors(tokens, start, length, row_logits, BLOCK)
            block_reaching, block_mass = tally(keep(values, maximum, scale, floor, scale), candidates)
            reaching += block_reaching
            mass += block_mass
        digit = highest_reached(reaching, mass, count, goal)
        prefix += digit << shift
        here = tl.sum(tl.where(digits == digit, reaching, 0), 0)
        above = tl.where(digit < MOST_CANDIDATES - 1, tl.sum(tl.where(digits == digit + 1, reaching, 0), 0), above)
        # The last digit is a short one. A prefix that one weight has, or just as many reach as are to, says all.
        shift = tl.where(shift > DIGIT_BITS, shift - DIGIT_BITS, tl.where(shift > 0, 0, -1))
        shift = tl.where((here - above <= 1) | (here == count), -1, shift)
    return prefix


@triton.jit
def search_kernel(
    thresholds,
    drawn_masses,
    survivors,
    lengths,
    prefixes,
    masses,
    maxima,
    logits,
    temperature,
    min_p,
    top_k,
    top_p,
    temperature_last,
    vocab_size,
    stride,
    num_splits,
    PASSES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows): thresholds int32 [rows], what a weight has to reach in bits, and the sum of those that do,
    drawn_masses int64 [rows]. Rows without filters are left alone.
    """
    row = tl.program_id(0).to(tl.int64)
    maximum = row_maximum(maxima, row, num_splits, SPLITS)
    if not is_drawn(maximum, row, temperature):
        return
    scale, threshold, count, share = row_filters(
        row, temperature, min_p, top_k, top_p, temperature_last, vocab_size, True
    )
    if threshold == 0:
        return
    tokens = survivors + row * vocab_size
    length = tl.load(lengths + row)
    row_logits = logits + row * stride
    prefix = tl.load(prefixes + row * (PASSES + 1) + PASSES)
    shift = tl.where(prefix > 0, FIRST_SHIFT - DIGIT_BITS * PASSES, TOP_SHIFT)
    while (count > 0) | (share < 1.0):
        # First top-k, if it is on, then top-p, which counts what is left as one.
        goal = tl.full([], 0.0, tl.float64)
        if count == 0:
            if threshold == SMALLEST:
                passed = tl.sum(split_masses(masses, row, num_splits, 0, PASSES, SPLITS), 0)
            else:
                passed = _mass_of(tokens, length, row_logits, maximum, scale, threshold, scale, BLOCK)
                prefix = 0
                shift = TOP_SHIFT
            goal = least_mass(share, passed)
            share = 1.0
        found = _search(tokens, length, row_logits, maximum, scale, threshold, prefix, shift, count, goal, BLOCK)
        threshold = tl.maximum(threshold, found)
        count = 0
    final_scale = LOG2E / tl.load(temperature + row)
    mass = _mass_of(tokens, length, row_logits, maximum, scale, threshold, final_scale, BLOCK)
    tl.store(thresholds + row, threshold)
    tl.store(drawn_masses + row, mass)
