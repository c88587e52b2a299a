"""How often tokens occur in the texts of requests with penalties, in tables on the device of the logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.request import Request

_FEWEST_SLOTS = 4
PENDING = -1
"""Stands for a token that is still on the device."""


class CountedText:
    """A request's text, whose latest `window` tokens (0: all) the tables count.

    `num_counted` tokens are taken in so far, into the tables' row `slot`; -1 while it has none.
    """

    def __init__(self, request: Request, tables: CountTables) -> None:
        self.tables = tables
        self.slot = -1
        self.num_counted = 0
        self._request = request
        self._window = request.params.penalty_window

    def release(self) -> None:
        """Gives the row of the tables back; called when the request is over."""
        self.tables.release(self)

    def missing(self, end: int) -> Iterator[tuple[bool, list[int], int]]:
        """Tokens to be counted (1) or no longer (-1) so that the first `end` are taken in: (in output, ids, change)."""
        old_start, new_start = (self._window_start(each) for each in (self.num_counted, end))
        for first, last, change in (
            (max(self.num_counted, new_start), end, 1),
            (old_start, min(new_start, self.num_counted), -1),
        ):
            output_start = max(first, self._request.num_prompt_tokens)
            if first < last:
                yield False, self._request.token_ids[first:last], change
            if output_start < last:
                yield True, self._request.token_ids[output_start:last], change

    def _window_start(self, end: int) -> int:
        return max(0, end - self._window) if self._window else 0

    def deltas(self, end: int, following: Sequence[int], vocab_size: int) -> list[tuple[int, int, int]]:
        """What changes if tokens follow the first `end` ones: (token id, change of the sequence, of the output)."""
        changes: list[tuple[int, int, int]] = []
        for position, token_id in enumerate(following, start=end):
            changes.append((token_id, 1, 1))
            leaving = position - self._window
            if self._window and leaving >= 0:
                gone = self._request.token_ids[leaving] if leaving < end else following[leaving - end]
                if gone < vocab_size:
                    changes.append((gone, -1, -1 if leaving >= self._request.num_prompt_tokens else 0))
        return changes


@dataclass(frozen=True, slots=True)
class CountUpdate:
    """What brings tables up to date: `places` int64 in the flattened tables and `changes` int32 there."""

    places: np.ndarray
    changes: np.ndarray
    ends: Mapping[CountedText, int]


class CountTables:
    """Counts of every token, a row for each text that is being written, kept up to date by difference.

    They are made when first needed, for the vocabulary and device of then, and grow with the number of texts.
    """

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None  # int32 [2, num_slots, vocab_size]: sequence, output
        self._free: list[int] = []

    @property
    def sequence(self) -> torch.Tensor:
        """int32 [num_slots, vocab_size], counts in prompt and output."""
        assert self._counts is not None
        return self._counts[0]

    @property
    def output(self) -> torch.Tensor:
        """int32 [num_slots, vocab_size], counts in the output."""
        assert self._counts is not None
        return self._counts[1]

    @property
    def nbytes(self) -> int:
        return 0 if self._counts is None else self._counts.nbytes

    def release(self, text: CountedText) -> None:
        if text.slot >= 0:
            self._free.append(text.slot)
            text.slot, text.num_counted = -1, 0

    def update_to(self, ends: Mapping[CountedText, int], vocab_size: int, device: torch.device) -> CountUpdate | None:
        """Gives each text a slot, and says what is missing until its tokens before an end are counted, if anything."""
        for text in ends:
            if text.slot < 0:
                text.slot = self._take_slot(vocab_size, device)
        num_slots = len(self.sequence)
        ids: list[int] = []
        rows: list[int] = []
        changes: list[int] = []
        for text, end in ends.items():
            for in_output, token_ids, change in text.missing(end):
                ids += token_ids
                rows += [text.slot + num_slots * in_output] * len(token_ids)
                changes += [change] * len(token_ids)
        if not ids:
            return None
        columns = np.array(ids, dtype=np.int64)
        places = np.array(rows, dtype=np.int64) * vocab_size + columns
        # A prompt given as ids may hold padding of the vocabulary, which has no logit.
        known = columns < vocab_size
        return CountUpdate(places[known], np.array(changes, dtype=np.int32)[known], ends)

    def apply(self, update: CountUpdate, places: torch.Tensor, changes: torch.Tensor) -> None:
        """Takes an update in, whose arrays are on the device by now."""
        assert self._counts is not None
        self._counts.view(-1).scatter_add_(0, places, changes)
        for text, end in update.ends.items():
            text.num_counted = end

    def _take_slot(self, vocab_size: int, device: torch.device) -> int:
        if not self._free:
            num_slots = 0 if self._counts is None else self._counts.shape[1]
            with torch.inference_mode(False):  # in which drafts are drawn, but not all logits verified
                grown = torch.zeros(2, max(_FEWEST_SLOTS, 2 * num_slots), vocab_size, dtype=torch.int32, device=device)
            if self._counts is not None:
                grown[:, :num_slots] = self._counts
            self._counts = grown
            self._free = list(reversed(range(num_slots, grown.shape[1])))
        assert self._counts is not None and self._counts.shape[2] == vocab_size
        slot = self._free.pop()
        self._counts[:, slot].zero_()
        return slot
