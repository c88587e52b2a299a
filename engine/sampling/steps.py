"""What several steps in a row drew, each with the tokens of the one before, without the host in between."""

from __future__ import annotations

import torch

from engine.sampling.verify import Verified


class DrawnSteps:
    """The tokens of several steps. token_ids int64 and healthy bool are [num_steps * num_rows], step by step."""

    def __init__(self, token_ids: torch.Tensor, healthy: torch.Tensor, num_rows: int) -> None:
        self.token_ids = token_ids
        self._healthy = healthy
        self._num_rows = num_rows

    def result(self) -> list[Verified]:
        """The new tokens of each request, in order: those before its first row of logits that was no numbers.

        A step of its own comes upon that row again.
        """
        token_ids, healthy = self.token_ids.tolist(), self._healthy.tolist()
        results: list[Verified] = []
        for row in range(self._num_rows):
            own, flags = token_ids[row :: self._num_rows], healthy[row :: self._num_rows]
            count = len(own) if all(flags) else flags.index(False)
            results.append(Verified(own[:count] or None))
        return results
