"""The engine takes for its KV cache what the arithmetic before the load said."""

from __future__ import annotations

import pytest
import torch

from engine import memory
from engine.catalog import describe_path, starter_model
from engine.memory import DeviceMemory, Hardware, estimate, fits, kv_bytes_per_token
from engine.placement import choose_num_blocks, max_batched_tokens
from engine.protocol import EngineConfig

CPU = torch.device("cpu")
NATIVE = Hardware("RAM", native=True)
GIB = 1 << 30


def free_ram(monkeypatch: pytest.MonkeyPatch, free: int) -> DeviceMemory:
    device = DeviceMemory("RAM", "system memory", 64 * GIB, free)
    monkeypatch.setattr(memory, "ram", lambda: device)
    return device


@pytest.mark.parametrize(("max_context", "max_num_seqs"), [(8192, 8), (8192, 1), (1024, 4), (256, 64), (4096, 64)])
def test_the_cache_of_an_engine_is_the_one_that_was_estimated(
    monkeypatch: pytest.MonkeyPatch, max_context: int, max_num_seqs: int
) -> None:
    free_ram(monkeypatch, 32 * GIB)
    starter = starter_model()
    assert starter is not None
    shape = describe_path(starter).shape
    assert shape is not None
    per_token = kv_bytes_per_token(shape, "fp16")
    config = EngineConfig(model=str(starter), max_context=max_context, max_num_seqs=max_num_seqs)
    taken = choose_num_blocks(config, max_context, per_token, CPU) * config.block_size * per_token
    wanted = estimate(shape, config, NATIVE)
    assert taken == wanted.kv_cache


def test_where_memory_is_short_the_cache_is_the_one_that_was_said_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    starter = starter_model()
    assert starter is not None
    shape = describe_path(starter).shape
    assert shape is not None
    per_token = kv_bytes_per_token(shape, "fp16")
    config = EngineConfig(model=str(starter))
    wanted = estimate(shape, config, NATIVE)
    told = fits(wanted, free_ram(monkeypatch, wanted.weights + wanted.runtime + GIB))
    assert told.fits and told.needed < wanted.total
    free_ram(monkeypatch, GIB)  # as it is once the weights are there
    blocks = choose_num_blocks(config, shape.max_context, per_token, CPU)
    assert blocks == told.granted.num_blocks
    assert told.largest_context == blocks * 16
    assert blocks * 16 < wanted.kv_tokens


@pytest.mark.parametrize(("device", "default"), [("cpu", 128), ("cuda", 2048)])
def test_a_step_is_as_large_as_the_device_bears_and_has_room_for_every_answer(device: str, default: int) -> None:
    place = torch.device(device)
    assert max_batched_tokens(EngineConfig(model="m"), place) == default
    assert max_batched_tokens(EngineConfig(model="m", max_num_seqs=4000), place) == 4000
    assert max_batched_tokens(EngineConfig(model="m", max_batched_tokens=64), place) == 64
