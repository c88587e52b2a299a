"""Find in the open chat."""

from __future__ import annotations

from collections.abc import Iterable

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QHBoxLayout, QLabel, QLineEdit, QWidget

from app.chat.message_footer import ActionButton
from app.state.records import MessageView
from app.theme import Theme


def find_messages(messages: Iterable[MessageView], text: str) -> list[int]:
    """Ids of the messages that hold `text`, whatever its case, in reading order."""
    wanted = text.casefold()
    return [message.id for message in messages if wanted in message.text.casefold()] if wanted else []


class FindBar(QWidget):
    """A field with a count and buttons for the previous and next message; Escape closes it."""

    text_changed = Signal(str)
    step_requested = Signal(int)
    closed = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setObjectName("findBar")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.field = QLineEdit(self)
        self.field.setObjectName("findField")
        self.field.setPlaceholderText("Find in this chat")
        self.field.setAccessibleName("Find in this chat")
        self.count = QLabel(self)
        self.count.setObjectName("findCount")
        self._previous = ActionButton("chevron-up", "Previous match", self)
        self._next = ActionButton("chevron-down", "Next match", self)
        self._close = ActionButton("close", "Close", self)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(10, 5, 6, 5)
        layout.setSpacing(4)
        layout.addWidget(self.field, 1)
        for widget in (self.count, self._previous, self._next, self._close):
            layout.addWidget(widget)
        self.field.textChanged.connect(self.text_changed)
        self._previous.clicked.connect(lambda: self.step_requested.emit(-1))
        self._next.clicked.connect(lambda: self.step_requested.emit(1))
        self._close.clicked.connect(self.closed)

    def set_theme(self, theme: Theme) -> None:
        for button in (self._previous, self._next, self._close):
            button.set_theme(theme)

    def set_position(self, index: int, total: int) -> None:
        if not self.field.text():
            self.count.setText("")
        else:
            self.count.setText(f"{index + 1} of {total}" if total else "Not found")

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape:
            self.closed.emit()
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.step_requested.emit(-1 if event.modifiers() & Qt.KeyboardModifier.ShiftModifier else 1)
        else:
            super().keyPressEvent(event)
