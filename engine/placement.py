"""Where a model is put and how much KV cache it gets."""

from __future__ import annotations

import torch

from engine import memory, preflight
from engine.protocol import EngineConfig
from kernels import gpu as gpu_kernels


def resolve_device(name: str) -> torch.device:
    """The device that `EngineConfig.device` asks for. Raises `ValueError` saying why it cannot be used."""
    if name == "auto":
        return torch.device("cpu" if preflight.why_no_cuda() is not None else "cuda:0")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is unknown: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"device={name!r} is not supported: use auto, cpu, cuda or cuda:N")
    index = device.index or 0
    # What is found out about the first GPU need not be true of another.
    if (finding := preflight.why_no_cuda()) is not None and not 0 < index < torch.cuda.device_count():
        raise ValueError(f"device={name!r} cannot be used: {finding.why}. {finding.advice} Or use device='cpu'.")
    if index >= torch.cuda.device_count():
        raise ValueError(f"device={name!r} does not exist: there are {torch.cuda.device_count()} GPUs, counted from 0")
    if (obstacle := gpu_kernels.why_not_built_for(torch.cuda.get_device_capability(index))) is not None:
        raise ValueError(f"device={name!r} ({torch.cuda.get_device_name(index)}) cannot be used: {obstacle}")
    return torch.device("cuda", index)


def load_warnings(config: EngineConfig, device: torch.device) -> list[str]:
    """What people should know of the device that was chosen for them, or that they chose."""
    return preflight.warnings_on(device.type) if device.type == "cuda" or config.device == "auto" else []


def max_batched_tokens(config: EngineConfig, device: torch.device) -> int:
    if config.max_batched_tokens is not None:
        return config.max_batched_tokens
    return memory.default_batched_tokens(_kind(device), config.max_num_seqs)


def choose_num_blocks(
    config: EngineConfig, max_context: int, bytes_per_token: int, device: torch.device, needed: int = 0
) -> int:
    """Blocks of the KV cache: what was asked for, or as many as are planned and there is memory for.

    `needed` is what steps take on a GPU besides weights and cache, and is not taken yet.
    Raises `ValueError` if not even what was asked for fits into free memory, or nothing does.
    """
    place = device_memory(device)
    block_bytes = bytes_per_token * config.block_size
    if config.num_kv_blocks is not None:
        size = config.num_kv_blocks * block_bytes
        free = place.free if place.kind == "RAM" else memory.affordable_kv_bytes(place, 1.0, needed)
        if size > free:
            besides = f" beside the {memory.format_bytes(needed)} that steps take" if needed else ""
            raise ValueError(
                f"num_kv_blocks={config.num_kv_blocks} takes {memory.format_bytes(size)}, "
                f"but {memory.format_bytes(free)} {place.kind} are free{besides}: use at most {free // block_bytes}"
            )
        return config.num_kv_blocks
    tokens = memory.planned_kv_tokens(place.kind, max_context, config.max_num_seqs)
    affordable = memory.affordable_kv_bytes(place, config.gpu_memory_share, needed) // block_bytes
    if affordable < 1:
        raise ValueError(_no_room(config, place, block_bytes, needed, device))
    return min(-(-tokens // config.block_size), affordable)


def _no_room(
    config: EngineConfig, place: memory.DeviceMemory, block_bytes: int, needed: int, device: torch.device
) -> str:
    block, free = memory.format_bytes(block_bytes), memory.format_bytes(place.free)
    if place.kind == "RAM":
        return (
            f"no room for a KV cache: a block takes {block}, and {free} RAM are free. Close other programs or choose "
            "a smaller model."
        )
    kept = memory.format_bytes((1.0 - config.gpu_memory_share) * place.total)
    return (
        f"no room for a KV cache on {place.name}: with the weights there, {free} of "
        f"{memory.format_bytes(place.total)} are free, steps take {memory.format_bytes(needed)}, and {kept} stay free "
        f"for other programs (gpu_memory_share={config.gpu_memory_share:g}). {_smaller(config)} "
        f"{memory.close_others(gpu_id(device))}"
    )


def gpu_too_small(
    config: EngineConfig,
    name: str,
    needed: memory.MemoryEstimate,
    gpu: memory.DeviceMemory,
    device: torch.device,
) -> str:
    """What to tell people for whom `gpu`, as it was before, had no room for a model."""
    smallest = needed.with_blocks(-(-needed.context // needed.block_size))
    parts = {
        "weights": needed.weights,
        f"the KV cache of {needed.context} tokens": smallest.kv_cache,
        "steps and CUDA graphs": needed.workspace,
        "a draft model": smallest.draft,
    }
    listed = ", ".join(f"{part} {memory.format_bytes(size)}" for part, size in parts.items() if size)
    total = memory.format_bytes(sum(parts.values()))
    return (
        f"{gpu.name} has too little memory for {name}: it needs about {total} ({listed}), and "
        f"{memory.format_bytes(gpu.free)} of {memory.format_bytes(gpu.total)} were free. {_smaller(config)} "
        f"{memory.close_others(gpu_id(device))}"
    )


def _smaller(config: EngineConfig) -> str:
    """Advice for a model that is too large for its GPU as it was to be loaded."""
    smaller = {None: "quantization int8 or int4, ", "int8": "quantization int4, ", "int4": ""}[config.quantization]
    return f"Choose {smaller}fewer tokens a step (max_batched_tokens), a shorter context or a smaller model."


def device_memory(device: torch.device) -> memory.DeviceMemory:
    """The memory of the device that a model is put on, as torch sees it.

    Raises `ValueError` for a GPU that has none left even to be asked, or is another program's alone.
    """
    if device.type == "cpu":
        return memory.ram()
    name = torch.cuda.get_device_name(device)
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        why = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"{name} cannot be used: {why}. {memory.close_others(gpu_id(device))}") from error
    return memory.DeviceMemory("VRAM", name, total, free)


def gpu_id(device: torch.device) -> str:
    """The name by which the driver knows a GPU of torch: both may count them differently."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _kind(device: torch.device) -> memory.MemoryKind:
    return "RAM" if device.type == "cpu" else "VRAM"
