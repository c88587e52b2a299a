"""Integer weights in the tiles that the Triton kernels stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.quantization.affine import AffineMatrix, rows_at_a_time
from kernels.ggml_codes import CODED_FORMATS, ggml_codes

if TYPE_CHECKING:
    from kernels.triton.matmul import TiledWeight


class TritonWeight:
    """`tiled` computes in the dtype it was tiled for; `permutation` gathers the columns of the input first."""

    __slots__ = ("permutation", "tiled")

    def __init__(self, tiled: TiledWeight, permutation: torch.Tensor | None = None) -> None:
        self.tiled = tiled
        self.permutation = permutation

    @property
    def shape(self) -> tuple[int, int]:
        return self.tiled.out_features, self.tiled.in_features

    @property
    def nbytes(self) -> int:
        return self.tiled.nbytes + (0 if self.permutation is None else self.permutation.nbytes)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        from kernels.triton.matmul import tiled_linear

        return tiled_linear(x if self.permutation is None else x[:, self.permutation], self.tiled)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return self._numbers(indices).to(self.tiled.scales.dtype)

    def dequantize(self) -> torch.Tensor:
        return self._numbers(None)

    def _numbers(self, rows: torch.Tensor | None) -> torch.Tensor:
        from kernels.triton.matmul import untile

        stored = untile(self.tiled, rows)
        if self.permutation is None:
            return stored
        return torch.empty_like(stored).index_copy_(1, self.permutation, stored)


def triton_affine(matrix: AffineMatrix, dtype: torch.dtype) -> TritonWeight | None:
    """Tiles integer codes; None where their groups cannot be tiled, as where the last one is short."""
    from kernels.triton.matmul import tile_columns, tile_weight

    if tile_columns(matrix.shape[1], matrix.group_size, matrix.bits) is None:
        return None
    zeros, scales = matrix.zeros.float(), matrix.scales.float()
    zero = round(float(zeros.flatten()[0])) if zeros.numel() else 0
    # One zero point in the middle, as symmetric rounding has it, needs no minimums and stays exact.
    if 0 <= zero < 1 << matrix.bits and bool((zeros == zero).all()):
        tiled = tile_weight(matrix.unpacked(), scales, None, matrix.bits, dtype, zero)
    else:
        tiled = tile_weight(matrix.unpacked(), scales, -zeros * scales, matrix.bits, dtype)
    return TritonWeight(tiled, matrix.permutation)


def triton_ggml(
    parts: list[torch.Tensor], tensor_type: str, device: torch.device, dtype: torch.dtype
) -> TritonWeight | None:
    """Tiles rows of a GGUF file, on top of each other; None for a format without whole codes.

    parts: uint8 [rows, row_bytes] each. Codes are taken apart a few rows at a time, on the device.
    """
    from kernels.triton.matmul import tile_weight

    if tensor_type not in CODED_FORMATS:
        return None
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    step = rows_at_a_time(rows.shape[1])
    taken = [ggml_codes(rows[first : first + step].to(device), tensor_type) for first in range(0, rows.shape[0], step)]
    minimums = [part.minimums for part in taken if part.minimums is not None]
    return TritonWeight(
        tile_weight(
            torch.cat([part.codes for part in taken]),
            torch.cat([part.scales for part in taken]),
            torch.cat(minimums) if minimums else None,
            taken[0].bits,
            dtype,
            taken[0].zero,
            is_float=tensor_type == "MXFP4",
        )
    )
