"""The tensors that KV blocks live in."""

from __future__ import annotations

import torch

from engine.dtypes import KV_DTYPES
from engine.models.config import ModelConfig
from kernels.host_memory import lazy_zeros
from kernels.kv import KVLayer

_SCALE = torch.float32


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers, in either kind of cache; int8 has a scale for each head's."""
    per_head = config.head_dim * dtype.itemsize + (_SCALE.itemsize if dtype == torch.int8 else 0)
    return config.num_layers * 2 * config.num_kv_heads * per_head


class KVCache:
    """Keys and values of all layers for `num_blocks` blocks of `block_size` tokens.

    Memory is zeroed and, on a CPU, touched only when written.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a KV cache of {num_blocks} blocks of {block_size} tokens is empty")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        shape = (num_blocks, block_size, 2, config.num_kv_heads)

        def layer() -> KVLayer:
            data = _zeros((*shape, config.head_dim), dtype, device)
            scales = _zeros(shape, _SCALE, device) if dtype == torch.int8 else None
            return KVLayer(data, scales)

        self.layers = [layer() for _ in range(config.num_layers)]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


class NativeKVCache:
    """The same for the native CPU kernels, in the layout they read (kernels/cpu/src/kvasir_cpu.h).

    `keys[i]` is [num_blocks, num_kv_heads, head_dim, block_size], `values[i]`
    [num_blocks, num_kv_heads, block_size, head_dim]. For int8, `key_scales[i]` and `value_scales[i]` are
    [num_blocks, num_kv_heads, block_size]; otherwise both lists are empty.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV cache of {num_blocks} blocks is empty")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        heads, size = config.num_kv_heads, config.head_dim
        layers = range(config.num_layers)
        scaled = layers if dtype == torch.int8 else ()
        self.keys = [lazy_zeros((num_blocks, heads, size, block_size), dtype) for _ in layers]
        self.values = [lazy_zeros((num_blocks, heads, block_size, size), dtype) for _ in layers]
        self.key_scales = [lazy_zeros((num_blocks, heads, block_size), _SCALE) for _ in scaled]
        self.value_scales = [lazy_zeros((num_blocks, heads, block_size), _SCALE) for _ in scaled]

    @property
    def nbytes(self) -> int:
        tensors = (*self.keys, *self.values, *self.key_scales, *self.value_scales)
        return sum(tensor.nbytes for tensor in tensors)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def native_kv_dtype(name: str) -> torch.dtype:
    """As `kv_cache_dtype`, for the native kernels: "auto" is fp16, half the memory at no loss that shows."""
    if name == "bf16":
        raise ValueError(
            "kv_dtype='bf16' is not available with the native CPU kernels; choose auto, fp16, fp32 or int8"
        )
    return kv_cache_dtype(name, torch.float16)


def kv_cache_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype `EngineConfig.kv_dtype` asks for; "auto" is the model's own. Raises KeyError for a name of none."""
    return model_dtype if name == "auto" else KV_DTYPES[name]
