"""What a section found: figures with their units, shares and goals, and checks with their tolerances."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number. `share` is its part of the limit it is bound by, 1.0 being all of it.

    `goal` is the least to aim at: of the share where `goal_is_share`, else of the value. `note` says what it is of.
    """

    section: str
    name: str
    value: float
    unit: str
    share: float | None = None
    goal: float | None = None
    goal_is_share: bool = False
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the goal is reached; None where there is none."""
        if self.goal is None:
            return None
        reached = self.share if self.goal_is_share else self.value
        return reached is not None and reached >= self.goal

    def line(self) -> str:
        line = f"{self.name:58} {_number(self.value):>9} {self.unit:8}"
        line += "" if self.share is None else f" {self.share:6.1%}"
        line += f" {self.note}" if self.note else ""
        if self.goal is not None:
            goal = f"{self.goal:.0%}" if self.goal_is_share else f"{_number(self.goal)} {self.unit}"
            line += f"  goal {goal}: {'reached' if self.passed else 'MISSED'}"
        return line


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison. `error` is the largest difference found, `tolerance` the largest allowed."""

    section: str
    name: str
    passed: bool
    error: float | None = None
    tolerance: float | None = None
    message: str = ""

    def line(self) -> str:
        line = f"{'ok  ' if self.passed else 'FAIL'} {self.name:58}"
        if self.error is not None:
            line += f" error {self.error:.1e}"
        if self.tolerance is not None:
            line += f" of {self.tolerance:.1e}"
        return f"{line} {self.message}".rstrip()


Entry = Figure | Check


class Report:
    """Takes down one section's entries, printing each as it comes; `send` passes them on, in plain values."""

    def __init__(self, section: str, send: Callable[[dict[str, Any]], None] = lambda entry: None) -> None:
        self.section = section
        self.entries: list[Entry] = []
        self._send = send

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        share: float | None = None,
        goal: float | None = None,
        goal_is_share: bool = False,
        note: str = "",
    ) -> None:
        self._add(Figure(self.section, name, value, unit, share, goal, goal_is_share, note))

    def check(
        self,
        name: str,
        passed: bool,
        error: float | None = None,
        tolerance: float | None = None,
        message: str = "",
    ) -> None:
        """An `error` that is no finite number, which JSON does not have, is told in the message."""
        if error is not None and not math.isfinite(error):
            error, message = None, f"the error is {error} {message}".rstrip()
        self._add(Check(self.section, name, passed, error, tolerance, message))

    def failed(self, name: str, error: Exception) -> None:
        """A check that could not be made. The whole error is printed; to be called while it is handled."""
        traceback.print_exc()
        self.check(name, False, message=f"{type(error).__name__}: {str(error)[:200]}")

    def machine(self, facts: dict[str, Any]) -> None:
        """What everything was measured on."""
        for name, value in facts.items():
            say(f"  {name:20} {value}")
        self._send({"kind": "machine", **facts})

    def limits(self, limits: dict[str, float]) -> None:
        """What later sections compare with: the fields of `tests.gpu.limits.Limits`."""
        self._send({"kind": "limits", **limits})

    def _add(self, entry: Entry) -> None:
        self.entries.append(entry)
        say(f"  {entry.line()}")
        self._send(as_values(entry))


def as_values(entry: Entry) -> dict[str, Any]:
    """The entry for JSON; `kind` is "figure" or "check"."""
    return {"kind": type(entry).__name__.lower(), **asdict(entry), "passed": entry.passed}


def say(text: str) -> None:
    """Prints at once: who waits for a slow section sees how far it is."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
