"""What a layer may ask of a weight, whatever its format."""

from __future__ import annotations

from typing import Protocol

import torch


class QuantWeight(Protocol):
    """A weight matrix [out_features, in_features]."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int:
        """Bytes it takes in memory, scales included."""
        ...

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T: [num_tokens, in_features] -> [num_tokens, out_features], in the dtype of x."""
        ...

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows as plain numbers, for an embedding: int64 [num_tokens] -> [num_tokens, in_features]."""
        ...

    def dequantize(self) -> torch.Tensor:
        """The weight as plain numbers [out_features, in_features]; float32 for packed formats."""
        ...
