"""Rounding a matrix to symmetric 8-bit codes."""

from __future__ import annotations

import torch

from engine.quantization.affine import AffineMatrix

MIDDLE = 128
"""The code that stands for zero."""
_LARGEST = 127
ELEMENTS_AT_A_TIME = 1 << 18
"""Rounded at once: scratch that stays in the cache, yet is large beside what each small operation costs."""


def quantize_int8(weight: torch.Tensor, group_size: int | None = None) -> AffineMatrix:
    """Rounds weight [out, in] of any floating dtype with one scale for each row, or each `group_size` of its columns.

    The largest magnitude of a row or group becomes 127. Scales are float32, rounded to what half precision holds
    where that loses nothing but bits, so that they can be stored so.
    """
    num_rows, columns = weight.shape
    group_size = columns if group_size is None else min(group_size, columns)
    groups = -(-columns // group_size)
    codes = torch.empty(num_rows, columns, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(num_rows, groups, dtype=torch.float32, device=weight.device)
    step = max(1, ELEMENTS_AT_A_TIME // columns)
    for first in range(0, num_rows, step):
        rows = weight[first : first + step].float()
        for group in range(groups):
            chosen = slice(group * group_size, (group + 1) * group_size)
            scale = storable_scale(rows[:, chosen].abs().amax(1) / _LARGEST)
            rounded = (rows[:, chosen] / scale[:, None]).round_().clamp_(-_LARGEST, _LARGEST).add_(MIDDLE)
            codes[first : first + step, chosen] = rounded
            scales[first : first + step, group] = scale
    return AffineMatrix(codes, scales, torch.full_like(scales, MIDDLE), 8, group_size)


def storable_scale(scale: torch.Tensor) -> torch.Tensor:
    """Positive scales, rounded to half precision where that has all its bits; 1 where there is nothing to scale."""
    half = scale.half().float()
    in_range = (scale >= torch.finfo(torch.float16).smallest_normal) & half.isfinite()
    return torch.where(in_range, half, torch.where(scale > 0, scale, 1.0))
