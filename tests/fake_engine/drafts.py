"""Speculation as far as it is seen from outside: counts of drafts, by position."""

from __future__ import annotations

from collections.abc import Sequence


class FakeDrafts:
    """Of every hundred drafts at a position, `acceptance` there is how many are accepted, as a share."""

    def __init__(self, acceptance: Sequence[float]) -> None:
        self._acceptance = list(acceptance)
        self.drafted = [0] * len(self._acceptance)
        self._exact = [0.0] * len(self._acceptance)

    @property
    def accepted(self) -> list[int]:
        return [int(share) for share in self._exact]

    def verify(self, num_steps: int) -> tuple[int, int]:
        """Counts the drafts of some steps; returns how many there were and how many of them were accepted."""
        before = sum(self.accepted)
        for index, share in enumerate(self._acceptance):
            self.drafted[index] += num_steps
            self._exact[index] += num_steps * share
        return num_steps * len(self._acceptance), sum(self.accepted) - before
