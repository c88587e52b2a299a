"""The engine's last steps as bars: how long each took, and for whose tokens.

A bar's height is the step's time and its pieces are the step's tokens, so a tall bar of one
colour among the decodes says which chat's prompt made everybody wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PySide6.QtCore import QEvent, QPoint, QRect, QSize, Qt
from PySide6.QtGui import QColor, QFontMetrics, QImage, QMouseEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.charts.axes import CalmRange, paint_ends, paint_value_axis
from app.charts.figures import Figure, sized_font
from app.charts.page import ChartPage, SessionTitles
from app.state.telemetry import TelemetryState
from app.theme import Theme, mix
from app.units import format_ms, plural, three_figures
from engine.protocol import NUM_OWNER_SLOTS, StepRecord

BAR_WIDTH = 4
BAR_PITCH = 5
_GRID, _BRIGHT, _DIM = 1, 1 << 6, 2 << 6  # palette index: shade in the high bits, owner slot in the low ones


class StepImage:
    """The bars as an 8-bit image, uint8 [height, columns * BAR_PITCH * scale] of palette indices.

    The newest step is at the right. From the bottom of a bar upwards: each request's decode tokens plain,
    its prefill tokens striped, its draft tokens dim, in proportion to the step's tokens.
    """

    def __init__(self, columns: int, height: int, top_ms: float, scale: int = 1) -> None:
        self.size = (columns, height, top_ms, scale)
        self.columns = columns
        self._top_ms = top_ms
        self._pitch, self._bar = BAR_PITCH * scale, BAR_WIDTH * scale
        self._newest: StepRecord | None = None
        self.pixels = np.zeros((height, columns * self._pitch), dtype=np.uint8)
        self._clear(self.pixels)

    def show(self, steps: Sequence[StepRecord]) -> None:
        """Makes `steps`, oldest first, the last bars; those that are there already are moved, not painted again."""
        new = steps[-self.columns :] if self.columns > 0 else steps[:0]
        for position in range(len(new) - 1, -1, -1):
            if new[position] is self._newest:
                new = new[position + 1 :]
                break
        else:
            self._clear(self.pixels)
        if not new:
            return
        kept = self.pixels.shape[1] - len(new) * self._pitch
        self.pixels[:, :kept] = self.pixels[:, self.pixels.shape[1] - kept :].copy()
        self._clear(self.pixels[:, kept:])
        for number, step in enumerate(new):
            self._paint_bar(step, kept + number * self._pitch)
        self._newest = new[-1]

    def _clear(self, pixels: np.ndarray) -> None:
        pixels[:] = 0
        for row in (0, (len(pixels) - 1) // 2, len(pixels) - 1):
            pixels[row] = _GRID

    def _paint_bar(self, step: StepRecord, left: int) -> None:
        column = self.pixels[::-1, left : left + self._bar]
        height = len(column)
        full = min(height, max(1, round((step.end - step.start) * 1000 / self._top_ms * height)))
        total = sum(e.prefill_tokens + e.decode_tokens + e.draft_tokens for e in step.entries)
        done = 0
        for entry in step.entries:
            slot = entry.owner_slot % NUM_OWNER_SLOTS
            for tokens, even, odd in (
                (entry.decode_tokens, _BRIGHT, _BRIGHT),
                (entry.prefill_tokens, _BRIGHT, _DIM),
                (entry.draft_tokens, _DIM, _DIM),
            ):
                if tokens > 0:
                    low = full * done // total
                    done += tokens
                    high = full * done // total
                    column[low:high:2] = even | slot
                    column[low + 1 : high : 2] = odd | slot


class StepTimeline(QWidget):
    """Bars of the last steps; stands still under the mouse so that a bar can be read."""

    def __init__(
        self, state: TelemetryState, theme: Theme, session_titles: SessionTitles, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._state = state
        self._session_titles = session_titles
        self._version = -1
        self._steps: list[StepRecord] = []
        self._picked: int | None = None
        self._bars = StepImage(0, 1, 1.0)
        self._image = QImage()
        self._image_steps = 0
        self.range = CalmRange(1.0)
        self._peak = 0.0
        self.setMouseTracking(True)
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Ignored)
        self.set_theme(theme)

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._font = sized_font(self.font(), theme.font_size_tiny)
        self._metrics = QFontMetrics(self._font)
        bright = [theme.owner_color(slot) for slot in range(NUM_OWNER_SLOTS)]
        dim = [mix(theme.surface, colour, 0.45) for colour in bright]
        nothing = [theme.surface] * NUM_OWNER_SLOTS
        self._colours = [QColor(colour).rgb() for colour in (*nothing, *bright, *dim)]
        self._colours[_GRID] = QColor(theme.chart_grid).rgb()
        self._version = -1
        self.update()

    def refresh(self, now: float) -> None:
        """Takes over the newest steps, unless the mouse holds the picture."""
        if self._picked is not None:
            return
        if self._version == self._state.steps_version and not self.range.update(self._peak, now):
            return
        self._version = self._state.steps_version
        columns = self._columns()
        steps = self._state.steps
        self._steps = [steps[i] for i in range(max(0, len(steps) - columns), len(steps))]
        self._peak = max((step.end - step.start for step in self._steps), default=0.0) * 1000
        scale = max(1, round(self.devicePixelRatioF()))
        area = self._area()
        self.range.update(self._peak, now)
        size = (columns, max(1, area.height() * scale), self.range.top, scale)
        whole = size != self._bars.size or not self._image_steps
        if whole:
            self._bars = StepImage(*size)
        self._bars.show(self._steps)
        rows, width = self._bars.pixels.shape
        indexed = QImage(self._bars.pixels.data, width, rows, width, QImage.Format.Format_Indexed8)
        indexed.setColorTable(self._colours)
        self._image = indexed.convertToFormat(QImage.Format.Format_RGB32)
        self._image.setDevicePixelRatio(scale)
        whole = whole or len(self._steps) != self._image_steps
        self._image_steps = len(self._steps)
        self.update(self.rect() if whole else area)

    def describe_step(self, step: StepRecord) -> str:
        lines = [f"Step {step.index:,}: {format_ms((step.end - step.start) * 1000)}"]
        for entry in step.entries:
            owner = self._state.owner_name(entry.owner_slot)
            title = (self._session_titles(owner) if owner is not None else "") or "a closed chat"
            shares = []
            if entry.prefill_tokens:
                shares.append(f"{plural(entry.prefill_tokens, 'prompt token')}")
            if entry.decode_tokens:
                in_a_row = " in a row" if entry.decode_tokens > 1 else ""
                shares.append(f"{plural(entry.decode_tokens, 'new token')}{in_a_row}")
            if entry.draft_tokens:
                shares.append(f"{entry.accepted_tokens} of {plural(entry.draft_tokens, 'draft')} accepted")
            lines.append(f"{title}: {', '.join(shares)}")
        if step.preempted:
            lines.append(f"{plural(step.preempted, 'request')} preempted")
        return "\n".join(lines)

    def step_at(self, x: int) -> StepRecord | None:
        """The step whose bar is at a pixel of this widget."""
        column = (x - self._area().left()) // BAR_PITCH
        index = column - (self._columns() - len(self._steps))
        return self._steps[index] if 0 <= column < self._columns() and index >= 0 else None

    def sizeHint(self) -> QSize:
        return QSize(280, 110)

    def minimumSizeHint(self) -> QSize:
        return QSize(120, 40)

    def resizeEvent(self, event: QEvent) -> None:
        self._version = -1

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        position = event.position().toPoint()
        step = self.step_at(position.x()) if self._area().contains(position) else None
        self._picked = step.index if step is not None else None
        if step is not None:
            QToolTip.showText(event.globalPosition().toPoint(), self.describe_step(step), self)
        else:
            QToolTip.hideText()
        self.update()

    def leaveEvent(self, event: QEvent) -> None:
        self._picked = None
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(event.rect(), QColor(self._theme.surface))
        painter.setFont(self._font)
        if not self._steps:
            painter.setPen(QColor(self._theme.text_faint))
            painter.drawText(self.rect(), Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap, "No steps yet")
            painter.end()
            return
        area = self._area()
        painter.drawImage(area.topLeft(), self._image)
        if self._picked is not None:
            column = self._columns() - 1 - (self._steps[-1].index - self._picked)
            frame = QRect(area.left() + column * BAR_PITCH, area.top(), BAR_WIDTH, area.height() - 1)
            painter.setPen(QPen(QColor(self._theme.text_muted), 1))
            painter.drawRect(frame)
        if not area.contains(event.rect()):
            painter.setPen(QColor(self._theme.text_muted))
            paint_value_axis(painter, self._metrics, area, self.range.top, format_ms)
            oldest = f"{plural(len(self._steps), 'step')} ago"
            paint_ends(painter, self._metrics, area, oldest, "now", "striped: prompt")
        painter.end()

    def _columns(self) -> int:
        return max(0, self._area().width() // BAR_PITCH)

    def _area(self) -> QRect:
        gutter = self._metrics.horizontalAdvance("888 ms") + 8
        half = self._metrics.height() // 2
        width = max(0, self.width() - 2 - gutter) // BAR_PITCH * BAR_PITCH
        corner = QPoint(self.width() - 2 - width, half)
        return QRect(corner, QSize(width, max(0, self.height() - half - self._metrics.height() - 4)))


class StepsPage(ChartPage):
    title = "Steps"

    def __init__(
        self, state: TelemetryState, theme: Theme, session_titles: SessionTitles, parent: QWidget | None = None
    ) -> None:
        super().__init__(state, theme, parent)
        self.timeline = StepTimeline(state, theme, session_titles, self)
        self.add_picture(self.timeline)

    def set_theme(self, theme: Theme) -> None:
        super().set_theme(theme)
        self.timeline.set_theme(theme)

    def refresh(self, now: float) -> None:
        self.timeline.refresh(now)

    def refresh_figures(self) -> None:
        steps = self.state.steps
        self.set_note(*self.queue_words())
        if not steps:
            self.figure_row.set_figures(Figure("–", "no steps yet"))
            self.describe("No engine steps yet.")
            return
        recent = [steps[i] for i in range(max(0, len(steps) - 50), len(steps))]
        tokens = sum(e.prefill_tokens + e.decode_tokens + e.draft_tokens for step in recent for e in step.entries)
        mean_ms = sum(step.end - step.start for step in recent) / len(recent) * 1000
        per_step = three_figures(round(tokens / len(recent), 1))
        noun = "token" if per_step == "1" else "tokens"
        self.figure_row.set_figures(Figure(format_ms(mean_ms), "per step"), Figure(per_step, f"{noun} per step"))
        self.describe(
            f"The last {plural(len(recent), 'engine step')} took {format_ms(mean_ms)} and "
            f"computed {per_step} {noun} each on average."
        )
