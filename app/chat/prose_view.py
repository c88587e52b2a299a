"""A read-only text widget for a run of paragraphs, headings, lists and quotations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PySide6.QtCore import QRectF, Qt, QUrl
from PySide6.QtGui import (
    QDesktopServices,
    QFocusEvent,
    QPainter,
    QPaintEvent,
    QTextBlock,
    QTextCursor,
    QTextOption,
    QWheelEvent,
)
from PySide6.QtWidgets import QFrame, QTextBrowser, QWidget

from app.chat.markdown import ProseBlock, Span
from app.chat.text_style import INLINE_CODE, QUOTE_DEPTH, QUOTE_INDENT, RULE, TextStyle

_OPENABLE = ("http", "https", "mailto")


def open_link(url: QUrl) -> bool:
    """Hands a link to the system's browser; schemes other than http, https and mailto are refused."""
    return url.scheme().lower() in _OPENABLE and QDesktopServices.openUrl(url)


class StaticText(QTextBrowser):
    """A text browser that never scrolls by itself, loads nothing and opens links outside."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setOpenLinks(False)
        self.setUndoRedoEnabled(False)
        self.viewport().setAutoFillBackground(False)
        self.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextBrowserInteraction | Qt.TextInteractionFlag.TextSelectableByKeyboard
        )
        self.document().setDocumentMargin(0)
        self.anchorClicked.connect(open_link)
        self.highlighted.connect(self._show_address)

    def loadResource(self, type: int, name: QUrl | str) -> object:
        return None

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()  # the message list scrolls

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        if event.reason() == Qt.FocusReason.MouseFocusReason:
            # A page of many text widgets must not show a selection in each of them.
            cursor = self.textCursor()
            cursor.clearSelection()
            self.setTextCursor(cursor)

    def _show_address(self, url: QUrl) -> None:
        self.setToolTip(url.toDisplayString())


class ProseView(StaticText):
    """Shows prose blocks, one document paragraph each.

    New blocks are compared with those shown: only from the first difference on is the
    document touched, so that a growing answer lays out no more than its last paragraph.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWordWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
        self._style: TextStyle | None = None
        self._blocks: list[ProseBlock] = []
        self._height: dict[int, int] = {}
        self._shows_caret = False
        self.setObjectName("messageText")
        self.setAccessibleName("Message text")

    @property
    def blocks(self) -> Sequence[ProseBlock]:
        return self._blocks

    def set_blocks(self, blocks: Sequence[ProseBlock], style: TextStyle) -> int:
        """Shows `blocks` and returns how many paragraphs had to be written."""
        if style is not self._style:
            self._style = style
            self._blocks = []
            self.document().setDefaultFont(style.font)
            self.document().clear()
        kept = 0
        for old, new in zip(self._blocks, blocks):
            if old is not new and old != new:
                break
            kept += 1
        written = len(blocks) - kept
        if not written and kept == len(self._blocks):
            return 0
        self._height.clear()
        cursor = self._truncate(kept)
        for index in range(kept, len(blocks)):
            self._append(cursor, blocks[index], first=index == 0)
        cursor.endEditBlock()
        self._blocks = list(blocks)
        return written

    def set_caret(self, shown: bool) -> None:
        """Shows or hides the mark behind the last character of an answer that is still growing."""
        if shown != self._shows_caret:
            self._shows_caret = shown
            self.viewport().update()

    def height_for(self, width: int) -> int:
        """The height in pixels that the text takes at `width`."""
        if (known := self._height.get(width)) is None:
            document = self.document()
            self._widen(width)
            known = math.ceil(document.size().height())
            self._height = {width: known}
        return known

    def ideal_width(self, limit: int) -> int:
        """The width in pixels that the text takes if it may be as wide as `limit`."""
        self._widen(limit)
        return min(limit, math.ceil(self.document().idealWidth()) + 1)

    def _widen(self, width: int) -> None:
        # The widget itself must have the width: a QTextEdit lays its document out again
        # for its own viewport whenever the document's size changes.
        self.ensurePolished()
        if self.width() != width:
            self.resize(width, self.height())
        self.document().setTextWidth(width)

    def _truncate(self, kept: int) -> QTextCursor:
        """Drops all paragraphs from number `kept` on; returns the cursor at the end, in an open edit block."""
        document = self.document()
        cursor = QTextCursor(document)
        cursor.beginEditBlock()
        if kept < len(self._blocks):
            if kept == 0:
                cursor.select(QTextCursor.SelectionType.Document)
            else:
                cursor.setPosition(document.findBlockByNumber(kept - 1).position())
                cursor.movePosition(QTextCursor.MoveOperation.EndOfBlock)
                cursor.movePosition(QTextCursor.MoveOperation.End, QTextCursor.MoveMode.KeepAnchor)
            cursor.removeSelectedText()
        cursor.movePosition(QTextCursor.MoveOperation.End)
        return cursor

    def _append(self, cursor: QTextCursor, block: ProseBlock, first: bool) -> None:
        style = self._style
        assert style is not None
        block_format = style.block_format(block, first)
        plain = style.char_format(Span(""), block.heading, block.quote)
        if first:
            cursor.setBlockFormat(block_format)
            cursor.setBlockCharFormat(plain)
        else:
            cursor.insertBlock(block_format, plain)
        if block.marker:
            cursor.insertText(block.marker + "\t", style.marker_format())
        for span in block.spans:
            text = span.text.replace("\n", "\u2028")
            cursor.insertText(text, style.char_format(span, block.heading, block.quote))

    # ---------------------------------------------------------------- painting

    def paintEvent(self, event: QPaintEvent) -> None:
        if self._style is not None and self._blocks:
            painter = QPainter(self.viewport())
            painter.setRenderHint(QPainter.RenderHint.Antialiasing)
            painter.setPen(Qt.PenStyle.NoPen)
            self._paint_under_text(painter, event.rect().top(), event.rect().bottom())
            painter.end()
        super().paintEvent(event)

    def _paint_under_text(self, painter: QPainter, top: int, bottom: int) -> None:
        layout = self.document().documentLayout()
        block = self.document().begin()
        previous_quote = 0
        previous_bottom = 0.0
        while block.isValid():
            rect = layout.blockBoundingRect(block)
            if rect.top() > bottom:
                return
            block_format = block.blockFormat()
            quote = block_format.intProperty(QUOTE_DEPTH)
            if rect.bottom() >= top:
                if block_format.boolProperty(RULE):
                    self._paint_rule(painter, rect)
                self._paint_quote(painter, rect, previous_bottom, previous_quote, quote)
                self._paint_inline_code(painter, block, rect)
            previous_quote, previous_bottom = quote, rect.bottom()
            block = block.next()
        if self._shows_caret:
            self._paint_caret(painter)

    def _paint_rule(self, painter: QPainter, rect: QRectF) -> None:
        assert self._style is not None
        painter.fillRect(QRectF(rect.left(), round(rect.center().y()), self.viewport().width(), 1), self._style.rule)

    def _paint_quote(self, painter: QPainter, rect: QRectF, above: float, depth_above: int, depth: int) -> None:
        assert self._style is not None
        for level in range(depth):
            top = above if level < depth_above else rect.top()
            bar = QRectF(level * QUOTE_INDENT, top, 3, rect.bottom() - top)
            painter.fillRect(bar, self._style.quote_bar)

    def _paint_inline_code(self, painter: QPainter, block: QTextBlock, rect: QRectF) -> None:
        assert self._style is not None
        layout = block.layout()
        iterator = block.begin()
        while not iterator.atEnd():
            fragment = iterator.fragment()
            iterator += 1
            if not fragment.charFormat().boolProperty(INLINE_CODE):
                continue
            start = fragment.position() - block.position()
            end = start + fragment.length()
            ascent = fragment.charFormat().font().pixelSize()
            for index in range(layout.lineCount()):
                line = layout.lineAt(index)
                line_end = line.textStart() + line.textLength()
                if line.textStart() >= end or line_end <= start:
                    continue
                left, _ = line.cursorToX(max(start, line.textStart()))  # type: ignore[misc]
                right, _ = line.cursorToX(min(end, line_end))  # type: ignore[misc]
                baseline = rect.top() + line.y() + line.ascent()
                left, right = max(0.0, rect.left() + left - 1), rect.left() + right + 1
                pill = QRectF(left, baseline - ascent - 1, right - left, ascent * 1.38 + 2)
                painter.setBrush(self._style.inline_code_background)
                painter.drawRoundedRect(pill, 4, 4)

    def _paint_caret(self, painter: QPainter) -> None:
        assert self._style is not None
        block = self.document().lastBlock()
        layout = block.layout()
        if not layout.lineCount():
            return
        line = layout.lineAt(layout.lineCount() - 1)
        x, _ = line.cursorToX(block.length() - 1)  # type: ignore[misc]
        rect = self.document().documentLayout().blockBoundingRect(block)
        baseline = rect.top() + line.y() + line.ascent()
        size = self._style.theme.font_size * 0.62
        painter.setBrush(self._style.theme.accent)
        painter.drawEllipse(QRectF(rect.left() + x + 4, baseline - size + 0.5, size, size))
