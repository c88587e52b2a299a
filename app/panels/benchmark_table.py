"""The table of a benchmark: a row for each number of chats at a time."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QFontMetrics
from PySide6.QtWidgets import QAbstractItemView, QFrame, QHeaderView, QSizePolicy, QTableWidget, QTableWidgetItem

from app.benchmark.report import BenchmarkReport, rows, titles

_EXPLANATIONS = {
    "chats": "How many chats were answered at a time",
    "TTFT": "Time to first token, in milliseconds",
    "TPOT": "Time per output token after the first, in milliseconds",
    "output": "Tokens written a second, all chats together",
    "requests": "Requests answered a second",
    "queue": "Time a request waited before it was computed, in milliseconds",
    "KV": "Most of the KV cache that was in use",
    "memory": "Most memory the engine held",
    "errors": "Requests that failed, of those sent",
    "cost": "Of a million output tokens, at the price given",
}


class BenchmarkTable(QTableWidget):
    """As high as its rows; scrolls sideways where it does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.setObjectName("benchmarkTable")
        self.setAccessibleName("Figures by the number of chats at a time")
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setShowGrid(False)
        self.setWordWrap(False)
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self.verticalHeader().hide()
        header = self.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
        header.setHighlightSections(False)
        header.setSectionsClickable(False)

    def set_report(self, report: BenchmarkReport) -> None:
        names, lines = titles(report), rows(report)
        self.setColumnCount(len(names))
        self.setRowCount(len(lines))
        right = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
        for column, name in enumerate(names):
            item = QTableWidgetItem(name.strip())
            item.setTextAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignBottom)
            item.setToolTip(next(text for start, text in _EXPLANATIONS.items() if name.startswith(start)))
            self.setHorizontalHeaderItem(column, item)
        for row, cells in enumerate(lines):
            for column, text in enumerate(cells):
                cell = QTableWidgetItem(text)
                cell.setTextAlignment(right)
                self.setItem(row, column, cell)
        self.fit()

    def fit(self) -> None:
        """Takes the height that the rows need in the font of now."""
        self.ensurePolished()
        metrics = QFontMetrics(self.font())
        self.verticalHeader().setDefaultSectionSize(metrics.height() + 12)
        self.horizontalHeader().setFixedHeight(2 * metrics.height() + 10)
        # Columns share the width, but none gets less than its words need.
        widest = max((metrics.horizontalAdvance(text) for text in self._words()), default=0)
        self.horizontalHeader().setMinimumSectionSize(widest + 16)
        self.setFixedHeight(self.sizeHint().height())

    def sizeHint(self) -> QSize:
        rows_high = self.rowCount() * self.verticalHeader().defaultSectionSize()
        return QSize(600, self.horizontalHeader().height() + rows_high + 2)

    def _words(self) -> list[str]:
        titles_now = (self.horizontalHeaderItem(column) for column in range(self.columnCount()))
        words = [part for item in titles_now if item is not None for part in item.text().split("\n")]
        cells = (self.item(row, column) for row in range(self.rowCount()) for column in range(self.columnCount()))
        return words + [cell.text() for cell in cells if cell is not None]
