"""Short messages over the window's lower edge, with one thing to do about them."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QEvent, QObject, Qt, QTimer
from PySide6.QtGui import QColor
from PySide6.QtWidgets import QFrame, QGraphicsDropShadowEffect, QHBoxLayout, QLabel, QWidget

from app.panels.widgets import IconButton, button, label
from app.theme import SPACE_L, SPACE_M, SPACE_S, ThemeManager, pixmap

SHOWN_MS = 7000
AFTER_POINTER_MS = 2500
WIDTH = 440
BOTTOM = 156  # above the composer and the button that jumps to the end


class Toast(QFrame):
    """One message at a time; a new one takes the place of the old. Stays while the pointer is on it."""

    def __init__(self, host: QWidget, themes: ThemeManager) -> None:
        super().__init__(host)
        self._host = host
        self._themes = themes
        self._action: Callable[[], object] | None = None
        self._is_sticky = False
        self.setObjectName("toast")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._row = row = QHBoxLayout(self)
        row.setContentsMargins(SPACE_M, SPACE_S, SPACE_S, SPACE_S)
        row.setSpacing(SPACE_S)
        self._icon = QLabel()
        self.text = label(wrap=True)
        self.action_button = button("Undo", "link")
        self.action_button.clicked.connect(self._act)
        close = IconButton("close", "Dismiss", themes, size=26)
        close.clicked.connect(self.hide)
        row.addWidget(self._icon)
        row.addWidget(self.text, 1)
        row.addWidget(self.action_button)
        row.addWidget(close)
        shadow = QGraphicsDropShadowEffect(self)
        shadow.setBlurRadius(28)
        shadow.setOffset(0, 6)
        shadow.setColor(QColor(0, 0, 0, 70))
        self.setGraphicsEffect(shadow)
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self.hide)
        host.installEventFilter(self)
        self.hide()

    def say(
        self,
        text: str,
        action: str = "",
        callback: Callable[[], object] | None = None,
        *,
        kind: str = "info",
        milliseconds: int = SHOWN_MS,
    ) -> None:
        """Shows a message; `kind` is info, success or danger. With 0 milliseconds it stays until dismissed."""
        self._action, self._is_sticky = callback, milliseconds == 0
        self.text.setText(text)
        self.setAccessibleName(text)
        names = {"info": ("info", "accent"), "success": ("check", "success"), "danger": ("alert", "danger")}
        name, colour = names[kind]
        self._icon.setPixmap(pixmap(name, getattr(self._themes.theme, colour), 18))
        self.action_button.setText(action)
        self.action_button.setAccessibleName(action)
        self.action_button.setVisible(bool(action))
        self._place()
        self.show()
        self.raise_()
        self._place()
        if self._is_sticky:
            self._timer.stop()
        else:
            self._timer.start(milliseconds)

    def withdraw(self, callback: Callable[[], object]) -> None:
        """Takes the message back whose button would call `callback`, if it is the one shown."""
        if self._action == callback:
            self._action = None
            self.hide()

    def _act(self) -> None:
        action, self._action = self._action, None
        self.hide()
        if action is not None:
            action()

    def _place(self) -> None:
        host = self._host
        width = min(WIDTH, host.width() - 2 * SPACE_L)
        self.setFixedWidth(width)
        self._row.activate()
        height = max(44, self._row.totalHeightForWidth(width))
        self.setFixedHeight(height)
        self.move((host.width() - width) // 2, max(SPACE_L, host.height() - height - BOTTOM))

    def enterEvent(self, event: QEvent) -> None:  # type: ignore[override]
        super().enterEvent(event)  # type: ignore[arg-type]
        self._timer.stop()

    def leaveEvent(self, event: QEvent) -> None:
        super().leaveEvent(event)
        if not self._is_sticky:
            self._timer.start(AFTER_POINTER_MS)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Resize and self.isVisible():
            self._place()
        return super().eventFilter(watched, event)
