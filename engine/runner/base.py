"""What every runner does."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.scheduler import StepPlan


class Runner(Protocol):
    """Runs one ragged forward pass for all requests of a step together."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache."""
        ...

    @property
    def workspace_bytes(self) -> int | None:
        """Bytes of activations and scratch; None where they come and go with each step."""
        ...

    @property
    def graph_bytes(self) -> int:
        """Bytes of recorded CUDA graphs, with the activations and logits they have of their own."""
        ...

    def execute(self, plan: StepPlan, all_logits: bool = False, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Computes a step and writes its keys and values. Returns logits, float32 [num_rows, vocab_size].

        Rows follow `plan.scheduled`: one for each entry that samples, plus one for each of its draft
        tokens, which come first in the entry's rows. With `all_logits`, one for every scheduled token.
        The next step may write over them. `token_ids` int64 [rows of the step before], on the device, is what that
        step chose; entries with a `source_row` take their token from it. On a GPU nothing here waits for it.
        Raises ValueError for a plan beyond the token budget or with too few blocks.
        """
        ...
