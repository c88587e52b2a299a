"""The line under a message: sibling switcher, actions and the answer's figures."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, QTimer, Signal
from PySide6.QtGui import QFontMetrics
from PySide6.QtWidgets import QLabel, QToolButton, QWidget

from app.chat.figures import figures, figures_in_full
from app.chat.icons import cached_icon
from app.state.records import MessageView
from app.theme import Theme

FOOTER_HEIGHT = 28
_BUTTON = 26
_ICON = 15
_COPIED_MS = 1500


class ActionButton(QToolButton):
    """A small icon button with a name for tooltip and screen reader."""

    def __init__(self, icon_name: str, name: str, parent: QWidget) -> None:
        super().__init__(parent)
        self.setObjectName("chatAction")
        self.icon_name = icon_name
        self.setIconSize(QSize(_ICON, _ICON))
        self.setFixedSize(_BUTTON, _BUTTON)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.set_name(name)

    def set_name(self, name: str) -> None:
        self.setToolTip(name)
        self.setAccessibleName(name)

    def set_theme(self, theme: Theme) -> None:
        self.setIcon(cached_icon(self.icon_name, theme.text_muted, theme.border, _ICON))


class MessageFooter(QWidget):
    """Actions on one message. Which ones are shown depends on its role and state."""

    copy_requested = Signal()
    edit_requested = Signal()
    regenerate_requested = Signal()
    delete_requested = Signal()
    sibling_requested = Signal(int)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._theme: Theme | None = None
        self._message: MessageView | None = None
        self._can_generate = True
        self.previous = ActionButton("chevron-left", "Previous version", self)
        self.next = ActionButton("chevron-right", "Next version", self)
        self.copy = ActionButton("copy", "Copy", self)
        self.edit = ActionButton("edit", "Edit and send again", self)
        self.regenerate = ActionButton("refresh", "Answer again", self)
        self.delete = ActionButton("trash", "Delete from here on", self)
        self._siblings = QLabel(self)
        self._siblings.setObjectName("siblingLabel")
        self._siblings.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._figures = QLabel(self)
        self._figures.setObjectName("figuresLabel")
        self._figures.setTextFormat(Qt.TextFormat.PlainText)
        self._figures_text = ""
        self.copy.clicked.connect(self.copy_requested)
        self.edit.clicked.connect(self.edit_requested)
        self.regenerate.clicked.connect(self.regenerate_requested)
        self.delete.clicked.connect(self.delete_requested)
        self.previous.clicked.connect(lambda: self.sibling_requested.emit(-1))
        self.next.clicked.connect(lambda: self.sibling_requested.emit(1))
        self._copied_timer = QTimer(self)
        self._copied_timer.setSingleShot(True)
        self._copied_timer.setInterval(_COPIED_MS)
        self._copied_timer.timeout.connect(self._show_copy)

    @property
    def figures_text(self) -> str:
        return self._figures_text

    @property
    def sibling_text(self) -> str:
        return self._siblings.text()

    def set_theme(self, theme: Theme) -> None:
        if theme is not self._theme:
            self._theme = theme
            for button in self._buttons():
                button.set_theme(theme)

    def set_message(self, message: MessageView, can_generate: bool) -> None:
        """Shows what can be done with `message`; `can_generate` is False while the session writes an answer."""
        is_answer, idle = message.role == "assistant", not message.is_streaming
        several = message.sibling_count > 1
        for button, shown in (
            (self.previous, several),
            (self.next, several),
            (self.copy, idle),
            (self.edit, not is_answer),
            (self.regenerate, is_answer and idle),
            (self.delete, idle),
        ):
            button.setVisible(shown)
        self._siblings.setVisible(several)
        if several:
            self._siblings.setText(f"{message.sibling_index + 1}/{message.sibling_count}")
            self._siblings.setAccessibleName(f"Version {message.sibling_index + 1} of {message.sibling_count}")
        self.previous.setEnabled(can_generate and message.sibling_index > 0)
        self.next.setEnabled(can_generate and message.sibling_index + 1 < message.sibling_count)
        for button in (self.edit, self.regenerate, self.delete):
            button.setEnabled(can_generate)
        if self._message is None or message.id != self._message.id:
            self._show_copy()
        self._message = message
        run = message.run
        self._figures_text = " · ".join(figures(run)) if run is not None else ""
        self._figures.setToolTip(figures_in_full(run) if run is not None and idle else "")
        self._figures.setAccessibleName(self._figures_text.replace(" · ", ", "))
        self._place()

    def show_copied(self) -> None:
        if self._theme is not None:
            self.copy.setIcon(cached_icon("check", self._theme.success, size=_ICON))
            self.copy.set_name("Copied")
            self._copied_timer.start()

    def _show_copy(self) -> None:
        self._copied_timer.stop()
        if self._theme is not None:
            self.copy.set_theme(self._theme)
        self.copy.set_name("Copy")

    def _buttons(self) -> tuple[ActionButton, ...]:
        return (self.previous, self.next, self.copy, self.edit, self.regenerate, self.delete)

    def resizeEvent(self, event: object) -> None:
        self._place()

    def _place(self) -> None:
        message = self._message
        if message is None:
            return
        shown = [button for button in self._buttons()[2:] if not button.isHidden()]
        switcher = 2 * _BUTTON - 8 + self._sibling_width() if message.sibling_count > 1 else 0
        total = switcher + len(shown) * _BUTTON
        # The icons, not their frames, line up with the text's edge.
        inset = (_BUTTON - _ICON) // 2
        x = self.width() - total + inset if message.role == "user" else -inset
        y = (FOOTER_HEIGHT - _BUTTON) // 2
        if switcher:
            self.previous.move(x, y)
            self._siblings.setGeometry(x + _BUTTON - 4, y, self._sibling_width(), _BUTTON)
            self.next.move(x + _BUTTON - 8 + self._sibling_width(), y)
            x += switcher
        for button in shown:
            button.move(x, y)
            x += _BUTTON
        left = x + 6 if shown or switcher else 0
        room = max(0, self.width() - left)
        self._figures.setGeometry(left, y, room, _BUTTON)
        elided = QFontMetrics(self._figures.font()).elidedText(self._figures_text, Qt.TextElideMode.ElideRight, room)
        self._figures.setText(elided)

    def _sibling_width(self) -> int:
        return self._siblings.sizeHint().width() + 4
