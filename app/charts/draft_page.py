"""Speculative decoding: how many of the guessed tokens were right, overall and by how far ahead they were."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QRect, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFontMetrics, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.charts.figures import Figure, sized_font
from app.charts.page import ChartPage
from app.state.telemetry import TelemetryState
from app.theme import Theme
from app.units import format_percent, plural, three_figures

_WIDEST_BAR = 44
_GAP = 6


class PositionBars(QWidget):
    """One bar for each position: the share of its drafts that was accepted, on a ground that is the whole."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._shares: tuple[float, ...] = ()
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Ignored)
        self.set_theme(theme)

    @property
    def shares(self) -> tuple[float, ...]:
        return self._shares

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._font = sized_font(self.font(), theme.font_size_tiny)
        self._metrics = QFontMetrics(self._font)
        self.update()

    def set_shares(self, shares: Sequence[float]) -> None:
        """`shares` from 0 to 1, that of the token right after the latest one first."""
        if tuple(shares) != self._shares:
            self._shares = tuple(shares)
            self.update()

    def sizeHint(self) -> QSize:
        return QSize(220, 100)

    def minimumSizeHint(self) -> QSize:
        return QSize(100, 40)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setFont(self._font)
        if not self._shares:
            painter.setPen(QColor(self._theme.text_faint))
            painter.drawText(self.rect(), Qt.AlignmentFlag.AlignCenter, "No drafts yet")
            painter.end()
            return
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        line = self._metrics.height()
        count = len(self._shares)
        pitch = min(_WIDEST_BAR + _GAP, self.width() / count)
        top, height = line + 2, max(8, self.height() - 2 * line - 6)
        for index, share in enumerate(self._shares):
            left = index * pitch
            column = QRect(round(left), 0, round(pitch - _GAP), self.height())
            ground = QRectF(column.left(), top, column.width(), height)
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(QColor(self._theme.chart_grid))
            painter.drawRoundedRect(ground, 3, 3)
            filled = QRectF(ground.left(), ground.bottom() - height * share, ground.width(), height * share)
            painter.setBrush(QColor(self._theme.memory_draft))
            painter.drawRoundedRect(filled, 3, 3)
            painter.setPen(QColor(self._theme.text))
            above = QRect(column.left(), 0, column.width(), line)
            painter.drawText(above, Qt.AlignmentFlag.AlignCenter, f"{100 * share:.0f} %" if pitch > 36 else "")
            painter.setPen(QColor(self._theme.text_muted))
            below = QRect(column.left(), self.height() - line, column.width(), line)
            painter.drawText(below, Qt.AlignmentFlag.AlignCenter, f"+{index + 1}")
        painter.end()


class DraftPage(ChartPage):
    """Counts are since loading; the note says what speculation does now, such as that it paused."""

    title = "Drafts"

    def __init__(self, state: TelemetryState, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(state, theme, parent)
        self.bars = PositionBars(theme, self)
        self.add_picture(self.bars)
        self.setToolTip("Speculative decoding: tokens guessed ahead, and how many of them were right")

    def set_theme(self, theme: Theme) -> None:
        super().set_theme(theme)
        self.bars.set_theme(theme)

    def refresh(self, now: float) -> None:
        pass  # shares change slowly: at the pace of the figures

    def refresh_figures(self) -> None:
        telemetry = self.state.latest
        if telemetry is None:
            return
        drafted, accepted = telemetry.drafted_tokens, telemetry.accepted_tokens
        by_position = [
            right / tried
            for tried, right in zip(telemetry.drafted_by_position, telemetry.accepted_by_position)
            if tried > 0
        ]
        self.bars.set_shares(by_position)
        steps = telemetry.drafted_by_position[0] if telemetry.drafted_by_position else 0
        figures = [Figure(format_percent(accepted, drafted), "accepted")]
        if steps:
            figures.append(Figure(f"+{three_figures(accepted / steps)}", "tokens a step"))
        self.figure_row.set_figures(*figures)
        self.set_note(telemetry.speculation_note or plural(drafted, "draft"))
        positions = ", ".join(f"{100 * share:.0f} % at {index}" for index, share in enumerate(by_position, 1))
        self.describe(
            f"Speculation: {accepted:,} of {plural(drafted, 'draft')} accepted"
            f"{f'; by position {positions}' if positions else ''}. {telemetry.speculation_note}".strip()
        )
