"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Passes text through until a stop string is complete, holding back only what could still become one.

    The stop that is complete first wins; of those complete at the same place, the longest.
    So the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if any(not stop for stop in stop_strings):
            raise ValueError("stop strings must not be empty")
        self._stops = tuple(dict.fromkeys(stop_strings))
        # Always a proper prefix of some stop, hence shorter than the longest one.
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns (text that may be shown, the stop string that is now complete or None).

        A stop string itself and what follows it are never shown; after it nothing is.
        """
        if self.matched is not None:
            return "", self.matched
        pending = self._held + text
        match = self._first_match(pending)
        if match is not None:
            start, self.matched = match
            self._held = ""
            return pending[:start], self.matched
        keep = len(pending) - self._held_length(pending)
        self._held = pending[keep:]
        return pending[:keep], None

    def flush(self) -> str:
        """The held-back text at the end of an answer that no stop string ended."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, pending: str) -> tuple[int, str] | None:
        found = [(start, stop) for stop in self._stops if (start := pending.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _held_length(self, pending: str) -> int:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(pending)), longest, -1):
                if pending.endswith(stop[:length]):
                    longest = length
                    break
        return longest
