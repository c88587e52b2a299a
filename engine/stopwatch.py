"""Where time goes: exclusive seconds by part, for functions of objects that know nothing of it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class Stopwatch:
    """Exclusive seconds by part: while one part runs inside another, the outer one's clock rests.

    `seconds` therefore add up to the time spent in outermost parts.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._clock = clock
        self._open: list[str] = []
        self._since = 0.0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def enter(self, part: str) -> None:
        self._book()
        self._open.append(part)

    def leave(self) -> None:
        self._book()
        self._open.pop()

    def move(self, from_part: str, to_part: str, seconds: float) -> None:
        """Books time of one part under another, after it was measured elsewhere."""
        self.seconds[from_part] -= seconds
        self.seconds[to_part] += seconds

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time booked under the part."""

        def run(*arguments: Any, **options: Any) -> Any:
            self.enter(part)
            try:
                return function(*arguments, **options)
            finally:
                self.leave()

        return run

    def _book(self) -> None:
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


@contextmanager
def replaced_methods(*replacements: tuple[object, str, Callable[..., Any]]) -> Iterator[None]:
    """Gives single objects other methods (object, name, function), and takes them away at the end."""
    with ExitStack() as stack:
        for owner, name, function in replacements:
            setattr(owner, name, function)
            stack.callback(delattr, owner, name)
        yield
