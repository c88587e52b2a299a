"""How much of the model's context the chat takes."""

from __future__ import annotations

from PySide6.QtCore import QTimer
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QProgressBar, QVBoxLayout

from app.panels.widgets import label, set_role
from app.state.engine_state import EngineState
from app.state.session import ChatSession
from app.theme import SPACE_M, SPACE_S

COUNT_DELAY_MS = 250
STREAMING_INTERVAL_MS = 1000


class ContextMeter(QFrame):
    """Tokens used of the context, counted by the worker after the chat template; every second while it streams."""

    def __init__(self, engine: EngineState) -> None:
        super().__init__()
        self.setObjectName("footer")
        self._engine = engine
        self._session: ChatSession | None = None
        self._waiting = False
        column = QVBoxLayout(self)
        column.setContentsMargins(SPACE_M, SPACE_S + 2, SPACE_M, SPACE_S + 4)
        column.setSpacing(SPACE_S - 2)
        row = QHBoxLayout()
        row.addWidget(label("Context", "strong"))
        row.addStretch(1)
        self.figure = label(role="figure")
        self.figure.setAccessibleName("Context used")
        row.addWidget(self.figure)
        column.addLayout(row)
        self.bar = QProgressBar()
        self.bar.setTextVisible(False)
        self.bar.setAccessibleName("Share of the context in use")
        column.addWidget(self.bar)
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self._count)
        engine.changed.connect(self._engine_changed)
        self._show(None)

    def set_session(self, session: ChatSession | None) -> None:
        if self._session is not None:
            self._session.path_changed.disconnect(self.schedule)
            self._session.message_appended.disconnect(self.schedule)
            self._session.generating_changed.disconnect(self.schedule)
            self._session.settings_changed.disconnect(self.schedule)
        self._session = session
        self._show(None)
        if session is not None:
            session.path_changed.connect(self.schedule)
            session.message_appended.connect(self.schedule)
            session.generating_changed.connect(self.schedule)
            session.settings_changed.connect(self.schedule)
            self.schedule()

    def schedule(self, *_: object) -> None:
        """Counts soon; many calls in a row make one count."""
        if not self._timer.isActive():
            self._timer.start(COUNT_DELAY_MS)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.schedule()

    def _engine_changed(self) -> None:
        if self._engine.is_ready:
            self.schedule()
        else:
            self._show(None)

    def _count(self) -> None:
        session = self._session
        if session is None or not self._engine.is_ready or not self.isVisible() or self._waiting:
            return
        self._waiting = True

        def counted(count: int | None, error: str | None) -> None:
            self._waiting = False
            if session is self._session:
                self._show(count, error)
                if session.is_generating:
                    self._timer.start(STREAMING_INTERVAL_MS)
            else:
                self.schedule()

        self._engine.count_tokens(session.messages_for_model(), counted)

    def _show(self, used: int | None, error: str | None = None) -> None:
        model = self._engine.model
        limit = model.max_context if model is not None else 0
        self.setToolTip(error or "")
        self.bar.setRange(0, max(1, limit))
        self.bar.setValue(min(used or 0, max(1, limit)))
        over = used is not None and used > limit
        set_role(self.figure, "role", "danger" if over else "figure")
        if not limit:
            self.figure.setText("no model")
        elif used is None:
            self.figure.setText(f"– / {limit:,}")
        else:
            self.figure.setText(f"{used:,} / {limit:,}")
