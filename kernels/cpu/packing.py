"""Weights in the layout that the native kernels stream (src/kvasir_cpu.h)."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from dataclasses import dataclass

import torch

from kernels.cpu.library import GROUP, ActivationKind, NativeLibraryError, SourceFormat, Weight, WeightFormat, load

_FOUR_BIT = (WeightFormat.Q4_F16, WeightFormat.Q4_F32)
_DENSE = (WeightFormat.DENSE_F32, WeightFormat.DENSE_F16, WeightFormat.DENSE_BF16)


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

        4-bit weights take 16 bits, or 8 at about half the time for many rows.
        """
        if self.format in _DENSE:
            return ActivationKind.F32
        if self.format not in _FOUR_BIT:
            return ActivationKind.INT16
        return ActivationKind.BYTE_PAIR if precise else ActivationKind.INT8

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def dequantize(self, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Rows first..first+count as float32 [count, columns]."""
        count = self.rows - first if count is None else count
        out = torch.empty(count, self.columns, dtype=torch.float32)
        if load().kv_dequantize(ctypes.byref(self.struct), first, count, out.data_ptr()) != 0:
            raise NativeLibraryError(f"rows {first} to {first + count} of {self.rows} cannot be dequantised")
        return out


_HUGE_PAGE = 2 << 20
_ARENA_BYTES = 32 << 20


class _Arena:
    """Memory shared by many matrices, most of which are smaller than a huge page.

    Only the matrices keep an arena's pages alive: they go with the last of them.
    """

    def __init__(self) -> None:
        self._pages: weakref.ref[mmap.mmap] | None = None
        self._used = 0
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zeroed bytes, 64-byte aligned; on Linux on huge pages, from which weights stream faster."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.zeros(nbytes, dtype=torch.uint8)
        with self._lock:
            pages = self._pages() if self._pages else None
            if pages is None or self._used + nbytes > len(pages):
                pages = mmap.mmap(-1, max(_ARENA_BYTES, -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE))
                pages.madvise(mmap.MADV_HUGEPAGE)
                self._pages, self._used = weakref.ref(pages), 0
            data = torch.frombuffer(pages, dtype=torch.uint8, offset=self._used, count=nbytes)
            self._used += -(-nbytes // 64) * 64
        return data


_arena = _Arena()


def can_pack(columns: int) -> bool:
    return columns % GROUP == 0


def pack(source: torch.Tensor, source_format: SourceFormat, columns: int) -> PackedWeight:
    """Packs rows as a model file stores them: a contiguous CPU tensor [rows, bytes or values of a row].

    Raises `NativeLibraryError` where the columns are no multiple of 32.
    """
    library = load()
    rows = source.shape[0]
    weight_format = library.kv_packed_format(source_format)
    nbytes = library.kv_packed_bytes(weight_format, rows, columns)
    if nbytes < 0:
        raise NativeLibraryError(
            f"a {SourceFormat(source_format).name} matrix of {rows} x {columns} cannot be packed: "
            f"columns must be a multiple of {GROUP}"
        )
    assert source.is_contiguous() and source.device.type == "cpu"
    data = _arena.allocate(nbytes)
    if library.kv_pack(source_format, source.data_ptr(), rows, columns, data.data_ptr()) != 0:
        raise NativeLibraryError(f"packing a {SourceFormat(source_format).name} matrix of {rows} x {columns} failed")
    return PackedWeight(data, Weight(weight_format, rows, columns, 0, data.data_ptr()))
