"""The panel at the window's bottom that shows what the engine is doing."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, QTimer
from PySide6.QtGui import QColor, QFontMetrics, QHideEvent, QPainter, QPaintEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QSizePolicy, QStackedLayout, QWidget

from app.charts.card_deck import CardDeck
from app.charts.curve_pages import ThroughputPage, TPOTPage, TTFTPage
from app.charts.draft_page import DraftPage
from app.charts.figures import sized_font
from app.charts.kv_block_map import KVPage
from app.charts.memory_bar import MemoryPage
from app.charts.page import ChartPage, SessionTitles
from app.charts.step_timeline import StepsPage
from app.state.telemetry import TelemetryState
from app.theme import DEFAULT_FONT_SIZE, SPACE_M, SPACE_S, Theme, ThemeManager

TICK_MS = 50
CURVE_TICKS = 4  # a curve moves some three pixels a second: less than one from picture to picture
CURVE_TICKS_AT_REST = 20
FIGURE_TICKS = 5  # numbers that change faster cannot be read
AT_REST_AFTER_SECONDS = 2.0

PREFERRED_HEIGHT = 190
# Panel widths, at the default font size, from which there are that many columns.
COLUMNS_FROM_WIDTH = {1240: 5, 900: 4, 700: 3, 460: 2, 0: 1}


class _Words(QWidget):
    """A line and a quieter one below it, centred: what the panel says while there is nothing to chart."""

    def __init__(self, theme: Theme, parent: QWidget) -> None:
        super().__init__(parent)
        self._line = self._hint = ""
        self.set_theme(theme)

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.update()

    def set_words(self, line: str, hint: str) -> None:
        self._line, self._hint = line, hint
        self.setAccessibleName(f"{line}. {hint}")
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        big = sized_font(self.font(), self._theme.font_size + 1, bold=True)
        small = sized_font(self.font(), self._theme.font_size_small)
        line_height, hint_height = QFontMetrics(big).height(), QFontMetrics(small).height()
        box = self.rect()
        box.setTop((self.height() - line_height - hint_height - 4) // 2)
        box.setHeight(line_height)
        painter.setFont(big)
        painter.setPen(QColor(self._theme.text_muted))
        painter.drawText(box, Qt.AlignmentFlag.AlignCenter, self._line)
        box.translate(0, line_height + 4)
        painter.setFont(small)
        painter.setPen(QColor(self._theme.text_faint))
        painter.drawText(box, Qt.AlignmentFlag.AlignCenter, self._hint)
        painter.end()


class DashboardPanel(QWidget):
    """Memory, KV blocks, latencies and throughput, side by side; with less width, several share a column.

    One timer drives every chart, and only those that are visible are drawn.
    """

    def __init__(
        self,
        state: TelemetryState,
        theme: ThemeManager,
        session_titles: SessionTitles,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._state = state
        self._theme = theme.theme
        self._ticks = 0
        self.setObjectName("dashboard")
        self.setAccessibleName("Engine dashboard")
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)

        self.memory = MemoryPage(state, self._theme)
        self.kv = KVPage(state, self._theme, session_titles)
        self.ttft = TTFTPage(state, self._theme)
        self.tpot = TPOTPage(state, self._theme)
        self.throughput = ThroughputPage(state, self._theme)
        self.steps = StepsPage(state, self._theme, session_titles)
        self.drafts = DraftPage(state, self._theme, self)
        self.drafts.hide()
        self.pages: tuple[ChartPage, ...] = (
            self.memory,
            self.kv,
            self.ttft,
            self.tpot,
            self.throughput,
            self.steps,
            self.drafts,
        )
        self._charts = QWidget(self)
        self._row = QHBoxLayout(self._charts)
        self._row.setContentsMargins(SPACE_M, SPACE_S, SPACE_M, SPACE_S)
        self._row.setSpacing(2 * SPACE_M + 1)
        self.decks: list[CardDeck] = []
        self._words = _Words(self._theme, self)
        self._stack = QStackedLayout(self)
        self._stack.setContentsMargins(0, 0, 0, 0)
        # The columns that fit now must not keep the panel from shrinking to where fewer do.
        self._stack.setSizeConstraint(QStackedLayout.SizeConstraint.SetNoConstraint)
        self._stack.addWidget(self._charts)
        self._stack.addWidget(self._words)
        self._arrange(5)

        self._timer = QTimer(self)
        self._timer.setInterval(TICK_MS)
        self._timer.timeout.connect(self._tick)
        state.engine.changed.connect(self._show_status)
        state.updated.connect(self._show_status)
        theme.changed.connect(self.set_theme)
        self._show_status()

    @property
    def num_columns(self) -> int:
        return len(self.decks)

    @property
    def is_drawing(self) -> bool:
        """Whether the timer runs."""
        return self._timer.isActive()

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._words.set_theme(theme)
        for page in self.pages:
            page.set_theme(theme)
        for deck in self.decks:
            deck.set_theme(theme)
        self._fit_columns()
        self.update()

    def refresh(self) -> None:
        """Brings every visible chart and figure up to date, whatever the timer is at."""
        now = self._state.clock()
        for page in self._visible_pages():
            page.refresh(now)
            page.refresh_figures()

    def sizeHint(self) -> QSize:
        return QSize(1024, round(PREFERRED_HEIGHT * self._theme.font_size / DEFAULT_FONT_SIZE))

    def minimumSizeHint(self) -> QSize:
        return QSize(280, round(0.75 * self.sizeHint().height()))

    def showEvent(self, event: QShowEvent) -> None:
        self.refresh()
        self._timer.start()

    def hideEvent(self, event: QHideEvent) -> None:
        self._timer.stop()

    def resizeEvent(self, event: QResizeEvent) -> None:
        self._fit_columns()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), QColor(self._theme.surface))
        if self._charts.isVisible():
            for deck in self.decks[1:]:
                x = deck.geometry().left() - SPACE_M - 1
                painter.fillRect(x, SPACE_M, 1, self.height() - 2 * SPACE_M, QColor(self._theme.border))
        painter.end()

    def _tick(self) -> None:
        window = self.window().windowHandle()
        if self._state.latest is None or self.window().isMinimized() or self.visibleRegion().isEmpty():
            return
        if window is not None and not window.isExposed():
            return
        self._ticks += 1
        now = self._state.clock()
        at_rest = now - self._state.last_busy > AT_REST_AFTER_SECONDS
        curves = self._ticks % (CURVE_TICKS_AT_REST if at_rest else CURVE_TICKS) == 0
        figures = self._ticks % FIGURE_TICKS == 0
        for page in self._visible_pages():
            if curves or page in (self.kv, self.steps):
                page.refresh(now)
            if figures:
                page.refresh_figures()

    def _visible_pages(self) -> list[ChartPage]:
        if self._state.latest is None:
            return []
        return [deck.current for deck in self.decks if deck.current is not None]

    def _show_status(self) -> None:
        state = self._state
        if state.engine.is_ready and self._speculates != self._model_speculates():
            self._arrange(self.num_columns)
        charts = state.engine.is_ready and state.latest is not None
        if charts == (self._stack.currentWidget() is self._charts) and charts:
            return
        if charts:
            self._stack.setCurrentWidget(self._charts)
            self.refresh()
        else:
            self._words.set_words(*self._status_words())
            self._stack.setCurrentWidget(self._words)
        self.update()

    def _status_words(self) -> tuple[str, str]:
        engine = self._state.engine
        progress = engine.progress
        match engine.status:
            case "starting":
                return "Starting the engine", "Its memory, KV cache and speed appear here."
            case "loading" if progress is not None and progress.total_bytes > 0:
                share = 100 * progress.done_bytes / progress.total_bytes
                return "Loading the model", f"{progress.stage}: {share:.0f} %"
            case "loading":
                return "Loading the model", progress.stage if progress is not None else ""
            case "dead":
                return "The engine is not running", "Restart it to see its memory, KV cache and speed."
            case "ready":
                return "The model is loaded", "Waiting for the first figures."
            case "no_model":
                return "No model loaded", "Load one to see where its memory goes and how fast it answers."

    def _model_speculates(self) -> bool:
        model = self._state.engine.model
        return model is not None and model.speculation is not None

    def _fit_columns(self) -> None:
        width = self.width() * DEFAULT_FONT_SIZE / self._theme.font_size
        wanted = next(columns for smallest, columns in COLUMNS_FROM_WIDTH.items() if width >= smallest)
        if wanted != self.num_columns:
            self._arrange(wanted)
            self.refresh()

    def _arrange(self, num_columns: int) -> None:
        latency, rates = [self.ttft, self.tpot], [self.throughput, self.steps]
        self._speculates = self._model_speculates()
        if self._speculates:
            rates.append(self.drafts)
        groups: dict[int, list[list[ChartPage]]] = {
            5: [[self.memory], [self.kv], [self.ttft], [self.tpot], [*rates]],
            4: [[self.memory], [self.kv], [*latency], [*rates]],
            3: [[self.memory, self.kv], [*latency], [*rates]],
            2: [[self.memory, self.kv], [*latency, *rates]],
            1: [[self.memory, self.kv, *latency, *rates]],
        }
        stretches = {5: (20, 28, 22, 22, 27), 4: (20, 25, 23, 25), 3: (1, 1, 1), 2: (1, 1), 1: (1,)}
        shown = [deck.current for deck in self.decks]
        old = self.decks
        self.decks = []
        for pages, stretch in zip(groups[num_columns], stretches[num_columns]):
            deck = CardDeck(self._theme, self._charts)
            deck.set_pages(pages, next((page for page in pages if page in shown), None))
            deck.current_changed.connect(self.refresh)
            self._row.addWidget(deck, stretch)
            deck.show()
            self.decks.append(deck)
        if not self._speculates:
            self.drafts.setParent(self)  # not to go with the deck it was in
            self.drafts.hide()
        for deck in old:
            deck.set_pages([])
            self._row.removeWidget(deck)
            deck.deleteLater()
