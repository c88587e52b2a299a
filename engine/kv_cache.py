"""The tensors that KV blocks live in."""

from __future__ import annotations

import torch

from engine.dtypes import DTYPES
from engine.models.config import ModelConfig


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers, in either kind of cache."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVCache:
    """Keys and values of all layers for `num_blocks` blocks of `block_size` tokens.

    `layers[i]` is [num_blocks, block_size, 2, num_kv_heads, head_dim]: a block's keys and values lie
    together, so that one copy moves both. Memory is zeroed and, on a CPU, touched only when written.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a KV cache of {num_blocks} blocks of {block_size} tokens is empty")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        shape = (num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


class NativeKVCache:
    """The same for the native CPU kernels, in the layout they read (kernels/cpu/src/kvasir_cpu.h).

    `keys[i]` is [num_blocks, num_kv_heads, head_dim, block_size], `values[i]`
    [num_blocks, num_kv_heads, block_size, head_dim].
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV cache of {num_blocks} blocks is empty")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        heads, size = config.num_kv_heads, config.head_dim
        layers = range(config.num_layers)
        self.keys = [torch.zeros(num_blocks, heads, size, block_size, dtype=dtype) for _ in layers]
        self.values = [torch.zeros(num_blocks, heads, block_size, size, dtype=dtype) for _ in layers]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


def native_kv_dtype(name: str) -> torch.dtype:
    """As `kv_cache_dtype`, for the native kernels: "auto" is fp16, half the memory at no loss that shows."""
    if name in ("auto", "fp16"):
        return torch.float16
    if name == "fp32":
        return torch.float32
    raise ValueError(f"kv_dtype={name!r} is not available with the native CPU kernels; choose auto, fp16 or fp32")


def kv_cache_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype `EngineConfig.kv_dtype` asks for; "auto" is the model's own. Raises KeyError for a name of none."""
    return model_dtype if name == "auto" else DTYPES[name]
