"""How much of the model's context a chat takes, for everything that shows it."""

from __future__ import annotations

from PySide6.QtCore import QObject, QTimer, Signal

from app.state.engine_state import EngineState
from app.state.session import ChatSession

COUNT_DELAY_MS = 300  # after the last change
STREAMING_INTERVAL_MS = 200


class ContextUsage(QObject):
    """Follows one session at a time, the one in front. `changed` tells of any difference in what can be read here.

    While an answer is written its own figures are taken. Otherwise the worker counts, after the chat template, what
    would be asked if the draft were sent now: a moment after the last change, and one count at a time, as each one
    works through the whole chat on the thread that new requests wait for.
    """

    changed = Signal()

    def __init__(self, engine: EngineState, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._engine = engine
        self.session: ChatSession | None = None
        self.used: int | None = None
        """Tokens; None while they are not known."""
        self.error = ""
        """Why they cannot be counted."""
        self._is_counting = False
        self._is_outdated = False
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self._update)
        engine.changed.connect(self._engine_changed)

    @property
    def limit(self) -> int | None:
        """The model's context in tokens, None without a model."""
        return None if self._engine.model is None else self._engine.model.max_context

    def set_session(self, session: ChatSession | None) -> None:
        """Follows another session, or none."""
        if session is self.session:
            return
        if self.session is not None:
            for signal in _signals(self.session):
                signal.disconnect(self.schedule)
            self.session.text_appended.disconnect(self._text_appended)
        self.session = session
        if session is not None:
            for signal in _signals(session):
                signal.connect(self.schedule)
            session.text_appended.connect(self._text_appended)
        self._set(None)
        self.schedule()

    def schedule(self, *_: object) -> None:
        """Looks again soon; many calls in a row make one look."""
        if self.session is not None and self._engine.is_ready:
            self._timer.start(COUNT_DELAY_MS)

    def _text_appended(self, *_: object) -> None:
        if not self._timer.isActive():
            self._timer.start(STREAMING_INTERVAL_MS)

    def _engine_changed(self) -> None:
        if self._engine.is_ready:
            self.schedule()
        self._set(None)

    def _update(self) -> None:
        session = self.session
        if session is None or not session.is_loaded or not self._engine.is_ready:
            return
        last = session.messages[-1] if len(session.messages) else None
        if last is not None and last.run is not None and last.is_streaming:
            if last.run.prompt_tokens is not None:
                self._set(last.run.prompt_tokens + (last.run.output_tokens or 0))
        elif self._is_counting:
            self._is_outdated = True
        else:
            self._count(session)

    def _count(self, session: ChatSession) -> None:
        def counted(count: int | None, error: str | None) -> None:
            self._is_counting = False
            if session is self.session and self._engine.is_ready:
                self._set(count, error or "")
            if self._is_outdated or session is not self.session:
                self.schedule()

        self._is_counting, self._is_outdated = True, False
        self._engine.count_tokens(session.messages_for_model(session.draft), counted)

    def _set(self, used: int | None, error: str = "") -> None:
        self.used, self.error = used, error
        self.changed.emit()


def _signals(session: ChatSession) -> tuple:
    """What tells that the next prompt may take another number of tokens."""
    return (
        session.path_changed,
        session.message_appended,
        session.message_changed,
        session.generating_changed,
        session.settings_changed,
    )
