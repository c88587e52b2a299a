"""Which tokens of a row may be drawn: the search for its threshold, with the vocabulary shared out among programs.

A token's weight is exp((logit - maximum) / temperature), at most 1. Weights are summed as integers of 42 bits
behind the point, so that sums are exact: neither their order nor how a row is cut can change a token.
Positive floats order like their bits, and the bits of a threshold are found digit by digit from the top: how
many weights reach each of some candidates, and what do they add up to.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_CANDIDATES = tl.constexpr(16)
"""Thresholds tried at once: all values of a digit of 4 bits."""
FIRST_CANDIDATES = tl.constexpr(4)
"""In the first pass."""
MOST_TALLIED = 512
"""Weights that `tally` can take at once."""

LOG2E = tl.constexpr(1.4426950408889634)
# Bits of the least normal float32, which a weight has to reach once any filter is on.
SMALLEST = tl.constexpr(0x00800000)
# The first pass tells thresholds from 2**-15, 2**-31 and 2**-47 up apart, its digit being 3 bits from this one on,
# of which the lower half is one case: a threshold that is hardly ever met, and is then searched for from its top.
FIRST_SHIFT = tl.constexpr(27)
FIRST_DIGIT = tl.constexpr(4)
TOP_SHIFT = tl.constexpr(26)
DIGIT_BITS = tl.constexpr(4)
HALF_FRACTION = tl.constexpr(21)
COUNT_BITS = tl.constexpr(10)
COUNT_MASK = tl.constexpr(0x3FF)


@triton.jit
def weigh(logits, maximum, scale):
    return tl.exp2((logits - maximum) * scale)


@triton.jit
def fixed_point(weights):
    """Weights in [0, 1] as multiples of 2**-42, rounded down: in two halves, as GPUs convert to 32 bits faster."""
    scaled = weights * 2097152.0
    high = scaled.to(tl.int32)
    low = ((scaled - high.to(tl.float32)) * 2097152.0).to(tl.int32)
    return (high.to(tl.int64) << HALF_FRACTION) + low


@triton.jit
def maximum_kernel(maxima, likeliest, logits, vocab_size, stride, num_splits, SPLIT: tl.constexpr):
    """Grid (rows, splits): each split's maximum, infinity if it holds NaN, and the first token that has it."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    ids = split * SPLIT + tl.arange(0, SPLIT)
    values = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    maximum = tl.max(tl.where(values == values, values, float("inf")), 0)
    tl.store(maxima + row * num_splits + split, maximum)
    tl.store(likeliest + row * num_splits + split, tl.min(tl.where(values == maximum, ids, vocab_size), 0))


@triton.jit
def row_maximum(maxima, row, num_splits, SPLITS: tl.constexpr):
    """Infinite, of either sign, where the row is no numbers to draw from."""
    splits = tl.arange(0, SPLITS)
    return tl.max(tl.load(maxima + row * num_splits + splits, mask=splits < num_splits, other=float("-inf")), 0)


@triton.jit
def is_drawn(maximum, row, temperature):
    """Whether the row is healthy and not greedy."""
    return (tl.abs(maximum) < float("inf")) & (tl.load(temperature + row) > 0.0)


@triton.jit
def row_filters(row, temperature, min_p, top_k, top_p, temperature_last, vocab_size, FILTERS: tl.constexpr):
    """(scale of the weights that filters see, bits of min-p's threshold, how many tokens to keep, their share).

    Where a filter is off, as with none at all, the bits and the number are 0 and the share is 1.
    """
    scale = LOG2E / tl.load(temperature + row)
    floor = 0
    count = 0
    share = 1.0
    if FILTERS:
        least = tl.load(min_p + row)
        count = tl.load(top_k + row)
        share = tl.load(top_p + row)
        is_filtered = (least > 0.0) | (count > 0) | (share < 1.0)
        floor = tl.where(is_filtered, tl.maximum(least.to(tl.int32, bitcast=True), SMALLEST), 0)
        scale = tl.where(is_filtered & (tl.load(temperature_last + row) != 0), LOG2E, scale)
        count = tl.where(count < vocab_size, count, 0)
    return scale, floor, count, share


@triton.jit
def is_searched(floor, count, share):
    """Whether the first threshold has to be found: top-k's, or top-p's where nothing comes before it."""
    return (count > 0) | ((share < 1.0) & (floor == SMALLEST))


@triton.jit
def least_mass(share, mass):
    """What top-p has to reach; the likeliest token is kept even if that is nothing."""
    return tl.maximum(share.to(tl.float64) * mass.to(tl.float64), 0.5)


@triton.jit
def split_masses(masses, row, num_splits, PLACE: tl.constexpr, PASSES: tl.constexpr, SPLITS: tl.constexpr):
    """Of each split, what reached the first candidate of a pass: int64 [SPLITS]."""
    splits = tl.arange(0, SPLITS)
    at = ((row * PASSES + PLACE) * num_splits + splits) * MOST_CANDIDATES
    return tl.load(masses + at, mask=splits < num_splits, other=0)


@triton.jit
def found_digit(
    counts, masses, row, count, share, num_splits, PLACE: tl.constexpr, PASSES: tl.constexpr, SPLITS: tl.constexpr
):
    """The digit that a pass has found."""
    WIDTH: tl.constexpr = FIRST_CANDIDATES if PLACE == 0 else MOST_CANDIDATES
    splits = tl.arange(0, SPLITS)
    at = ((row * PASSES + PLACE) * num_splits + splits[:, None]) * MOST_CANDIDATES + tl.arange(0, WIDTH)[None, :]
    reaching = tl.sum(tl.load(counts + at, mask=splits[:, None] < num_splits, other=0), 0)
    mass = tl.sum(tl.load(masses + at, mask=splits[:, None] < num_splits, other=0), 0)
    goal = tl.full([], 0.0, tl.float64)
    if count == 0:
        goal = least_mass(share, tl.sum(split_masses(masses, row, num_splits, 0, PASSES, SPLITS), 0))
    return highest_reached(reaching, mass, count, goal)


@triton.jit
def with_digit(prefix, digit, PLACE: tl.constexpr):
    """The prefix after a pass. It is 0 as long as the first digit is not found, which later passes leave so."""
    if PLACE == 0:
        extended = tl.where(digit > 0, (digit + FIRST_DIGIT) << FIRST_SHIFT, 0)
    else:
        extended = tl.where(prefix > 0, prefix + (digit << (FIRST_SHIFT - DIGIT_BITS * PLACE)), 0)
    return extended


@triton.jit
def highest_reached(reaching, mass, count, goal):
    reached = (reaching >= count) & (mass.to(tl.float64) >= goal)
    return tl.maximum(tl.sum(reached.to(tl.int32), 0) - 1, 0)


@triton.jit
def tally(weights, candidates):
    """How many of up to MOST_TALLIED weights reach each candidate, and their sum: both in one number at first."""
    reached = weights.to(tl.int32, bitcast=True)[:, None] >= candidates[None, :]
    both = (fixed_point(weights) << COUNT_BITS) + 1
    sums = tl.sum(tl.where(reached, both[:, None], 0), 0)
    return (sums & COUNT_MASK).to(tl.int32), sums >> COUNT_BITS


@triton.jit
def tally_kernel(
    counts,
    masses,
    prefixes,
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
    PLACE: tl.constexpr,
    PASSES: tl.constexpr,
    FILTERS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, splits): counts and masses [rows, PASSES, splits, MOST_CANDIDATES] of pass PLACE.

    prefixes [rows, PASSES + 1] are the bits found before each pass. Rows without a search are tallied at their own
    threshold, in the last pass.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    maximum = row_maximum(maxima, row, num_splits, SPLITS)
    if not is_drawn(maximum, row, temperature):
        return
    scale, floor, count, share = row_filters(
        row, temperature, min_p, top_k, top_p, temperature_last, vocab_size, FILTERS
    )
    WIDTH: tl.constexpr = 1 if not FILTERS else FIRST_CANDIDATES if PLACE == 0 else MOST_CANDIDATES
    digits = tl.arange(0, WIDTH)
    candidates = floor + 0 * digits
    if FILTERS:
        searched = is_searched(floor, count, share)
        if PLACE < PASSES - 1 and not searched:
            return
        prefix = 0
        if PLACE > 0 and searched:
            prefix = tl.load(prefixes + row * (PASSES + 1) + PLACE - 1)
            digit = found_digit(counts, masses, row, count, share, num_splits, PLACE - 1, PASSES, SPLITS)
            prefix = with_digit(prefix, digit, PLACE - 1)
        if split == 0:
            tl.store(prefixes + row * (PASSES + 1) + PLACE, prefix)
        candidates = tl.where(searched, tl.maximum(with_digit(prefix, digits, PLACE), SMALLEST), candidates)
    least = tl.min(candidates, 0)
    reaching = tl.zeros([WIDTH], dtype=tl.int32)
    mass = tl.zeros([WIDTH], dtype=tl.int64)
    for start in range(0, SPLIT, BLOCK):
        ids = split * SPLIT + start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=float("-inf"))
        weights = weigh(values, maximum, scale)
        if tl.max(weights, 0).to(tl.int32, bitcast=True) >= least:
            block_reaching, block_mass = tally(weights, candidates)
            reaching += block_reaching
            mass += block_mass
    at = ((row * PASSES + PLACE) * num_splits + split) * MOST_CANDIDATES + digits
    tl.store(counts + at, reaching)
    tl.store(masses + at, mass)


@triton.jit
def gather_kernel(
    survivors,
    lengths,
    prefixes,
    counts,
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
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, splits): in the order of the vocabulary, the tokens that reach what the passes have found.

    survivors int32 [rows, vocab_size], of which `lengths` [rows] are written; none in rows without filters.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    maximum = row_maximum(maxima, row, num_splits, SPLITS)
    if not is_drawn(maximum, row, temperature):
        return
    scale, floor, count, share = row_filters(row, temperature, min_p, top_k, top_p, temperature_last, vocab_size, True)
    if floor == 0:
        return
    prefix = tl.load(prefixes + row * (PASSES + 1) + PASSES - 1)
    digit = 0
    if is_searched(floor, count, share):
        digit = found_digit(counts, masses, row, count, share, num_splits, PASSES - 1, PASSES, SPLITS)
        prefix = with_digit(prefix, digit, PASSES - 1)
        floor = tl.maximum(prefix, SMALLEST)
    splits = tl.arange(0, SPLITS)
    at = ((row * PASSES + PASSES - 1) * num_splits + splits) * MOST_CANDIDATES + digit
    each = tl.load(counts + at, mask=splits < num_splits, other=0)
    if split == 0:
        tl.store(lengths + row, tl.sum(each, 0))
        tl.store(prefixes + row * (PASSES + 1) + PASSES, prefix)
    place = row * vocab_size + tl.sum(tl.where(splits < split, each, 0), 0)
    if tl.sum(tl.where(splits == split, each, 0), 0) > 0:
        for start in range(0, SPLIT, BLOCK):
            ids = split * SPLIT + start + tl.arange(0, BLOCK)
            values = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=float("-inf"))
            survives = (weigh(values, maximum, scale).to(tl.int32, bitcast=True) >= floor).to(tl.int32)
            tl.store(survivors + place + tl.cumsum(survives, 0) - 1, ids, mask=survives > 0)
            place += tl.sum(survives, 0)
