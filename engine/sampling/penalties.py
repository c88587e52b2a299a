"""What changes single logits before any filter: bias, penalties, and ends that may not come yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import repeat

import numpy as np
import torch

from engine.parameters import SamplingParams


class TokenCounts:
    """How often each token occurs among the latest `window` tokens (0: all), kept up to date by difference."""

    def __init__(self, num_prompt_tokens: int, window: int) -> None:
        self.sequence: Counter[int] = Counter()
        """Prompt and output."""
        self.output: Counter[int] = Counter()
        self._num_prompt_tokens = num_prompt_tokens
        self._window = window
        self._end = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes in the tokens that came since the last call; `token_ids` only ever grows."""
        start = self._end
        if self._window and len(token_ids) - start > self._window:
            start = len(token_ids) - self._window
            self.sequence.clear()
            self.output.clear()
        for position in range(start, len(token_ids)):
            self._append(position, token_ids.__getitem__)
        self._end = len(token_ids)

    def after(self, token_ids: Sequence[int], drafts: Sequence[int]) -> TokenCounts:
        """The counts as they would be if `drafts` followed `token_ids`, which are taken in already."""
        counts = TokenCounts(self._num_prompt_tokens, self._window)
        counts.sequence, counts.output = self.sequence.copy(), self.output.copy()
        counts._end = len(token_ids) + len(drafts)

        def token_at(position: int) -> int:
            return token_ids[position] if position < len(token_ids) else drafts[position - len(token_ids)]

        for position in range(len(token_ids), counts._end):
            counts._append(position, token_at)
        return counts

    def _append(self, position: int, token_at: Callable[[int], int]) -> None:
        self._count(position, token_at(position), 1)
        leaving = position - self._window
        if self._window and leaving >= 0 and self.sequence.total() > self._window:
            self._count(leaving, token_at(leaving), -1)

    def _count(self, position: int, token_id: int, change: int) -> None:
        counters = (self.sequence, self.output) if position >= self._num_prompt_tokens else (self.sequence,)
        for counter in counters:
            counter[token_id] += change
            if not counter[token_id]:
                del counter[token_id]


def uses_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class LogitCells:
    """Single logits of a batch that are changed in one go, each with a value."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def add(self, row: int, ids: Collection[int], values: Iterable[float]) -> None:
        """Ids beyond the vocabulary, which a prompt given as ids may hold, have no logit and are left out."""
        own_ids = np.fromiter(ids, dtype=np.int64, count=len(ids))
        own_values = np.fromiter(values, dtype=np.float32, count=len(ids))
        known = own_ids < self._vocab_size
        if not known.all():
            own_ids, own_values = own_ids[known], own_values[known]
        self._rows.append(np.full(len(own_ids), row))
        self._ids.append(own_ids)
        self._values.append(own_values)

    def on(self, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """Row and column of each cell, and its value; None if there is none."""
        if not self._rows:
            return None
        rows, ids, values = (
            torch.from_numpy(np.concatenate(parts)).to(device) for parts in (self._rows, self._ids, self._values)
        )
        return (rows, ids), values


def apply_penalties(logits: torch.Tensor, penalised: Iterable[tuple[int, SamplingParams, TokenCounts]]) -> None:
    """Lowers, in place, the logits [num_rows, vocab_size] of tokens that occurred in the text of their row.

    Repetition (Keskar et al. 2019) covers prompt and output: positive logits are divided, negative
    ones multiplied. Presence and frequency cover the output only and are subtracted.
    """
    factors, losses = LogitCells(logits.shape[-1]), LogitCells(logits.shape[-1])
    for row, params, counts in penalised:
        if params.repetition_penalty != 1.0 and counts.sequence:
            factors.add(row, counts.sequence.keys(), repeat(params.repetition_penalty))
        if (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0) and counts.output:
            presence, frequency = params.presence_penalty, params.frequency_penalty
            losses.add(row, counts.output.keys(), (presence + frequency * times for times in counts.output.values()))
    if (divided := factors.on(logits.device)) is not None:
        cells, penalty = divided
        values = logits[cells]
        logits[cells] = torch.where(values > 0, values / penalty, values * penalty)
    if (subtracted := losses.on(logits.device)) is not None:
        cells, loss = subtracted
        logits[cells] -= loss


def apply_logit_bias(logits: torch.Tensor, biases: Iterable[tuple[int, dict[int, float]]]) -> None:
    """Adds to the logits [num_rows, vocab_size] of the tokens with a bias, row by row, in place."""
    sums = LogitCells(logits.shape[-1])
    for row, bias in biases:
        sums.add(row, bias.keys(), bias.values())
    if (added := sums.on(logits.device)) is not None:
        cells, bias_values = added
        logits[cells] += bias_values


def forbid(logits: torch.Tensor, forbidden: Iterable[tuple[int, Collection[int]]]) -> None:
    """Takes every chance from tokens of a row, in place."""
    gone = LogitCells(logits.shape[-1])
    for row, ids in forbidden:
        gone.add(row, ids, repeat(-np.inf))
    if (removed := gone.on(logits.device)) is not None:
        cells, minus_infinity = removed
        logits[cells] = minus_infinity
