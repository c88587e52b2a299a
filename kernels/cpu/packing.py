"""Weights in the layout that the native kernels stream (src/kvasir_cpu.h)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from kernels.cpu.arena import Arena
from kernels.cpu.library import (
    GROUP,
    ActivationKind,
    NativeLibraryError,
    Packing,
    Rows,
    Weight,
    WeightFormat,
    load,
)

_DENSE = (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16)
_BYTES = (WeightFormat.Q8_0, WeightFormat.IQ4_NL, WeightFormat.IQ4_XS)


@dataclass(frozen=True)
class PackedWeight:
    """A packed matrix [rows, columns]; `data` owns the bytes that `struct` points to."""

    data: torch.Tensor
    struct: Weight

    @property
    def rows(self) -> int:
        return self.struct.rows

    @property
    def columns(self) -> int:
        return self.struct.columns

    @property
    def format(self) -> WeightFormat:
        return WeightFormat(self.struct.format)

    def activation(self, precise: bool = True) -> ActivationKind:
        """What a matrix product with this weight reads its input as.

        Codes of up to 6 bits take 16 bits, or 8 at about half the time for many rows.
        """
        if self.format in _DENSE:
            return ActivationKind.F32
        if self.format in _BYTES:
            return ActivationKind.INT16
        return ActivationKind.BYTE_PAIR if precise else ActivationKind.INT8

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T for float32 [num_rows, columns]: float32 [num_rows, rows]. Threads take turns."""
        assert x.dtype == torch.float32 and x.device.type == "cpu" and x.shape[1] == self.columns
        x = x.contiguous()
        out = torch.empty(x.shape[0], self.rows)
        code = load().kv_matmul(
            ctypes.byref(self.struct), self.activation(), x.data_ptr(), x.shape[0], None, out.data_ptr()
        )
        if code != 0:
            raise NativeLibraryError(f"the native kernels refuse a product with {self.format.name} weights")
        return out

    def dequantize(self, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Rows first..first+count as float32 [count, columns]."""
        count = self.rows - first if count is None else count
        out = torch.empty(count, self.columns, dtype=torch.float32)
        if load().kv_dequantize(ctypes.byref(self.struct), first, count, out.data_ptr()) != 0:
            raise NativeLibraryError(f"rows {first} to {first + count} of {self.rows} cannot be dequantised")
        return out


_BYTES_AT_ONCE = 128 << 20
_arena = Arena()


def can_pack(columns: int) -> bool:
    """Whether rows of that many numbers fit the native layouts; formats with larger blocks imply more."""
    return columns % GROUP == 0


class Packer:
    """Packs many matrices at once, on all threads of the library, which then wait for each other only seldom."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Packing, list[torch.Tensor]]] = []
        self._waiting_bytes = 0

    def pack(self, parts: list[torch.Tensor], weight_format: WeightFormat, columns: int) -> PackedWeight:
        """Matrices on top of each other as one, whose numbers are there after `finish`.

        Each part holds rows as a model file stores them: a contiguous CPU tensor [rows, bytes or values of a row].
        Raises `NativeLibraryError` where the columns are no multiple of the format's block.
        """
        assert all(part.is_contiguous() and part.device.type == "cpu" for part in parts)
        rows = sum(part.shape[0] for part in parts)
        nbytes = load().kv_packed_bytes(weight_format, rows, columns)
        if nbytes < 0:
            raise NativeLibraryError(
                f"a matrix of {rows} x {columns} cannot be packed as {weight_format.name}: "
                "columns must be a multiple of its blocks, 32 or 256"
            )
        data = _arena.allocate(nbytes)
        structs = (Rows * len(parts))(*((part.data_ptr(), part.shape[0]) for part in parts))
        # All has to live as long as its address is needed, even a weight that nobody wants any more.
        self._waiting.append((Packing(weight_format, columns, structs, len(parts), data.data_ptr()), [*parts, data]))
        self._waiting_bytes += nbytes
        if self._waiting_bytes >= _BYTES_AT_ONCE:
            self.finish()
        return PackedWeight(data, Weight(weight_format, rows, columns, 0, data.data_ptr()))

    def finish(self) -> None:
        matrices = (Packing * len(self._waiting))(*(packing for packing, _memory in self._waiting))
        code = load().kv_pack(matrices, len(matrices))
        assert code == 0, f"matrix {-1 - code} has a shape that was not refused before"
        self._waiting.clear()
        self._waiting_bytes = 0


def pack(parts: list[torch.Tensor], weight_format: WeightFormat, columns: int) -> PackedWeight:
    """As `Packer.pack`, at once."""
    packer = Packer()
    packed = packer.pack(parts, weight_format, columns)
    packer.finish()
    return packed
