"""Uniform noise that is a function of (seed, position), so that a draw does not depend on its batch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


class Stream(IntEnum):
    """Independent noise for different purposes at the same position."""

    DRAW = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


_FEW = 8
"""Up to so many numbers are made sooner one by one than as arrays."""


def _mix(value: int) -> int:
    # The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int, stream: Stream = Stream.DRAW) -> float:
    """A number in [0, 1) with 53 random bits. `position` is the index of the token to be drawn."""
    key = _mix((seed + _GOLDEN_GAMMA) & _MASK)
    counter = (position << 8 | stream) * _GOLDEN_GAMMA & _MASK
    return (_mix(_mix(key ^ counter) + _GOLDEN_GAMMA & _MASK) >> 11) * 2.0**-53


def uniforms(seeds: Sequence[int], positions: Sequence[int], streams: Sequence[Stream]) -> np.ndarray:
    """`uniform` of each row: float64 [num_rows]."""
    if len(seeds) <= _FEW:
        return np.array([uniform(*each) for each in zip(seeds, positions, streams)], dtype=np.float64)
    keys = _mix_array(np.array(seeds, dtype=np.uint64) + np.uint64(_GOLDEN_GAMMA))
    counters = np.array(positions, dtype=np.uint64) << np.uint64(8) | np.array(streams, dtype=np.uint64)
    counters *= np.uint64(_GOLDEN_GAMMA)
    mixed = _mix_array(_mix_array(keys ^ counters) + np.uint64(_GOLDEN_GAMMA))
    return (mixed >> np.uint64(11)) * 2.0**-53


def _mix_array(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
