"""The feed-forward layers: one for every token, or a few chosen out of many experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.layers.grouped_experts import group_experts
from engine.layers.linear import Linear
from kernels import ops

Gate = Callable[[torch.Tensor], torch.Tensor]
"""[num_tokens, 2 * n], gate beside up -> [num_tokens, n]: `kernels.ops.silu_and_mul` or one like it."""


class GatedMLP:
    """down(gated(gate(x), up(x))), gate and up fused: [num_tokens, hidden_size] -> the same shape."""

    __slots__ = ("down", "gate_up", "gated")

    def __init__(self, gate_up: Linear, down: Linear, gated: Gate) -> None:
        self.gate_up = gate_up
        self.down = down
        self.gated = gated

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.gated(self.gate_up(hidden)))

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


class MixtureOfExperts:
    """The sum of the experts that a router chooses for each token, weighted by its scores.

    `normalize`: the weights are a softmax over the chosen experts' logits; otherwise over all experts'.
    On a GPU the experts are stacked and computed together; those of formats that differ, one after another.
    Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; Jiang et al. 2024, https://arxiv.org/abs/2401.04088
    """

    __slots__ = ("experts", "grouped", "normalize", "num_chosen", "router")

    def __init__(self, router: Linear, experts: list[GatedMLP], num_chosen: int, normalize: bool) -> None:
        self.router = router
        self.experts = experts
        self.num_chosen = num_chosen
        self.normalize = normalize
        self.grouped = group_experts(experts) if ops.kernel_backend() == "triton" else None

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can hold it: no part asks the host how many tokens an expert has."""
        return self.grouped is not None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        logits = self.router(hidden)
        if self.grouped is not None:
            return self.grouped(hidden, logits, self.num_chosen, self.normalize)
        logits = logits.float()
        best, chosen = logits.topk(self.num_chosen, dim=-1)
        weights = best.softmax(-1) if self.normalize else logits.softmax(-1).gather(-1, chosen)
        # Rows are sorted by expert, so that each computes all of its tokens at once.
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        inputs = hidden[order // self.num_chosen]
        outputs = torch.empty_like(inputs)
        for expert, rows, out in zip(self.experts, inputs.split(counts), outputs.split(counts), strict=True):
            if rows.shape[0]:
                out.copy_(expert(rows))
        by_token = torch.empty_like(outputs).index_copy_(0, order, outputs)
        by_token = by_token.view(*chosen.shape, -1) * weights.to(hidden.dtype).unsqueeze(-1)
        return by_token.sum(1)

    @property
    def nbytes(self) -> int:
        return self.router.nbytes + sum(expert.nbytes for expert in self.experts)
