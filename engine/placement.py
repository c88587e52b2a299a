"""Where a model is put and how much KV cache it gets."""

from __future__ import annotations

import torch

from engine import memory
from engine.machine import why_no_cuda
from engine.protocol import EngineConfig


def resolve_device(name: str) -> torch.device:
    """The device that `EngineConfig.device` asks for. Raises `ValueError` saying why it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is unknown: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"device={name!r} is not supported: use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        reason = why_no_cuda() or "This machine shows no NVIDIA GPU."
        raise ValueError(f"device={name!r} cannot be used. {reason} Use device='cpu' or 'auto'.")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r} does not exist: there are {torch.cuda.device_count()} GPUs, counted from 0")
    return device


def max_batched_tokens(config: EngineConfig, device: torch.device) -> int:
    if config.max_batched_tokens is not None:
        return config.max_batched_tokens
    return memory.default_batched_tokens(_kind(device), config.max_num_seqs)


def choose_num_blocks(config: EngineConfig, max_context: int, bytes_per_token: int, device: torch.device) -> int:
    """Blocks of the KV cache: what was asked for, or enough for one full context and several usual chats.

    Raises `ValueError` if not even what was asked for fits into free memory, or nothing does.
    """
    free = _free_bytes(device)
    block_bytes = bytes_per_token * config.block_size
    kind = _kind(device)
    if config.num_kv_blocks is not None:
        size = config.num_kv_blocks * block_bytes
        if size > free:
            raise ValueError(
                f"num_kv_blocks={config.num_kv_blocks} takes {memory.format_bytes(size)}, "
                f"but {memory.format_bytes(free)} {kind} are free: use at most {free // block_bytes}"
            )
        return config.num_kv_blocks
    tokens = memory.planned_kv_tokens(max_context, config.max_num_seqs)
    affordable = memory.affordable_kv_bytes(kind, free) // block_bytes
    if affordable < 1:
        raise ValueError(
            f"no room for a KV cache: a block takes {memory.format_bytes(block_bytes)}, "
            f"and {memory.format_bytes(free)} {kind} are free. Close other programs or choose a smaller model."
        )
    return min(-(-tokens // config.block_size), affordable)


def _kind(device: torch.device) -> memory.MemoryKind:
    return "RAM" if device.type == "cpu" else "VRAM"


def _free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return memory.ram().free
    return torch.cuda.mem_get_info(device)[0]
