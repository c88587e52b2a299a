"""A plain text field that grows with its text, sends on Enter and is safe for input methods."""

from __future__ import annotations

import math

from PySide6.QtCore import QEvent, QMimeData, Qt, Signal
from PySide6.QtGui import QFocusEvent, QFontMetricsF, QInputMethodEvent, QKeyEvent, QKeySequence, QResizeEvent
from PySide6.QtWidgets import QFrame, QPlainTextEdit, QWidget

MAX_PASTE = 2_000_000  # characters


class GrowingTextEdit(QPlainTextEdit):
    """Enter asks to send, Shift+Enter breaks the line, Escape asks to leave.

    `wanted_height` changes with the text, from one line to `max_lines`; beyond that the
    field scrolls. Keys that belong to an input method's composition are left to it.
    """

    submitted = Signal()
    escaped = Signal()
    height_changed = Signal()
    focus_changed = Signal()

    def __init__(self, max_lines: int, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._max_lines = max_lines
        self._composing = False
        self._wanted_height = 0
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setTabChangesFocus(True)
        self.document().setDocumentMargin(2)
        self.viewport().setAutoFillBackground(False)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.document().documentLayout().documentSizeChanged.connect(self._fit)

    @property
    def wanted_height(self) -> int:
        if not self._wanted_height:
            self._fit()
        return self._wanted_height

    def event(self, event: QEvent) -> bool:
        # With nothing to redo, the keys belong to the window.
        if (
            isinstance(event, QKeyEvent)
            and event.type() == QEvent.Type.ShortcutOverride
            and event.matches(QKeySequence.StandardKey.Redo)
            and not self.document().isRedoAvailable()
        ):
            event.ignore()
            return False
        return super().event(event)

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self.focus_changed.emit()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self.focus_changed.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        key, modifiers = event.key(), event.modifiers()
        if key in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and not self._composing:
            plain = modifiers & ~Qt.KeyboardModifier.KeypadModifier
            if plain in (Qt.KeyboardModifier.NoModifier, Qt.KeyboardModifier.ControlModifier):
                self.submitted.emit()
                return
            # A line separator would be invisible to Markdown: always a real line break.
            self.textCursor().insertBlock()
            self.ensureCursorVisible()
            return
        if key == Qt.Key.Key_Escape and not self._composing:
            self.escaped.emit()
            return
        super().keyPressEvent(event)

    def inputMethodEvent(self, event: QInputMethodEvent) -> None:
        self._composing = bool(event.preeditString())
        super().inputMethodEvent(event)

    def insertFromMimeData(self, source: QMimeData) -> None:
        if source.hasText():
            self.textCursor().insertText(source.text()[:MAX_PASTE])
            self.ensureCursorVisible()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self._fit()

    def _fit(self, *_: object) -> None:
        spacing = QFontMetricsF(self.font()).lineSpacing()
        # A QPlainTextEdit's document height is counted in lines.
        lines = max(1.0, self.document().size().height())
        height = math.ceil(min(lines, self._max_lines) * spacing) + 6
        overflows = lines > self._max_lines
        self.setVerticalScrollBarPolicy(
            Qt.ScrollBarPolicy.ScrollBarAsNeeded if overflows else Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        )
        if height != self._wanted_height:
            self._wanted_height = height
            self.height_changed.emit()
