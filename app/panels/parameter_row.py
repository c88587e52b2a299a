"""One sampling parameter: its name, number box, slider and explanation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from PySide6.QtCore import QSignalBlocker, Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from app.panels.widgets import CalmSlider, NumberBox, label
from app.theme import SPACE_XS
from engine.protocol import PARAMETER_RANGES, ParameterRange, SamplingParams

SLIDER_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Scale:
    """How a slider's travel, 0 to 1, maps onto a value; both functions undo each other."""

    to_value: Callable[[float], float]
    to_travel: Callable[[float], float]


def linear_scale(low: float, high: float) -> Scale:
    return Scale(lambda t: low + t * (high - low), lambda v: (v - low) / (high - low))


def power_scale(low: float, high: float, exponent: float) -> Scale:
    """Gives the low end more travel: for temperatures, whose useful part is far below their maximum."""
    return Scale(
        lambda t: low + (high - low) * t**exponent,
        lambda v: ((v - low) / (high - low)) ** (1 / exponent),
    )


def log_scale(low: float, high: float) -> Scale:
    """Equal travel for equal ratios. With `low` 0 the first 2 % of the travel are zero and the rest starts at 1."""
    zero_travel = 0.02 if low == 0 else 0.0
    first = max(low, 1.0)
    span = math.log(high / first)

    def to_value(travel: float) -> float:
        if travel < zero_travel:
            return 0.0
        return first * math.exp(span * (travel - zero_travel) / (1 - zero_travel))

    def to_travel(value: float) -> float:
        if value < first:
            return 0.0
        return zero_travel + (1 - zero_travel) * math.log(value / first) / span

    return Scale(to_value, to_travel)


def centred_scale(low: float, centre: float, high: float) -> Scale:
    """Half of the travel below `centre`, half above, the upper half finer near the centre."""

    def to_value(travel: float) -> float:
        if travel <= 0.5:
            return low + (centre - low) * travel * 2
        return centre + (high - centre) * (travel * 2 - 1) ** 2

    def to_travel(value: float) -> float:
        if value <= centre:
            return (value - low) / (centre - low) / 2
        return 0.5 + math.sqrt((value - centre) / (high - centre)) / 2

    return Scale(to_value, to_travel)


@dataclasses.dataclass(frozen=True)
class ParameterStyle:
    """How one parameter of `PARAMETER_RANGES` is shown: title, decimals, arrow-key step and slider scale."""

    title: str
    decimals: int
    step: float
    scale: Scale


def _style(name: str, title: str, decimals: int, step: float, make: Callable[[float, float], Scale]) -> ParameterStyle:
    allowed = PARAMETER_RANGES[name]
    return ParameterStyle(title, decimals, step, make(allowed.low, allowed.high))


PARAMETER_STYLES: dict[str, ParameterStyle] = {
    "temperature": _style("temperature", "Temperature", 2, 0.05, lambda low, high: power_scale(low, high, 2)),
    "top_p": _style("top_p", "Top-p", 3, 0.01, linear_scale),
    "min_p": _style("min_p", "Min-p", 3, 0.01, lambda low, high: power_scale(low, high, 2)),
    "top_k": _style("top_k", "Top-k", 0, 1, log_scale),
    "repetition_penalty": _style(
        "repetition_penalty", "Repetition penalty", 2, 0.01, lambda low, high: centred_scale(low, 1.0, high)
    ),
    "presence_penalty": _style("presence_penalty", "Presence penalty", 2, 0.05, linear_scale),
    "frequency_penalty": _style("frequency_penalty", "Frequency penalty", 2, 0.05, linear_scale),
    "penalty_window": _style("penalty_window", "Penalty window", 0, 16, log_scale),
    "min_tokens": _style("min_tokens", "Least tokens", 0, 1, log_scale),
    "max_tokens": _style("max_tokens", "Most tokens", 0, 16, log_scale),
}


def rounded(value: float, decimals: int, allowed: ParameterRange) -> float:
    """A slider's value as a person would write it: the box's decimals, two leading digits for large whole numbers."""
    if decimals == 0 and value >= 100:
        value = round(value, 1 - math.floor(math.log10(value)))
    value = round(value, decimals)
    return min(max(value, allowed.low), allowed.high)


class ParameterRow(QWidget):
    """Edits one numeric parameter. `edited` carries the new value, an int where the parameter is whole."""

    edited = Signal(object)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.allowed = PARAMETER_RANGES[name]
        self.style_ = PARAMETER_STYLES[name]
        default = getattr(SamplingParams(), name)
        self._value: float = self.allowed.low if default is None else default

        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACE_XS)
        top = QHBoxLayout()
        title = label(self.style_.title, "strong")
        self.box = NumberBox(
            self.style_.title, self.allowed.low, self.allowed.high, self.style_.decimals, self.style_.step
        )
        self.box.setFixedWidth(84)
        title.setBuddy(self.box)
        top.addWidget(title, 1)
        top.addWidget(self.box)
        self.slider = CalmSlider(f"{self.style_.title} slider")
        self.slider.setRange(0, SLIDER_STEPS)
        self.slider.setPageStep(SLIDER_STEPS // 20)
        self.slider.setMinimumHeight(18)
        self.help = label(self.allowed.help, "faint", wrap=True)
        self.help.setAlignment(Qt.AlignmentFlag.AlignTop)
        for widget in (self.box, self.slider):
            widget.setAccessibleDescription(self.allowed.help)
        column.addLayout(top)
        column.addWidget(self.slider)
        column.addWidget(self.help)

        self.box.valueChanged.connect(self._box_moved)
        self.slider.valueChanged.connect(self._slider_moved)
        self.set_value(self._value)

    @property
    def value(self) -> float:
        return int(self._value) if self.allowed.integer else self._value

    def set_value(self, value: float) -> None:
        """Shows a value that was set elsewhere; does not emit `edited`."""
        self._value = value
        with QSignalBlocker(self.box), QSignalBlocker(self.slider):
            self.box.setValue(value)
            self.slider.setValue(round(self.style_.scale.to_travel(value) * SLIDER_STEPS))

    def _box_moved(self, value: float) -> None:
        self._value = value
        with QSignalBlocker(self.slider):
            self.slider.setValue(round(self.style_.scale.to_travel(value) * SLIDER_STEPS))
        self.edited.emit(self.value)

    def _slider_moved(self, position: int) -> None:
        value = rounded(self.style_.scale.to_value(position / SLIDER_STEPS), self.style_.decimals, self.allowed)
        if value == self._value:
            return
        self._value = value
        with QSignalBlocker(self.box):
            self.box.setValue(value)
        self.edited.emit(self.value)
