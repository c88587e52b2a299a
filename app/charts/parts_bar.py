"""A stacked bar of sizes with its legend: what a whole is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from PySide6.QtCore import QEvent, QPointF, QRect, QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QColor, QFontMetrics, QHelpEvent, QPainter, QPainterPath, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.charts.figures import sized_font
from app.theme import Theme
from app.units import format_percent
from engine.memory import format_bytes

BAR_HEIGHT = 14
SMALLEST_SEGMENT = 3
TWO_COLUMNS_FROM = 300


@dataclasses.dataclass(frozen=True)
class Part:
    """`colour` is a theme token."""

    name: str
    colour: str
    size: int
    explanation: str


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


class PartsBar(QWidget):
    """Paints parts as segments and a legend row each; tooltips say what a part is and its share of `whole`.

    With a `limit` below the parts' sum, what lies beyond it is shown as too much.
    """

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._parts: tuple[Part, ...] = ()
        self._whole = ""
        self._limit: int | None = None
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Ignored)
        self.set_theme(theme)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self._parts

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._font = sized_font(self.font(), theme.font_size_tiny)
        self._metrics = QFontMetrics(self._font)
        self.updateGeometry()
        self.update()

    def set_parts(self, parts: Sequence[Part], whole: str, limit: int | None = None) -> None:
        """`whole` names what the parts make up, in words."""
        if (tuple(parts), whole, limit) != (self._parts, self._whole, self._limit):
            if len(parts) != len(self._parts):
                self.updateGeometry()
            self._parts, self._whole, self._limit = tuple(parts), whole, limit
            self.update()

    def sizeHint(self) -> QSize:
        return QSize(220, BAR_HEIGHT + max(1, len(self._parts)) * (self._metrics.height() + 2) + 8)

    def minimumSizeHint(self) -> QSize:
        return QSize(120, BAR_HEIGHT)

    def part_at(self, position: QPointF) -> Part | None:
        """The part whose segment or legend row is there."""
        if position.y() <= BAR_HEIGHT:
            left = 0
            for part, width in zip(self._parts, self._widths()):
                if left <= position.x() < left + width:
                    return part
                left += width
            return None
        return next((p for p, row in zip(self._parts, self._legend_rows()) if row.contains(position.toPoint())), None)

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip:
            assert isinstance(event, QHelpEvent)
            part = self.part_at(QPointF(event.pos()))
            if part is not None:
                share = format_percent(part.size, sum(part.size for part in self._parts))
                text = f"{part.name}: {format_bytes(part.size)}, {share} of {self._whole}\n{part.explanation}"
                QToolTip.showText(event.globalPos(), text, self)
            else:
                QToolTip.hideText()
            return True
        return super().event(event)

    def paintEvent(self, event: QPaintEvent) -> None:
        if not self._parts:
            return
        painter = QPainter(self)
        self._paint_bar(painter)
        painter.setFont(self._font)
        for part, row in zip(self._parts, self._legend_rows()):
            self._paint_row(painter, part, row)
        painter.end()

    def _widths(self) -> list[int]:
        return segment_widths([part.size for part in self._parts], self.width())

    def _paint_bar(self, painter: QPainter) -> None:
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        outline = QPainterPath()
        outline.addRoundedRect(QRectF(0, 0, self.width(), BAR_HEIGHT), 4, 4)
        painter.setClipPath(outline)
        left = 0
        for part, width in zip(self._parts, self._widths()):
            gap = 1 if width > SMALLEST_SEGMENT and part is not self._parts[-1] else 0
            painter.fillRect(QRect(left, 0, width - gap, BAR_HEIGHT), QColor(getattr(self._theme, part.colour)))
            left += width
        total = sum(part.size for part in self._parts)
        if self._limit is not None and 0 <= self._limit < total:
            x = min(self.width() - 4, round(self.width() * self._limit / total))
            hatch = QBrush(QColor(self._theme.surface), Qt.BrushStyle.BDiagPattern)
            painter.fillRect(QRect(x, 0, self.width() - x, BAR_HEIGHT), hatch)
            painter.fillRect(QRect(x - 1, 0, 3, BAR_HEIGHT), QColor(self._theme.danger))
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
        """A row for each part in one column or two, closer together when there is less room."""
        count = len(self._parts)
        columns = 2 if self.width() >= TWO_COLUMNS_FROM else 1
        rows = -(-count // columns)
        top = BAR_HEIGHT + 6
        height = min(self._metrics.height() + 6, max(self._metrics.height() - 2, (self.height() - top) // max(1, rows)))
        gutter = 24
        width = (self.width() - gutter * (columns - 1)) // columns
        return [
            QRect(index // rows * (width + gutter), top + index % rows * height, width, height)
            for index in range(count)
        ]
