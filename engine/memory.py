"""What a model needs and what the machine has: arithmetic from metadata, and measured breakdowns.

Torch-free, so that the window and the command line can ask before anything is loaded.
All sizes are bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import psutil

from engine.protocol import MemoryBreakdown
from kernels.cpu.library import library_path

WeightFormat = Literal["stored", "fp32", "fp16", "bf16", "int8", "int4"]
KVFormat = Literal["fp32", "fp16", "bf16", "int8"]
MemoryKind = Literal["RAM", "VRAM"]

# Bytes per weight; int4 carries one fp16 scale and zero point per group of 128.
_WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5 + 4 / 128}
_KV_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
# An int8 cache keeps one float32 scale per token and head, for K and for V.
_INT8_SCALE_BYTES = 4

# What a worker holds besides its tensors. RAM: interpreter, torch and transformers, measured at 280 MiB on the
# starter model, rounded up. VRAM: driver context and libraries, a usual figure, not measured here.
RUNTIME_BYTES: dict[MemoryKind, int] = {"RAM": 320 << 20, "VRAM": 600 << 20}

MIN_POOL_TOKENS = 16384
# Of what is free once the weights are there, for the KV cache. RAM is somebody's desktop; of VRAM, the rest is for
# activations.
KV_CACHE_SHARE: dict[MemoryKind, float] = {"RAM": 0.25, "VRAM": 0.85}
# Tokens a step computes at most. A CPU needs about a millisecond for each even with a small model, and all
# running answers wait for the step.
BATCHED_TOKENS: dict[MemoryKind, int] = {"RAM": 128, "VRAM": 2048}


@dataclass(frozen=True)
class ModelShape:
    """What memory arithmetic needs to know of a model, from its metadata alone.

    `kv_heads` holds the number of KV heads of each layer; `stored_bytes` is the size of the
    weights in the file; `intermediate_size` is the widest MLP.
    """

    num_parameters: int
    stored_bytes: int
    kv_heads: tuple[int, ...]
    key_dim: int
    value_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_context: int

    @property
    def num_layers(self) -> int:
        return len(self.kv_heads)


def cpu_formats() -> tuple[WeightFormat, KVFormat]:
    """How a CPU worker will hold weights and KV: as stored and in halves where its native kernels are built."""
    wanted = os.environ.get("KVASIR_KERNELS", "").strip()
    native = wanted in ("", "cpu") and library_path() is not None
    return ("stored", "fp16") if native else ("fp32", "fp32")


def kv_bytes_per_token(shape: ModelShape, kv_dtype: KVFormat) -> int:
    """K and V of one token over all layers: sum over layers of kv_heads * (key_dim + value_dim) * itemsize.

    An upper bound for models whose sliding-window layers forget old tokens.
    """
    per_head = (shape.key_dim + shape.value_dim) * _KV_BYTES[kv_dtype]
    if kv_dtype == "int8":
        per_head += 2 * _INT8_SCALE_BYTES
    return sum(shape.kv_heads) * per_head


def weight_bytes(shape: ModelShape, held_as: WeightFormat = "stored") -> int:
    """Size of the weights in memory: as packed in the file, or converted at load.

    The reference kernels on a CPU dequantise GGUF weights once to "fp32": several times the file's size.
    """
    if held_as == "stored":
        return shape.stored_bytes
    return int(shape.num_parameters * _WEIGHT_BYTES[held_as])


def workspace_bytes(shape: ModelShape, max_batched_tokens: int, max_num_seqs: int) -> int:
    """Activations of one step in float32: residual, norm, q/k/v, attention output and both MLP halves for each
    token, and logits, probabilities and a sorted copy for each sequence."""
    attention = 2 * max(shape.kv_heads, default=0) * (shape.key_dim + shape.value_dim)
    per_token = 4 * shape.hidden_size + attention + 3 * shape.intermediate_size
    return 4 * (max_batched_tokens * per_token + 3 * max_num_seqs * shape.vocab_size)


def planned_kv_tokens(max_context: int, max_num_seqs: int) -> int:
    """Tokens the KV cache is made for where memory allows: one full context and several usual chats."""
    return min(max_num_seqs * max_context, max(max_context, MIN_POOL_TOKENS))


def affordable_kv_bytes(kind: MemoryKind, free: int) -> int:
    """The most a KV cache may take of the `free` bytes there are once the weights are loaded."""
    return int(KV_CACHE_SHARE[kind] * max(0, free))


def default_batched_tokens(kind: MemoryKind, max_num_seqs: int) -> int:
    """Tokens a step computes at most, where nothing else was asked for; every running answer has its place."""
    return max(BATCHED_TOKENS[kind], max_num_seqs)


@dataclass(frozen=True)
class MemoryEstimate:
    """What loading a model will take where there is room. `context` is what one chat can hold, in tokens;
    `kv_tokens` what the KV cache holds, for all chats together."""

    weights: int
    kv_cache: int
    workspace: int
    runtime: int
    context: int
    kv_tokens: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.workspace + self.runtime


def estimate(
    shape: ModelShape,
    kind: MemoryKind,
    *,
    max_context: int | None = None,
    max_num_seqs: int = 8,
    weights_held_as: WeightFormat = "stored",
    kv_dtype: KVFormat = "fp16",
) -> MemoryEstimate:
    """Adds up what one loaded model takes on a device. `max_context` None is the model's own."""
    context = shape.max_context if max_context is None else max_context
    kv_tokens = planned_kv_tokens(context, max_num_seqs)
    return MemoryEstimate(
        weights=weight_bytes(shape, weights_held_as),
        kv_cache=kv_tokens * kv_bytes_per_token(shape, kv_dtype),
        workspace=workspace_bytes(shape, default_batched_tokens(kind, max_num_seqs), max_num_seqs),
        runtime=RUNTIME_BYTES[kind],
        context=context,
        kv_tokens=kv_tokens,
    )


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device. `free` is what can be had without pushing others out."""

    kind: MemoryKind
    name: str
    total: int
    free: int


@dataclass(frozen=True)
class NoGPU:
    """Why there is no VRAM to speak of; `reason` is for people and says what to do."""

    reason: str


@dataclass(frozen=True)
class Fit:
    """Whether a model can be loaded with the context asked for.

    `needed` is what it will take of the `available` bytes; `largest_context` the longest chat its KV cache could
    hold, in tokens, 0 where the model does not fit at all.
    """

    fits: bool
    needed: int
    available: int
    largest_context: int
    message: str


def fits(wanted: MemoryEstimate, device: DeviceMemory) -> Fit:
    """Compares an estimate with what is free on a device.

    As at load, the KV cache takes no more than its share of what the weights leave free: a smaller one still
    fits as long as one chat's whole context has room in it.
    """
    available = device.free
    without_cache = wanted.total - wanted.kv_cache
    left = min(
        affordable_kv_bytes(device.kind, available - wanted.weights - wanted.runtime), max(0, available - without_cache)
    )
    largest = left * wanted.kv_tokens // wanted.kv_cache if wanted.kv_cache else wanted.kv_tokens
    cache = min(wanted.kv_cache, left)
    needed = without_cache + (cache if largest > 0 else wanted.kv_cache)
    free = f"{format_bytes(available)} {device.kind} free"
    if without_cache <= available and largest >= wanted.context:
        return Fit(True, needed, available, largest, f"fits: needs {format_bytes(needed)} of {free}")
    if largest > 0:
        message = (
            f"fits with a context of {largest} tokens at most: of {free}, "
            f"the KV cache may take {format_bytes(left)}, and {wanted.context} tokens need "
            f"{format_bytes(wanted.kv_cache * wanted.context // wanted.kv_tokens)}"
        )
    else:
        message = f"does not fit: needs {format_bytes(needed)}, {free}"
    return Fit(False, needed, available, largest, message)


def fit_model(shape: ModelShape, device: DeviceMemory, *, max_context: int | None = None, max_num_seqs: int = 8) -> Fit:
    """Whether a model fits a device, with weights and KV cache held as the engine will hold them there."""
    weights, kv_cache = cpu_formats() if device.kind == "RAM" else ("stored", "fp16")
    wanted = estimate(
        shape,
        device.kind,
        max_context=max_context,
        max_num_seqs=max_num_seqs,
        weights_held_as=weights,
        kv_dtype=kv_cache,
    )
    return fits(wanted, device)


def format_bytes(size: float) -> str:
    """A size for people, in powers of 1024 and with three figures: 512 B, 93.8 MiB, 1.25 GiB."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1024, larger
    if unit == "B":
        return f"{value:.0f} B"
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{decimals}f} {unit}"


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class WorkerParts:
    """What the worker knows it holds on the device, from its own tensors."""

    weights: int = 0
    kv_cache: int = 0
    workspace: int = 0


def ram() -> DeviceMemory:
    """The machine's RAM. `free` counts what the system can give without swapping."""
    memory = psutil.virtual_memory()
    return DeviceMemory("RAM", "system memory", memory.total, memory.available)


def vram(device: int | str = 0) -> DeviceMemory | NoGPU:
    """The memory of a GPU, given its index among those CUDA sees or its UUID ("GPU-...").

    Indices follow the bus order; with unlike GPUs in one machine CUDA may count otherwise, so ask by UUID there.
    """
    try:
        nvml = _nvml()
    except ImportError:
        return NoGPU("GPU memory cannot be read: install nvidia-ml-py.")
    except Exception as error:  # NVMLError, a class that exists only in the module
        return NoGPU(f"No usable NVIDIA driver ({error}): install or update it, or run on the CPU.")
    try:
        handle = _nvml_handle(device)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        name = nvml.nvmlDeviceGetName(handle)
    except (nvml.NVMLError, LookupError) as error:
        return NoGPU(f"GPU {device} cannot be read ({error}): check CUDA_VISIBLE_DEVICES and nvidia-smi.")
    return DeviceMemory("VRAM", name, int(memory.total), int(memory.free))


def measure_ram(parts: WorkerParts, pid: int | None = None) -> MemoryBreakdown:
    """Where the RAM is, seen from the worker `pid` (None: this process). The parts add up to the total exactly.

    Memory that is reserved but not touched yet (a fresh KV cache) counts as the worker's, not as free.
    """
    return break_down(ram(), parts, psutil.Process(pid).memory_info().rss)


def measure_vram(parts: WorkerParts, device: int | str = 0, pid: int | None = None) -> MemoryBreakdown | NoGPU:
    """Where a GPU's memory is, seen from the worker. The parts add up to the total exactly.

    Where the driver does not tell processes apart (containers, Windows), what the worker holds
    beyond `parts` counts as other.
    """
    memory = vram(device)
    if isinstance(memory, NoGPU):
        return memory
    held = parts.weights + parts.kv_cache + parts.workspace
    reported = _gpu_process_bytes(device, os.getpid() if pid is None else pid)
    return break_down(memory, parts, max(held, reported))


def break_down(device: DeviceMemory, parts: WorkerParts, resident: int) -> MemoryBreakdown:
    """Splits a device's memory up, given what the worker holds there in all. The parts add up to the total exactly."""
    held = parts.weights + parts.kv_cache + parts.workspace
    runtime = max(0, resident - held)
    untouched = max(0, held - resident)
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


@lru_cache(maxsize=1)
def _nvml() -> Any:
    """The NVML module, initialised once for the life of the process: doing so takes many milliseconds."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def _nvml_handle(device: int | str) -> object:
    """NVML counts all GPUs, CUDA only those in CUDA_VISIBLE_DEVICES. Raises LookupError for one CUDA cannot see."""
    nvml = _nvml()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if isinstance(device, int) and visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        if device >= len(names):
            raise LookupError(f"CUDA_VISIBLE_DEVICES={visible!r} shows {len(names)} GPUs")
        device = int(names[device]) if names[device].isdigit() else names[device]
    if isinstance(device, int):
        return nvml.nvmlDeviceGetHandleByIndex(device)
    return nvml.nvmlDeviceGetHandleByUUID(device)


def _gpu_process_bytes(device: int | str, pid: int) -> int:
    """What the driver says a process holds on a GPU; 0 where it does not tell."""
    nvml = _nvml()
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(_nvml_handle(device))
    except (nvml.NVMLError, LookupError):
        return 0
    return sum(process.usedGpuMemory or 0 for process in processes if process.pid == pid)
