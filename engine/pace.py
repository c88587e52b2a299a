"""How many steps are computed in a row before anybody looks at their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.protocol import StepEntry

MOST_STEPS = 4
FRAME_SECONDS = 0.016
"""What a screen takes to show something new: nobody sees whether tokens within it came one by one."""


class DecodePace:
    """Lets as many steps run in a row as fit into a frame.

    A step of a small model goes through all that is in the processor's cache, and to plan the next one and to hand
    out its tokens takes the host four times as long as it would with the cache as it was: several times in a row,
    that is paid once. A prompt that arrives meanwhile waits no longer than a frame.
    """

    def __init__(self) -> None:
        self._seconds = math.inf

    @property
    def num_steps(self) -> int:
        """At most `MOST_STEPS`; 1 as long as no step has shown how long they take."""
        return max(1, min(MOST_STEPS, int(FRAME_SECONDS / self._seconds)))

    def observe(self, entries: Sequence[StepEntry], num_steps: int, seconds: float) -> None:
        """What so many steps took. What is no mere decoding says nothing about those that follow."""
        decodes = all(entry.decode_tokens and not entry.draft_tokens for entry in entries)
        self._seconds = seconds / num_steps if decodes else math.inf
