"""The left panel: search, all chats by day, what can be done with one, import."""

from __future__ import annotations

import datetime
from collections.abc import Callable

from PySide6.QtCore import QEvent, QObject, QPoint, Qt, QTimer, Signal
from PySide6.QtGui import QAction, QKeyEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLineEdit, QMenu, QVBoxLayout

from app.panels.dialogs import ask_text
from app.panels.sidebar_list import ChatRow, HeaderRow, ResultRow, Row, SidebarList, grouped_rows
from app.panels.widgets import IconButton, label
from app.state.records import ConversationSummary, SearchResult
from app.state.session import ChatSession
from app.state.workspace import Workspace
from app.theme import SPACE_S, ThemeManager, icon

SEARCH_DELAY_MS = 150
MIDNIGHT_CHECK_MS = 60_000


class Sidebar(QFrame):
    """Lists the workspace's conversations. `owner_colour` gives an open chat's colour in the block map."""

    new_requested = Signal()
    import_requested = Signal()
    settings_requested = Signal()
    export_requested = Signal(str, str)
    """Conversation id and "markdown" or "json"."""
    result_opened = Signal(str, object)
    """Conversation and message id of a search result that was gone to."""

    def __init__(self, workspace: Workspace, themes: ThemeManager, owner_colour: Callable[[str], str]) -> None:
        super().__init__()
        self._workspace, self._themes, self._owner_colour = workspace, themes, owner_colour
        self.setObjectName("sidebar")
        self.setMinimumWidth(190)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, SPACE_S, 0, 0)
        column.setSpacing(SPACE_S)

        self.search = QLineEdit()
        self.search.setObjectName("searchField")
        self.search.setPlaceholderText("Search all chats")
        self.search.setAccessibleName("Search all chats")
        self.search.setClearButtonEnabled(False)
        self._search_icon = QAction("Search", self)
        self.search.addAction(self._search_icon, QLineEdit.ActionPosition.LeadingPosition)
        self.search.textChanged.connect(self._search_typed)
        self.search.installEventFilter(self)
        new = IconButton("plus", "New chat", themes, size=32, colour="text")
        new.clicked.connect(self.new_requested)
        top = QHBoxLayout()
        top.setContentsMargins(SPACE_S, 0, SPACE_S, 0)
        top.setSpacing(SPACE_S // 2)
        top.addWidget(self.search, 1)
        top.addWidget(new)
        column.addLayout(top)

        self.list = SidebarList(themes)
        self.list.chat_activated.connect(workspace.open)
        self.list.result_activated.connect(self._open_result)
        self.list.menu_requested.connect(self._show_menu)
        self.list.delete_requested.connect(workspace.delete)
        self.list.rename_requested.connect(self.rename)
        self.empty = label("", "small", wrap=True)
        self.empty.setAlignment(Qt.AlignmentFlag.AlignHCenter | Qt.AlignmentFlag.AlignTop)
        self.empty.setContentsMargins(SPACE_S * 2, SPACE_S * 3, SPACE_S * 2, 0)
        column.addWidget(self.empty)
        column.addWidget(self.list, 1)

        footer = QFrame()
        footer.setObjectName("footer")
        row = QHBoxLayout(footer)
        row.setContentsMargins(SPACE_S, SPACE_S - 2, SPACE_S, SPACE_S - 2)
        row.setSpacing(SPACE_S // 2)
        settings = IconButton("settings", "Settings", themes, size=30)
        settings.clicked.connect(self.settings_requested)
        importing = IconButton("import", "Import a chat", themes, size=30)
        importing.clicked.connect(self.import_requested)
        self.count = label(role="faint")
        row.addWidget(settings)
        row.addWidget(importing)
        row.addStretch(1)
        row.addWidget(self.count)
        row.addSpacing(SPACE_S // 2)
        column.addWidget(footer)

        self._watched: dict[str, ChatSession] = {}
        self._results: list[SearchResult] | None = None
        self._search_timer = QTimer(self)
        self._search_timer.setSingleShot(True)
        self._search_timer.timeout.connect(self._search_now)
        self._day_timer = QTimer(self)
        self._day_timer.timeout.connect(self.refresh)
        self._day_timer.start(MIDNIGHT_CHECK_MS)
        workspace.conversations_changed.connect(self.refresh)
        workspace.current_changed.connect(self.refresh)
        workspace.session_opened.connect(self._watch)
        workspace.session_closed.connect(self._session_closed)
        workspace.search_finished.connect(self._search_finished)
        themes.changed.connect(self._draw_icon)
        for session in workspace.sessions:
            self._watch(session)
        self._draw_icon()
        self.refresh()

    def focus_search(self) -> None:
        self.search.setFocus()
        self.search.selectAll()

    def refresh(self, *_: object) -> None:
        """Shows the conversations, or the results while something is searched for."""
        conversations = list(self._workspace.conversations)
        # Until the database has answered, nobody shall think that the chats are gone.
        is_known = self._workspace.is_restored
        self.count.setText(f"{len(conversations):,} chat{'' if len(conversations) == 1 else 's'}" if is_known else "")
        if self._results is not None:
            rows: list[Row] = [ResultRow(result) for result in self._results]
            if rows:
                number = f"{len(rows)} place{'' if len(rows) == 1 else 's'} found"
                rows.insert(0, HeaderRow(number))
            self.empty.setText("Nothing found. Try fewer or shorter words.")
        else:
            rows = grouped_rows(conversations, datetime.datetime.now(), self._chat_row)
            self.empty.setText("Your chats will be listed here." if is_known else "")
        self.list.set_rows(rows)
        self.empty.setVisible(not rows)
        self.list.setVisible(bool(rows))
        if not rows:
            self.layout().setStretchFactor(self.empty, 1)  # type: ignore[union-attr]

    def rename(self, conversation_id: str) -> None:
        """Asks for another title."""
        title = next((c.title for c in self._workspace.conversations if c.id == conversation_id), "")
        text = ask_text(self, "Rename chat", "Title", title)
        if text:
            self._workspace.rename(conversation_id, text)

    def _chat_row(self, conversation: ConversationSummary) -> ChatRow:
        session = next((s for s in self._workspace.sessions if s.conversation_id == conversation.id), None)
        current = self._workspace.current
        return ChatRow(
            conversation.id,
            conversation.title,
            is_open=session is not None,
            is_current=current is not None and current.conversation_id == conversation.id,
            is_generating=session is not None and session.is_generating,
            colour=self._owner_colour(conversation.id) if session is not None else "",
        )

    def _watch(self, session: ChatSession) -> None:
        session.generating_changed.connect(self.refresh)
        session.title_changed.connect(self.refresh)
        self._watched[session.conversation_id] = session
        self.refresh()

    def _session_closed(self, conversation_id: str) -> None:
        session = self._watched.pop(conversation_id, None)
        if session is not None:
            session.generating_changed.disconnect(self.refresh)
            session.title_changed.disconnect(self.refresh)
        self.refresh()

    # ------------------------------------------------------------ search

    def _search_typed(self, text: str) -> None:
        if text.strip():
            self._search_timer.start(SEARCH_DELAY_MS)
        else:
            self._search_timer.stop()
            self._results = None
            self.refresh()

    def _search_now(self) -> None:
        self._workspace.search(self.search.text())

    def _search_finished(self, query: str, results: list[SearchResult]) -> None:
        if query.strip() and query.strip() == self.search.text().strip():
            self._results = results
            self.refresh()

    def _open_result(self, result: SearchResult) -> None:
        self._workspace.open(result.conversation_id, result.message_id)
        if result.message_id is not None:
            self.result_opened.emit(result.conversation_id, result.message_id)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self.search and isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
            if event.key() == Qt.Key.Key_Escape and self.search.text():
                self.search.clear()
                return True
            if event.key() == Qt.Key.Key_Down and self.list.rows:
                self.list.setFocus()
                first = next(i for i, row in enumerate(self.list.rows) if not isinstance(row, HeaderRow))
                self.list.setCurrentIndex(self.list.model().index(first, 0))
                return True
        return super().eventFilter(watched, event)

    # ------------------------------------------------------------ menu

    def _show_menu(self, conversation_id: str, place: QPoint) -> None:
        theme = self._themes.theme
        menu = QMenu(self)
        menu.addAction(icon("chat", theme.text_muted), "Open", lambda: self._workspace.open(conversation_id))
        menu.addAction(icon("edit", theme.text_muted), "Rename…", lambda: self.rename(conversation_id))
        menu.addSeparator()
        export = icon("export", theme.text_muted)
        menu.addAction(export, "Export as Markdown…", lambda: self.export_requested.emit(conversation_id, "markdown"))
        menu.addAction(export, "Export as JSON…", lambda: self.export_requested.emit(conversation_id, "json"))
        menu.addSeparator()
        menu.addAction(icon("trash", theme.danger), "Delete", lambda: self._workspace.delete(conversation_id))
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(place)

    def _draw_icon(self, *_: object) -> None:
        self._search_icon.setIcon(icon("search", self._themes.theme.text_faint))
