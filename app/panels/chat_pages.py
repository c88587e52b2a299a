"""The middle of the window: tab strip, engine banner, and one chat page for each open chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QStackedWidget, QVBoxLayout

from app.panels.banner import EngineBanner
from app.panels.tabs import TabStrip
from app.state.context_usage import ContextUsage
from app.state.engine_state import EngineState
from app.state.session import ChatSession
from app.state.workspace import Workspace
from app.theme import ThemeManager

if TYPE_CHECKING:
    from app.chat.chat_page import ChatPage


class ChatPages(QFrame):
    """Keeps tabs and pages in step with the workspace. A page is made when its tab first comes to the front."""

    rename_requested = Signal(str)

    def __init__(
        self,
        workspace: Workspace,
        engine: EngineState,
        usage: ContextUsage,
        themes: ThemeManager,
        banner: EngineBanner,
        owner_colour: Callable[[str], str],
    ) -> None:
        super().__init__()
        self._workspace, self._engine, self._usage, self._themes = workspace, engine, usage, themes
        self._owner_colour = owner_colour
        self._pages: dict[str, ChatPage] = {}
        self._watched: dict[str, ChatSession] = {}
        self.setMinimumWidth(360)
        self.strip = TabStrip(themes)
        self.banner = banner
        self._stack = QStackedWidget()
        self._stack.setObjectName("pages")
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.strip)
        column.addWidget(banner)
        column.addWidget(self._stack, 1)
        self.strip.chosen.connect(workspace.set_current)
        self.strip.close_requested.connect(workspace.close)
        self.strip.new_requested.connect(workspace.new_session)
        self.strip.rename_requested.connect(self.rename_requested)
        self.strip.reordered.connect(self._reordered)
        workspace.session_opened.connect(self._session_opened)
        workspace.session_closed.connect(self._session_closed)
        workspace.current_changed.connect(self._current_changed)
        themes.changed.connect(self.refresh_dots)
        for session in workspace.sessions:
            self._session_opened(session)
        self._current_changed(workspace.current)

    @property
    def current_page(self) -> ChatPage | None:
        current = self._stack.currentWidget()
        return next((page for page in self._pages.values() if page is current), None)

    def page(self, conversation_id: str) -> ChatPage | None:
        """The page of an open chat, None if its tab was not in front yet."""
        return self._pages.get(conversation_id)

    def step(self, delta: int) -> None:
        """Goes to the tab `delta` places to the right, around the end."""
        ids = self.strip.ids
        if ids:
            self._workspace.set_current(ids[(self.strip.bar.currentIndex() + delta) % len(ids)])

    def go_to(self, index: int) -> None:
        """Goes to a tab by place, -1 being the last; nothing happens if there is none."""
        ids = self.strip.ids
        if -1 <= index < len(ids) and ids:
            self._workspace.set_current(ids[index])

    def refresh_dots(self, *_: object) -> None:
        """Gives each tab its colour in the block map and marks those that are answering."""
        for session in self._workspace.sessions:
            self._refresh_dot(session)

    def _refresh_dot(self, session: ChatSession) -> None:
        id_ = session.conversation_id
        if self.strip.index_of(id_) >= 0:
            self.strip.set_dot(id_, self._owner_colour(id_), pulsing=session.is_generating)

    def _session_opened(self, session: ChatSession) -> None:
        id_ = session.conversation_id
        self.strip.add(id_, session.title)
        place = [other.conversation_id for other in self._workspace.sessions].index(id_)
        self.strip.move(id_, place)
        # Slots that know no session, taken back when it closes: nothing here may keep a closed chat in memory.
        session.title_changed.connect(self._refresh_titles)
        session.generating_changed.connect(self.refresh_dots)
        self._watched[id_] = session
        self._refresh_dot(session)

    def _refresh_titles(self, *_: object) -> None:
        for session in self._workspace.sessions:
            if self.strip.index_of(session.conversation_id) >= 0:
                self.strip.set_title(session.conversation_id, session.title)

    def _session_closed(self, conversation_id: str) -> None:
        session = self._watched.pop(conversation_id, None)
        if session is not None:
            session.title_changed.disconnect(self._refresh_titles)
            session.generating_changed.disconnect(self.refresh_dots)
        self.strip.remove(conversation_id)
        page = self._pages.pop(conversation_id, None)
        if page is not None:
            self._stack.removeWidget(page)
            page.deleteLater()

    def _current_changed(self, session: ChatSession | None) -> None:
        if session is None:
            return
        id_ = session.conversation_id
        page = self._pages.get(id_)
        if page is None:
            # Not before the window is on screen, which needs none of it.
            from app.chat.chat_page import ChatPage

            page = ChatPage(session, self._themes, self._engine, self._usage)
            self._pages[id_] = page
            self._stack.addWidget(page)
        self._stack.setCurrentWidget(page)
        self.strip.choose(id_)
        page.focus_composer()

    def _reordered(self, ids: list[str]) -> None:
        for index, conversation_id in enumerate(ids):
            self._workspace.move(conversation_id, index)
