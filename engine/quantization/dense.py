"""A weight held as plain floating point numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels import ops


class DenseWeight:
    """`weight` is [out_features, in_features] in the model's dtype."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return F.embedding(indices, self.weight)

    def dequantize(self) -> torch.Tensor:
        return self.weight
