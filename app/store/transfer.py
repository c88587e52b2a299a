"""Conversations to a JSON file and back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from sqlite_utils import Database

from app.state.prompt import clean_text
from app.state.records import Conversation, ConversationRecord, MessageRecord, RunRecord
from app.store import conversations
from app.store.errors import ImportRefusedError
from engine.protocol import FinishReason, SamplingParams

FORMAT = "kvasir-conversations"
VERSION = 1
MAX_IMPORT_BYTES = 512 * 1024 * 1024

Count = Annotated[int, Meta(ge=0, le=2**53)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Milliseconds = Annotated[float, Meta(ge=0)]
Timestamp = Annotated[float, Meta(ge=0, le=253_402_300_799)]  # to the end of the year 9999


class _Exported(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class ExportedRun(_Exported, frozen=True):
    status: Literal["finished", "interrupted", "failed"]
    model: str
    params: SamplingParams
    started_at: Timestamp
    seed: Seed | None = None
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    output_tokens: Count | None = None
    dropped_messages: Count = 0
    preemptions: Count = 0
    drafted_tokens: Count = 0
    accepted_tokens: Count = 0
    queue_ms: Milliseconds | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | Annotated[int, Meta(ge=0, le=2**53)] | None = None
    error: str | None = None
    finished_at: Timestamp | None = None


class ExportedMessage(_Exported, frozen=True):
    """`id` and `parent_id` mean something within their conversation only."""

    id: int
    parent_id: int | None
    role: Literal["user", "assistant"]
    text: str
    created_at: Timestamp
    run: ExportedRun | None = None


class ExportedConversation(_Exported, frozen=True):
    title: Annotated[str, Meta(min_length=1)]
    system_prompt: str
    params: SamplingParams
    created_at: Timestamp
    updated_at: Timestamp
    messages: list[ExportedMessage]
    title_is_auto: bool = False
    preset_name: str = ""
    active_leaf_id: int | None = None


class ExportFile(_Exported, frozen=True):
    format: Literal["kvasir-conversations"]
    version: Literal[1]
    exported_at: Timestamp
    conversations: list[ExportedConversation]


class _Heading(msgspec.Struct):
    format: str = ""
    version: int = 0


def encode_export(exported: Iterable[Conversation]) -> bytes:
    """The conversations with all their branches and runs, as indented JSON."""
    file = ExportFile(
        format=FORMAT,
        version=VERSION,
        exported_at=time.time(),
        conversations=[_exported_conversation(conversation) for conversation in exported],
    )
    return msgspec.json.format(msgspec.json.encode(file), indent=1)


def read_export(path: Path, new_id: Callable[[], int]) -> list[Conversation]:
    """The conversations of an exported file under new ids, checked in every respect; nothing is stored yet.

    Raises `ImportRefusedError` with the place and the fault.
    """
    try:
        if path.stat().st_size > MAX_IMPORT_BYTES:
            raise ImportRefusedError(f"{path.name} is larger than {MAX_IMPORT_BYTES >> 20} MiB.")
        data = path.read_bytes()
    except OSError as error:
        raise ImportRefusedError(f"{path} cannot be read: {error.strerror or error}.") from error
    return [_imported(path, conversation, new_id) for conversation in _decode(path, data).conversations]


def insert_imported(db: Database, imported: Iterable[Conversation]) -> None:
    """Stores conversations that `read_export` made; inside one transaction, so all or none."""
    for conversation in imported:
        record = conversation.record
        conversations.insert_conversation(db, record)
        conversations.add_messages(db, record.id, conversation.messages, record.updated_at)
        conversations.set_active_leaf(db, record.id, record.active_leaf_id, record.updated_at)


def _decode(path: Path, data: bytes) -> ExportFile:
    try:
        heading = msgspec.json.decode(data, type=_Heading)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ImportRefusedError(f"{path.name} is not a Kvasir export: {error}.") from error
    if heading.format != FORMAT:
        raise ImportRefusedError(f"{path.name} is not a Kvasir export: its format is {heading.format!r}.")
    if heading.version > VERSION:
        raise ImportRefusedError(
            f"{path.name} was exported by a newer Kvasir (format version {heading.version}, this one reads {VERSION}). "
            "Update Kvasir to import it."
        )
    try:
        return msgspec.json.decode(data, type=ExportFile)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ImportRefusedError(f"{path.name} is not a valid Kvasir export: {error}.") from error


def _imported(path: Path, exported: ExportedConversation, new_id: Callable[[], int]) -> Conversation:
    def refuse(fault: str) -> ImportRefusedError:
        return ImportRefusedError(f"{path.name} is not a valid Kvasir export: in “{exported.title}”, {fault}.")

    by_id = {message.id: message for message in exported.messages}
    if len(by_id) != len(exported.messages):
        raise refuse("two messages have the same id")
    children: dict[int | None, list[ExportedMessage]] = {}
    for message in exported.messages:
        if message.parent_id is not None and message.parent_id not in by_id:
            raise refuse(f"message {message.id} answers message {message.parent_id}, which is not there")
        children.setdefault(message.parent_id, []).append(message)
    if exported.active_leaf_id is not None and exported.active_leaf_id not in by_id:
        raise refuse(f"the active message {exported.active_leaf_id} is not there")

    # New ids are given in an order in which every parent comes first and siblings keep their places.
    ids: dict[int, int] = {}
    messages = []
    generation = children.get(None, [])
    while generation:
        for message in generation:
            ids[message.id] = new_id()
            messages.append(_imported_message(message, ids, new_id))
        generation = [child for message in generation for child in children.get(message.id, [])]
    if len(ids) != len(by_id):
        raise refuse("messages answer each other in a circle")
    record = ConversationRecord(
        id=uuid.uuid4().hex,
        title=clean_text(exported.title),
        title_is_auto=exported.title_is_auto,
        system_prompt=clean_text(exported.system_prompt),
        params=exported.params,
        preset_name=exported.preset_name,
        draft="",
        active_leaf_id=None if exported.active_leaf_id is None else ids[exported.active_leaf_id],
        created_at=exported.created_at,
        updated_at=exported.updated_at,
    )
    return Conversation(record, messages, {})


def _imported_message(message: ExportedMessage, ids: dict[int, int], new_id: Callable[[], int]) -> MessageRecord:
    run = None
    if message.run is not None:
        fields = {name: getattr(message.run, name) for name in ExportedRun.__struct_fields__}
        run = RunRecord(id=new_id(), message_id=ids[message.id], **fields)
    parent_id = None if message.parent_id is None else ids[message.parent_id]
    return MessageRecord(
        ids[message.id], parent_id, message.role, clean_text(message.text), message.created_at, True, run
    )


def _exported_conversation(conversation: Conversation) -> ExportedConversation:
    record = conversation.record
    return ExportedConversation(
        title=record.title,
        title_is_auto=record.title_is_auto,
        system_prompt=record.system_prompt,
        params=record.params,
        preset_name=record.preset_name,
        active_leaf_id=record.active_leaf_id,
        created_at=record.created_at,
        updated_at=record.updated_at,
        messages=[
            ExportedMessage(
                id=message.id,
                parent_id=message.parent_id,
                role=message.role,
                text=message.text,
                created_at=message.created_at,
                run=None if message.run is None else _exported_run(message.run),
            )
            for message in conversation.messages
        ],
    )


def _exported_run(run: RunRecord) -> ExportedRun:
    if run.is_open:
        run = msgspec.structs.replace(
            run, status="interrupted", error="The chat was exported while this answer was being written."
        )
    return ExportedRun(**{name: getattr(run, name) for name in ExportedRun.__struct_fields__})
