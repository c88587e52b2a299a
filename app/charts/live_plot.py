"""A scrolling plot of the last minute: pyqtgraph curves between axes that stay still.

The axes are painted here and not by pyqtgraph: its AxisItems cost four times what the curves
cost, and its automatic range moves with every sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QPoint, QRect, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFontMetrics, QMouseEvent, QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QFrame, QSizePolicy, QToolTip, QWidget

from app.charts.axes import CalmRange, paint_ends, paint_value_axis
from app.charts.figures import sized_font
from app.theme import Theme, mix


@dataclasses.dataclass(frozen=True)
class Series:
    """One curve: its name for tooltips and the theme token of its colour.

    `dots` marks single events, `faint` is for raw values behind the curves that matter.
    """

    name: str
    colour: str
    dots: bool = False
    filled: bool = False
    faint: bool = False


class _Curve(pg.PlotCurveItem):
    """A curve that takes the whole plot as its bounds, and so never searches its data for them."""

    def __init__(self, **options: object) -> None:
        self.bounds = QRectF()
        super().__init__(**options)

    def set_bounds(self, bounds: QRectF) -> None:
        self.prepareGeometryChange()
        self.bounds = bounds

    def boundingRect(self) -> QRectF:
        return self.bounds


class CurveView(pg.GraphicsView):
    """Holds the curves and paints the grid lines behind them."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent, useOpenGL=False)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setAntialiasing(False)
        self.viewport().setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.box = pg.ViewBox(enableMouse=False, enableMenu=False, defaultPadding=0)
        self.box.disableAutoRange()
        self.setCentralItem(self.box)
        self.surface = QColor()
        self.grid = QColor()

    def drawBackground(self, painter: QPainter, rect: QRectF) -> None:
        painter.fillRect(rect, self.surface)
        painter.setPen(QPen(self.grid, 0))
        width, bottom = self.width(), self.height() - 1
        for y in (0, bottom // 2, bottom):
            painter.drawLine(0, y, width, y)


class LivePlot(QWidget):
    """Curves over the last `seconds`, newest at the right edge.

    `format_tick` writes a value of the y axis with its unit; `smallest_top` keeps the axis from
    zooming into noise.
    """

    def __init__(
        self,
        series: Sequence[Series],
        format_tick: Callable[[float], str],
        theme: Theme,
        *,
        seconds: float = 60.0,
        smallest_top: float = 10.0,
        time_axis: bool = True,
        widest_tick: str = "888 ms",
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._series = tuple(series)
        self._format_tick = format_tick
        self._seconds = seconds
        self._time_axis = time_axis
        self._widest_tick = widest_tick
        self._empty_text = ""
        self._data: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0), np.zeros(0))] * len(self._series)
        self.range = CalmRange(smallest_top)
        self._view = CurveView(self)
        # A fill is an item of its own: pyqtgraph fills in pieces, and antialiased pieces show their seams.
        self._fills = {i: self._make_fill() for i, item in enumerate(self._series) if item.filled}
        self._curves = [self._make_curve(item) for item in self._series]
        self._apply_range()
        self.setMouseTracking(True)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Ignored)
        self.set_theme(theme)

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._font = sized_font(self.font(), theme.font_size_tiny)
        self._metrics = QFontMetrics(self._font)
        self._view.surface = QColor(theme.surface)
        self._view.grid = QColor(theme.chart_grid)
        for item, curve in zip(self._series, self._curves):
            colour = getattr(theme, item.colour)
            if item.dots:
                curve.setPen(None)
                curve.setBrush(pg.mkBrush(colour))
            else:
                curve.setPen(pg.mkPen(mix(theme.surface, colour, 0.55) if item.faint else colour, width=1))
        for index, fill in self._fills.items():
            fill.setBrush(pg.mkBrush(mix(theme.surface, getattr(theme, self._series[index].colour), 0.18)))
        self._place_view()
        self._view.resetCachedContent()
        self._view.viewport().update()
        self.update()

    @property
    def plot_area(self) -> QRect:
        """Where the curves are, in this widget's pixels."""
        return self._view.geometry()

    def set_empty_text(self, text: str) -> None:
        """Words shown in place of curves; "" when there is something to see."""
        if text != self._empty_text:
            self._empty_text = text
            self._view.setVisible(not text)
            self.update()

    def set_data(self, data: Sequence[tuple[np.ndarray, np.ndarray]], now: float) -> None:
        """Shows for each series its times (seconds, on the clock of `now`) and values; NaN values are gaps."""
        peak = 0.0
        for index, (curve, (times, values)) in enumerate(zip(self._curves, data)):
            ages = times - now
            finite = np.isfinite(values)
            shown = finite & (ages >= -self._seconds)
            if shown.any():
                peak = max(peak, float(values[shown].max()))
            self._data[index] = (ages, values)
            if not isinstance(curve, _Curve):
                curve.setData(ages[shown], values[shown])
                continue
            # A rolling window is empty at first, and after a long rest: no line across the gap.
            whole = bool(finite.all())
            how = {"connect": "all" if whole else "finite", "skipFiniteCheck": whole}
            curve.setData(ages, values, **how)
            if index in self._fills:
                self._fills[index].setData(ages, values, **how)
        if self.range.update(peak, now):
            self._apply_range()
            self.update()

    def value_at(self, age: float) -> list[tuple[str, float]]:
        """Name and value of each series nearest to `age` seconds ago; series with nothing near are left out."""
        found = []
        reach = self._seconds / 60
        for item, (ages, values) in zip(self._series, self._data):
            if len(ages) == 0:
                continue
            distances = np.where(np.isfinite(values), np.abs(ages + age), np.inf)
            index = int(distances.argmin())
            if distances[index] <= reach:
                found.append((item.name, float(values[index])))
        return found

    def sizeHint(self) -> QSize:
        return QSize(220, 110)

    def minimumSizeHint(self) -> QSize:
        return QSize(120, 36)

    def resizeEvent(self, event: QResizeEvent) -> None:
        self._place_view()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        area = self._view.geometry()
        if self._empty_text or not area.contains(event.position().toPoint()):
            QToolTip.hideText()
            return
        age = (area.right() - event.position().x()) / max(1, area.width()) * self._seconds
        lines = [f"{name}: {self._format_tick(value)}" for name, value in self.value_at(age)]
        if lines:
            QToolTip.showText(event.globalPosition().toPoint(), "\n".join([f"{age:.0f} s ago", *lines]), self)
        else:
            QToolTip.hideText()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setFont(self._font)
        if self._empty_text:
            painter.setPen(QColor(self._theme.text_faint))
            painter.drawText(self.rect(), Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap, self._empty_text)
            painter.end()
            return
        painter.setPen(QColor(self._theme.text_muted))
        area = self._view.geometry()
        paint_value_axis(painter, self._metrics, area, self.range.top, self._format_tick)
        if self._time_axis:
            paint_ends(painter, self._metrics, area, f"{self._seconds:.0f} s ago", "now")
        painter.end()

    def _make_curve(self, item: Series) -> _Curve | pg.ScatterPlotItem:
        if item.dots:
            curve = pg.ScatterPlotItem(size=4, pxMode=True, antialias=True)
        else:
            # One pixel wide, an antialiased line costs what a plain one does; two wide, fifteen times that.
            curve = _Curve(antialias=True)
        self._view.box.addItem(curve, ignoreBounds=True)
        return curve

    def _make_fill(self) -> _Curve:
        fill = _Curve(pen=None, antialias=False, fillLevel=0.0)
        self._view.box.addItem(fill, ignoreBounds=True)
        return fill

    def _apply_range(self) -> None:
        top = self.range.top
        self._view.box.setRange(xRange=(-self._seconds, 0.0), yRange=(0.0, top), padding=0)
        for curve in (*self._curves, *self._fills.values()):
            if isinstance(curve, _Curve):
                curve.set_bounds(QRectF(-self._seconds, 0.0, self._seconds, top))

    def _place_view(self) -> None:
        gutter = self._metrics.horizontalAdvance(self._widest_tick) + 8
        half = self._metrics.height() // 2
        bottom = self._metrics.height() + 4 if self._time_axis else half
        corner = QPoint(gutter, half)
        self._view.setGeometry(QRect(corner, QPoint(self.width() - 2, self.height() - 1 - bottom)))
