"""Streams an answer to standard output."""

from __future__ import annotations

import sys


class AnswerPrinter:
    """Prints pieces as they come and ends the answer with exactly one line break."""

    def __init__(self) -> None:
        self._last = ""

    @property
    def has_written(self) -> bool:
        """Whether something of this answer is on the screen."""
        return bool(self._last)

    def write(self, text: str) -> None:
        if text:
            self._last = text[-1]
            sys.stdout.write(text)
            sys.stdout.flush()

    def end(self) -> None:
        if self._last != "\n":
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._last = ""
