"""All conversations: which are open in tabs, which there are, and everything one does to them from outside."""

from __future__ import annotations

import functools
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from PySide6.QtCore import QObject, QTimer, Signal, Slot
from sqlite_utils import Database

from app.bridge import Bridge
from app.state.delivery import Delivery
from app.state.engine_state import EngineState
from app.state.files import ConversationFiles
from app.state.finder import Finder
from app.state.presets import PresetLibrary
from app.state.prompt import clean_text
from app.state.records import (
    NEW_CHAT_TITLE,
    Conversation,
    ConversationRecord,
    ConversationSummary,
    Preset,
)
from app.state.session import ChatSession, Services, Write
from app.store import Store, StoreError, conversations, presets
from engine.protocol import SamplingParams

FLUSH_INTERVAL_MS = 500  # a partial answer in the database is at most this old, plus one commit


class OpenTabs(msgspec.Struct, frozen=True):
    """Which conversations are open, left to right, as it is stored."""

    open: list[str] = []
    current: str | None = None


@dataclass(frozen=True)
class _Stored:
    tabs: OpenTabs
    summaries: list[ConversationSummary]
    presets: list[Preset]
    default_params: SamplingParams | None


@dataclass(frozen=True)
class _Undo:
    description: str
    conversation_id: str
    run: Callable[[], object]


class Workspace(QObject):
    """Opens, closes, deletes, finds and keeps conversations. Call `restore` once at the start, `shutdown` at the end.

    `undo_available` carries what `undo_delete` would bring back, empty for nothing. `storage_trouble` carries why
    nothing can be saved at the moment, empty when it is over. `search_finished` repeats the query, so that the
    answer to an older one can be told from it. `export_finished` carries the file's path, `import_finished` the
    ids of the new conversations.
    """

    session_opened = Signal(object)
    session_closed = Signal(str)
    current_changed = Signal(object)
    conversations_changed = Signal()
    presets_changed = Signal()
    undo_available = Signal(str)
    search_finished = Signal(str, list)
    export_finished = Signal(str)
    import_finished = Signal(list)
    storage_trouble = Signal(str)
    error_occurred = Signal(str)
    restored = Signal()

    def __init__(
        self,
        store: Store,
        bridge: Bridge,
        engine: EngineState,
        *,
        builtin_presets: Sequence[Preset] = (),
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._store = store
        self._bridge = bridge
        self._delivery = Delivery(self)
        self._services = Services(store, bridge, engine, self._delivery)
        self._files = ConversationFiles(store)
        self._finder = Finder(
            store,
            self._delivery,
            self.search_finished.emit,
            lambda error: self.error_occurred.emit(f"The search failed. {error}"),
        )
        self._presets = PresetLibrary(store, builtin_presets)
        self._sessions: list[ChatSession] = []
        # Closed or deleted, but with an answer or a write still on its way.
        self._parked: dict[str, ChatSession] = {}
        self._current: ChatSession | None = None
        self._summaries: dict[str, ConversationSummary] = {}
        self._undo: list[_Undo] = []
        self._stored_tabs = OpenTabs()
        self._is_restored = False
        self._is_flushing = False
        self._flush_timer = QTimer(self)
        self._flush_timer.setInterval(FLUSH_INTERVAL_MS)
        self._flush_timer.timeout.connect(self.flush)
        # Both are called on the database thread.
        store.on_trouble = lambda error: self._delivery.post(lambda: self._trouble_changed(error))
        store.on_lost_write = lambda error: self._delivery.post(lambda: self.error_occurred.emit(str(error)))

    # ------------------------------------------------------------ tabs

    @property
    def is_restored(self) -> bool:
        """Whether it is known which chats there are."""
        return self._is_restored

    @property
    def sessions(self) -> list[ChatSession]:
        """The open conversations, left to right."""
        return list(self._sessions)

    @property
    def current(self) -> ChatSession | None:
        return self._current

    def session(self, conversation_id: str) -> ChatSession | None:
        """The session of an open conversation."""
        return next((session for session in self._sessions if session.conversation_id == conversation_id), None)

    def new_session(self) -> ChatSession:
        """Opens an empty conversation with the default parameters and makes it current."""
        now = time.time()
        params = self._presets.default_params
        record = ConversationRecord(uuid.uuid4().hex, NEW_CHAT_TITLE, True, "", params, "", "", None, now, now)
        self._store.write(lambda db: conversations.insert_conversation(db, record))
        self._summaries[record.id] = ConversationSummary(record.id, record.title, now, 0)
        session = self._make_session(record, is_loaded=True)
        self._add_session(session)
        self.set_current(record.id)
        return session

    def open(self, conversation_id: str, message_id: int | None = None) -> ChatSession:
        """Opens a conversation, or goes to its tab, and shows the branch with `message_id` in it.

        The messages of one that was not open arrive a moment later, see `ChatSession.is_loaded`. Raises `KeyError`
        for an unknown conversation.
        """
        session = self.session(conversation_id) or self._open_tab(conversation_id)
        self.set_current(conversation_id)
        if message_id is not None:
            session.show_message(message_id)
        return session

    def close(self, conversation_id: str) -> None:
        """Closes a tab. An answer being written is stopped; an empty conversation leaves nothing behind."""
        session = self.session(conversation_id)
        if session is None:
            return
        if session.is_empty:
            del self._summaries[conversation_id]
            self._store.write(lambda db: conversations.delete_conversation(db, conversation_id))
        self._remove_session(session)
        self.conversations_changed.emit()

    def set_current(self, conversation_id: str | None) -> None:
        """Brings an open conversation to the front; its answers are drawn before those of others."""
        session = None if conversation_id is None else self.session(conversation_id)
        if session is not self._current:
            self._current = session
            self._bridge.set_visible("" if session is None else session.conversation_id)
            self.current_changed.emit(session)

    def move(self, conversation_id: str, index: int) -> None:
        """Puts a tab at another place in the order that is restored."""
        session = self.session(conversation_id)
        if session is not None:
            self._sessions.remove(session)
            self._sessions.insert(index, session)

    # ------------------------------------------------------------ conversations

    @property
    def conversations(self) -> list[ConversationSummary]:
        """All conversations, the one used last first, but for open ones that were neither used nor named yet."""
        # A closed one without messages was kept for its draft or system prompt: here one gets back to it.
        open_ids = {session.conversation_id for session in self._sessions}
        shown = [
            s for s in self._summaries.values() if s.num_messages or s.title != NEW_CHAT_TITLE or s.id not in open_ids
        ]
        return sorted(shown, key=lambda summary: summary.updated_at, reverse=True)

    def title(self, conversation_id: str) -> str:
        """A conversation's title, empty for an unknown one."""
        summary = self._summaries.get(conversation_id)
        return "" if summary is None else summary.title

    def rename(self, conversation_id: str, title: str) -> None:
        """Gives a conversation, open or not, another title; a blank one changes nothing."""
        session = self.session(conversation_id) or self._parked.get(conversation_id)
        summary = self._summaries.get(conversation_id)
        title = " ".join(clean_text(title).split())
        if session is not None:
            session.rename(title)
        elif summary is not None and title and title != summary.title:
            self._summaries[conversation_id] = replace(summary, title=title)
            self._store.write(lambda db: conversations.rename(db, conversation_id, title))
            self.conversations_changed.emit()

    def delete(self, conversation_id: str) -> None:
        """Deletes a conversation and closes its tab; `undo_delete` brings both back until the application ends."""
        summary = self._summaries.pop(conversation_id, None)
        if summary is None:
            return
        session = self.session(conversation_id)
        index = None if session is None else self._sessions.index(session)
        if session is not None:
            self._remove_session(session)
        now = time.time()
        self._store.write(lambda db: conversations.mark_conversation_deleted(db, conversation_id, now))
        bring_back = functools.partial(self._bring_back, summary, index)
        self._push_undo(_Undo(f"Deleted “{summary.title}”", conversation_id, bring_back))
        self.conversations_changed.emit()

    def undo_delete(self) -> None:
        """Brings back what was deleted last, a conversation or a branch of messages."""
        if self._undo:
            self._undo.pop().run()
            self._tell_undo()

    def search(self, text: str) -> None:
        """Finds all words of `text` in titles and messages; `search_finished` brings `SearchResult`s."""
        self._finder.search(text)

    # ------------------------------------------------------------ files

    def export_markdown(self, conversation_id: str, path: Path) -> None:
        """Writes the visible path of a conversation; then `export_finished`, or `error_occurred`."""
        snapshots = self._snapshots([conversation_id])
        self._watch_export(self._files.export_markdown(path, conversation_id, snapshots), path)

    def export_json(self, path: Path, conversation_ids: Sequence[str] | None = None) -> None:
        """Writes conversations (default: all) with all branches; then `export_finished`, or `error_occurred`."""
        ids = [s.id for s in self.conversations] if conversation_ids is None else list(conversation_ids)
        self._watch_export(self._files.export_json(path, ids, self._snapshots(ids)), path)

    def import_json(self, path: Path) -> None:
        """Adds the conversations of an exported file, all or none; then `import_finished`, or `error_occurred`."""

        def finished(summaries: list[ConversationSummary] | None, error: BaseException | None) -> None:
            if error is not None or summaries is None:
                self.error_occurred.emit(f"Nothing was imported. {error}")
                return
            self._summaries.update({summary.id: summary for summary in summaries})
            self.conversations_changed.emit()
            self.import_finished.emit([summary.id for summary in summaries])

        self._delivery.when_done(self._files.import_json(path), finished)

    # ------------------------------------------------------------ presets

    @property
    def presets(self) -> list[Preset]:
        """Built-in presets, then a person's own by name."""
        return self._presets.all

    def save_preset(self, name: str, session: ChatSession) -> None:
        """Keeps a session's parameters and system prompt under a name, which the session then uses.

        Raises `ValueError` for a blank name and for that of a built-in preset.
        """
        preset = self._presets.save(name, session.params, session.system_prompt)
        self.presets_changed.emit()
        session.apply_preset(preset)

    def delete_preset(self, name: str) -> None:
        """Removes one of a person's own presets; sessions that use it keep its values."""
        if self._presets.delete(name):
            self.presets_changed.emit()

    @property
    def default_params(self) -> SamplingParams:
        """What a new conversation starts with."""
        return self._presets.default_params

    def set_default_params(self, params: SamplingParams) -> None:
        self._presets.set_default_params(params)

    # ------------------------------------------------------------ life

    def restore(self) -> None:
        """Repairs what a crash left open and brings back tabs, conversations and presets; then `restored`."""
        self._store.write(conversations.repair_open_runs)
        self._store.write(conversations.purge_deleted)
        self._delivery.when_done(self._store.submit(_read_stored), self._take_over)
        self._flush_timer.start()

    @Slot()
    def flush(self) -> None:
        """Writes all that is not in the database yet, in one transaction."""
        if self._is_flushing:
            return  # the disk is slow or full: what has come since goes with a later turn
        writes = self._take_unsaved()
        if writes:
            self._is_flushing = True
            self._delivery.when_done(self._store.write_each(writes), self._flushed)
        elif self._parked and self._store.num_unsaved == 0:
            self._parked = {id_: session for id_, session in self._parked.items() if session.is_generating}

    def shutdown(self, timeout_s: float = 5.0) -> int:
        """Ends all answers as interrupted, writes everything, removes what was deleted, and closes the database.

        Blocks for at most about `timeout_s`. Returns how many writes could not be saved.
        """
        self._flush_timer.stop()
        for session in [*self._sessions, *self._parked.values()]:
            session.interrupt(conversations.INTERRUPTED_ERROR)
        writes = self._take_unsaved()
        if writes:
            self._store.write_each(writes)
        self._store.write(conversations.purge_deleted)
        self._files.close()
        return self._store.close(timeout_s)

    # ------------------------------------------------------------ inside

    def _take_over(self, stored: _Stored | None, error: BaseException | None) -> None:
        if stored is None:
            self.error_occurred.emit(f"The chats could not be read. {error}")
        else:
            self._summaries = {summary.id: summary for summary in stored.summaries} | self._summaries
            self._presets.restore(stored.presets, stored.default_params)
            self._stored_tabs = stored.tabs
            self._is_restored = True
            self._open_stored_tabs(stored.tabs)
        self.presets_changed.emit()
        self.conversations_changed.emit()
        self.restored.emit()

    def _open_stored_tabs(self, tabs: OpenTabs) -> None:
        wanted = [id_ for id_ in tabs.open if id_ in self._summaries and self.session(id_) is None]
        # The one in front is read first; all are shown in their order.
        loading = sorted(wanted, key=lambda id_: id_ != tabs.current)
        sessions = {id_: self._load(self._summaries[id_]) for id_ in loading}
        for id_ in wanted:
            self._add_session(sessions[id_])
        if self._current is None and wanted:
            self.set_current(tabs.current if tabs.current in sessions else wanted[-1])

    def _open_tab(self, conversation_id: str, index: int | None = None) -> ChatSession:
        session = self._parked.pop(conversation_id, None) or self._load(self._summaries[conversation_id])
        self._add_session(session, index)
        return session

    def _load(self, summary: ConversationSummary) -> ChatSession:
        at = summary.updated_at
        unknown = ConversationRecord(
            summary.id, summary.title, False, "", self._presets.default_params, "", "", None, at, at
        )
        session = self._make_session(unknown, is_loaded=False)

        def loaded(conversation: Conversation | None, error: BaseException | None) -> None:
            if conversation is not None:
                session.set_conversation(conversation)
                return
            self.error_occurred.emit(f"“{summary.title}” could not be opened. {error or 'It is not there any more.'}")
            self._remove_session(session)

        read = functools.partial(conversations.load_conversation, conversation_id=summary.id)
        self._delivery.when_done(self._store.submit(read), loaded)
        return session

    def _make_session(self, record: ConversationRecord, *, is_loaded: bool) -> ChatSession:
        session = ChatSession(self._services, record, is_loaded=is_loaded)
        # A connection that held the session would keep it, with all its messages, after its tab is closed.
        reference = weakref.ref(session)
        session.title_changed.connect(functools.partial(self._update_summary, reference))
        session.activity.connect(functools.partial(self._update_summary, reference))
        session.branch_deleted.connect(functools.partial(self._branch_deleted, reference))
        return session

    def _add_session(self, session: ChatSession, index: int | None = None) -> None:
        self._sessions.insert(len(self._sessions) if index is None else index, session)
        self.session_opened.emit(session)

    def _remove_session(self, session: ChatSession) -> None:
        if session not in self._sessions:
            return
        index = self._sessions.index(session)
        self._sessions.remove(session)
        session.stop()
        self._parked[session.conversation_id] = session
        kept = [undo for undo in self._undo if undo.conversation_id != session.conversation_id]
        if len(kept) < len(self._undo):
            self._undo = kept
            self._tell_undo()
        if session is self._current:
            neighbour = self._sessions[min(index, len(self._sessions) - 1)] if self._sessions else None
            self.set_current(None if neighbour is None else neighbour.conversation_id)
        self.session_closed.emit(session.conversation_id)

    def _bring_back(self, summary: ConversationSummary, index: int | None) -> None:
        self._store.write(lambda db: conversations.mark_conversation_deleted(db, summary.id, None))
        self._summaries[summary.id] = summary
        if index is not None:
            self._open_tab(summary.id, index)
            self.set_current(summary.id)
        self.conversations_changed.emit()

    def _branch_deleted(self, reference: weakref.ref[ChatSession], num_messages: int) -> None:
        session = reference()
        assert session is not None
        what = "1 message" if num_messages == 1 else f"{num_messages} messages"
        self._push_undo(_Undo(f"Deleted {what}", session.conversation_id, session.undo_delete_branch))

    def _push_undo(self, undo: _Undo) -> None:
        self._undo.append(undo)
        self._tell_undo()

    def _tell_undo(self) -> None:
        self.undo_available.emit(self._undo[-1].description if self._undo else "")

    def _update_summary(self, reference: weakref.ref[ChatSession], *_: object) -> None:
        session = reference()
        if session is None or session.conversation_id not in self._summaries:
            return  # deleted
        summary = ConversationSummary(session.conversation_id, session.title, session.updated_at, session.num_messages)
        if summary != self._summaries[session.conversation_id]:
            self._summaries[session.conversation_id] = summary
            self.conversations_changed.emit()

    def _snapshots(self, conversation_ids: Iterable[str]) -> dict[str, Conversation]:
        live = {s.conversation_id: s for s in [*self._parked.values(), *self._sessions] if s.is_loaded}
        return {id_: live[id_].snapshot() for id_ in conversation_ids if id_ in live}

    def _watch_export(self, future: Future[None], path: Path) -> None:
        def finished(_: None, error: BaseException | None) -> None:
            if error is not None:
                self.error_occurred.emit(f"The export failed. {error}")
            else:
                self.export_finished.emit(str(path))

        self._delivery.when_done(future, finished)

    def _take_unsaved(self) -> list[Write]:
        writes = [write for session in [*self._sessions, *self._parked.values()] for write in session.take_unsaved()]
        current = None if self._current is None else self._current.conversation_id
        tabs = OpenTabs([session.conversation_id for session in self._sessions], current)
        # Before the stored tabs were read, the few that are open say nothing about them.
        if self._is_restored and tabs != self._stored_tabs:
            self._stored_tabs = tabs
            writes.append(lambda db: presets.set_value(db, "open_tabs", tabs))
        return writes

    def _flushed(self, _: None, error: BaseException | None) -> None:
        self._is_flushing = False

    def _trouble_changed(self, error: StoreError | None) -> None:
        message = "" if error is None else str(error)
        self.storage_trouble.emit(message)
        if message:
            for session in self._sessions:
                session.report_storage_trouble(message)


def _read_stored(db: Database) -> _Stored:
    return _Stored(
        presets.get_value(db, "open_tabs", OpenTabs) or OpenTabs(),
        conversations.list_conversations(db),
        presets.list_presets(db),
        presets.get_value(db, "default_params", SamplingParams),
    )
