"""The gated feed-forward layer."""

from __future__ import annotations

import torch

from engine.layers.linear import Linear
from kernels import ops


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up fused: [num_tokens, hidden_size] -> the same shape."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(ops.silu_and_mul(self.gate_up(hidden)))

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes
