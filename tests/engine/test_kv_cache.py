"""The tensors KV blocks live in."""

from __future__ import annotations

import dataclasses

import psutil
import pytest
import torch

from engine import memory
from engine.kv_cache import KVCache, NativeKVCache, kv_bytes_per_token, kv_cache_dtype, native_kv_dtype
from engine.models.config import ModelConfig, RopeConfig
from engine.placement import choose_num_blocks
from engine.protocol import EngineConfig
from kernels.kv import quantize_int8

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
    assert cache.layers[1].data.shape == (5, 16, 2, 3, 8)


def test_an_empty_cache_is_refused():
    with pytest.raises(ValueError, match="0 blocks"):
        KVCache(CONFIG, 0, 16, torch.float32, torch.device("cpu"))


def test_auto_keeps_the_models_dtype():
    assert kv_cache_dtype("auto", torch.bfloat16) == torch.bfloat16
    assert kv_cache_dtype("fp16", torch.float32) == torch.float16
    assert kv_cache_dtype("int8", torch.float32) == native_kv_dtype("int8") == torch.int8


def test_a_type_the_native_kernels_lack_is_refused_by_name():
    with pytest.raises(ValueError, match="kv_dtype='bf16'"):
        native_kv_dtype("bf16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_both_kinds_of_cache_take_the_bytes_a_token_is_said_to_take(dtype):
    expected = 5 * 16 * kv_bytes_per_token(CONFIG, dtype)
    assert KVCache(CONFIG, 5, 16, dtype, torch.device("cpu")).nbytes == expected
    assert NativeKVCache(CONFIG, 5, 16, dtype).nbytes == expected


def test_eight_bits_hold_about_twice_the_tokens_of_sixteen():
    """A scale costs four bytes for each head: head_dim 64 gives 128 / 68, head_dim 128 gives 256 / 132."""
    for head_dim, gain in ((64, 1.88), (128, 1.93)):
        config = dataclasses.replace(CONFIG, head_dim=head_dim)
        half, eighth = (kv_bytes_per_token(config, dtype) for dtype in (torch.float16, torch.int8))
        assert half / eighth == pytest.approx(gain, abs=0.01)


def test_more_blocks_of_eight_bits_fit_into_the_same_memory(monkeypatch):
    config = dataclasses.replace(CONFIG, head_dim=64, max_context=2048)
    free = memory.DeviceMemory("RAM", "system memory", 1 << 30, free=20 << 20)
    monkeypatch.setattr(memory, "ram", lambda: free)
    blocks = {
        dtype: choose_num_blocks(
            EngineConfig(model=""), config.max_context, kv_bytes_per_token(config, dtype), torch.device("cpu")
        )
        for dtype in (torch.float16, torch.int8)
    }
    assert blocks[torch.int8] == pytest.approx(blocks[torch.float16] * 128 / 68, abs=1)


def vectors(*shape: int) -> torch.Tensor:
    """Heads whose magnitudes differ by orders, as those of real models do."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(*shape, generator=generator) * 10 ** torch.empty(*shape[:-1], 1).uniform_(
        -3, 2, generator=generator
    )


def test_rounding_to_bytes_is_never_off_by_more_than_half_a_step_of_its_own_head():
    x = vectors(50, 6, 64)
    values, scales = quantize_int8(x)
    assert values.dtype == torch.int8 and scales.shape == (50, 6)
    assert (values.abs().amax(-1) == 127).all()  # every head uses its whole range
    error = (values * scales[..., None] - x).abs()
    assert (error <= scales[..., None] * 0.5001).all()
    assert error.max() > 0


def test_zeros_stay_zeros_and_one_large_value_does_not_blind_its_neighbours():
    x = torch.zeros(2, 3, 8)
    values, scales = quantize_int8(x)
    assert not values.any() and not scales.any()
    x[0, 1, 2] = 1e4
    x[0, 2] = 0.01
    values, scales = quantize_int8(x)
    torch.testing.assert_close(values * scales[..., None], x, atol=0, rtol=1e-6)


def test_a_layer_of_bytes_gives_back_what_was_written_where_it_was_written():
    cache = KVCache(CONFIG, 5, 16, torch.int8, torch.device("cpu"))
    layer, kv = cache.layers[1], vectors(7, 2 * CONFIG.num_kv_heads, CONFIG.head_dim)
    slots = torch.tensor([79, 3, 40, 41, 0, 17, 16])
    layer.write(slots, kv)
    read = layer.read(slots, torch.float32).flatten(1, 2)
    step = kv.abs().amax(-1, keepdim=True) / 127
    assert ((read - kv).abs() <= step * 0.5001).all()
    others = torch.ones(80, dtype=torch.bool)
    others[slots] = False
    assert not layer.read(others.nonzero().flatten(), torch.float32).any()
    assert not cache.layers[0].read(slots, torch.float32).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_memory_is_taken_only_for_blocks_that_are_written(dtype):
    config = dataclasses.replace(CONFIG, num_kv_heads=9, head_dim=64)
    process = psutil.Process()
    before = process.memory_info().rss
    caches = (
        NativeKVCache(config, 4000, 16, dtype),
        KVCache(config, 4000, 16, dtype, torch.device("cpu")),
    )
    assert sum(cache.nbytes for cache in caches) > 280 << 20
    assert process.memory_info().rss - before < 20 << 20
    assert not caches[0].keys[1].any() and not caches[1].layers[0].data.any()
