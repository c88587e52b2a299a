"""The tensors KV blocks live in."""

from __future__ import annotations

import pytest
import torch

from engine.kv_cache import KVCache, NativeKVCache, kv_bytes_per_token, kv_cache_dtype
from engine.models.config import ModelConfig, RopeConfig

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=10,
    hidden_size=72,
    intermediate_size=32,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=8,
    max_context=64,
    norm_eps=1e-5,
    rope=RopeConfig(10000.0, 8),
)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_its_size_is_layers_times_tokens_times_two_times_width(dtype, width):
    cache = KVCache(CONFIG, num_blocks=5, block_size=16, dtype=dtype, device=torch.device("cpu"))
    assert cache.nbytes == 2 * (5 * 16) * 2 * (3 * 8) * width
    assert cache.layers[1].shape == (5, 16, 2, 3, 8)


def test_an_empty_cache_is_refused():
    with pytest.raises(ValueError, match="0 blocks"):
        KVCache(CONFIG, 0, 16, torch.float32, torch.device("cpu"))


def test_auto_keeps_the_models_dtype():
    assert kv_cache_dtype("auto", torch.bfloat16) == torch.bfloat16
    assert kv_cache_dtype("fp16", torch.float32) == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_both_kinds_of_cache_take_the_bytes_a_token_is_said_to_take(dtype):
    expected = 5 * 16 * kv_bytes_per_token(CONFIG, dtype)
    assert KVCache(CONFIG, 5, 16, dtype, torch.device("cpu")).nbytes == expected
    assert NativeKVCache(CONFIG, 5, 16, dtype).nbytes == expected
