"""A code block: language label, copy button and highlighted, selectable text."""

from __future__ import annotations

import math

from PySide6.QtCore import QRectF, Qt, QTimer
from PySide6.QtGui import (
    QColor,
    QFocusEvent,
    QFont,
    QFontMetricsF,
    QGuiApplication,
    QPainter,
    QPaintEvent,
    QPen,
    QTextCursor,
    QTextLayout,
    QWheelEvent,
)
from PySide6.QtWidgets import QFrame, QLabel, QPlainTextEdit, QPushButton, QWidget

from app.chat.highlight import PygmentsHighlighter
from app.chat.icons import cached_icon
from app.chat.markdown import CodeBlock
from app.chat.text_style import TextStyle
from app.theme import RADIUS_M, mix

HEADER = 34
PADDING_X = 14
PADDING_Y = 12
SCROLL_BAR = 10
_COPIED_MS = 1500

_NAMES = {
    "": "text",
    "cpp": "C++",
    "csharp": "C#",
    "cs": "C#",
    "css": "CSS",
    "html": "HTML",
    "java": "Java",
    "javascript": "JavaScript",
    "js": "JavaScript",
    "json": "JSON",
    "py": "Python",
    "python": "Python",
    "sh": "Shell",
    "bash": "Bash",
    "sql": "SQL",
    "ts": "TypeScript",
    "typescript": "TypeScript",
    "xml": "XML",
    "yaml": "YAML",
    "yml": "YAML",
}


class _CodeText(QPlainTextEdit):
    """The text itself: as high as its lines, scrolled sideways only."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setObjectName("codeText")
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setReadOnly(True)
        self.setUndoRedoEnabled(False)
        self.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse | Qt.TextInteractionFlag.TextSelectableByKeyboard
        )
        self.viewport().setAutoFillBackground(False)
        self.document().setDocumentMargin(0)
        self.horizontalScrollBar().setAccessibleName("Scroll the code sideways")

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        if event.reason() == Qt.FocusReason.MouseFocusReason:
            cursor = self.textCursor()
            cursor.clearSelection()
            self.setTextCursor(cursor)

    def wheelEvent(self, event: QWheelEvent) -> None:
        delta = event.angleDelta()
        sideways = abs(delta.x()) > abs(delta.y()) or event.modifiers() & Qt.KeyboardModifier.ShiftModifier
        if sideways and self.horizontalScrollBar().maximum() > 0:
            super().wheelEvent(event)
        else:
            event.ignore()


class CodeView(QWidget):
    """Shows one `CodeBlock`. Text that only grew is appended, never set anew."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._block: CodeBlock | None = None
        self._style: TextStyle | None = None
        self._text_height = 0
        self._text_width = 0.0
        self._measured_lines = 0
        self._heights: list[float] = []
        self._label = QLabel(self)
        self._label.setObjectName("languageLabel")
        self._text = _CodeText(self)
        self._highlighter = PygmentsHighlighter(self._text.document())
        self._copy = QPushButton("Copy", self)
        self._copy.setObjectName("copyCode")
        self._copy.setCursor(Qt.CursorShape.PointingHandCursor)
        self._copy.clicked.connect(self.copy)
        self._copied_timer = QTimer(self)
        self._copied_timer.setSingleShot(True)
        self._copied_timer.setInterval(_COPIED_MS)
        self._copied_timer.timeout.connect(self._show_copy)

    @property
    def text_edit(self) -> QPlainTextEdit:
        return self._text

    @property
    def language_label(self) -> str:
        return self._label.text()

    @property
    def copy_button(self) -> QPushButton:
        return self._copy

    @property
    def is_highlighting(self) -> bool:
        return self._highlighter.is_working

    def set_block(self, block: CodeBlock, style: TextStyle) -> None:
        if style is not self._style:
            self._set_style(style)
        old = self._block
        if block == old:
            return
        self._block = block
        if old is None or block.language != old.language:
            name = _NAMES.get(block.language, block.language)
            self._label.setText(name)
            self._copy.setAccessibleName(f"Copy the {name} code")
            self._text.setAccessibleName(f"{name} code")
        grows = old is not None and block.language == old.language and block.text.startswith(old.text)
        if grows and old is not None:
            self._append(block.text[len(old.text) :])
        else:
            self._highlighter.forget()
            self._text.setPlainText(block.text)
            self._show_copy()
        self._measure(from_line=self._measured_lines - 1 if grows else 0)
        self._highlighter.update_text(block.text, block.language, block.closed)

    def _append(self, text: str) -> None:
        if text:
            cursor = QTextCursor(self._text.document())
            cursor.movePosition(QTextCursor.MoveOperation.End)
            cursor.insertText(text)

    def _set_style(self, style: TextStyle) -> None:
        self._style = style
        self._text.setFont(style.mono)
        self._text.document().setDefaultFont(style.mono)
        self._highlighter.set_theme(style.theme)
        self._measured_lines = 0
        self._show_copy()
        if self._block is not None:
            self._measure(from_line=0)
        self.update()

    def _measure(self, from_line: int) -> None:
        """Adds up line heights. Only lines with fallback fonts need a layout; the rest are all alike."""
        assert self._style is not None and self._block is not None
        metrics = QFontMetricsF(self._style.mono)
        line_height = _line_height(self._style.mono)
        from_line = max(0, from_line)
        if from_line == 0:
            self._heights = []
            self._text_width = 0.0
        del self._heights[from_line:]
        layout = self._text.document().documentLayout()
        block = self._text.document().findBlockByNumber(from_line)
        advance = metrics.horizontalAdvance("0")
        while block.isValid():
            text = block.text()
            if text.isascii():
                self._heights.append(line_height)
                columns = len(text.expandtabs(8)) if "\t" in text else len(text)
                self._text_width = max(self._text_width, columns * advance)
            else:
                rect = layout.blockBoundingRect(block)
                self._heights.append(rect.height())
                self._text_width = max(self._text_width, block.layout().maximumWidth())
            block = block.next()
        self._measured_lines = len(self._heights)
        self._text_height = math.ceil(sum(self._heights))

    def height_for(self, width: int) -> int:
        """The height in pixels of header, all lines and, if needed, the scroll bar at `width`."""
        scrolls = self._text_width + 2 > width - 2 * PADDING_X
        return HEADER + self._text_height + 1 + 2 * PADDING_Y + (SCROLL_BAR if scrolls else 0)

    def ideal_width(self, limit: int) -> int:
        return min(limit, math.ceil(self._text_width) + 2 * PADDING_X + 4)

    def resizeEvent(self, event: object) -> None:
        copy_width = self._copy.sizeHint().width()
        self._copy.setGeometry(self.width() - copy_width - 6, 4, copy_width, HEADER - 8)
        self._label.setGeometry(PADDING_X, 0, max(0, self.width() - copy_width - 24), HEADER)
        top = HEADER + PADDING_Y
        scrolls = self._text_width + 2 > self.width() - 2 * PADDING_X
        bottom = 2 if scrolls else PADDING_Y
        self._text.setHorizontalScrollBarPolicy(
            Qt.ScrollBarPolicy.ScrollBarAlwaysOn if scrolls else Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        )
        self._text.setGeometry(PADDING_X, top, self.width() - 2 * PADDING_X, self.height() - top - bottom)

    def copy(self) -> None:
        """Puts the code, without the fence, on the clipboard."""
        if self._block is not None:
            QGuiApplication.clipboard().setText(self._block.text)
            self._show_copied()

    def _show_copied(self) -> None:
        assert self._style is not None
        self._copy.setText("Copied")
        self._copy.setIcon(cached_icon("check", self._style.theme.success))
        self._copied_timer.start()
        self.resizeEvent(None)

    def _show_copy(self) -> None:
        if self._style is not None:
            self._copied_timer.stop()
            self._copy.setText("Copy")
            self._copy.setIcon(cached_icon("copy", self._style.theme.text_muted))
            self.resizeEvent(None)

    def paintEvent(self, event: QPaintEvent) -> None:
        if self._style is None:
            return
        theme = self._style.theme
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QPen(QColor(theme.code_border), 1))
        painter.setBrush(QColor(theme.code_background))
        painter.drawRoundedRect(QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5), RADIUS_M, RADIUS_M)
        painter.fillRect(1, HEADER - 1, self.width() - 2, 1, QColor(mix(theme.code_border, theme.code_background, 0.3)))


def _line_height(font: QFont) -> float:
    """What a text document gives a line of `font`: whole pixels, where the font's own metrics need not be."""
    layout = QTextLayout("0", font)
    layout.beginLayout()
    line = layout.createLine()
    line.setLeadingIncluded(True)
    line.setLineWidth(1e6)
    layout.endLayout()
    return line.height()
