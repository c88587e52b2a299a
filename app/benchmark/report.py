"""A benchmark's outcome as a table for people and as JSON for keeping."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence

import msgspec
import psutil

from app.benchmark.plan import BenchmarkPlan, LevelResult
from app.units import format_percent
from app.version import version
from engine.memory import format_bytes
from engine.protocol import EngineConfig, ModelInfo, WorkerStarted


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the figures were measured on. `cores` are those this process may use."""

    system: str
    device: str
    kernels: str
    cores: int
    memory: int
    versions: dict[str, str]


class BenchmarkReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to measure the same again."""

    kvasir: str
    timestamp: float
    machine: Machine
    model: ModelInfo
    config: EngineConfig
    plan: BenchmarkPlan
    price_per_hour: float | None
    levels: list[LevelResult]


def make_report(
    plan: BenchmarkPlan,
    levels: Sequence[LevelResult],
    worker: WorkerStarted,
    model: ModelInfo,
    config: EngineConfig,
    price_per_hour: float | None = None,
) -> BenchmarkReport:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return BenchmarkReport(
        kvasir=version(),
        timestamp=time.time(),
        machine=Machine(
            system=platform.platform(),
            device=worker.device_name,
            kernels=model.kernels,
            cores=cores,
            memory=psutil.virtual_memory().total,
            versions=worker.versions,
        ),
        model=model,
        config=config,
        plan=plan,
        price_per_hour=price_per_hour,
        levels=list(levels),
    )


def titles(report: BenchmarkReport) -> list[str]:
    """What the columns of `rows` are, each in two lines."""
    columns = ["chats\n", "TTFT\np50 ms", "TTFT\np99 ms", "TPOT\np50 ms", "TPOT\np99 ms", "output\ntok/s"]
    columns += ["requests\n/s", "queue\np50 ms", "KV\npeak", "memory\npeak", "errors\n"]
    return columns if report.price_per_hour is None else [*columns, "cost\n/1M tok"]


def rows(report: BenchmarkReport) -> list[list[str]]:
    """The levels as cells for people, in the order of `titles`."""
    result: list[list[str]] = []
    for level in report.levels:
        row = [
            str(level.concurrency),
            _number(level.ttft_p50, 0),
            _number(level.ttft_p99, 0),
            _number(level.tpot_p50, 1),
            _number(level.tpot_p99, 1),
            _number(level.output_tokens_per_s, 1),
            _number(level.requests_per_s, 2),
            _number(level.queue_p50, 0),
            "-" if level.kv_peak is None else format_percent(level.kv_peak, 1.0),
            "-" if level.memory_peak is None else format_bytes(level.memory_peak),
            f"{level.errors}/{level.requests}",
        ]
        if report.price_per_hour is not None:
            row.append(_number(level.cost_per_million_tokens, 3))
        result.append(row)
    return result


def table(report: BenchmarkReport) -> str:
    """The levels, a line each, under two lines of titles."""
    lines = [
        *(list(line) for line in zip(*(title.split("\n") for title in titles(report)), strict=True)),
        *rows(report),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def as_text(report: BenchmarkReport) -> str:
    """Headline, table and what went wrong, as plain text."""
    return "\n".join([headline(report), "", table(report), *failures(report)])


def failures(report: BenchmarkReport) -> list[str]:
    """A line for each level that had failed requests."""
    return [
        f"{level.errors} of {level.requests} requests failed at {level.concurrency}: {level.first_error}"
        for level in report.levels
        if level.first_error is not None
    ]


def as_json(report: BenchmarkReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def headline(report: BenchmarkReport) -> str:
    """What was measured, in a line or two."""
    model, plan = report.model, report.plan
    return (
        f"{model.name} ({model.format}, {model.kernels}, KV {model.kv_dtype}) on {report.machine.device}, "
        f"{report.machine.cores} cores\n"
        f"{plan.input_tokens} input and {plan.output_tokens} output tokens a request"
    )


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"
