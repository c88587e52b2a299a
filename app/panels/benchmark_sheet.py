"""A benchmark's figures on one sheet: what was measured, three plots and the table; on screen and as a picture."""

from __future__ import annotations

from datetime import datetime

from PySide6.QtCore import QBuffer, QByteArray, QIODevice, QPoint, QSize, Qt
from PySide6.QtGui import QColor, QImage, QImageWriter, QPainter
from PySide6.QtWidgets import QFrame, QHBoxLayout, QVBoxLayout, QWidget

from app.benchmark.report import BenchmarkReport
from app.charts.figures import Figure, FigureRow
from app.charts.level_plot import LevelPlot
from app.charts.live_plot import Series
from app.panels.benchmark_table import BenchmarkTable
from app.panels.widgets import label
from app.theme import SPACE_L, SPACE_S, SPACE_XS, Theme
from app.units import format_ms, format_rate, plural

PICTURE_WIDTH = 1120
PICTURE_PLOTS = 190  # what the plots get above the least they need
PICTURE_SCALE = 2
_RATE, _P50, _P99 = (
    Series("tokens/s, all chats together", "accent"),
    Series("p50", "accent"),
    Series("p99", "warning"),
)


class _PlotCard(QFrame):
    """A plot under its name and legend."""

    def __init__(self, title: str, explanation: str, plot: LevelPlot, theme: Theme, series: tuple[Series, ...]) -> None:
        super().__init__()
        self.setObjectName("plotCard")
        self.plot = plot
        self._title, self._series = title, series
        self._head = FigureRow(theme)
        self.setToolTip(explanation)
        plot.setAccessibleName(explanation)
        column = QVBoxLayout(self)
        column.setContentsMargins(SPACE_S + 4, SPACE_S, SPACE_S + 4, SPACE_S)
        column.setSpacing(SPACE_XS)
        column.addWidget(self._head)
        column.addWidget(plot, 1)
        self.set_theme(theme)

    def set_theme(self, theme: Theme) -> None:
        self._head.set_theme(theme)
        self.plot.set_theme(theme)
        legend = [Figure("", series.name, getattr(theme, series.colour)) for series in self._series]
        self._head.set_figures(Figure(self._title, ""), *legend)


class BenchmarkSheet(QWidget):
    """Shows one report; `set_report` may be called after each level."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("benchmarkSheet")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.title = label(role="heading")
        self.facts = label(role="small")
        both = (_P50, _P99)
        self.throughput = LevelPlot((_RATE,), format_rate, theme)
        self.ttft, self.tpot = LevelPlot(both, format_ms, theme), LevelPlot(both, format_ms, theme)
        self._cards = [
            _PlotCard("Output", "Tokens written a second, all chats together", self.throughput, theme, (_RATE,)),
            _PlotCard("TTFT", "Time to first token", self.ttft, theme, both),
            _PlotCard("TPOT", "Time per output token after the first", self.tpot, theme, both),
        ]
        self.table = BenchmarkTable()
        plots = QHBoxLayout()
        plots.setSpacing(SPACE_S + 4)
        for card in self._cards:
            plots.addWidget(card, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACE_XS)
        column.addWidget(self.title)
        column.addWidget(self.facts)
        column.addSpacing(SPACE_S)
        column.addLayout(plots, 1)
        column.addSpacing(SPACE_S)
        column.addWidget(self.table)

    def set_theme(self, theme: Theme) -> None:
        for card in self._cards:
            card.set_theme(theme)
        self.table.fit()

    def set_report(self, report: BenchmarkReport) -> None:
        # Room for all levels from the start, so that no point moves when another is measured.
        chats = report.plan.concurrency
        levels = [*report.levels, *[None] * (len(chats) - len(report.levels))]
        self.title.setText(report.model.name)
        self.facts.setText("\n".join(facts(report)))

        def values(*names: str) -> list[list[float | None]]:
            return [[None if level is None else getattr(level, name) for level in levels] for name in names]

        self.throughput.set_data(chats, values("output_tokens_per_s"))
        self.ttft.set_data(chats, values("ttft_p50", "ttft_p99"))
        self.tpot.set_data(chats, values("tpot_p50", "tpot_p99"))
        self.table.set_report(report)


def facts(report: BenchmarkReport) -> tuple[str, str]:
    """What was measured, and on what."""
    model, plan, machine = report.model, report.plan, report.machine
    when = datetime.fromtimestamp(report.timestamp).strftime("%Y-%m-%d %H:%M")
    how = (model.format, model.kernels, f"KV {model.kv_dtype}", *([model.quantization] if model.quantization else []))
    load = f"{plural(plan.input_tokens, 'token')} in, {plural(plan.output_tokens, 'token')} out a request"
    return " · ".join(
        (*how, load)
    ), f"{machine.device}, {plural(machine.cores, 'core')} · Kvasir {report.kvasir} · {when}"


def picture(report: BenchmarkReport, theme: Theme) -> bytes:
    """The sheet as a PNG file. The application has to be dressed in the theme."""
    sheet = BenchmarkSheet(theme)
    sheet.set_report(report)
    sheet.resize(PICTURE_WIDTH, PICTURE_PLOTS + sheet.minimumSizeHint().height())
    margins = QSize(2 * SPACE_L, 2 * SPACE_L)
    image = QImage((sheet.size() + margins) * PICTURE_SCALE, QImage.Format.Format_RGB32)
    image.setDevicePixelRatio(PICTURE_SCALE)
    image.fill(QColor(theme.surface))
    painter = QPainter(image)
    sheet.render(painter, QPoint(SPACE_L, SPACE_L))
    painter.end()
    sheet.deleteLater()
    buffer = QBuffer()
    buffer.open(QIODevice.OpenModeFlag.WriteOnly)
    QImageWriter(buffer, QByteArray(b"png")).write(image)
    return bytes(buffer.data().data())
