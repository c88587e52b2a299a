"""What changes single logits before any filter: bias, penalties, and ends that may not come yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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
            self._count(position, token_ids[position], 1)
            leaving = position - self._window
            if self._window and leaving >= 0 and self.sequence.total() > self._window:
                self._count(leaving, token_ids[leaving], -1)
        self._end = len(token_ids)

    def _count(self, position: int, token_id: int, change: int) -> None:
        counters = (self.sequence, self.output) if position >= self._num_prompt_tokens else (self.sequence,)
        for counter in counters:
            counter[token_id] += change
            if not counter[token_id]:
                del counter[token_id]


def uses_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def apply_penalties(logits: torch.Tensor, params: SamplingParams, counts: TokenCounts) -> None:
    """Lowers, in place, the logits [vocab_size] of tokens that occurred.

    Repetition (Keskar et al. 2019) covers prompt and output: positive logits are divided, negative
    ones multiplied. Presence and frequency cover the output only and are subtracted. Tokens beyond the
    vocabulary, which a prompt given as ids may hold, have no logit to lower.
    """
    if params.repetition_penalty != 1.0 and counts.sequence:
        ids, _ = _occurrences(counts.sequence, logits)
        values = logits[ids]
        penalty = params.repetition_penalty
        logits[ids] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0) and counts.output:
        ids, times = _occurrences(counts.output, logits)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * times


def _occurrences(counter: Counter[int], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The counted tokens that `logits` [vocab_size] has a place for, and how often each occurs."""
    pairs = np.array([*counter.keys(), *counter.values()], dtype=np.int64).reshape(2, -1)
    ids, times = torch.from_numpy(pairs[:, pairs[0] < logits.shape[-1]]).to(logits.device)
    return ids, times


def apply_logit_bias(logits: torch.Tensor, bias: dict[int, float]) -> None:
    """Adds `bias` to the logits [vocab_size] of its tokens, in place."""
    ids = torch.tensor(list(bias), device=logits.device)
    logits[ids] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
