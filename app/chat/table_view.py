"""A table of a message: selectable text, scrolled sideways where its columns do not fit."""

from __future__ import annotations

import dataclasses
import math

from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import (
    QBrush,
    QColor,
    QPainter,
    QPaintEvent,
    QPen,
    QTextBlockFormat,
    QTextCharFormat,
    QTextCursor,
    QTextFrameFormat,
    QTextLength,
    QTextTable,
    QTextTableCellFormat,
    QTextTableFormat,
    QWheelEvent,
)
from PySide6.QtWidgets import QWidget

from app.chat.markdown import Span, TableBlock
from app.chat.prose_view import StaticText
from app.chat.text_style import TextStyle
from app.theme import RADIUS_M

MIN_COLUMN = 140
SCROLL_BAR = 10
_CELL_PADDING = 7
_ALIGN = {
    "left": Qt.AlignmentFlag.AlignLeft,
    "center": Qt.AlignmentFlag.AlignHCenter,
    "right": Qt.AlignmentFlag.AlignRight,
}


class TableView(StaticText):
    """Shows one `TableBlock` as wide as its text, at most as wide as the column unless it has many columns."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("tableText")
        self.setAccessibleName("Table")
        self._block: TableBlock | None = None
        self._style: TextStyle | None = None
        self._natural_width = 0
        self._measured: tuple[int, int] | None = None
        self._table: QTextTable | None = None
        self.setLineWrapMode(StaticText.LineWrapMode.FixedPixelWidth)

    def set_block(self, block: TableBlock, style: TextStyle) -> None:
        if block == self._block and style is self._style:
            return
        self._block, self._style = block, style
        self._measured = None
        document = self.document()
        document.setDefaultFont(style.font)
        document.clear()
        cursor = QTextCursor(document)
        cursor.beginEditBlock()
        columns = len(block.header)
        table_format = QTextTableFormat()
        table_format.setBorder(0)
        table_format.setCellSpacing(0)
        table_format.setCellPadding(0)
        table_format.setHeaderRowCount(1)
        table = cursor.insertTable(len(block.rows) + 1, columns, table_format)
        for row, cells in enumerate((block.header, *block.rows)):
            for column in range(columns):
                self._fill(table, row, column, cells[column] if column < len(cells) else ())
        cursor.endEditBlock()
        self._table = table
        self.setLineWrapColumnOrWidth(10_000)
        self._natural_width = math.ceil(document.idealWidth()) + 1
        self.moveCursor(QTextCursor.MoveOperation.Start)

    def _fill(self, table: QTextTable, row: int, column: int, spans: tuple[Span, ...]) -> None:
        style, block = self._style, self._block
        assert style is not None and block is not None
        cell = table.cellAt(row, column)
        cursor = cell.firstCursorPosition()
        paragraph = QTextBlockFormat()
        paragraph.setAlignment(_ALIGN[block.align[column]])
        cursor.setBlockFormat(paragraph)
        for span in spans:
            shown = dataclasses.replace(span, bold=True) if row == 0 else span
            text_format = QTextCharFormat(style.char_format(shown))
            if span.code:
                text_format.setBackground(style.inline_code_background)
            cursor.insertText(span.text.replace("\n", "\u2028"), text_format)
        # Last, for a cell's format is kept where the format of its first paragraph is.
        cell_format = QTextTableCellFormat()
        cell_format.merge(style.char_format(Span("", bold=row == 0)))
        cell_format.setLeftPadding(14)
        cell_format.setRightPadding(14)
        cell_format.setTopPadding(_CELL_PADDING)
        cell_format.setBottomPadding(_CELL_PADDING)
        if row < len(block.rows):
            cell_format.setBottomBorder(1)
            cell_format.setBottomBorderBrush(QBrush(QColor(style.theme.border)))
            cell_format.setBottomBorderStyle(QTextFrameFormat.BorderStyle.BorderStyle_Solid)
        cell.setFormat(cell_format)

    def height_for(self, width: int) -> int:
        """The height in pixels that the table takes in a column of `width`."""
        if self._measured is None or self._measured[0] != width:
            self._measured = (width, self._lay_out(width))
        return self._measured[1]

    def _lay_out(self, width: int) -> int:
        self.ensurePolished()
        shown = self._shown_width(width)
        scrolls = shown > width
        if self._table is not None:
            wanted = QTextLength(QTextLength.Type.FixedLength, shown)
            table_format = self._table.format().toTableFormat()
            if table_format.width().rawValue() != shown:
                table_format.setWidth(wanted)
                self._table.setFormat(table_format)
        self.setHorizontalScrollBarPolicy(
            Qt.ScrollBarPolicy.ScrollBarAlwaysOn if scrolls else Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        )
        if self.width() != min(shown, width):
            self.resize(min(shown, width), self.height())
        self.setLineWrapColumnOrWidth(shown)
        return math.ceil(self.document().size().height()) + (SCROLL_BAR if scrolls else 0)

    def ideal_width(self, limit: int) -> int:
        return min(limit, self._shown_width(limit))

    def _shown_width(self, width: int) -> int:
        if self._natural_width <= width or self._block is None:
            return self._natural_width
        return min(self._natural_width, max(width, len(self._block.header) * MIN_COLUMN))

    def wheelEvent(self, event: QWheelEvent) -> None:
        bar = self.horizontalScrollBar()
        if abs(event.angleDelta().x()) > abs(event.angleDelta().y()) and bar.maximum() > 0:
            bar.setValue(bar.value() - event.angleDelta().x())
            event.accept()
        else:
            event.ignore()

    def paintEvent(self, event: QPaintEvent) -> None:
        if self._style is not None and self._table is not None:
            theme = self._style.theme
            painter = QPainter(self.viewport())
            painter.setRenderHint(QPainter.RenderHint.Antialiasing)
            box = QRectF(self.viewport().rect()).adjusted(0.5, 0.5, -0.5, -0.5)
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(QColor(theme.code_background))
            painter.save()
            painter.setClipRect(QRectF(0, 0, box.width() + 1, self._header_height()))
            painter.drawRoundedRect(box, RADIUS_M, RADIUS_M)
            painter.restore()
            painter.setPen(QPen(QColor(theme.border), 1))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRoundedRect(box, RADIUS_M, RADIUS_M)
            painter.end()
        super().paintEvent(event)

    def _header_height(self) -> float:
        assert self._table is not None
        if self._table.rows() == 1:
            return self.viewport().height()
        below = self._table.cellAt(1, 0).firstCursorPosition().block()
        return self.document().documentLayout().blockBoundingRect(below).top() - _CELL_PADDING
