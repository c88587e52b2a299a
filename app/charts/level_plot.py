"""Figures of a benchmark over the number of chats at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QPoint, QPointF, QRect, QSize, Qt
from PySide6.QtGui import QColor, QFontMetrics, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.charts.axes import nice_ceiling, paint_value_axis
from app.charts.figures import sized_font
from app.charts.live_plot import CurveView, Series
from app.theme import Theme

X_AXIS = "chats at a time"
_HEADROOM = 1.15  # for the figures above the points
_STEPS = (1.0, 1.2, 1.6, 2.0, 2.4, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


class LevelPlot(QWidget):
    """A point for each level, evenly spaced; figures stand at those of the first series."""

    def __init__(
        self,
        series: Sequence[Series],
        format_value: Callable[[float], str],
        theme: Theme,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._series = tuple(series)
        self._format = format_value
        self._levels: list[int] = []
        self._top = 1.0
        self._view = CurveView(self)
        self._curves = [pg.PlotDataItem(antialias=True) for _ in self._series]
        for curve in reversed(self._curves):  # the first series on top
            self._view.box.addItem(curve, ignoreBounds=True)
        self._words: list[pg.TextItem] = []
        self._values: list[Sequence[float | None]] = [[] for _ in self._series]
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Ignored)
        self.set_theme(theme)

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._font = sized_font(self.font(), theme.font_size_tiny)
        self._metrics = QFontMetrics(self._font)
        self._view.surface = QColor(theme.surface)
        self._view.grid = QColor(theme.chart_grid)
        for item, curve in zip(self._series, self._curves, strict=True):
            colour = getattr(theme, item.colour)
            curve.setPen(pg.mkPen(colour, width=1))
            curve.setSymbol("o")
            curve.setSymbolSize(6)
            curve.setSymbolPen(None)
            curve.setSymbolBrush(pg.mkBrush(colour))
        self._place_view()
        self._view.resetCachedContent()
        self._view.viewport().update()
        self.update()

    def set_data(self, levels: Sequence[int], values: Sequence[Sequence[float | None]]) -> None:
        """Shows for each series its value at each level; None where it is not known (yet)."""
        self._levels, self._values = list(levels), list(values)
        known = [value for series in values for value in series if value is not None]
        self._top = nice_ceiling(max(known, default=1.0) * _HEADROOM, _STEPS)
        for curve, series in zip(self._curves, values, strict=True):
            points = [(place, value) for place, value in enumerate(series) if value is not None]
            curve.setData(np.array(points, dtype=np.float64).reshape(-1, 2))
        self._view.box.setRange(xRange=(-0.5, max(0.5, len(levels) - 0.5)), yRange=(0.0, self._top), padding=0)
        self._place_view()
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(240, 150)

    def minimumSizeHint(self) -> QSize:
        return QSize(140, 90)

    def resizeEvent(self, event: QResizeEvent) -> None:
        self._place_view()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setFont(self._font)
        painter.setPen(QColor(self._theme.text_muted))
        area = self._view.geometry()
        paint_value_axis(painter, self._metrics, area, self._top, self._format)
        row = area.bottom() + 4
        step = area.width() / max(1, len(self._levels))
        for index, level in enumerate(self._levels):
            centre = area.left() + round((index + 0.5) * step)
            label = QRect(QPoint(centre - 30, row), QSize(60, self._metrics.height()))
            painter.drawText(label, Qt.AlignmentFlag.AlignCenter, str(level))
        painter.setPen(QColor(self._theme.text_faint))
        caption = QRect(area.left(), row + self._metrics.height(), area.width(), self._metrics.height())
        painter.drawText(caption, Qt.AlignmentFlag.AlignCenter, X_AXIS)
        painter.end()

    def _show_words(self) -> None:
        for words in self._words:
            self._view.box.removeItem(words)
        self._words = []
        for index, value in enumerate(self._values[0]):
            if value is None:
                continue
            # Below the point, away from the slower series, where there is room; and right of it as far as there is
            # room, where no line comes from below.
            text = self._format(value)
            height = value / self._top * self._view.height()
            is_below = len(self._series) > 1 and height > self._metrics.height() + 8
            width = self._metrics.horizontalAdvance(text) + 8
            right = (len(self._levels) - index - 0.5) * self._view.width() / len(self._levels)
            left = min(0.5, max(0.0, 1.0 - right / width)) if is_below else 0.5
            words = pg.TextItem(text, color=self._theme.text, anchor=(left, -0.1 if is_below else 1.1))
            words.setFont(self._font)
            words.setPos(QPointF(index, value))
            self._view.box.addItem(words, ignoreBounds=True)
            self._words.append(words)

    def _place_view(self) -> None:
        gutter = max(self._metrics.horizontalAdvance(self._format(value)) for value in (self._top, self._top / 2)) + 10
        corner = QPoint(gutter, self._metrics.height() // 2)
        bottom = self.height() - 1 - 2 * self._metrics.height() - 6
        self._view.setGeometry(QRect(corner, QPoint(self.width() - 2, bottom)))
        self._show_words()
