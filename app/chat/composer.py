"""Where a question is written: grows with it, sends it, and stops the answer."""

from __future__ import annotations

from typing import Literal

from PySide6.QtCore import QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QIcon, QKeyEvent, QMouseEvent, QPainter, QPaintEvent, QPen, QPixmap
from PySide6.QtWidgets import QHBoxLayout, QLabel, QToolButton, QVBoxLayout, QWidget

from app.chat.growing_text import GrowingTextEdit
from app.chat.icons import cached_icon
from app.theme import Theme

MAX_LINES = 10
RADIUS = 20
_SEND_SIZE = 32
_FEW_TOKENS_LEFT = 0.9  # share of the context from which on the counter warns


class _ComposerText(GrowingTextEdit):
    page_requested = Signal(int)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_PageUp, Qt.Key.Key_PageDown) and not event.modifiers():
            self.page_requested.emit(-1 if event.key() == Qt.Key.Key_PageUp else 1)
        else:
            super().keyPressEvent(event)


class Composer(QWidget):
    """A rounded field with a counter and one button, which sends or stops.

    Sending does not clear the text: whoever takes it calls `clear`, so that a question
    that was refused is not lost.
    """

    submitted = Signal(str)
    stop_requested = Signal()
    text_changed = Signal(str)
    page_requested = Signal(int)

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._is_generating = False
        self._unready_reason = ""
        self.setCursor(Qt.CursorShape.IBeamCursor)
        self.text_edit = _ComposerText(MAX_LINES, self)
        self.text_edit.setObjectName("composerText")
        self.text_edit.setAccessibleName("Your message")
        self.text_edit.setAccessibleDescription("Enter sends, Shift+Enter starts a new line, Escape stops the answer")
        self.hint = QLabel(self)
        self.hint.setObjectName("composerHint")
        self.counter = QLabel(self)
        self.counter.setObjectName("contextCounter")
        self.counter.setAccessibleName("Context used")
        self.send_button = QToolButton(self)
        self.send_button.setObjectName("sendButton")
        self.send_button.setFixedSize(_SEND_SIZE, _SEND_SIZE)
        self.send_button.setIconSize(QSize(16, 16))
        self.send_button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.send_button.setCursor(Qt.CursorShape.PointingHandCursor)
        bottom = QHBoxLayout()
        bottom.setSpacing(12)
        bottom.addWidget(self.hint, 1)
        bottom.addWidget(self.counter)
        bottom.addWidget(self.send_button)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(18, 12, 10, 8)
        layout.setSpacing(4)
        layout.addWidget(self.text_edit)
        layout.addLayout(bottom)
        self.text_edit.submitted.connect(self._submit)
        self.text_edit.escaped.connect(self._escape)
        self.text_edit.height_changed.connect(self._fit)
        self.text_edit.focus_changed.connect(self.update)
        self.text_edit.textChanged.connect(self._on_text_changed)
        self.text_edit.page_requested.connect(self.page_requested)
        self.send_button.clicked.connect(self._on_button)
        self.setFocusProxy(self.text_edit)
        self.set_context_usage(None, None)
        self.set_theme(theme)
        self._fit()

    @property
    def text(self) -> str:
        return self.text_edit.toPlainText()

    def set_text(self, text: str) -> None:
        """Puts a text in, with the cursor behind it; can be undone."""
        cursor = self.text_edit.textCursor()
        cursor.select(cursor.SelectionType.Document)
        cursor.insertText(text)
        cursor.movePosition(cursor.MoveOperation.End)
        self.text_edit.setTextCursor(cursor)

    def clear(self) -> None:
        self.text_edit.clear()

    def set_generating(self, generating: bool) -> None:
        self._is_generating = generating
        self._update()

    def set_unready(self, reason: str) -> None:
        """Says why nothing can be sent now; empty when it can. Writing is always possible."""
        self._unready_reason = reason
        self._update()

    def set_context_usage(self, used: int | None, limit: int | None) -> None:
        """Shows how many tokens the next prompt takes of the context; `None` shows nothing."""
        shown = used is not None and bool(limit)
        self.counter.setVisible(shown)
        if used is None or not limit:
            return
        tone: Literal["", "warning", "danger"] = ""
        if used > limit:
            tone = "danger"
        elif used > limit * _FEW_TOKENS_LEFT:
            tone = "warning"
        self.counter.setText(f"{_short(used)} / {_short(limit)}")
        what = f"{used:,} of {limit:,} tokens of the context are taken by this chat and what is typed"
        self.counter.setToolTip(f"{what}: too long to be sent whole" if tone == "danger" else what)
        if self.counter.property("tone") != tone:
            self.counter.setProperty("tone", tone)
            self.counter.style().unpolish(self.counter)
            self.counter.style().polish(self.counter)

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._update()
        self.update()

    def _update(self) -> None:
        theme = self._theme
        name = "Stop the answer" if self._is_generating else "Send"
        self.send_button.setIcon(
            _stop_icon(theme.accent_text)
            if self._is_generating
            else cached_icon("send", theme.accent_text, theme.text_faint)
        )
        self.send_button.setAccessibleName(name)
        can_send = bool(self.text.strip()) and not self._unready_reason
        self.send_button.setEnabled(self._is_generating or can_send)
        keys = "Esc" if self._is_generating else "Enter"
        self.send_button.setToolTip(self._unready_reason or f"{name} ({keys})")
        placeholder = "Ask anything"
        if self._is_generating:
            hint = "Esc stops the answer"
        else:
            hint = self._unready_reason or ("Enter sends · Shift+Enter for a new line" if self.text else "")
        self.text_edit.setPlaceholderText(placeholder)
        self.hint.setText(hint)

    def _on_text_changed(self) -> None:
        self._update()
        self.text_changed.emit(self.text)

    def _submit(self) -> None:
        text = self.text.strip()
        if text and not self._is_generating:
            self.submitted.emit(text)

    def _escape(self) -> None:
        if self._is_generating:
            self.stop_requested.emit()

    def _on_button(self) -> None:
        if self._is_generating:
            self.stop_requested.emit()
        else:
            self._submit()
        self.text_edit.setFocus(Qt.FocusReason.OtherFocusReason)

    def _fit(self) -> None:
        self.text_edit.setFixedHeight(self.text_edit.wanted_height)
        self.updateGeometry()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        self.text_edit.setFocus(Qt.FocusReason.MouseFocusReason)

    def paintEvent(self, event: QPaintEvent) -> None:
        theme = self._theme
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        has_focus = self.text_edit.hasFocus()
        painter.setPen(QPen(QColor(theme.accent if has_focus else theme.border), 1))
        painter.setBrush(QColor(theme.surface_raised))
        painter.drawRoundedRect(QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5), RADIUS, RADIUS)


def _stop_icon(colour: str) -> QIcon:
    """A filled square: an outlined one looks like a check box on the filled button."""
    result = QIcon()
    for scale in (1.0, 2.0):
        image = QPixmap(round(16 * scale), round(16 * scale))
        image.fill(Qt.GlobalColor.transparent)
        image.setDevicePixelRatio(scale)
        painter = QPainter(image)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(colour))
        painter.drawRoundedRect(QRectF(3, 3, 10, 10), 2, 2)
        painter.end()
        result.addPixmap(image)
    return result


def _short(tokens: int) -> str:
    if tokens < 1000:
        return str(tokens)
    thousands = tokens / 1000
    return f"{thousands:.1f}k" if thousands < 99.95 else f"{thousands:.0f}k"
