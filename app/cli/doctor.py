"""`kvasir doctor`: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from app.cli import display
from app.cli.chosen_model import find_models
from app.cli.failure import reports_failures
from engine import catalog, memory
from engine.client import LocalEngineClient
from engine.protocol import WorkerDied, WorkerStarted

_ENGINE_SECONDS = 120.0
_MARKS = {"ok": "ok  ", "note": "note", "broken": "FAIL"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. A `note` is worth knowing, a `broken` one keeps Kvasir from working."""

    subject: str
    status: Literal["ok", "note", "broken"]
    text: str
    advice: str = ""


@reports_failures
def run(arguments: argparse.Namespace) -> int:
    findings = []
    for finding in examine():
        findings.append(finding)
        if not arguments.json:
            _show(finding)
    broken = [finding.subject for finding in findings if finding.status == "broken"]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        print(f"\nKvasir cannot work: see {', '.join(broken)}." if broken else "\nKvasir can work here.")
    return 1 if broken else 0


def examine() -> Iterator[Finding]:
    """Looks at everything, the slowest last."""
    yield Finding("Python", "ok", f"{platform.python_version()} ({sys.executable}) on {platform.platform()}")
    yield _memory()
    yield _gpu()
    yield _display()
    yield _qt_libraries()
    yield _database()
    yield _models()
    yield from _engine()


def _show(finding: Finding) -> None:
    lines = textwrap.wrap(finding.text, 88) or [""]
    print(f"{_MARKS[finding.status]}  {finding.subject:<16} {lines[0]}")
    for line in lines[1:]:
        print(f"{'':<23}{line}")
    if finding.advice:
        for line in textwrap.wrap(f"-> {finding.advice}", 88, subsequent_indent="   ", break_on_hyphens=False):
            print(f"{'':<23}{line}")
    sys.stdout.flush()


def _memory() -> Finding:
    ram = memory.ram()
    return Finding("Memory", "ok", f"{memory.format_bytes(ram.free)} free of {memory.format_bytes(ram.total)}")


def _gpu() -> Finding:
    """What the driver says; what torch can make of it is the engine's to tell."""
    gpu = memory.vram()
    if isinstance(gpu, memory.NoGPU):
        return Finding("GPU", "note", f"none in use, the processor computes. {gpu.reason}")
    free, total = memory.format_bytes(gpu.free), memory.format_bytes(gpu.total)
    text = f"{gpu.name}, {free} free of {total}, driver {memory.driver().version}"
    if gpu.free >= memory.SCARCE_SHARE * gpu.total:
        return Finding("GPU", "ok", text)
    return Finding("GPU", "note", f"{text}: larger models need more", memory.close_others())


def _display() -> Finding:
    if (reason := display.why_no_display()) is not None:
        return Finding(
            "Display", "note", reason, "`kvasir chat` works without one; a window needs a desktop, Xvfb or ssh -X"
        )
    return Finding("Display", "ok", "a window can open")


def _qt_libraries() -> Finding:
    import importlib.metadata

    try:
        version = importlib.metadata.version("PySide6-Essentials")
    except importlib.metadata.PackageNotFoundError:
        return Finding("Qt", "note", "PySide6 is not installed: there is no window", "run `make setup`")
    if (reason := display.missing_libraries()) is not None:
        text, _, command = reason.partition(": ")
        return Finding("Qt", "note", f"PySide6 {version}, but {text}", command)
    return Finding("Qt", "ok", f"PySide6 {version}, and the system libraries it needs")


def _database() -> Finding:
    from app.cli.database_check import check_database

    status, text, advice = check_database()
    return Finding("Database", status, text, advice)


def _models() -> Finding:
    entries = find_models()
    usable = [entry.name for entry in entries if entry.error is None]
    if not usable:
        return Finding(
            "Models",
            "broken",
            "none found",
            f"`make setup` installs the starter model; or put a .gguf file into {catalog.user_models_folder()}",
        )
    damaged = [f"{entry.name}: {entry.error}" for entry in entries if entry.error is not None]
    more = f" and {len(usable) - 3} more" if len(usable) > 3 else ""
    text = f"{', '.join(usable[:3])}{more}"
    if damaged:
        return Finding("Models", "note", f"{text}; cannot be used: {'; '.join(damaged)}", "download them again")
    return Finding("Models", "ok", text)


def _engine(make_client: Callable[[], LocalEngineClient] = LocalEngineClient) -> Iterator[Finding]:
    """Starts a real worker: what it says it runs on is what chats will run on."""
    client = make_client()
    try:
        client.start()
        events = client.wait_events(_ENGINE_SECONDS)
    finally:
        client.close(2.0)
    first = events[0] if events else None
    if isinstance(first, WorkerDied):
        detail = first.detail.strip().splitlines()[-1:]
        yield Finding("Engine", "broken", first.reason, f"its last words: {detail[0]}" if detail else "")
        return
    if not isinstance(first, WorkerStarted):
        yield Finding("Engine", "broken", f"the engine did not answer within {_ENGINE_SECONDS:g} seconds")
        return
    yield Finding("Engine", "ok", f"starts and computes on {first.device_name} ({first.device})")
    yield from _engine_parts(first)


def _engine_parts(worker: WorkerStarted) -> Iterator[Finding]:
    versions = dict(worker.versions)
    cuda = f", CUDA {versions['cuda']}" if "cuda" in versions else ", without CUDA"
    packages = [f"{name} {versions[name]}" for name in ("transformers", "tokenizers") if name in versions]
    yield Finding("torch", "ok", ", ".join([f"{versions.get('torch', '?')}{cuda}", *packages]))
    on_gpu = worker.device.startswith("cuda")
    if "triton" in versions:
        yield Finding("Triton", "ok", versions["triton"] + ("" if on_gpu else ", not needed on a processor"))
    elif on_gpu:
        yield Finding("Triton", "note", "not installed: the GPU runs plain torch, slower")
    else:
        yield Finding("Triton", "ok", "not installed, not needed on a processor")
    forced = os.environ.get("KVASIR_KERNELS", "").strip()
    if worker.kernels == "cpu":
        yield Finding("CPU kernels", "ok", "native ones compute")
    elif on_gpu:
        yield Finding("CPU kernels", "ok", "not in use, not needed beside a GPU")
    elif forced:
        yield Finding(
            "CPU kernels",
            "note",
            f"native ones are not in use: KVASIR_KERNELS={forced} asks for {_kernels_in_words(worker.kernels)}",
            "unset KVASIR_KERNELS",
        )
    else:
        computes = _kernels_in_words(worker.kernels)
        yield Finding("CPU kernels", "note", f"native ones are not in use: {computes} computes, slower")
    for warning in worker.warnings:
        yield Finding("Engine", "note", warning)


def _kernels_in_words(kernels: str) -> str:
    return {"reference": "plain torch", "triton": "Triton"}.get(kernels, kernels)
