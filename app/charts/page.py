"""What every chart of the dashboard is: a headline of figures above a picture."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.charts.figures import FigureRow
from app.state.telemetry import TelemetryState
from app.theme import Theme

# The engine reports between its steps: silence while requests run is a step that takes long.
LONG_STEP_SECONDS = 2.0

SessionTitles = Callable[[str], str]


class ChartPage(QWidget):
    """One chart with its headline figures.

    The dashboard calls `refresh` at its timer's pace and `refresh_figures` a few times a second, both
    only while the page is shown and there is telemetry. `note` is a remark for the card's header.
    """

    title = ""
    note_changed = Signal()

    def __init__(self, state: TelemetryState, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.state = state
        self.theme = theme
        self.note = self.short_note = ""
        self.figure_row = FigureRow(theme, self)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(4)
        self._column.addWidget(self.figure_row)
        self.setAccessibleName(self.title)

    def add_picture(self, picture: QWidget, stretch: int = 1) -> None:
        self._column.addWidget(picture, stretch)

    def set_theme(self, theme: Theme) -> None:
        self.theme = theme
        self.figure_row.set_theme(theme)

    def set_note(self, note: str, short: str = "") -> None:
        if (note, short) != (self.note, self.short_note):
            self.note, self.short_note = note, short
            self.note_changed.emit()

    def queue_words(self) -> tuple[str, str]:
        """How many requests run and wait, long and short, for a note; in a long step, how long it is already."""
        telemetry = self.state.latest
        if telemetry is None:
            return "", ""
        running, waiting = telemetry.running, telemetry.waiting
        silence = self.state.clock() - self.state.last_arrival
        if running and silence >= LONG_STEP_SECONDS:
            return f"{running} running · in a step for {silence:.0f} s", f"step: {silence:.0f} s"
        return f"{running} running · {waiting} waiting", f"{running} run, {waiting} wait"

    def describe(self, words: str) -> None:
        """Says the figures in words to whoever cannot see the picture."""
        if words != self.accessibleDescription():
            self.setAccessibleDescription(words)

    def refresh(self, now: float) -> None:
        raise NotImplementedError

    def refresh_figures(self) -> None:
        raise NotImplementedError
