"""Runs sections in processes of their own, and stops those that hang. Imports no torch."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

Status = Literal["done", "failed", "stopped", "skipped"]


@dataclass(frozen=True, slots=True)
class Section:
    """`target` is "module:function", called with a `Report`, then with the `Limits` where it `needs_limits`.

    `seconds` is the most it may take, its process' start included. Where it fails, it is run once more with the
    options of `fallback`, if there are any.
    """

    name: str
    target: str
    seconds: float
    needs_limits: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    fallback: dict[str, Any] = field(default_factory=dict)

    def again(self) -> Section:
        name = f"{self.name} with {', '.join(f'{key}={value}' for key, value in self.fallback.items())}"
        return replace(self, name=name, options=self.options | self.fallback, fallback={})


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a section ended; `message` says why it did not run to its end."""

    name: str
    status: Status
    seconds: float
    message: str = ""


@dataclass(slots=True)
class _Running:
    section: Section
    process: Any
    connection: Connection
    deadline: float
    message: str = ""


def run_together(
    sections: Sequence[Section],
    seconds: float,
    limits: dict[str, float],
    take: Callable[[dict[str, Any]], None],
) -> list[Outcome]:
    """Runs sections at the same time, for at most `seconds` or their own limit; hands on what they report.

    A section that is still running then is killed; what it had reported is kept.
    """
    context = multiprocessing.get_context("spawn")
    began = time.monotonic()
    running: list[_Running] = []
    for section in sections:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(section, limits, sender), daemon=True)
        process.start()
        sender.close()
        running.append(_Running(section, process, receiver, began + min(seconds, section.seconds)))
    outcomes: dict[str, Outcome] = {}
    try:
        while running:
            nearest = min(each.deadline for each in running)
            ready = wait([each.connection for each in running], timeout=max(0.0, nearest - time.monotonic()))
            for each in list(running):
                outcome = _outcome(each, each.connection in ready, began, take)
                if outcome is not None:
                    running.remove(each)
                    outcomes[each.section.name] = outcome
    finally:
        for each in running:
            each.process.kill()
    return [outcomes[section.name] for section in sections]


def _outcome(each: _Running, is_ready: bool, began: float, take: Callable[[dict[str, Any]], None]) -> Outcome | None:
    """How a section ended, None while it runs. Takes in one message of one that is ready."""
    if is_ready:
        try:
            message = each.connection.recv()
        except EOFError:
            each.process.join()
            return _ended(each, began)
        if message["kind"] == "failed":
            each.message = message["message"]
        else:
            take(message)
        return None
    if time.monotonic() < each.deadline:
        return None
    each.process.kill()
    each.process.join()
    allowed = each.deadline - began
    return Outcome(each.section.name, "stopped", time.monotonic() - began, f"stopped after {allowed:.0f} s")


def _ended(each: _Running, began: float) -> Outcome:
    seconds = time.monotonic() - began
    code = each.process.exitcode
    if not each.message and code:
        each.message = f"the process died of signal {-code}" if code < 0 else f"the process exited with {code}"
    return Outcome(each.section.name, "failed" if each.message else "done", seconds, each.message)


def _run(section: Section, limits: dict[str, float], sender: Connection) -> None:
    """In the section's process."""
    try:
        from tests.gpu.report import Report

        module, _, function = section.target.partition(":")
        report = Report(section.name, sender.send)
        arguments: list[object] = [report]
        if section.needs_limits:
            from tests.gpu.limits import Limits

            arguments.append(Limits(**limits))
        target = getattr(importlib.import_module(module), function)
        gc.freeze()  # each engine that is closed collects garbage: what was imported need not be looked through
        target(*arguments, **section.options)
    except Exception as error:
        traceback.print_exc()
        sender.send({"kind": "failed", "message": f"{type(error).__name__}: {error}"})
    finally:
        sender.close()
