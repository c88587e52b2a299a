"""What the model itself thinks of the chosen tokens and of the likeliest others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.sampling.rows import SamplingRow
from engine.sampling.transfer import Download, upload


@dataclass(slots=True)
class RawLogprobs:
    """Natural log-probabilities of the model itself, before penalties, temperature and filters."""

    chosen: float
    top: list[tuple[int, float]] = field(default_factory=list)
    """The likeliest tokens, best first."""


class LogprobReport:
    """Log-probabilities of the rows that ask for them, computed where the logits are, before these are adjusted."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        self._num_rows = len(rows)
        self._num_top = {
            index: row.settings.params.logprobs
            for index, row in enumerate(rows)
            if row.settings.params.logprobs is not None
        }
        self._copies: Download | None = None
        if self._num_top:
            self._rows = upload({"rows": np.array(list(self._num_top), dtype=np.int64)}, logits.device)["rows"]
            own = logits if len(self._num_top) == len(rows) else logits[self._rows]
            self._logprobs = torch.log_softmax(own, dim=-1)

    def choose(self, token_ids: torch.Tensor) -> None:
        """Looks the chosen tokens [num_rows] up."""
        if self._num_top:
            chosen = self._logprobs.gather(-1, token_ids[self._rows].unsqueeze(-1)).squeeze(-1)
            num_top = min(max(self._num_top.values()), self._logprobs.shape[-1])
            values, ids = torch.topk(self._logprobs, num_top, dim=-1)
            self._copies = Download(chosen, values, ids)
            # As large as the logits: the step after this one, which may be queued already, needs the room.
            del self._logprobs

    def result(self) -> list[RawLogprobs | None]:
        """A report for each row, None where none was asked for."""
        reports: list[RawLogprobs | None] = [None] * self._num_rows
        if self._copies is not None:
            chosen, values, ids = (tensor.tolist() for tensor in self._copies.wait())
            for place, (index, count) in enumerate(self._num_top.items()):
                reports[index] = RawLogprobs(chosen[place], list(zip(ids[place][:count], values[place][:count])))
        return reports
