"""Where the device's memory is: one stacked bar and its legend."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from PySide6.QtCore import QEvent, QPointF, QRect, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFontMetrics, QHelpEvent, QPainter, QPainterPath, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.charts.figures import Figure, sized_font
from app.charts.page import ChartPage
from app.state.telemetry import TelemetryState
from app.theme import Theme
from app.units import format_percent
from engine.memory import format_bytes
from engine.protocol import MemoryBreakdown

BAR_HEIGHT = 14
SMALLEST_SEGMENT = 3
TWO_COLUMNS_FROM = 300


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    colour: str
    size: int
    explanation: str


def parts_of(memory: MemoryBreakdown) -> tuple[Part, ...]:
    """The parts in the order of the bar; `colour` is a theme token."""
    return (
        Part("Weights", "memory_weights", memory.weights, "the model's parameters"),
        Part("KV cache", "memory_kv", memory.kv_cache, "keys and values of every token the chats hold"),
        Part("Workspace", "memory_workspace", memory.workspace, "activations and scratch space of a step"),
        Part("Runtime", "memory_runtime", memory.runtime, "interpreter, libraries and driver of the engine"),
        Part("Other", "memory_other", memory.other, "other programs and this window"),
        Part("Free", "memory_free", memory.free, "not used by anything"),
    )


def segment_widths(sizes: Sequence[int], width: int) -> list[int]:
    """Pixels of each segment, summing to `width`: in proportion, but nothing that exists is invisible.

    What small segments need beyond their share is taken from the largest one.
    """
    total = sum(sizes)
    if total <= 0 or width <= 0:
        return [0] * len(sizes)
    widths = [max(SMALLEST_SEGMENT, round(width * size / total)) if size > 0 else 0 for size in sizes]
    largest = max(range(len(widths)), key=widths.__getitem__)
    widths[largest] = max(0, widths[largest] + width - sum(widths))
    return widths


class MemoryBar(QWidget):
    """Paints a `MemoryBreakdown`; tooltips say what each part is."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._memory: MemoryBreakdown | None = None
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Ignored)
        self.set_theme(theme)

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._font = sized_font(self.font(), theme.font_size_tiny)
        self._metrics = QFontMetrics(self._font)
        self.update()

    def set_memory(self, memory: MemoryBreakdown) -> None:
        if memory != self._memory:
            self._memory = memory
            self.update()

    def sizeHint(self) -> QSize:
        return QSize(220, BAR_HEIGHT + 6 * (self._metrics.height() + 2) + 8)

    def minimumSizeHint(self) -> QSize:
        return QSize(120, BAR_HEIGHT)

    def part_at(self, position: QPointF) -> Part | None:
        """The part whose segment or legend row is there."""
        if self._memory is None:
            return None
        parts = parts_of(self._memory)
        if position.y() <= BAR_HEIGHT:
            left = 0
            for part, width in zip(parts, segment_widths([p.size for p in parts], self.width())):
                if left <= position.x() < left + width:
                    return part
                left += width
            return None
        return next((p for p, row in zip(parts, self._legend_rows()) if row.contains(position.toPoint())), None)

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip:
            assert isinstance(event, QHelpEvent)
            part = self.part_at(QPointF(event.pos()))
            if part is not None and self._memory is not None:
                share = format_percent(part.size, self._memory.total)
                text = f"{part.name}: {format_bytes(part.size)}, {share} of {self._memory.kind}\n{part.explanation}"
                QToolTip.showText(event.globalPos(), text, self)
            else:
                QToolTip.hideText()
            return True
        return super().event(event)

    def paintEvent(self, event: QPaintEvent) -> None:
        if self._memory is None:
            return
        painter = QPainter(self)
        parts = parts_of(self._memory)
        self._paint_bar(painter, parts)
        painter.setFont(self._font)
        for part, row in zip(parts, self._legend_rows()):
            self._paint_row(painter, part, row)
        painter.end()

    def _paint_bar(self, painter: QPainter, parts: Sequence[Part]) -> None:
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        outline = QPainterPath()
        outline.addRoundedRect(QRectF(0, 0, self.width(), BAR_HEIGHT), 4, 4)
        painter.setClipPath(outline)
        left = 0
        for part, width in zip(parts, segment_widths([part.size for part in parts], self.width())):
            gap = 1 if width > SMALLEST_SEGMENT and part.name != "Free" else 0
            painter.fillRect(QRect(left, 0, width - gap, BAR_HEIGHT), QColor(getattr(self._theme, part.colour)))
            left += width
        painter.setClipping(False)

    def _paint_row(self, painter: QPainter, part: Part, row: QRect) -> None:
        swatch = QRectF(row.left(), row.center().y() - 3, 8, 8)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(getattr(self._theme, part.colour)))
        painter.drawRoundedRect(swatch, 2, 2)
        text = row.adjusted(14, 0, 0, 0)
        size = format_bytes(part.size)
        painter.setPen(QColor(self._theme.text))
        painter.drawText(text, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, size)
        room = text.width() - self._metrics.horizontalAdvance(size) - 6
        painter.setPen(QColor(self._theme.text_muted))
        name = self._metrics.elidedText(part.name, Qt.TextElideMode.ElideRight, room)
        painter.drawText(text, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, name)

    def _legend_rows(self) -> list[QRect]:
        """Rows for six parts in one column or two, closer together when there is less room."""
        columns = 2 if self.width() >= TWO_COLUMNS_FROM else 1
        rows = 6 // columns
        top = BAR_HEIGHT + 6
        height = min(self._metrics.height() + 6, max(self._metrics.height() - 2, (self.height() - top) // rows))
        gutter = 24
        width = (self.width() - gutter * (columns - 1)) // columns
        return [
            QRect(index // rows * (width + gutter), top + index % rows * height, width, height) for index in range(6)
        ]


class MemoryPage(ChartPage):
    title = "Memory"

    def __init__(self, state: TelemetryState, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(state, theme, parent)
        self.bar = MemoryBar(theme, self)
        self.add_picture(self.bar)

    def set_theme(self, theme: Theme) -> None:
        super().set_theme(theme)
        self.bar.set_theme(theme)

    def refresh(self, now: float) -> None:
        pass  # sizes are read as numbers: they change at the pace of the figures

    def refresh_figures(self) -> None:
        telemetry = self.state.latest
        if telemetry is None:
            return
        memory = telemetry.memory
        self.bar.set_memory(memory)
        used = format_bytes(memory.total - memory.free)
        total = format_bytes(memory.total)
        self.figure_row.set_figures(Figure(used, f"of {total} {memory.kind}"))
        worker = self.state.engine.worker
        self.set_note(worker.device_name if worker is not None else "")
        listed = ", ".join(f"{part.name.lower()} {format_bytes(part.size)}" for part in parts_of(memory))
        self.describe(f"{memory.kind}: {used} used of {total}. {listed}.")
