"""Edits a question in its place and sends it again."""

from __future__ import annotations

from PySide6.QtCore import QRectF, Signal
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QPushButton, QWidget

from app.chat.growing_text import GrowingTextEdit
from app.theme import RADIUS_L, Theme

MAX_LINES = 16
_PADDING = 14
_BUTTON_HEIGHT = 32


class MessageEditor(QWidget):
    """A framed text field with Cancel and Send; Enter sends, Escape cancels."""

    submitted = Signal(str)
    cancelled = Signal()
    height_changed = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._theme: Theme | None = None
        self.text_edit = GrowingTextEdit(MAX_LINES, self)
        self.text_edit.setObjectName("editorText")
        self.text_edit.setAccessibleName("Edit the question")
        self.send_button = QPushButton("Send", self)
        self.send_button.setProperty("variant", "primary")
        self.send_button.setAccessibleName("Send the edited question")
        self.cancel_button = QPushButton("Cancel", self)
        self.text_edit.submitted.connect(self._submit)
        self.text_edit.escaped.connect(self.cancelled)
        self.text_edit.height_changed.connect(self.height_changed)
        self.text_edit.textChanged.connect(self._update_button)
        self.send_button.clicked.connect(self._submit)
        self.cancel_button.clicked.connect(self.cancelled)

    def begin(self, text: str, theme: Theme) -> None:
        self._theme = theme
        self.text_edit.setPlainText(text)
        self.text_edit.moveCursor(self.text_edit.textCursor().MoveOperation.End)
        self._update_button()

    def layout_for(self, width: int) -> int:
        self.text_edit.resize(width - 2 * _PADDING, self.text_edit.height())
        text_height = self.text_edit.wanted_height
        self.text_edit.setGeometry(_PADDING, 12, width - 2 * _PADDING, text_height)
        top = 12 + text_height + 12
        right = width - _PADDING
        for button in (self.send_button, self.cancel_button):
            button_width = button.sizeHint().width()
            button.setGeometry(right - button_width, top, button_width, _BUTTON_HEIGHT)
            right -= button_width + 8
        return top + _BUTTON_HEIGHT + 12

    def _submit(self) -> None:
        if text := self.text_edit.toPlainText().strip():
            self.submitted.emit(text)

    def _update_button(self) -> None:
        self.send_button.setEnabled(bool(self.text_edit.toPlainText().strip()))

    def paintEvent(self, event: QPaintEvent) -> None:
        if self._theme is None:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QPen(QColor(self._theme.accent), 1))
        painter.setBrush(QColor(self._theme.surface_raised))
        painter.drawRoundedRect(QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5), RADIUS_L, RADIUS_L)
