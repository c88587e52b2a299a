"""The engine takes for its KV cache what the arithmetic before the load said, and says what a GPU has no room for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import assembly, memory
from engine.assembly import load
from engine.catalog import describe_path, starter_model
from engine.memory import DeviceMemory, Hardware, estimate, fits, kv_bytes_per_token
from engine.memory.budget import RESERVE_BYTES
from engine.placement import choose_num_blocks, max_batched_tokens
from engine.protocol import EngineConfig
from tests.engine.gpu_machine import GPUMachine
from tests.engine.gpu_machine import forgotten_machines as forgotten_machines
from tests.engine.tiny_gguf import write_model

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")
NATIVE = Hardware("RAM", native=True)
GIB = 1 << 30
MIB = 1 << 20


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


def test_on_a_gpu_the_cache_is_what_the_share_the_steps_and_a_reserve_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = GPUMachine(total=24 * GIB, free=10 * GIB).install(monkeypatch)
    config = EngineConfig(model="m", gpu_memory_share=0.75)
    per_token, needed = 128 << 10, GIB
    room = 10 * GIB - 6 * GIB - GIB - RESERVE_BYTES
    assert choose_num_blocks(config, 131_072, per_token, CUDA, needed) == room // (16 * per_token)
    assert choose_num_blocks(config, 1024, per_token, CUDA, needed) == 8 * 1024 // 16, "no more than all chats can use"
    asked = EngineConfig(model="m", num_kv_blocks=4400)
    assert choose_num_blocks(asked, 1024, per_token, CUDA, needed) == 4400, "whatever is kept for others"
    with pytest.raises(ValueError, match=r"takes 9.18 GiB, but 8.88 GiB VRAM are free beside the 1.00 GiB that steps"):
        choose_num_blocks(EngineConfig(model="m", num_kv_blocks=4700), 1024, per_token, CUDA, needed)
    machine.processes = {os.getppid(): 13 * GIB}
    machine.free = 7 * GIB
    with pytest.raises(ValueError, match="no room for a KV cache on NVIDIA GeForce RTX 4090") as raised:
        choose_num_blocks(config, 1024, per_token, CUDA, needed)
    for part in (
        "7.00 GiB of 24.0 GiB are free, steps take 1.00 GiB, and 6.00 GiB stay free for other programs",
        "(gpu_memory_share=0.75)",
        "Choose quantization int8 or int4, fewer tokens a step (max_batched_tokens), a shorter context",
        f"(process {os.getppid()}) with 13.0 GiB.",
    ):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("free", "error"),
    [
        (1 << 10, None),
        (300 * MIB, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
        (300 * MIB, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    ],
)
def test_a_model_too_large_for_its_gpu_says_what_is_needed_what_is_free_and_what_to_choose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, error: RuntimeError | None
) -> None:
    def full(*_: Any) -> None:
        stages.append("Loading weights")
        assert error is not None, "what cannot fit is not even begun"
        raise error

    model = write_model(tmp_path / "tiny.gguf", context=128)
    GPUMachine(free=free, processes={os.getppid(): 23 * GIB}).install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(assembly, "load_model", full)
    stages: list[str] = []
    config = EngineConfig(model=str(model), device="cuda", quantization="int8")
    with pytest.raises(ValueError, match="has too little memory for tiny: it needs about") as raised:
        load(config, lambda stage, done, total: stages.append(stage))
    message = str(raised.value)
    assert f"the KV cache of 128 tokens {memory.format_bytes(128 * 2 * 2 * 2 * 8 * 2)}" in message
    assert f"{memory.format_bytes(free)} of 24.0 GiB were free. Choose quantization int4, fewer tokens" in message
    assert f"(process {os.getppid()}) with 23.0 GiB" in message
    assert stages == ["Reading the tokenizer"] + ["Loading weights"] * (error is not None)


def test_a_share_of_the_gpu_is_a_share() -> None:
    for share in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match=r"gpu_memory_share must lie in \(0, 1\], got"):
            assembly.refuse_unavailable(EngineConfig(model="m", gpu_memory_share=share))
