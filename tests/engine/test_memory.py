"""What a model needs is known before it is loaded, and where memory is adds up."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import memory
from engine.catalog import find_models
from engine.memory import (
    DeviceMemory,
    ModelShape,
    NoGPU,
    WorkerParts,
    cpu_formats,
    estimate,
    fit_model,
    fits,
    format_bytes,
    kv_bytes_per_token,
    measure_ram,
    planned_kv_tokens,
    weight_bytes,
)
from engine.protocol import MemoryBreakdown

LLAMA_3_8B = ModelShape(
    num_parameters=8_030_261_248,
    stored_bytes=16_060_522_496,
    kv_heads=(8,) * 32,
    key_dim=128,
    value_dim=128,
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=128256,
    max_context=8192,
)
GIB = 1 << 30


def test_kv_bytes_follow_the_formula() -> None:
    assert kv_bytes_per_token(LLAMA_3_8B, "fp16") == 2 * 32 * 8 * 128 * 2 == 131_072
    assert kv_bytes_per_token(LLAMA_3_8B, "fp32") == 2 * kv_bytes_per_token(LLAMA_3_8B, "bf16")
    assert kv_bytes_per_token(LLAMA_3_8B, "int8") == 2 * 32 * 8 * (128 + 4)


def test_kv_bytes_follow_each_layers_heads_and_unequal_dimensions() -> None:
    shape = ModelShape(1, 1, (4, 1, 0), 192, 128, 1, 1, 1, 1)
    assert kv_bytes_per_token(shape, "fp16") == 5 * (192 + 128) * 2


def test_weights_are_as_packed_as_the_path_keeps_them() -> None:
    starter = find_models()[0].shape
    assert starter is not None
    assert weight_bytes(starter) == starter.stored_bytes == 96_576_768
    assert weight_bytes(starter, "fp32") == 134_515_008 * 4
    assert weight_bytes(LLAMA_3_8B, "bf16") == LLAMA_3_8B.stored_bytes
    assert weight_bytes(LLAMA_3_8B, "int4") < weight_bytes(LLAMA_3_8B, "int8") == LLAMA_3_8B.num_parameters


def test_an_estimate_adds_up_and_follows_its_arguments() -> None:
    whole = estimate(LLAMA_3_8B, "VRAM", kv_dtype="fp16")
    assert whole.total == whole.weights + whole.kv_cache + whole.workspace + whole.runtime
    assert whole.kv_cache == 16384 * 131_072 == 2 * GIB
    assert estimate(LLAMA_3_8B, "VRAM", max_context=4096, max_num_seqs=1).kv_cache == GIB // 2
    assert estimate(LLAMA_3_8B, "VRAM", max_num_seqs=16).workspace > whole.workspace
    assert estimate(LLAMA_3_8B, "RAM").workspace < whole.workspace, "a CPU takes smaller steps"
    assert estimate(LLAMA_3_8B, "RAM", weights_held_as="fp32").weights == 4 * LLAMA_3_8B.num_parameters


@pytest.mark.parametrize(
    ("max_context", "max_num_seqs", "tokens"),
    [(8192, 8, 16384), (8192, 1, 8192), (1024, 8, 8192), (131_072, 8, 131_072), (512, 64, 16384)],
)
def test_a_cache_holds_one_full_context_and_several_usual_chats(
    max_context: int, max_num_seqs: int, tokens: int
) -> None:
    assert planned_kv_tokens(max_context, max_num_seqs) == tokens


def vram_of(free: int) -> DeviceMemory:
    return DeviceMemory("VRAM", "GPU", 24 * GIB, free)


def test_what_fits_is_said_with_the_figures() -> None:
    wanted = estimate(LLAMA_3_8B, "VRAM", kv_dtype="fp16")
    roomy = fits(wanted, vram_of(23 * GIB))
    assert (roomy.fits, roomy.needed) == (True, wanted.total)
    assert roomy.message == f"fits: needs {format_bytes(wanted.total)} of 23.0 GiB VRAM free"
    assert roomy.largest_context > 8192


def test_a_smaller_cache_than_planned_fits_while_one_chat_has_room() -> None:
    wanted = estimate(LLAMA_3_8B, "VRAM", kv_dtype="fp16")
    tight = fits(wanted, vram_of(wanted.total - GIB // 2))
    assert tight.fits
    assert 8192 <= tight.largest_context < wanted.kv_tokens
    assert tight.needed < wanted.total


def test_the_largest_context_that_fits_is_exact() -> None:
    wanted = estimate(LLAMA_3_8B, "VRAM", kv_dtype="fp16")
    tight = fits(wanted, vram_of(wanted.total - 3 * GIB // 2))
    assert not tight.fits
    assert 0 < tight.largest_context < 8192
    assert f"context of {tight.largest_context} tokens at most" in tight.message
    for context, expected in ((tight.largest_context, True), (tight.largest_context + 1, False)):
        again = estimate(LLAMA_3_8B, "VRAM", kv_dtype="fp16", max_context=context)
        assert fits(again, vram_of(tight.available)).fits is expected


def test_a_cache_in_ram_takes_a_share_of_what_the_weights_leave() -> None:
    wanted = estimate(LLAMA_3_8B, "RAM", max_num_seqs=1)
    without_cache = wanted.weights + wanted.runtime
    for free, expected in ((without_cache + 4 * GIB, True), (without_cache + 4 * GIB - (1 << 20), False)):
        assert fits(wanted, DeviceMemory("RAM", "system memory", 64 * GIB, free)).fits is expected


def test_what_does_not_fit_at_all_says_so() -> None:
    wanted = estimate(LLAMA_3_8B, "VRAM")
    answer = fits(wanted, vram_of(7 * GIB))
    assert (answer.fits, answer.largest_context) == (False, 0)
    assert answer.message == f"does not fit: needs {format_bytes(wanted.total)}, 7.00 GiB VRAM free"


def test_a_model_is_weighed_as_this_machine_will_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ram = DeviceMemory("RAM", "system memory", 1 << 50, 1 << 50)
    monkeypatch.setenv("KVASIR_KERNELS", "reference")
    reference = fit_model(LLAMA_3_8B, ram).needed
    assert reference == estimate(LLAMA_3_8B, "RAM", weights_held_as="fp32", kv_dtype="fp32").total
    monkeypatch.setenv("KVASIR_KERNELS", "cpu")
    weights, kv_cache = cpu_formats()
    assert fit_model(LLAMA_3_8B, ram).needed == (
        estimate(LLAMA_3_8B, "RAM", weights_held_as=weights, kv_dtype=kv_cache).total
    )
    assert fit_model(LLAMA_3_8B, DeviceMemory("VRAM", "GPU", 1 << 50, 1 << 50)).needed == (
        estimate(LLAMA_3_8B, "VRAM", weights_held_as="stored", kv_dtype="fp16").total
    )


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1536, "1.50 KiB"), (98_362_432, "93.8 MiB"),
     (842 << 20, "842 MiB"), (999.7 * (1 << 20), "0.98 GiB"), (5 * GIB, "5.00 GiB"), (80 * GIB, "80.0 GiB"),
     (1 << 40, "1.00 TiB"), (5000 << 40, "5,000 TiB")],
)  # fmt: skip
def test_sizes_have_three_figures_and_a_binary_unit(size: float, text: str) -> None:
    assert format_bytes(size) == text


def parts_of(breakdown: MemoryBreakdown) -> list[int]:
    return [
        breakdown.weights,
        breakdown.kv_cache,
        breakdown.workspace,
        breakdown.runtime,
        breakdown.other,
        breakdown.free,
    ]


SIZES = st.integers(0, 1 << 36)


@given(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES)
def test_parts_add_up_to_the_total_whatever_the_counters_say(
    total: int, free: int, weights: int, kv_cache: int, workspace: int, resident: int
) -> None:
    device = DeviceMemory("RAM", "x", total, free)
    breakdown = memory.break_down(device, WorkerParts(weights, kv_cache, workspace), resident)
    assert sum(parts_of(breakdown)) == breakdown.total == total
    assert min(parts_of(breakdown)) >= 0


def test_a_breakdown_puts_each_byte_where_it_belongs() -> None:
    device = DeviceMemory("RAM", "x", total=1000, free=500)
    breakdown = memory.break_down(device, WorkerParts(weights=100, kv_cache=50, workspace=20), resident=250)
    assert parts_of(breakdown) == [100, 50, 20, 80, 250, 500]


def test_reserved_but_untouched_memory_is_not_shown_as_free() -> None:
    device = DeviceMemory("RAM", "x", total=1000, free=800)
    breakdown = memory.break_down(device, WorkerParts(weights=100, kv_cache=300), resident=150)
    assert parts_of(breakdown) == [100, 300, 0, 0, 50, 550]


def test_this_machines_ram_is_measured() -> None:
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    breakdown = measure_ram(WorkerParts(kv_cache=len(held)))
    assert breakdown.kind == "RAM"
    assert breakdown.total == psutil.virtual_memory().total == sum(parts_of(breakdown))
    assert breakdown.kv_cache == 64 << 20
    assert 0 < breakdown.runtime < psutil.Process().memory_info().rss
    assert breakdown.free > 0
    assert breakdown.other > 0
    other_process = measure_ram(WorkerParts(), pid=os.getppid())
    assert other_process.runtime == psutil.Process(os.getppid()).memory_info().rss


def test_memory_given_back_is_seen_as_free_again() -> None:
    held = mmap.mmap(-1, 256 << 20)
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    before = measure_ram(WorkerParts(weights=len(held)))
    held.close()
    after = measure_ram(WorkerParts())
    assert before.weights == 256 << 20
    assert after.runtime < before.runtime + (64 << 20)


def has_gpu() -> bool:
    return not isinstance(memory.vram(), NoGPU)


def test_without_a_driver_the_answer_says_why() -> None:
    code = (
        "import sys\n"
        "import pynvml\n"
        "def absent(): raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)\n"
        "pynvml.nvmlInit = absent\n"
        "from engine.memory import WorkerParts, measure_vram, vram\n"
        "print(vram().reason)\n"
        "print(measure_vram(WorkerParts()) == vram())\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[0].startswith("No usable NVIDIA driver (")
    assert out[0].endswith("install or update it, or run on the CPU.")
    assert out[1] == "True"


@pytest.mark.skipif(not has_gpu(), reason="needs an NVIDIA GPU")
def test_a_gpus_memory_is_measured() -> None:
    device = memory.vram()
    breakdown = memory.measure_vram(WorkerParts(weights=1 << 20))
    assert isinstance(device, DeviceMemory) and isinstance(breakdown, MemoryBreakdown)
    assert breakdown.kind == "VRAM"
    assert breakdown.total == device.total == sum(parts_of(breakdown))
    assert isinstance(memory.vram(999), NoGPU)


def test_hidden_gpus_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert isinstance(memory.vram(), NoGPU)
