"""How long something takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_FLUSH_BYTES = 1 << 30
"""Written before each run: many times the L2 cache, and long enough for the host to queue the run meanwhile."""


class Clock:
    """Times single runs; on a GPU by CUDA events, with nothing of the run's data in the L2 cache.

    A median is of up to `repeats` runs.
    """

    def __init__(self, device: torch.device, repeats: int = 20) -> None:
        self.device = device
        self._repeats = repeats
        self._is_cuda = device.type == "cuda"
        self._flush: torch.Tensor | None = None

    def seconds(self, run: Callable[[], object], budget: float = 0.5) -> float:
        """The median of several runs, on a GPU after two that warm up; begins no further one after `budget` seconds."""
        for _ in range(2 if self._is_cuda else 0):
            run()
        self.wait()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < self._repeats and (len(times) < 3 or time.perf_counter() - began < budget):
            times.append(self._once(run))
        return statistics.median(times)

    def wall_seconds(self, run: Callable[[], object]) -> float:
        """One run as its caller waits for it, until the device is done."""
        self.wait()
        began = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def _once(self, run: Callable[[], object]) -> float:
        if not self._is_cuda:
            return self.wall_seconds(run)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self._flush is None:
            self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        for _ in range(2):  # half a millisecond on the fastest GPU: as long as the host needs for some ten kernels
            self._flush.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
