"""A weight in the tiles that the native CPU kernels stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.cpu.library import SourceFormat
from kernels.cpu.packing import PackedWeight, can_pack, pack
from kernels.cpu.program import Program, StepBatch

NATIVE_SOURCES = {source.name: source for source in SourceFormat}
"""By the names that files give their tensor types."""


class NativeWeight:
    """Packed [out_features, in_features]; in_features is a multiple of 32."""

    __slots__ = ("packed",)

    def __init__(self, packed: PackedWeight) -> None:
        self.packed = packed

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.rows, self.packed.columns

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed.matmul(x.float()).to(x.dtype)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        program = Program(max_rows=indices.numel())
        out = program.floats(self.packed.columns)
        program.embed(self.packed, out)
        program.run(StepBatch.of_rows(indices.numel(), indices.tolist()))
        return out

    def dequantize(self) -> torch.Tensor:
        return self.packed.dequantize()


def native_weight(parts: Sequence[torch.Tensor], tensor_type: str, in_features: int) -> NativeWeight | None:
    """Packs matrices of one stored type on top of each other; None where the native kernels lack the type or shape.

    Each part holds rows as a model file stores them: uint8 [rows, row_bytes], or plain values [rows, in_features].
    """
    source_format = NATIVE_SOURCES.get(tensor_type)
    if source_format is None or not can_pack(in_features):
        return None
    rows = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return NativeWeight(pack(rows.contiguous(), source_format, in_features))
