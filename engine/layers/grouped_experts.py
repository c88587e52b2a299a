"""The experts of a layer as two stacks of matrices, computed together on a GPU without asking it for counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.layers.linear import Linear
from engine.quantization import DenseWeight
from engine.quantization.triton_tiles import TritonWeight

if TYPE_CHECKING:
    from engine.layers.mlp import Gate, GatedMLP
    from kernels.triton.matmul import TiledWeight


class GroupedExperts:
    """What `group_experts` makes of experts; their own weights are then parts of the stacks."""

    __slots__ = ("down", "down_bias", "gate_up", "gate_up_bias", "gated", "num_experts")

    def __init__(
        self,
        gate_up: torch.Tensor | TiledWeight,
        down: torch.Tensor | TiledWeight,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        gated: Gate,
        num_experts: int,
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.gate_up_bias = gate_up_bias
        self.down_bias = down_bias
        self.gated = gated
        self.num_experts = num_experts

    def __call__(self, hidden: torch.Tensor, logits: torch.Tensor, num_chosen: int, normalize: bool) -> torch.Tensor:
        """hidden [num_tokens, hidden_size], the router's logits [num_tokens, num_experts] -> as hidden."""
        from kernels.triton import moe, routing

        chosen, shares = routing.choose_experts(logits, num_chosen, normalize)
        rows = routing.sort_by_expert(chosen, self.num_experts)
        gate_up = moe.grouped_linear(hidden, self.gate_up, rows, self.gate_up_bias, gather=True)
        outputs = moe.grouped_linear(self.gated(gate_up), self.down, rows, self.down_bias)
        return routing.combine(outputs, rows, shares)


def group_experts(experts: Sequence[GatedMLP]) -> GroupedExperts | None:
    """Stacks experts, one projection after the other, and lets them share the stacks' memory.

    None, and nothing changed, where a projection cannot be one stack: its matrices are neither all plain nor all
    tiles of one format, or gather their inputs each in an order of its own (GPTQ with act-order).
    """
    gate_ups, downs = ([getattr(expert, name) for expert in experts] for name in ("gate_up", "down"))
    if not _can_stack(gate_ups) or not _can_stack(downs):
        return None
    gate_up, down = _stack(gate_ups), _stack(downs)
    if gate_up is None or down is None:
        return None
    return GroupedExperts(gate_up, down, _biases(gate_ups), _biases(downs), experts[0].gated, len(experts))


def _can_stack(linears: Sequence[Linear]) -> bool:
    weights = [linear.weight for linear in linears]
    if len({weight.shape for weight in weights}) > 1 or len({linear.bias is None for linear in linears}) > 1:
        return False
    if all(isinstance(weight, DenseWeight) for weight in weights):
        return True
    return all(isinstance(weight, TritonWeight) and weight.permutation is None for weight in weights)


def _stack(linears: Sequence[Linear]) -> torch.Tensor | TiledWeight | None:
    from kernels.triton.moe import stack_tiled, unstack_tiled

    dense = [linear.weight.weight for linear in linears if isinstance(linear.weight, DenseWeight)]
    if dense:
        stack = torch.stack(dense)
        for linear, part in zip(linears, stack, strict=True):
            linear.weight = DenseWeight(part)
        return stack
    tiled = stack_tiled([linear.weight.tiled for linear in linears if isinstance(linear.weight, TritonWeight)])
    if tiled is not None:
        for linear, part in zip(linears, unstack_tiled(tiled), strict=True):
            linear.weight = TritonWeight(part)
    return tiled


def _biases(linears: Sequence[Linear]) -> torch.Tensor | None:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if not biases:
        return None
    stack = torch.stack(biases)
    for linear, part in zip(linears, stack, strict=True):
        linear.bias = part
    return stack
