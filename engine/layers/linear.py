"""A linear layer over one weight of any format."""

from __future__ import annotations

import torch

from engine.quantization import QuantWeight


class Linear:
    """x @ weight.T + bias: [num_tokens, in_features] -> [num_tokens, out_features]."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: QuantWeight, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.weight.matmul(x)
        return out if self.bias is None else out.add_(self.bias)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
