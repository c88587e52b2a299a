"""Starts kernels, or writes down what would be started, so that it can be compiled without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Capability = tuple[int, int]

OLDEST: Capability = (8, 0)
"""bfloat16 and asynchronous copies came with it."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel as it would be started: its arguments in order, then its compile-time constants."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


@dataclass(slots=True)
class _Recording:
    capability: Capability
    launches: list[Launch]


_recording: _Recording | None = None


@contextmanager
def recording(capability: Capability) -> Iterator[list[Launch]]:
    """Inside, nothing runs: operations choose what they would for a GPU of that capability, and it is listed."""
    global _recording
    before, _recording = _recording, _Recording(capability, [])
    try:
        yield _recording.launches
    finally:
        _recording = before


def compute_capability(device: torch.device) -> Capability:
    """A GPU's compute capability; for the interpreter, which runs on the CPU, that of the oldest supported one."""
    if _recording is not None:
        return _recording.capability
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else OLDEST


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, num_stages: int = 3, **constants: Any
) -> None:
    """Runs `kernel` over `grid`; a grid without programs is no error."""
    if _recording is not None:
        _recording.launches.append(Launch(kernel, args, constants, num_warps, num_stages))
    elif all(grid):
        kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
