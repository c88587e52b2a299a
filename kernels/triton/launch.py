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
    max_registers: int | None


@dataclass(slots=True)
class _Recording:
    capability: Capability
    runs_ptx: bool
    launches: list[Launch]


_recording: _Recording | None = None


@contextmanager
def recording(capability: Capability, runs_ptx: bool = True) -> Iterator[list[Launch]]:
    """Inside, nothing runs: operations choose what they would for a GPU of that capability, and it is listed."""
    global _recording
    before, _recording = _recording, _Recording(capability, runs_ptx, [])
    try:
        yield _recording.launches
    finally:
        _recording = before


def compute_capability(device: torch.device) -> Capability:
    """A GPU's compute capability; for the interpreter, which runs on the CPU, that of the oldest supported one."""
    if _recording is not None:
        return _recording.capability
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else OLDEST


def runs_ptx(device: torch.device) -> bool:
    """Whether kernels may hold instructions of NVIDIA's: not in the interpreter, nor on GPUs of others."""
    if _recording is not None:
        return _recording.runs_ptx
    return device.type == "cuda" and torch.version.hip is None


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int,
    num_stages: int = 3,
    max_registers: int | None = None,
    **constants: Any,
) -> None:
    """Runs `kernel` over `grid`; a grid without programs is no error.

    NVIDIA's assembler may spill registers to make room for more programs; told how many there are, it does not.
    """
    if _recording is not None:
        max_registers = max_registers if _recording.runs_ptx else None
        _recording.launches.append(Launch(kernel, args, constants, num_warps, num_stages, max_registers))
    elif all(grid):
        options = {} if max_registers is None or not runs_ptx(args[0].device) else {"maxnreg": max_registers}
        kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages, **options)
