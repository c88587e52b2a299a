"""Axes that stay still: a calm range from zero, and labels painted by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from PySide6.QtCore import QRect, Qt
from PySide6.QtGui import QFontMetrics, QPainter

SHRINK_AFTER_SECONDS = 4.0
NICE_STEPS = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0)


def nice_ceiling(value: float, steps: Sequence[float] = NICE_STEPS) -> float:
    """The smallest of the steps (from 1 to 10) times a power of ten that is not below `value`."""
    if not value > 0 or math.isinf(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in steps if step * power >= value * (1 - 1e-9))


class CalmRange:
    """The top of an axis from zero: it grows at once, and shrinks only when half of it stayed unused a while."""

    def __init__(self, smallest: float) -> None:
        self._smallest = smallest
        self.top = smallest
        self._low_since: float | None = None

    def update(self, peak: float, now: float) -> bool:
        """Takes the highest value shown; returns whether `top` has changed."""
        wanted = max(self._smallest, nice_ceiling(peak * 1.05))
        before = self.top
        if wanted > self.top:
            self.top = wanted
        if wanted > self.top / 2:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        elif now - self._low_since >= SHRINK_AFTER_SECONDS:
            self.top = wanted
            self._low_since = None
        return self.top != before


def paint_value_axis(
    painter: QPainter, metrics: QFontMetrics, area: QRect, top: float, format_tick: Callable[[float], str]
) -> None:
    """Writes zero, the top and, where there is room, the middle to the left of `area`."""
    ticks = [(area.top(), top), (area.bottom(), 0.0)]
    if area.height() >= 4 * metrics.height():
        ticks.append((area.center().y(), top / 2))
    for position, value in ticks:
        label = QRect(0, position - metrics.height() // 2, area.left() - 6, metrics.height())
        text = format_tick(value) if value else "0"
        painter.drawText(label, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, text)


def paint_ends(painter: QPainter, metrics: QFontMetrics, area: QRect, left: str, right: str, middle: str = "") -> None:
    """Writes what the two ends of the axis below `area` are, and a remark between them where there is room."""
    row = QRect(area.left(), area.bottom() + 3, area.width() + 1, metrics.height())
    centre = Qt.AlignmentFlag.AlignVCenter
    painter.drawText(row, Qt.AlignmentFlag.AlignLeft | centre, left)
    painter.drawText(row, Qt.AlignmentFlag.AlignRight | centre, right)
    widest_end = max(metrics.horizontalAdvance(left), metrics.horizontalAdvance(right))
    if middle and metrics.horizontalAdvance(middle) + 2 * widest_end + 16 <= row.width():
        painter.drawText(row, Qt.AlignmentFlag.AlignHCenter | centre, middle)
