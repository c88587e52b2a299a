"""What a model needs is known before it is loaded, and where memory is adds up."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import memory
from engine.catalog import find_models
from engine.memory import (
    DeviceMemory,
    Hardware,
    ModelShape,
    NoGPU,
    WeightGroup,
    WorkerParts,
    affordable_kv_bytes,
    available_to,
    cpu_hardware,
    estimate,
    fit_model,
    fits,
    format_bytes,
    kv_bytes_per_token,
    measure_ram,
    planned_kv_tokens,
    precision_of,
    weight_bytes,
)
from engine.memory.budget import RESERVE_BYTES
from engine.protocol import EngineConfig, MemoryBreakdown

GIB = 1 << 30
GPU = Hardware("VRAM")
NATIVE_CPU = Hardware("RAM", native=True)
PLAIN_CPU = Hardware("RAM")


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(model="a model", **changes)


def shape_of(*weights: WeightGroup, **changes: Any) -> ModelShape:
    values: dict[str, Any] = {
        "weights": weights,
        "stored_bytes": 2 * sum(group.num_weights for group in weights),
        "kv_heads": (8,) * 32,
        "num_heads": 32,
        "key_dim": 128,
        "value_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_context": 8192,
    }
    return ModelShape(**(values | changes))


LLAMA_3_8B = shape_of(
    WeightGroup("embedding", "BF16", 128256, 4096),
    WeightGroup("head", "BF16", 128256, 4096),
    WeightGroup("layers", "BF16", 32 * (4096 + 1024 + 1024 + 4096 + 2 * 14336), 4096),
    WeightGroup("layers", "BF16", 32 * 4096, 14336),
    WeightGroup("small", "BF16", 65, 4096),
)


def held(shape: ModelShape, hardware: Hardware, **changes: Any) -> int:
    return weight_bytes(shape, precision_of(config(**changes), hardware))


def test_kv_bytes_follow_the_formula() -> None:
    assert kv_bytes_per_token(LLAMA_3_8B, "fp16") == 2 * 32 * 8 * 128 * 2 == 131_072
    assert kv_bytes_per_token(LLAMA_3_8B, "fp32") == 2 * kv_bytes_per_token(LLAMA_3_8B, "bf16")
    assert kv_bytes_per_token(LLAMA_3_8B, "int8") == 2 * 32 * 8 * (128 + 4)


def test_kv_bytes_follow_each_layers_heads_and_unequal_dimensions() -> None:
    shape = shape_of(kv_heads=(4, 1, 0), key_dim=192, value_dim=128)
    assert kv_bytes_per_token(shape, "fp16") == 5 * (192 + 128) * 2


def test_weights_are_as_packed_as_each_device_keeps_them() -> None:
    starter = find_models()[0].shape
    assert starter is not None
    assert starter.num_parameters == 134_515_008
    assert held(starter, NATIVE_CPU) == starter.stored_bytes == 96_576_768
    assert held(starter, PLAIN_CPU) == 4 * starter.num_parameters
    assert LLAMA_3_8B.num_parameters == 8_030_261_248
    assert held(LLAMA_3_8B, GPU) == LLAMA_3_8B.stored_bytes
    assert held(LLAMA_3_8B, NATIVE_CPU) == LLAMA_3_8B.stored_bytes + 2 * 65 * 4096, "norms are float32"
    assert held(LLAMA_3_8B, NATIVE_CPU, dtype="bf16") == LLAMA_3_8B.stored_bytes, "the native kernels compute in fp32"


def test_rounding_while_loading_keeps_the_scales_in_mind() -> None:
    matrix = WeightGroup("layers", "BF16", 1000, 4096)
    for group_size in (32, 64, 128):
        packed = held(shape_of(matrix), PLAIN_CPU, quantization="int4", quantization_group_size=group_size)
        assert packed == 1000 * (4096 // 2 + 4096 // group_size * 4)
        assert held(shape_of(matrix), NATIVE_CPU, quantization="int4") == 1000 * 4096 * 5 // 8, "tiles share by 32"
    assert held(shape_of(matrix), PLAIN_CPU, quantization="int8") == 1000 * (4096 + 8)
    table = WeightGroup("embedding", "BF16", 1000, 4096)
    assert held(shape_of(table), PLAIN_CPU, quantization="int4") == 1000 * (4096 + 4096 // 32 * 8), "8 bits in both"
    odd = WeightGroup("layers", "F32", 10, 33)
    assert held(shape_of(odd), NATIVE_CPU, quantization="int4") == 10 * (33 + 8), "no tiles, no nibbles"


def test_the_native_cache_is_half_as_large_as_what_others_compute_in() -> None:
    assert precision_of(config(), NATIVE_CPU).kv == "fp16"
    assert precision_of(config(), PLAIN_CPU).kv == "fp32"
    assert precision_of(config(), GPU).kv == "bf16"
    assert precision_of(config(backend="transformers"), NATIVE_CPU).kv == "fp32"
    assert precision_of(config(kv_dtype="int8"), GPU).kv == "int8"


def test_an_estimate_adds_up_and_follows_its_arguments() -> None:
    whole = estimate(LLAMA_3_8B, config(), GPU)
    assert whole.total == whole.weights + whole.kv_cache + whole.workspace + whole.runtime
    assert (whole.num_blocks, whole.kv_tokens, whole.kv_cache) == (4096, 8 * 8192, 8 * GIB)
    assert estimate(LLAMA_3_8B, config(max_context=4096, max_num_seqs=1), GPU).kv_cache == GIB // 2
    assert estimate(LLAMA_3_8B, config(num_kv_blocks=10), GPU).kv_tokens == 160
    assert estimate(LLAMA_3_8B, config(max_num_seqs=16), GPU).workspace > whole.workspace
    assert estimate(LLAMA_3_8B, config(speculation="ngram"), GPU).workspace > whole.workspace, "more rows of logits"
    assert estimate(LLAMA_3_8B, config(), PLAIN_CPU).workspace < whole.workspace, "a CPU takes smaller steps"
    int8 = estimate(LLAMA_3_8B, config(kv_dtype="int8"), GPU)
    assert int8.kv_cache / whole.kv_cache == pytest.approx((128 + 4) / 256)
    rotary = estimate(shape_of(rope_dims=128), config(max_context=1000), GPU)
    assert rotary.weights == 1000 * 128 * 4


def test_a_draft_model_comes_on_top_with_a_cache_for_the_same_tokens() -> None:
    draft = shape_of(WeightGroup("layers", "BF16", 1000, 1024), kv_heads=(2,) * 4, max_context=2048)
    alone = estimate(LLAMA_3_8B, config(), GPU)
    both = estimate(LLAMA_3_8B, config(speculation="draft", quantization="int4"), GPU, draft)
    assert both.draft_kv_cache == alone.kv_tokens * 2 * 4 * 2 * 128 * 2
    assert both.draft > both.draft_kv_cache + 2 * 1000 * 1024, "as stored, whatever the model itself becomes"
    assert both.total == both.weights + both.kv_cache + both.workspace + both.runtime + both.draft
    assert estimate(LLAMA_3_8B, config(speculation="ngram"), GPU, draft).draft == 0
    half = both.with_blocks(2048)
    assert (half.kv_cache, half.draft_kv_cache) == (both.kv_cache // 2, both.draft_kv_cache // 2)
    assert both.total - half.total == (both.kv_cache + both.draft_kv_cache) // 2


@pytest.mark.parametrize(
    ("max_context", "max_num_seqs", "in_ram", "in_vram"),
    [
        (8192, 8, 16384, 65536),
        (8192, 1, 8192, 8192),
        (1024, 8, 8192, 8192),
        (131_072, 8, 131_072, 1 << 20),
        (512, 64, 16384, 32768),
    ],
)
def test_a_cache_holds_one_full_context_and_several_usual_chats_and_on_a_gpu_all_full_ones(
    max_context: int, max_num_seqs: int, in_ram: int, in_vram: int
) -> None:
    assert planned_kv_tokens("RAM", max_context, max_num_seqs) == in_ram
    assert planned_kv_tokens("VRAM", max_context, max_num_seqs) == in_vram


@given(*[st.integers(0, 1 << 38)] * 3, st.floats(0.01, 1.0))
def test_a_cache_on_a_gpu_leaves_room_for_steps_a_reserve_and_other_programs(
    total: int, free: int, needed: int, share: float
) -> None:
    gpu = DeviceMemory("VRAM", "GPU", total, min(free, total))
    taken = affordable_kv_bytes(gpu, share, needed)
    left = gpu.free - taken - needed
    assert taken == 0 or left == pytest.approx((1 - share) * total + RESERVE_BYTES, abs=2)
    assert taken <= affordable_kv_bytes(gpu, 1.0, needed) <= max(0, gpu.free - needed)


def test_steps_on_a_gpu_take_half_the_bytes_and_graphs_besides() -> None:
    """16-bit numbers for 2048 tokens, three rows of float32 a chat; graphs of 1, 2, 4 and 8 tokens for 3 lengths."""
    per_token = 4 * 4096 + 2 * 8 * 256 + 3 * 14336
    steps = 2048 * per_token * 2 + 8 * 3 * 128256 * 4
    graphs = 8 * (per_token * 2 + 128256 * 6) + 4 * 3 * 32 * 12 * (32 << 10)
    assert estimate(LLAMA_3_8B, config(), GPU).workspace == steps + graphs
    wider = estimate(LLAMA_3_8B, config(dtype="fp32"), GPU).workspace
    assert wider > 1.7 * (steps + graphs) - graphs
    assert estimate(LLAMA_3_8B, config(backend="transformers"), GPU).workspace == steps, "its code is not captured"
    assert estimate(LLAMA_3_8B, config(), PLAIN_CPU).workspace == 128 * per_token * 4 + 8 * 3 * 128256 * 4


def vram_of(free: int) -> DeviceMemory:
    return DeviceMemory("VRAM", "GPU", 24 * GIB, free)


def test_what_fits_is_said_with_the_figures() -> None:
    wanted = estimate(LLAMA_3_8B, config(max_num_seqs=1), GPU)
    roomy = fits(wanted, vram_of(23 * GIB))
    assert (roomy.fits, roomy.needed) == (True, wanted.total)
    assert roomy.message == f"fits: needs {format_bytes(wanted.total)} of 23.0 GiB VRAM free"
    assert roomy.largest_context > 8192


def test_a_smaller_cache_than_planned_fits_while_one_chat_has_room() -> None:
    wanted = estimate(LLAMA_3_8B, config(), GPU)
    tight = fits(wanted, vram_of(22 * GIB))
    assert tight.fits
    assert 8192 <= tight.largest_context < wanted.kv_tokens
    assert tight.needed < wanted.total


def test_a_larger_share_of_the_gpu_makes_a_larger_cache() -> None:
    granted = {
        share: fits(estimate(LLAMA_3_8B, config(gpu_memory_share=share), GPU), vram_of(20 * GIB)).granted
        for share in (0.9, 1.0)
    }
    assert granted[1.0].kv_cache - granted[0.9].kv_cache == pytest.approx(2.4 * GIB, abs=granted[1.0].block_bytes)


def test_the_largest_context_that_fits_is_exact() -> None:
    wanted = estimate(LLAMA_3_8B, config(max_num_seqs=1), GPU)
    tight = fits(wanted, vram_of(wanted.total + 2 * GIB))
    assert not tight.fits
    assert 2048 < tight.largest_context < 8192
    assert f"context of {tight.largest_context} tokens at most" in tight.message
    assert tight.granted.kv_tokens == tight.largest_context
    for context, expected in ((tight.largest_context, True), (tight.largest_context + 1, False)):
        again = estimate(LLAMA_3_8B, config(max_context=context, max_num_seqs=1), GPU)
        assert fits(again, vram_of(tight.available)).fits is expected


def test_a_cache_in_ram_takes_a_share_of_what_the_weights_leave() -> None:
    wanted = estimate(LLAMA_3_8B, config(max_num_seqs=1), PLAIN_CPU)
    without_cache = wanted.weights + wanted.runtime
    enough = without_cache + 4 * wanted.kv_cache
    for free, expected in ((enough, True), (enough - (1 << 20), False)):
        assert fits(wanted, DeviceMemory("RAM", "system memory", 64 * GIB, free)).fits is expected


def test_what_does_not_fit_at_all_says_so() -> None:
    wanted = estimate(LLAMA_3_8B, config(), GPU)
    answer = fits(wanted, vram_of(7 * GIB))
    assert (answer.fits, answer.largest_context) == (False, 0)
    assert answer.message == f"does not fit: needs {format_bytes(wanted.total)}, 7.00 GiB VRAM free"


def test_a_model_is_weighed_as_this_machine_will_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ram = DeviceMemory("RAM", "system memory", 1 << 50, 1 << 50)
    monkeypatch.setenv("KVASIR_KERNELS", "reference")
    assert fit_model(LLAMA_3_8B, ram, config()).granted == estimate(LLAMA_3_8B, config(), PLAIN_CPU)
    monkeypatch.setenv("KVASIR_KERNELS", "cpu")
    assert fit_model(LLAMA_3_8B, ram, config()).granted == estimate(LLAMA_3_8B, config(), cpu_hardware())
    vram = DeviceMemory("VRAM", "GPU", 1 << 50, 1 << 50)
    assert fit_model(LLAMA_3_8B, vram, config()).granted == estimate(LLAMA_3_8B, config(), GPU)


def test_what_a_worker_holds_is_free_for_the_next_model() -> None:
    child = subprocess.Popen([sys.executable, "-c", "held = bytes(64 << 20); print(len(held)); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    device = DeviceMemory("RAM", "system memory", 64 * GIB, GIB)
    with_worker = available_to(device, child.pid)
    assert with_worker.free == GIB + psutil.Process(child.pid).memory_info().rss
    child.communicate(b"\n")
    assert available_to(device, child.pid) == available_to(device, None) == device
    assert available_to(DeviceMemory("RAM", "x", 100, 90), os.getpid()).free == 100, "no more than there is"


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


def test_what_a_worker_held_before_its_cache_was_touched_stays_runtime() -> None:
    device = DeviceMemory("RAM", "x", total=1000, free=700)
    parts = WorkerParts(weights=100, kv_cache=300, runtime=80)
    fresh = memory.break_down(device, parts, resident=180)
    assert parts_of(fresh) == [100, 300, 0, 80, 120, 400], "the untouched cache is not free"
    touched = memory.break_down(DeviceMemory("RAM", "x", 1000, 400), parts, resident=480)
    assert parts_of(touched) == [100, 300, 0, 80, 120, 400]


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
