"""Where the memory of a device is, measured. The parts of every breakdown add up to its total exactly."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

import psutil

from engine.memory.nvml import DriverError, handle, nvml, process_bytes
from engine.protocol import MemoryBreakdown

MemoryKind = Literal["RAM", "VRAM"]


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device. `free` is what can be had without pushing others out."""

    kind: MemoryKind
    name: str
    total: int
    free: int


@dataclass(frozen=True)
class NoGPU:
    """Why there is no VRAM to speak of; `reason` is for people and says what to do.

    `is_absent` tells that the machine has no NVIDIA GPU at all, as far as can be seen.
    """

    reason: str
    is_absent: bool = False


@dataclass(frozen=True)
class WorkerParts:
    """What the worker knows it holds on the device, from its own tensors.

    `runtime` is what it held besides when the weights were loaded and there was no KV cache yet: from then on the
    system's counters alone cannot tell runtime from cache.
    """

    weights: int = 0
    kv_cache: int = 0
    workspace: int = 0
    runtime: int = 0


def ram() -> DeviceMemory:
    """The machine's RAM. `free` counts what the system can give without swapping."""
    memory = psutil.virtual_memory()
    return DeviceMemory("RAM", "system memory", memory.total, memory.available)


def vram(device: int | str = 0) -> DeviceMemory | NoGPU:
    """The memory of a GPU, given its index among those CUDA sees or its UUID ("GPU-...").

    Indices follow the bus order; with unlike GPUs in one machine CUDA may count otherwise, so ask by UUID there.
    """
    try:
        module = nvml()
    except DriverError as error:
        return NoGPU(f"{str(error)[0].upper()}{str(error)[1:]}", error.no_gpu)
    try:
        gpu = handle(device)
        memory = module.nvmlDeviceGetMemoryInfo(gpu)
        name = module.nvmlDeviceGetName(gpu)
    except (module.NVMLError, LookupError) as error:
        return NoGPU(f"GPU {device} cannot be read ({error}): check CUDA_VISIBLE_DEVICES and nvidia-smi.")
    return DeviceMemory("VRAM", name, int(memory.total), int(memory.free))


def available_to(device: DeviceMemory, worker_pid: int | None, index: int | str = 0) -> DeviceMemory:
    """The device with what a worker holds there counted as free: what it could have for another model.

    `index` is the GPU's, as for `vram`. A worker of another machine, or that has ended, holds nothing here.
    """
    if worker_pid is None:
        return device
    if device.kind == "VRAM":
        held = process_bytes(index, worker_pid)
    else:
        try:
            held = resident_bytes(worker_pid)
        except psutil.Error:
            held = 0
    return replace(device, free=min(device.total, device.free + held))


def measure_ram(parts: WorkerParts, pid: int | None = None) -> MemoryBreakdown:
    """Where the RAM is, seen from the worker `pid` (None: this process). The parts add up to the total exactly.

    Memory that is reserved but not touched yet (a fresh KV cache) counts as the worker's, not as free.
    """
    return break_down(ram(), parts, resident_bytes(pid))


def resident_bytes(pid: int | None = None) -> int:
    """RAM that a process (None: this one) holds now."""
    return psutil.Process(pid).memory_info().rss


def measure_vram(parts: WorkerParts, device: int | str = 0, pid: int | None = None) -> MemoryBreakdown | NoGPU:
    """Where a GPU's memory is, seen from the worker. The parts add up to the total exactly.

    Where the driver does not tell processes apart (containers, Windows), what the worker holds
    beyond `parts` counts as other.
    """
    memory = vram(device)
    if isinstance(memory, NoGPU):
        return memory
    held = parts.weights + parts.kv_cache + parts.workspace
    reported = process_bytes(device, os.getpid() if pid is None else pid)
    return break_down(memory, parts, max(held, reported))


def break_down(device: DeviceMemory, parts: WorkerParts, resident: int) -> MemoryBreakdown:
    """Splits a device's memory up, given what the worker holds there in all. The parts add up to the total exactly."""
    held = parts.weights + parts.kv_cache + parts.workspace
    runtime = max(parts.runtime, resident - held)
    untouched = max(0, held + runtime - resident)
    # Taken in this order, so that whatever the counters say the parts never exceed the total.
    left = device.total
    taken: list[int] = []
    for size in (parts.weights, parts.kv_cache, parts.workspace, runtime, device.free - untouched):
        taken.append(min(max(0, size), left))
        left -= taken[-1]
    weights, kv_cache, workspace, runtime, free = taken
    return MemoryBreakdown(
        kind=device.kind,
        total=device.total,
        weights=weights,
        kv_cache=kv_cache,
        workspace=workspace,
        runtime=runtime,
        other=left,
        free=free,
    )
