"""One conversation, open in a tab."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
from PySide6.QtCore import QObject, Signal
from sqlite_utils import Database

from app.bridge import Bridge, RequestEvent
from app.state.conversation_tree import ConversationTree, Node, VisibleMessages
from app.state.delivery import Delivery
from app.state.engine_state import EngineState
from app.state.generation import Generation
from app.state.prompt import build_messages, clean_params, clean_text, title_from_question
from app.state.records import Conversation, ConversationRecord, MessageView, Preset, RunRecord
from app.store import Store, conversations
from engine.client import EngineUnavailable
from engine.protocol import Accepted, Cancel, ChatMessage, Delta, Generate, SamplingParams

Write = Callable[[Database], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Services:
    """What every session works with."""

    store: Store
    bridge: Bridge
    engine: EngineState
    delivery: Delivery


class ChatSession(QObject):
    """Asks and keeps the answers of one conversation, as a tree of which one path is visible.

    `message_*` and `text_appended` carry message ids and speak of visible messages only. `path_changed` says that
    `messages` is another list altogether; `message_appended` that it grew by that one at its end.
    """

    path_changed = Signal()
    message_appended = Signal(int)
    message_changed = Signal(int)
    text_appended = Signal(int, str)
    generating_changed = Signal(bool)
    title_changed = Signal(str)
    settings_changed = Signal()
    error_occurred = Signal(str)
    activity = Signal()
    """Something was asked or answered: the conversation moves to the top of lists."""
    branch_deleted = Signal(int)
    """That many messages were deleted, and `undo_delete_branch` would bring them back."""

    def __init__(self, services: Services, record: ConversationRecord, *, is_loaded: bool = True) -> None:
        super().__init__()
        self._services = services
        self._record = record
        self._tree = ConversationTree()
        self._is_loaded = is_loaded
        self._when_loaded: list[Callable[[], object]] = []
        self._generation: Generation | None = None
        self._deleted: list[list[Node]] = []
        self._settings_unsaved = False

    # ------------------------------------------------------------ what it is

    @property
    def conversation_id(self) -> str:
        return self._record.id

    @property
    def record(self) -> ConversationRecord:
        return self._record

    @property
    def is_loaded(self) -> bool:
        """False until the messages have come from the database; `path_changed` tells."""
        return self._is_loaded

    @property
    def title(self) -> str:
        return self._record.title

    @property
    def params(self) -> SamplingParams:
        return self._record.params

    @property
    def system_prompt(self) -> str:
        return self._record.system_prompt

    @property
    def preset_name(self) -> str:
        """The preset in use, empty when parameters were changed by hand."""
        return self._record.preset_name

    @property
    def draft(self) -> str:
        """What is typed but not sent."""
        return self._record.draft

    @property
    def updated_at(self) -> float:
        return self._record.updated_at

    @property
    def is_generating(self) -> bool:
        return self._generation is not None

    @property
    def is_empty(self) -> bool:
        """Nothing was said, nothing typed, and no title or system prompt given to it."""
        is_blank = not (len(self._tree) or self._deleted or self.draft.strip() or self.system_prompt.strip())
        return self._is_loaded and is_blank and self._record.title_is_auto

    @property
    def num_messages(self) -> int:
        """Messages on all branches."""
        return len(self._tree)

    @property
    def messages(self) -> Sequence[MessageView]:
        """The visible path, oldest first; made on access, so an item read twice may differ."""
        return VisibleMessages(self._tree)

    def message(self, message_id: int) -> MessageView:
        """One message, visible or not. Raises `KeyError` for an unknown id."""
        return self._tree.view(self._tree.node(message_id))

    def messages_for_model(self, draft: str = "") -> list[ChatMessage]:
        """What the model would be asked if `draft` were sent now."""
        question = Node(0, self._tree.active_leaf, "user", draft, 0.0)
        return build_messages(self.system_prompt, [*self._tree.path, question])

    # ------------------------------------------------------------ asking

    def send(self, text: str) -> bool:
        """Asks `text` at the end of the visible path.

        Returns whether it was taken; if not, `error_occurred` says why. A blank text is not taken, silently.
        """
        text = clean_text(text)
        if not text.strip() or not self._may_generate():
            return False
        return self._ask(text, self._tree.active_leaf)

    def regenerate(self, message_id: int) -> bool:
        """Writes another answer, as a sibling, to the question that `message_id` answers or is."""
        if not self._may_generate():
            return False
        node = self._tree.node(message_id)
        question = node if node.role == "user" else node.parent
        if question is None:
            self.error_occurred.emit("There is no question before this answer that could be asked again.")
            return False
        self._answer(question, [])
        return True

    def edit_and_resend(self, message_id: int, text: str) -> bool:
        """Asks another question in the place of `message_id`; the old one stays as its sibling, with its answers."""
        text = clean_text(text)
        if not text.strip() or not self._may_generate():
            return False
        return self._ask(text, self._tree.node(message_id).parent)

    def stop(self) -> None:
        """Ends the answer being written and keeps what is there."""
        generation = self._generation
        if generation is None or generation.stop_requested:
            return
        generation.stop_requested = True
        if not generation.is_sent:
            generation.cancel()
            self._end_generation(generation)
            return
        try:
            self._services.bridge.send(Cancel(request_id=generation.request_id))
        except EngineUnavailable as error:
            self._services.bridge.unregister_request(generation.request_id)
            generation.interrupt(str(error))
            self._end_generation(generation)

    def interrupt(self, reason: str) -> None:
        """Ends the answer without waiting for the engine, as when the application closes."""
        generation = self._generation
        if generation is None:
            return
        self.stop()
        if self._generation is generation:
            self._services.bridge.unregister_request(generation.request_id)
            generation.interrupt(reason)
            self._end_generation(generation)

    # ------------------------------------------------------------ branches

    def switch_sibling(self, message_id: int, delta: int) -> None:
        """Shows the alternative `delta` places on, and below it what was visible last."""
        if self._tree.switch_sibling(message_id, delta):
            self._path_replaced()

    def show_message(self, message_id: int) -> bool:
        """Makes a message visible if it is not; returns False when there is none with this id (yet)."""
        if not self._is_loaded:
            self._when_loaded.append(functools.partial(self.show_message, message_id))
            return True
        if message_id not in self._tree:
            return False
        if not self._tree.is_visible(self._tree.node(message_id)) and self._tree.show(message_id):
            self._path_replaced()
        return True

    def delete_message_branch(self, message_id: int) -> None:
        """Deletes a message and everything below it, on all branches; `undo_delete_branch` brings them back."""
        removed = self._tree.remove(message_id)
        if self._generation is not None and any(node is self._generation.node for node in removed):
            self.stop()
        self._deleted.append(removed)
        self._mark_deleted(removed, time.time())
        self._path_replaced()
        self.branch_deleted.emit(len(removed))

    def undo_delete_branch(self) -> bool:
        """Brings the branch deleted last back; returns False if there is none."""
        while self._deleted:
            restored = self._deleted.pop()
            if self._tree.put_back(restored):
                self._mark_deleted(restored, None)
                self._path_replaced()
                return True
        return False

    # ------------------------------------------------------------ settings

    def rename(self, title: str) -> None:
        """Gives the conversation a title of a person's choice; a blank one changes nothing."""
        title = " ".join(clean_text(title).split())
        if not self._is_loaded:
            self._when_loaded.append(functools.partial(self.rename, title))
        elif title and title != self.title:
            self._set_title(title, is_auto=False)

    def set_params(self, params: SamplingParams) -> None:
        params = clean_params(params)
        if not self._is_loaded:
            self._when_loaded.append(functools.partial(self.set_params, params))
        elif params != self.params:
            self._change_settings(params=params, preset_name="")

    def set_system_prompt(self, text: str) -> None:
        text = clean_text(text)
        if not self._is_loaded:
            self._when_loaded.append(functools.partial(self.set_system_prompt, text))
        elif text != self.system_prompt:
            self._change_settings(system_prompt=text)

    def apply_preset(self, preset: Preset) -> None:
        """Takes over the preset's parameters, and its system prompt if it has one."""
        if not self._is_loaded:
            self._when_loaded.append(functools.partial(self.apply_preset, preset))
            return
        system_prompt = preset.system_prompt or self.system_prompt
        self._change_settings(params=clean_params(preset.params), system_prompt=system_prompt, preset_name=preset.name)

    def set_draft(self, text: str) -> None:
        """Keeps what is typed; no signal tells of it."""
        text = clean_text(text)
        if not self._is_loaded:
            self._when_loaded.append(functools.partial(self.set_draft, text))
        elif text != self.draft:
            self._record = replace(self._record, draft=text)
            self._settings_unsaved = True

    # ------------------------------------------------------------ for the workspace

    def set_conversation(self, conversation: Conversation) -> None:
        """Takes over what the database holds."""
        self._record = conversation.record
        # What the database shows as being written is written by nobody: this session would hold it.
        messages = [
            msgspec.structs.replace(message, complete=True, run=_interrupted(message.run))
            if message.run is not None and message.run.is_open
            else message
            for message in conversation.messages
        ]
        self._tree = ConversationTree.from_records(messages, conversation.record.active_leaf_id, conversation.visited)
        self._is_loaded = True
        self.title_changed.emit(self.title)
        self.settings_changed.emit()
        self.path_changed.emit()
        waiting, self._when_loaded = self._when_loaded, []
        for function in waiting:
            function()

    def snapshot(self) -> Conversation:
        """Everything as it is in memory now, saved or not."""
        return Conversation(self._record, [node.record() for node in self._tree.nodes()], dict(self._tree.visited))

    def take_unsaved(self) -> list[Write]:
        """What to run on the database to bring it up to date; each change is given out once."""
        writes: list[Write] = []
        if self._settings_unsaved:
            self._settings_unsaved = False
            record = self._record
            writes.append(lambda db: conversations.save_settings(db, record))
        if self._generation is not None and self._generation.is_sent:
            write = self._generation.take_unsaved()
            if write is not None:
                writes.append(write)
        return writes

    def report_storage_trouble(self, message: str) -> None:
        """Tells the person why a question that waits to be saved is not answered yet."""
        generation = self._generation
        if generation is not None and not generation.is_sent and not generation.delay_told:
            generation.delay_told = True
            self.error_occurred.emit(message)

    # ------------------------------------------------------------ inside

    def _may_generate(self) -> bool:
        reason = ""
        if not self._is_loaded:
            reason = "This chat is still being opened. Wait a moment and send again."
        elif self.is_generating:
            reason = "An answer is still being written. Stop it first."
        elif not self._services.engine.is_ready:
            reason = self._services.engine.unready_reason
        if reason:
            self.error_occurred.emit(reason)
        return not reason

    def _ask(self, text: str, parent: Node | None) -> bool:
        question = Node(self._services.store.new_id(), parent, "user", text, time.time())
        self._add(question)
        self._record = replace(self._record, draft="")
        if self._record.title_is_auto and (title := title_from_question(text)) and len(self._tree) == 1:
            self._set_title(title, is_auto=True)
        self._answer(question, [question])
        return True

    def _answer(self, question: Node, unsaved: list[Node]) -> None:
        """Adds an empty answer under `question`, commits it with `unsaved`, and only then asks the engine."""
        store, engine = self._services.store, self._services.engine
        assert engine.model is not None
        run_id = store.new_id()
        answer = Node(store.new_id(), question, "assistant", "", time.time())
        answer.run = RunRecord(run_id, answer.id, "waiting", engine.model.name, self.params, answer.created_at)
        self._add(answer)
        command = Generate(
            request_id=f"run-{run_id}",
            owner=self.conversation_id,
            params=self.params,
            messages=build_messages(self.system_prompt, self._tree.path),
        )
        self._generation = generation = Generation(answer, command)
        self._record = record = replace(self._record, updated_at=answer.created_at, active_leaf_id=answer.id)
        self._tree.visited[answer.id] = answer.created_at
        messages = [node.record() for node in [*unsaved, answer]]

        def commit(db: Database) -> None:
            conversations.add_messages(db, record.id, messages, record.updated_at)
            conversations.set_active_leaf(db, record.id, answer.id, record.updated_at)
            conversations.save_settings(db, record)

        saved = store.write(commit)
        self.generating_changed.emit(True)
        self.activity.emit()
        self._services.delivery.when_done(saved, lambda _, error: self._question_saved(generation, error))
        if store.trouble is not None:
            self.report_storage_trouble(str(store.trouble))

    def _question_saved(self, generation: Generation, error: BaseException | None) -> None:
        if self._generation is not generation:
            return  # stopped in the meantime
        if error is not None:
            self._fail(generation, f"The question could not be saved, so it was not sent: {error}")
            return
        self._services.bridge.register_request(
            generation.request_id, functools.partial(self._on_event, generation), self.conversation_id
        )
        generation.is_sent = True
        try:
            self._services.bridge.send(generation.command)
        except EngineUnavailable as unavailable:
            self._not_sent(generation, str(unavailable))
        except Exception as error:
            # Whatever it was, no engine will ever end this answer, and while it is open nothing else can be asked.
            _log.exception("the question could not be sent")
            self._not_sent(generation, f"The question could not be sent to the engine: {error}")

    def _on_event(self, generation: Generation, event: RequestEvent) -> None:
        node = generation.node
        if isinstance(event, Accepted):
            generation.accept(event)
            self._emit_changed(node)
        elif isinstance(event, Delta):
            if generation.mark_streaming():
                self._emit_changed(node)
            generation.append(event)
            if event.text and self._tree.is_visible(node):
                self.text_appended.emit(node.id, event.text)
        else:
            generation.finish(event)
            self._end_generation(generation)
            if event.finish_reason == "error":
                self.error_occurred.emit(generation.run.error or "")

    def _not_sent(self, generation: Generation, message: str) -> None:
        self._services.bridge.unregister_request(generation.request_id)
        self._fail(generation, message)

    def _fail(self, generation: Generation, message: str) -> None:
        generation.fail(message)
        self._end_generation(generation)
        self.error_occurred.emit(message)

    def _end_generation(self, generation: Generation) -> None:
        write = generation.take_unsaved()
        if write is not None:
            self._services.store.write(write)
        self._generation = None
        self._emit_changed(generation.node)
        self.generating_changed.emit(False)
        self.activity.emit()

    def _add(self, node: Node) -> None:
        if self._tree.add(node):
            self.message_appended.emit(node.id)
        else:
            self.path_changed.emit()

    def _path_replaced(self) -> None:
        now = time.time()
        leaf = self._tree.active_leaf
        leaf_id = None if leaf is None else leaf.id
        if leaf_id is not None:
            self._tree.visited[leaf_id] = now
        self._record = replace(self._record, active_leaf_id=leaf_id)
        conversation_id = self.conversation_id
        self._services.store.write(lambda db: conversations.set_active_leaf(db, conversation_id, leaf_id, now))
        self.path_changed.emit()

    def _mark_deleted(self, nodes: list[Node], deleted_at: float | None) -> None:
        ids = [node.id for node in nodes]
        self._services.store.write(lambda db: conversations.mark_messages_deleted(db, ids, deleted_at))

    def _set_title(self, title: str, *, is_auto: bool) -> None:
        self._record = replace(self._record, title=title, title_is_auto=is_auto)
        self._settings_unsaved = True
        self.title_changed.emit(title)

    def _change_settings(self, **changes: SamplingParams | str) -> None:
        self._record = replace(self._record, **changes)  # pyright: ignore[reportArgumentType]
        self._settings_unsaved = True
        self.settings_changed.emit()

    def _emit_changed(self, node: Node) -> None:
        if self._tree.is_visible(node):
            self.message_changed.emit(node.id)


def _interrupted(run: RunRecord) -> RunRecord:
    return msgspec.structs.replace(run, status="interrupted", error=conversations.INTERRUPTED_ERROR)
