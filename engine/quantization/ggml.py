"""A weight held as the packed blocks of a GGUF file."""

from __future__ import annotations

import torch

from kernels import ops


class GGMLWeight:
    """`packed` is uint8 [out_features, row_bytes] of one of `kernels.ops.QUANTIZED_FORMATS`."""

    __slots__ = ("in_features", "packed", "tensor_type")

    def __init__(self, packed: torch.Tensor, tensor_type: str, in_features: int) -> None:
        self.packed = packed
        self.tensor_type = tensor_type
        self.in_features = in_features

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.in_features

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return ops.quantized_linear(x, self.packed, self.tensor_type)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        packed = self.packed[indices]
        rows = torch.empty(packed.shape[0], self.in_features, dtype=torch.float32, device=packed.device)
        return ops.dequantize(packed, self.tensor_type, rows)

    def dequantize(self) -> torch.Tensor:
        weight = torch.empty(self.shape, dtype=torch.float32, device=self.packed.device)
        return ops.dequantize(self.packed, self.tensor_type, weight)
