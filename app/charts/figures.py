"""A row of headline figures, each a number with its unit and what it means."""

from __future__ import annotations

import dataclasses

from PySide6.QtCore import QPoint, QRect, QSize, Qt
from PySide6.QtGui import QColor, QFont, QFontMetrics, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.theme import Theme

SWATCH_WIDTH = 10


@dataclasses.dataclass(frozen=True)
class Figure:
    """`colour` draws a swatch before the number: the row is then also the legend of a chart."""

    value: str
    meaning: str
    colour: str = ""


def sized_font(base: QFont, pixel_size: int, *, bold: bool = False) -> QFont:
    font = QFont(base)
    font.setPixelSize(pixel_size)
    font.setWeight(QFont.Weight.DemiBold if bold else QFont.Weight.Normal)
    return font


class FigureRow(QWidget):
    """Paints its figures from left to right; what does not fit at the end is left out whole."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self._figures: tuple[Figure, ...] = ()
        self.set_theme(theme)

    @property
    def figures(self) -> tuple[Figure, ...]:
        return self._figures

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._value_font = sized_font(self.font(), theme.font_size + 1, bold=True)
        self._meaning_font = sized_font(self.font(), theme.font_size_tiny)
        self._value_metrics = QFontMetrics(self._value_font)
        self._meaning_metrics = QFontMetrics(self._meaning_font)
        self.updateGeometry()
        self.update()

    def set_figures(self, *figures: Figure) -> None:
        if figures != self._figures:
            self._figures = figures
            self.setAccessibleName(", ".join(f"{figure.value} {figure.meaning}" for figure in figures))
            self.update()

    def sizeHint(self) -> QSize:
        return QSize(120, self._value_metrics.height())

    def minimumSizeHint(self) -> QSize:
        return QSize(60, self._value_metrics.height())

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        x = 0
        baseline = (self.height() + self._value_metrics.ascent() - self._value_metrics.descent()) // 2
        gap = self._value_metrics.height() // 2 + 4
        for figure in self._figures:
            swatch = SWATCH_WIDTH + 5 if figure.colour else 0
            value_width = self._value_metrics.horizontalAdvance(figure.value)
            meaning_width = self._meaning_metrics.horizontalAdvance(figure.meaning)
            if x > 0 and x + swatch + value_width + 4 + meaning_width > self.width():
                break
            if figure.colour:
                middle = baseline - self._value_metrics.xHeight() // 2
                painter.fillRect(QRect(x, middle - 1, SWATCH_WIDTH, 3), QColor(figure.colour))
                x += swatch
            painter.setFont(self._value_font)
            painter.setPen(QColor(self._theme.text))
            painter.drawText(QPoint(x, baseline), figure.value)
            x += value_width + 4
            painter.setFont(self._meaning_font)
            painter.setPen(QColor(self._theme.text_muted))
            room = max(0, self.width() - x)
            meaning = self._meaning_metrics.elidedText(figure.meaning, Qt.TextElideMode.ElideRight, room)
            painter.drawText(QPoint(x, baseline), meaning)
            x += meaning_width + gap
        painter.end()
