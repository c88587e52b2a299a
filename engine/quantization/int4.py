"""Rounding a matrix to 4-bit codes, with a search for the scale and zero point of each group."""

from __future__ import annotations

import torch

from engine.quantization.affine import AffineMatrix, pack_nibbles
from engine.quantization.int8 import ELEMENTS_AT_A_TIME, storable_scale

_LARGEST = 15
# Ranges tried, as parts of the group's own: outliers are cut off where that serves the others.
_RANGES = (1.0, 0.94, 0.88, 0.82, 0.76, 0.7)
_REFINEMENTS = 3
# A group that is all but constant keeps a zero point which half precision holds.
_SMALLEST_STEP = 2.0**-14
_TINY = torch.finfo(torch.float32).tiny


def quantize_int4(weight: torch.Tensor, group_size: int) -> AffineMatrix:
    """Rounds weight [out, in] of any floating dtype, `in` even, in groups of `group_size` columns of a row.

    For each group the range of the codes is shrunk step by step, scale and minimum are fitted to the rounded
    codes by least squares, and the pair of the smallest squared error is refined by rounding and fitting in turn.
    Scales and zero points are half precision, scales float32 where the weights are too small for it.
    """
    num_rows, columns = weight.shape
    group_size = min(group_size, columns)
    whole = columns // group_size * group_size
    groups = -(-columns // group_size)
    packed = torch.empty(num_rows, columns // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(num_rows, groups, dtype=torch.float32, device=weight.device)
    zeros = torch.empty(num_rows, groups, dtype=torch.float16, device=weight.device)
    step = max(1, ELEMENTS_AT_A_TIME // columns)
    for first in range(0, num_rows, step):
        rows = weight[first : first + step].float()
        chosen = slice(first, first + rows.shape[0])
        codes = torch.empty(rows.shape, dtype=torch.uint8, device=weight.device)
        for start, end, width in ((0, whole, group_size), (whole, columns, columns - whole)):
            if end > start:
                of_groups = slice(start // group_size, -(-end // group_size))
                rounded, scale, zero = _round_groups(rows[:, start:end].reshape(-1, width))
                codes[:, start:end] = rounded.view(rows.shape[0], -1)
                scales[chosen, of_groups] = scale.view(rows.shape[0], -1)
                zeros[chosen, of_groups] = zero.view(rows.shape[0], -1)
        packed[chosen] = pack_nibbles(codes)
    half = scales.half()
    return AffineMatrix(packed, half if torch.equal(half.float(), scales) else scales, zeros, 4, group_size)


def _round_groups(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 [groups, n] -> codes uint8 [groups, n], scales and zero points [groups]."""
    scale, minimum = _search(weights)
    scale = storable_scale(scale)
    zero = (-minimum / scale).half()
    codes = (weights / scale[:, None]).add_(zero[:, None]).round_().clamp_(0, _LARGEST)
    return codes.to(torch.uint8), scale, zero


def _search(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum [groups] for which scale * code + minimum comes close to the weights [groups, n]."""
    by_group = weights.t().contiguous()  # sums over a group then run along the rows, many groups at once
    lowest, highest = by_group.amin(0), by_group.amax(0)
    floor = (torch.maximum(lowest.abs(), highest.abs()) * _SMALLEST_STEP).clamp_min_(_TINY)
    middle, half_range = (highest + lowest) / 2, (highest - lowest) / 2
    centred = by_group - middle
    mean = centred.mean(0)
    codes, product = torch.empty_like(centred), torch.empty_like(centred)
    size = centred.shape[0]

    def fit(scale: torch.Tensor, minimum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rounds, then fits by least squares; the squared error is a constant less the third result."""
        torch.sub(centred, minimum, out=codes).mul_(1 / scale).round_().clamp_(0, _LARGEST)
        code_mean = codes.mean(0)
        variance = torch.mul(codes, codes, out=product).sum(0) - size * code_mean.square()
        covariance = torch.mul(codes, centred, out=product).sum(0) - size * code_mean * mean
        spread = variance > 0.5 / size  # codes are whole numbers: less is rounding
        fitted = torch.where(spread, covariance / variance, scale).clamp_min_(floor)
        return fitted, mean - fitted * code_mean, torch.where(spread, covariance * covariance / variance, 0.0)

    best_scale, best_minimum = (2 / _LARGEST * half_range).clamp_min(floor), -half_range
    best_gain = torch.full_like(mean, -1.0)
    for part in _RANGES:
        scale, minimum, gain = fit((2 / _LARGEST * part * half_range).clamp_min_(floor), -part * half_range)
        better = gain > best_gain
        best_scale = torch.where(better, scale, best_scale)
        best_minimum = torch.where(better, minimum, best_minimum)
        best_gain = torch.maximum(gain, best_gain)
    for _ in range(_REFINEMENTS):
        best_scale, best_minimum, _gain = fit(best_scale, best_minimum)
    return best_scale, best_minimum + middle
