"""Weights in integer codes: the one form of everything quantised to whole numbers, in a checkpoint or while loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels import ops

# Bounds the scratch memory of unpacking a large matrix.
_ELEMENTS_AT_A_TIME = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class AffineMatrix:
    """A matrix [out, in] whose element is (code - zero) * scale, with scale and zero shared by a group of a row.

    codes: uint8, for 8 bits [out, in], for 4 bits [out, in / 2] with the even column in the low nibble.
    scales, zeros: floating [out, ceil(in / group_size)], zeros in units of codes; the last group may be short.
    permutation: int64 [in]; stored column j is column permutation[j] of the matrix, None where they agree.
    Raises ValueError where the parts do not fit together.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bits: int
    group_size: int
    permutation: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group_size < 1:
            raise ValueError(f"codes of {self.bits} bits in groups of {self.group_size} are not supported")
        groups = (self.shape[0], -(-self.shape[1] // self.group_size))
        for name, values in (("scales", self.scales), ("zeros", self.zeros)):
            if tuple(values.shape) != groups:
                raise ValueError(f"{name} have the shape {list(values.shape)}; the codes ask for {list(groups)}")
        if self.permutation is not None and tuple(self.permutation.shape) != (self.shape[1],):
            raise ValueError(f"a permutation of {self.permutation.numel()} columns does not fit {self.shape[1]}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        permutation = 0 if self.permutation is None else self.permutation.nbytes
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes + permutation

    def unpacked(self) -> torch.Tensor:
        """The codes one to a byte, uint8 [out, in], columns as stored."""
        return unpack_nibbles(self.codes) if self.bits == 4 else self.codes

    def dequantize(self) -> torch.Tensor:
        """The matrix as float32 [out, in], columns in their own order."""
        out = torch.empty(self.shape, dtype=torch.float32, device=self.codes.device)
        step = rows_at_a_time(self.shape[1])
        for first in range(0, self.shape[0], step):
            rows = self.row_slice(first, first + step).stored_values()
            if self.permutation is None:
                out[first : first + step] = rows
            else:
                out[first : first + step, self.permutation] = rows
        return out

    def stored_values(self) -> torch.Tensor:
        """The elements as float32 [out, in], columns as stored."""
        values = self.unpacked().float()
        scales, zeros = self.scales.float(), self.zeros.float()
        num_rows, columns = values.shape
        whole = columns // self.group_size
        grouped = values[:, : whole * self.group_size].view(num_rows, whole, -1) if whole else values[:, :0, None]
        grouped.sub_(zeros[:, :whole, None]).mul_(scales[:, :whole, None])
        values[:, whole * self.group_size :].sub_(zeros[:, whole:]).mul_(scales[:, whole:])
        return values

    def row_slice(self, first: int, end: int) -> AffineMatrix:
        """Rows first..end, sharing memory."""
        return replace(self, codes=self.codes[first:end], scales=self.scales[first:end], zeros=self.zeros[first:end])

    def to(self, device: torch.device) -> AffineMatrix:
        permutation = None if self.permutation is None else self.permutation.to(device)
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=self.zeros.to(device),
            permutation=permutation,
        )

    def fits(self, other: AffineMatrix) -> bool:
        """Whether the rows of both can stand in one matrix."""
        if (self.bits, self.group_size, self.shape[1]) != (other.bits, other.group_size, other.shape[1]):
            return False
        if self.permutation is None or other.permutation is None:
            return self.permutation is other.permutation
        return torch.equal(self.permutation, other.permutation)

    @staticmethod
    def cat(parts: Sequence[AffineMatrix]) -> AffineMatrix:
        """Parts that fit each other, on top of each other. Scales and zeros take the widest dtype among them."""
        first = parts[0]
        if len(parts) == 1:
            return first
        assert all(first.fits(part) for part in parts)
        return replace(
            first,
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zeros=torch.cat([part.zeros for part in parts]),
        )


class AffineWeight:
    """An `AffineMatrix` that stays packed; a product unpacks a few rows at a time. `dtype` is that of `rows`."""

    __slots__ = ("dtype", "matrix")

    def __init__(self, matrix: AffineMatrix, dtype: torch.dtype = torch.float32) -> None:
        self.matrix = matrix
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix
        if matrix.permutation is not None:
            x = x[:, matrix.permutation]
        num_rows, columns = matrix.shape
        out = torch.empty(x.shape[0], num_rows, dtype=x.dtype, device=x.device)
        step = rows_at_a_time(columns)
        for first in range(0, num_rows, step):
            weight = matrix.row_slice(first, first + step).stored_values()
            out[:, first : first + step] = ops.linear(x, weight.to(x.dtype))
        return out

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix
        chosen = replace(
            matrix, codes=matrix.codes[indices], scales=matrix.scales[indices], zeros=matrix.zeros[indices]
        )
        return chosen.dequantize().to(self.dtype)

    def dequantize(self) -> torch.Tensor:
        return self.matrix.dequantize()


def rows_at_a_time(columns: int) -> int:
    return max(1, _ELEMENTS_AT_A_TIME // columns)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, columns] of values below 16 -> [rows, columns / 2], the even column in the low nibble."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).view(packed.shape[0], -1)
