"""Whole models through the real engine: the 8B shape in bf16, int4 and int8, and the 0.6B shape."""

from __future__ import annotations

from transformers import PretrainedConfig

from tests.gpu.bench import SAMPLED, Bench, Workload
from tests.gpu.hugging_face import beside_hugging_face
from tests.gpu.limits import Limits
from tests.gpu.random_model import Quantization, llama_8b, qwen3_06b, random_model
from tests.gpu.report import Report

DECODE_GOALS: dict[Quantization | None, float] = {None: 0.85, "int4": 0.65}
"""Of the bandwidth, one answer alone."""
PREFILL_GOAL = 0.6
"""Of the matmul rate, in bf16, for prompts of `LONG_PROMPT` tokens and more."""
LONG_PROMPT = 4096
SMALL_GOAL = 900
"""Tokens a second of the 0.6B shape, one answer alone."""
SMALL_WAYS: dict[str, dict[str, bool]] = {
    "": {},
    ", graphs off,": {"cuda_graphs": False},
    ", not looking ahead,": {"looks_ahead": False},
    ", neither,": {"cuda_graphs": False, "looks_ahead": False},
}
SMALL_WORK = Workload(batches=(1, 8), steps=128, prefills=(512,))


def dense(
    report: Report,
    limits: Limits,
    device: str = "cuda",
    hf_config: PretrainedConfig | None = None,
    work: Workload | None = None,
    cuda_graphs: bool = True,
) -> None:
    """The 8B shape in bf16 (on a CPU in float32), beside Hugging Face."""
    work = Workload() if work is None else work
    with random_model(llama_8b() if hf_config is None else hf_config, device, work.max_context) as model:
        loaded = model.load()
        bench = Bench(model, loaded, work, cuda_graphs=cuda_graphs)
        decoded, prefilled = _measure(report, limits, "8B bf16", bench, DECODE_GOALS[None], PREFILL_GOAL)
        batch = work.batches[-1]
        sampled, _ = bench.decode(batch, SAMPLED)
        note = f"{sampled / decoded[batch]:.0%} of greedy"
        report.figure(f"8B bf16 decode, batch {batch}, all samplers on", sampled, "tok/s", note=note)
        try:
            beside_hugging_face(report, "8B bf16", model, loaded, bench, decoded, prefilled)
        except Exception as error:  # in transformers as likely as here
            report.failed("8B bf16 beside Hugging Face", error)
        bench.close()


def integers(
    report: Report,
    limits: Limits,
    device: str = "cuda",
    hf_config: PretrainedConfig | None = None,
    work: Workload | None = None,
    cuda_graphs: bool = True,
) -> None:
    """The same shape in int4 (groups of 32) and int8."""
    work = Workload() if work is None else work
    with random_model(llama_8b() if hf_config is None else hf_config, device, work.max_context) as model:
        for quantization in ("int4", "int8"):
            bench = Bench(model, model.load(quantization=quantization), work, cuda_graphs=cuda_graphs)
            _measure(report, limits, f"8B {quantization}", bench, DECODE_GOALS.get(quantization))
            bench.close()


def small(
    report: Report,
    limits: Limits,
    device: str = "cuda",
    hf_config: PretrainedConfig | None = None,
    work: Workload = SMALL_WORK,
    cuda_graphs: bool = True,
) -> None:
    """The 0.6B shape, with CUDA graphs and steps queued ahead, and without: it is bound by what starts the kernels."""
    with random_model(qwen3_06b() if hf_config is None else hf_config, device, work.max_context) as model:
        loaded = model.load()
        usual: dict[int, float] = {}
        for way, options in SMALL_WAYS.items():
            if options.get("cuda_graphs", True) and not cuda_graphs:
                continue
            bench = Bench(model, loaded, work, **options)
            rates: dict[int, float] = {}
            for batch in work.batches:
                rate, read = bench.decode(batch)
                note = "of the bandwidth" + (f"; {rate / usual[batch]:.2f} times the usual" if batch in usual else "")
                goal = None if usual or batch > 1 else SMALL_GOAL
                share = read / limits.bandwidth
                report.figure(f"0.6B bf16{way} decode, batch {batch}", rate, "tok/s", share, goal, note=note)
                rates[batch] = rate
            if not usual:
                _prefills(report, limits, "0.6B bf16", bench, None)
                usual = rates
            bench.close()


def _measure(
    report: Report,
    limits: Limits,
    name: str,
    bench: Bench,
    decode_goal: float | None = None,
    prefill_goal: float | None = None,
) -> tuple[dict[int, float], dict[int, float]]:
    """Tokens a second by batch and by prompt. Goals are shares of the limits."""
    report.figure(f"{name} weights", bench.llm.info.weight_bytes / 1e9, "GB", note=bench.llm.info.kernels)
    decoded: dict[int, float] = {}
    for batch in bench.work.batches:
        decoded[batch], read = bench.decode(batch)
        goal = decode_goal if batch == 1 else None
        share = read / limits.bandwidth
        report.figure(f"{name} decode, batch {batch}", decoded[batch], "tok/s", share, goal, True, "of the bandwidth")
    return decoded, _prefills(report, limits, name, bench, prefill_goal)


def _prefills(report: Report, limits: Limits, name: str, bench: Bench, goal: float | None) -> dict[int, float]:
    prefilled: dict[int, float] = {}
    for length in bench.work.prefills:
        prefilled[length], operations = bench.prefill(length)
        own_goal = goal if length >= LONG_PROMPT else None
        share = operations / limits.matmul
        title = f"{name} prefill, {length} tokens"
        report.figure(title, prefilled[length], "tok/s", share, own_goal, True, "of the matmul rate")
    return prefilled
