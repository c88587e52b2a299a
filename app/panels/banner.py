"""The strip above a chat that says what the engine needs: it stopped, no model is loaded, a load failed."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QFrame, QHBoxLayout, QLabel, QPlainTextEdit, QVBoxLayout

from app.panels.widgets import button, label, set_role
from app.state.engine_state import EngineState
from app.theme import SPACE_M, SPACE_S, ThemeManager, mono_font, pixmap

NARROW = 640  # the buttons go below the words


class EngineBanner(QFrame):
    """Shown while the engine is dead or has no model; its buttons offer the way out."""

    restart_requested = Signal()
    choose_model_requested = Signal()
    load_starter_requested = Signal()

    def __init__(self, engine: EngineState, themes: ThemeManager, *, has_starter: bool) -> None:
        super().__init__()
        self._engine, self._themes, self._has_starter = engine, themes, has_starter
        self.setObjectName("banner")
        column = QVBoxLayout(self)
        column.setContentsMargins(SPACE_M, SPACE_S + 2, SPACE_M, SPACE_S + 2)
        column.setSpacing(SPACE_S)
        self._row = row = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        row.setSpacing(SPACE_S)
        self._icon = QLabel()
        self._icon.setFixedWidth(24)
        self._icon.setAlignment(Qt.AlignmentFlag.AlignTop)
        words = QVBoxLayout()
        words.setSpacing(2)
        self.title = label(role="strong")
        self.text = label(role="small", wrap=True)
        self.text.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        words.addWidget(self.title)
        words.addWidget(self.text)
        self.details_button = button("Details", "flat", "Show the engine's last words")
        self.details_button.setCheckable(True)
        self.details_button.toggled.connect(self._show_details)
        self.choose_button = button("Choose a model…")
        self.choose_button.clicked.connect(self.choose_model_requested)
        self.starter_button = button("Load starter model", "primary")
        self.starter_button.clicked.connect(self.load_starter_requested)
        self.restart_button = button("Restart the engine", "primary")
        self.restart_button.clicked.connect(self.restart_requested)
        said = QHBoxLayout()
        said.setSpacing(SPACE_S)
        said.addWidget(self._icon, 0, Qt.AlignmentFlag.AlignTop)
        said.addLayout(words, 1)
        actions = QHBoxLayout()
        actions.setSpacing(SPACE_S)
        actions.addStretch(1)
        for action in (self.details_button, self.choose_button, self.starter_button, self.restart_button):
            actions.addWidget(action, 0, Qt.AlignmentFlag.AlignVCenter)
        row.addLayout(said, 1)
        row.addLayout(actions)
        column.addLayout(row)
        self.details = QPlainTextEdit()
        self.details.setObjectName("bannerDetails")
        self.details.setReadOnly(True)
        self.details.setFixedHeight(160)
        self.details.setFont(mono_font(12))
        self.details.setAccessibleName("The engine's last words")
        self.details.hide()
        column.addWidget(self.details)
        engine.changed.connect(self.refresh)
        themes.changed.connect(self.refresh)
        self.refresh()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        narrow = self.width() < NARROW
        self._row.setDirection(QBoxLayout.Direction.TopToBottom if narrow else QBoxLayout.Direction.LeftToRight)

    def _show_details(self, shown: bool) -> None:
        self.details.setVisible(shown and bool(self.details.toPlainText()))

    def refresh(self, *_: object) -> None:
        """Shows what the engine needs now; hides when it needs nothing."""
        engine = self._engine
        death = engine.death if engine.status == "dead" else None
        dead, idle = engine.status == "dead", engine.status == "no_model"
        detail = death.detail.strip() if death is not None else ""
        if dead:
            self._say("danger", "The engine stopped", death.reason if death is not None else engine.failure)
        elif idle and engine.failure:
            self._say("warning", "The model could not be loaded", engine.failure)
        elif idle:
            self._say("info", "No model is loaded", "Choose one to start chatting; your chats are all here.")
        if self.details.toPlainText() != detail:
            self.details.setPlainText(detail)
            self.details.verticalScrollBar().setValue(self.details.verticalScrollBar().maximum())
        self.details_button.setVisible(bool(detail))
        if not detail:
            self.details_button.setChecked(False)
        self.restart_button.setVisible(dead)
        self.choose_button.setVisible(idle)
        self.starter_button.setVisible(idle and self._has_starter and not engine.failure)
        self.setVisible(dead or idle)

    def _say(self, kind: str, title: str, text: str) -> None:
        set_role(self, "kind", kind)
        self.title.setText(title)
        self.text.setText(text)
        colour = {"danger": "danger", "warning": "warning", "info": "accent"}[kind]
        name = "info" if kind == "info" else "alert"
        self._icon.setPixmap(pixmap(name, getattr(self._themes.theme, colour), 20))
        self.setAccessibleName(title)
        self.setAccessibleDescription(text)
