"""A weight in the tiles that the native CPU kernels stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.cpu.library import WeightFormat
from kernels.cpu.packing import PackedWeight, can_pack, pack
from kernels.cpu.program import Program, StepBatch

PackFunction = Callable[[list[torch.Tensor], WeightFormat, int], PackedWeight]
"""`kernels.cpu.packing.pack`, or a `Packer`'s, which packs later."""


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


def native_weight(
    parts: Sequence[torch.Tensor], tensor_type: str, in_features: int, pack: PackFunction = pack
) -> NativeWeight | None:
    """Packs matrices of one stored type on top of each other; None where the native kernels lack the type or shape.

    Each part holds rows as a model file stores them: uint8 [rows, row_bytes], or plain values [rows, in_features].
    """
    if tensor_type not in WeightFormat.__members__ or not can_pack(in_features):
        return None
    return NativeWeight(pack([part.contiguous() for part in parts], WeightFormat[tensor_type], in_features))
