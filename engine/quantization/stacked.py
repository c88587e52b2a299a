"""Weights on top of each other that cannot be one matrix: their formats, groups or permutations differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.quantization.base import QuantWeight


class StackedWeight:
    """The rows of `parts`, one after another; a product is computed part by part."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[QuantWeight]) -> None:
        self.parts = tuple(parts)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.matmul(x) for part in self.parts], dim=1)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        first, pieces = 0, []
        order = torch.empty_like(indices)
        taken = 0
        for part in self.parts:
            chosen = ((indices >= first) & (indices < first + part.shape[0])).nonzero().squeeze(1)
            pieces.append(part.rows(indices[chosen] - first))
            order[chosen] = torch.arange(taken, taken + chosen.numel(), device=indices.device)
            first, taken = first + part.shape[0], taken + chosen.numel()
        return torch.cat(pieces)[order]

    def dequantize(self) -> torch.Tensor:
        return torch.cat([part.dequantize() for part in self.parts])
