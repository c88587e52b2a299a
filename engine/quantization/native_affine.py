"""Integer codes in the tiles of the native CPU kernels, which share a scale among 32 columns."""

from __future__ import annotations

import torch

from engine.quantization.affine import AffineMatrix, unpack_nibbles
from engine.quantization.native import NativeWeight, PackFunction
from kernels.cpu.library import GROUP, WeightFormat
from kernels.cpu.packing import can_pack, pack

_MIDDLE = 128
"""The 8-bit code that the tiles take for zero."""


class NativeAffineWeight:
    """Native tiles with what they lack: an order of the input columns, or zero points of 8-bit codes.

    offsets: float32 [out, groups], what each group's inputs are worth besides their tiles; None for none.
    """

    __slots__ = ("group_size", "offsets", "permutation", "tiles")

    def __init__(
        self,
        tiles: NativeWeight,
        permutation: torch.Tensor | None,
        offsets: torch.Tensor | None,
        group_size: int,
    ) -> None:
        self.tiles = tiles
        self.permutation = permutation
        self.offsets = offsets
        self.group_size = group_size

    @property
    def shape(self) -> tuple[int, int]:
        return self.tiles.shape

    @property
    def nbytes(self) -> int:
        extras = (self.permutation, self.offsets)
        return self.tiles.nbytes + sum(extra.nbytes for extra in extras if extra is not None)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        if self.permutation is not None:
            x = x[:, self.permutation]
        out = self.tiles.matmul(x)
        if self.offsets is not None:
            of_groups = torch.stack([part.sum(1) for part in x.float().split(self.group_size, dim=1)], dim=1)
            out += (of_groups @ self.offsets.t()).to(out.dtype)
        return out

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        offsets = None if self.offsets is None else self.offsets[indices]
        return self._in_order(self.tiles.rows(indices), offsets)

    def dequantize(self) -> torch.Tensor:
        return self._in_order(self.tiles.dequantize(), self.offsets)

    def _in_order(self, rows: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        if offsets is not None:
            rows = rows + offsets.repeat_interleave(self.group_size, dim=1)[:, : rows.shape[1]]
        if self.permutation is None:
            return rows
        ordered = torch.empty_like(rows)
        ordered[:, self.permutation] = rows
        return ordered


def native_affine(matrix: AffineMatrix, pack: PackFunction = pack) -> NativeWeight | NativeAffineWeight | None:
    """The matrix in native tiles, whose scales and minima are half precision: about 5 and 8.5 bits a weight.

    None where its groups are not made of whole groups of 32 columns, or its scales do not fit half precision.
    """
    columns = matrix.shape[1]
    if not can_pack(columns) or matrix.group_size % GROUP:
        return None
    scales, zeros = (
        values.float().repeat_interleave(matrix.group_size // GROUP, dim=1)[:, : columns // GROUP]
        for values in (matrix.scales, matrix.zeros)
    )
    if matrix.bits == 4:
        minima = -zeros * scales
        if not (_fits_half(scales) and _fits_half(minima)):
            return None
        tiles = NativeWeight(pack([_q4_1_rows(matrix.codes, scales, minima)], WeightFormat.Q4_1, columns))
        return tiles if matrix.permutation is None else NativeAffineWeight(tiles, matrix.permutation, None, GROUP)
    if not _fits_half(scales):
        return None
    tiles = NativeWeight(pack([_q8_0_rows(matrix.codes, scales)], WeightFormat.Q8_0, columns))
    offsets = None
    if not bool((matrix.zeros == _MIDDLE).all()):
        offsets = (_MIDDLE - matrix.zeros.float()) * matrix.scales.float()
    if offsets is None and matrix.permutation is None:
        return tiles
    return NativeAffineWeight(tiles, matrix.permutation, offsets, matrix.group_size)


def _fits_half(values: torch.Tensor) -> bool:
    """Whether half precision holds the values to a part in 2000 of themselves or of the average."""
    half = values.half().float()
    allowed = values.abs().maximum(values.abs().mean()) * 2.0**-11
    return bool(((half - values).abs() <= allowed).all())


def _q4_1_rows(codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """Nibbles [out, in / 2] in GGUF's Q4_1: of 32 columns the scale, the minimum, and 16 bytes of columns j, j + 16."""
    num_rows, groups = scales.shape
    rows = torch.empty(num_rows, groups, 20, dtype=torch.uint8)
    rows[:, :, 0:2] = _half_bytes(scales)
    rows[:, :, 2:4] = _half_bytes(minima)
    halves = unpack_nibbles(codes).view(num_rows, groups, 2, GROUP // 2)
    torch.bitwise_or(halves[:, :, 0], halves[:, :, 1] << 4, out=rows[:, :, 4:])
    return rows.view(num_rows, -1)


def _q8_0_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes [out, in] in GGUF's Q8_0: of 32 columns the scale and 32 signed bytes."""
    num_rows, groups = scales.shape
    rows = torch.empty(num_rows, groups, 34, dtype=torch.uint8)
    rows[:, :, 0:2] = _half_bytes(scales)
    rows[:, :, 2:] = (codes ^ _MIDDLE).view(num_rows, groups, GROUP)
    return rows.view(num_rows, -1)


def _half_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.half().unsqueeze(2).contiguous().view(torch.uint8)
