"""Proves and measures the engine on a CUDA GPU, in minutes and without a network.

    python -m tests.gpu [--json FILE] [--only SECTION ...] [--seconds N]

Prints what the machine can do, how far each Triton kernel is from the reference, each one's time and its share of
what limits it, and how fast whole models of random weights answer, beside Hugging Face on the same weights. Exits
with 1 where a check fails or a section does not run to its end, with 2 where there is no CUDA; a goal that is missed
is printed, and no error.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.gpu.report import say
from tests.gpu.sections import Outcome, Section, run_together

_MODULES = ("jinja2", "msgspec", "numpy", "packaging", "platformdirs", "psutil", "regex", "safetensors", "tokenizers",
            "torch", "transformers", "triton")  # fmt: skip
"""What the engine imports: a section that lacks one would only say so once the GPU is held."""
_SHARED_OUT = ("attention", "attention_options", "wide_attention", "products")
_WHOLE = ("experts", "elementwise", "sampling")
_NO_GRAPHS = {"cuda_graphs": False}
# Those of a stage run side by side: nothing in them is timed. The limits come first, whatever else is asked for.
STAGES: tuple[tuple[Section, ...], ...] = (
    (Section("limits", "tests.gpu.limits:measure", 60),),
    (
        *(
            Section(f"correctness {name} {part}/2", f"tests.gpu.correctness:{name}", 75, options={"part": (part, 2)})
            for name in _SHARED_OUT
            for part in (1, 2)
        ),
        *(Section(f"correctness {name}", f"tests.gpu.correctness:{name}", 75) for name in _WHOLE),
        Section("equality", "tests.gpu.equality:compare", 75, fallback=_NO_GRAPHS),
    ),
    (Section("kernels", "tests.gpu.kernel_speed:measure", 45, needs_limits=True),),
    (Section("8B bf16", "tests.gpu.models:dense", 75, needs_limits=True, fallback=_NO_GRAPHS),),
    (Section("8B int4 and int8", "tests.gpu.models:integers", 75, needs_limits=True, fallback=_NO_GRAPHS),),
    (Section("0.6B", "tests.gpu.models:small", 45, needs_limits=True, fallback=_NO_GRAPHS),),
)


class Results:
    """What all sections reported, kept so that it can be written at any time."""

    def __init__(self, path: Path | None) -> None:
        self.machine: dict[str, Any] = {}
        self.limits: dict[str, float] = {}
        self.entries: list[dict[str, Any]] = []
        self.outcomes: list[Outcome] = []
        self._path = path

    def take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind in ("machine", "limits"):
            setattr(self, kind, _without_kind(message))
        else:
            self.entries.append(message)

    def write(self) -> None:
        if self._path is None:
            return
        by_kind = {
            f"{kind}s": [_without_kind(entry) for entry in self.entries if entry["kind"] == kind]
            for kind in ("figure", "check")
        }
        sections = [asdict(outcome) for outcome in self.outcomes]
        text = json.dumps({"machine": self.machine, "sections": sections, **by_kind}, indent=1)
        self._path.write_text(text + "\n", encoding="utf-8")

    def summarise(self) -> int:
        """Prints what came of it; the exit code."""
        failed = [entry for entry in self.entries if entry["kind"] == "check" and not entry["passed"]]
        goals = [entry for entry in self.entries if entry["kind"] == "figure" and entry["passed"] is not None]
        broken = [outcome for outcome in self.outcomes if outcome.status != "done"]
        checks = sum(entry["kind"] == "check" for entry in self.entries)
        say(f"\n{checks - len(failed)} of {checks} checks passed")
        for entry in failed:
            say(f"  FAIL {entry['section']}: {entry['name']} {entry['message']}")
        say(f"{sum(entry['passed'] for entry in goals)} of {len(goals)} goals reached")
        for entry in goals:
            value = entry["share"] if entry["goal_is_share"] else entry["value"]
            say(f"  {'reached' if entry['passed'] else 'MISSED '} {entry['name']}: {value:.4g}, goal {entry['goal']:g}")
        for outcome in broken:
            say(f"  {outcome.status} {outcome.name}: {outcome.message}")
        return 1 if failed or broken else 0


def _without_kind(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "kind"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write everything to a file")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="sections whose names begin so")
    parser.add_argument("--seconds", type=float, default=235.0, help="stop after this time (default: %(default)s)")
    options = parser.parse_args(arguments)
    stages = chosen_stages(options.only)
    if len(stages) == 1 and options.only and not "limits".startswith(tuple(options.only)):
        names = ", ".join(section.name for stage in STAGES for section in stage)
        parser.error(f"no section begins with {' or '.join(options.only)}; there are {names}")
    obstacle = why_no_gpu()
    if obstacle is not None:
        sys.stderr.write(f"Nothing was measured: {obstacle}\n")
        return 2
    results = Results(options.json)
    try:
        run_stages(stages, results, options.seconds)
    finally:
        results.write()
    return results.summarise()


def chosen_stages(only: Sequence[str] | None) -> list[tuple[Section, ...]]:
    """The limits, and the sections that are asked for."""
    if not only:
        return list(STAGES)
    first, *rest = STAGES
    chosen = [tuple(section for section in stage if section.name.startswith(tuple(only))) for stage in rest]
    return [first, *(stage for stage in chosen if stage)]


def run_stages(stages: Sequence[Sequence[Section]], results: Results, seconds: float) -> None:
    """One stage after another until the time is up; what has come is written after each."""
    began = time.monotonic()
    waiting = list(stages)
    while waiting:
        stage = waiting.pop(0)
        left = seconds - (time.monotonic() - began)
        able = [section for section in stage if not section.needs_limits or results.limits]
        for section in stage:
            if left <= 0 or section not in able:
                reason = "the time is up" if left <= 0 else "the machine's limits are not known"
                results.outcomes.append(Outcome(section.name, "skipped", 0.0, reason))
        if left > 0 and able:
            say(f"\n{', '.join(section.name for section in able)} (at {time.monotonic() - began:.0f} s)")
            outcomes = run_together(able, left, results.limits, results.take)
            for outcome in outcomes:
                say(f"  -- {outcome.name}: {outcome.status} in {outcome.seconds:.1f} s {outcome.message}".rstrip())
            results.outcomes += outcomes
            failed = {outcome.name for outcome in outcomes if outcome.status == "failed"}
            again = [section.again() for section in able if section.name in failed and section.fallback]
            waiting[:0] = [again] if again else []
        results.write()


def why_no_gpu() -> str | None:
    """Why this cannot run here; None when it can."""
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        return f"{sys.executable} lacks {', '.join(missing)}."
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device here."
    from kernels.gpu import why_no_triton_kernels

    reason = why_no_triton_kernels()
    return None if reason is None else f"the Triton kernels cannot run here: {reason}."


if __name__ == "__main__":
    sys.exit(main())
