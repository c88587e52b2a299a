"""What every engine is asked to do, and how its process is weighed."""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Workload:
    """Token ids to prefill, starts of sequences to decode from, and how far; or only to load and make one token."""

    prompt: list[int]
    starts: list[list[int]]
    decode_tokens: int = 64
    concurrency: tuple[int, ...] = (1, 4, 8)
    only_load: bool = False

    @classmethod
    def from_text(cls, token_ids: list[int], only_load: bool = False, prompt_tokens: int = 512) -> Workload:
        """Cuts one long text into a prompt and eight different starts of 32 tokens."""
        if len(token_ids) < prompt_tokens:
            raise ValueError(f"the text has {len(token_ids)} tokens, {prompt_tokens} are needed")
        starts = [token_ids[40 * i : 40 * i + 32] for i in range(8)]
        return cls(token_ids[:prompt_tokens], starts, only_load=only_load)

    @staticmethod
    def ratio_of_steps(step: Callable[[int], float], drafts: int = 4, times: int = 60) -> float:
        """What a step that verifies drafts costs, in plain steps: medians of `step(rows)` in seconds, in turn."""
        plain, verifying = zip(*[(step(1), step(1 + drafts)) for _ in range(times)], strict=True)
        return statistics.median(verifying) / statistics.median(plain)


def rss() -> int:
    """Bytes of this process that are in memory now."""
    return psutil.Process().memory_info().rss


def peak_memory() -> int:
    """The most bytes of this process that were ever in memory at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
