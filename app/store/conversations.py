"""Rows of conversations, messages, branches and runs, to records and back. Every function takes the database."""

from __future__ import annotations

import functools
import logging
import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlite_utils import Database

from app.state.records import (
    Conversation,
    ConversationRecord,
    ConversationSummary,
    MessageRecord,
    RunRecord,
)
from engine.protocol import SamplingParams, TokenLogprob

logger = logging.getLogger(__name__)

INTERRUPTED_ERROR = "Kvasir was closed while this answer was being written."

_CONVERSATION_COLUMNS = (
    "id, title, title_is_auto, system_prompt, params, preset_name, draft, active_leaf_id, created_at, updated_at"
)
_RUN_FIELDS = RunRecord.__struct_fields__
_RUN_COLUMNS = ", ".join(_RUN_FIELDS)


def insert_conversation(db: Database, record: ConversationRecord) -> None:
    values = (
        record.id,
        record.title,
        record.title_is_auto,
        record.system_prompt,
        encode_params(record.params),
        record.preset_name,
        record.draft,
        record.active_leaf_id,
        record.created_at,
        record.updated_at,
    )
    db.execute(f"INSERT INTO conversations ({_CONVERSATION_COLUMNS}) VALUES ({_marks(len(values))})", values)


def save_settings(db: Database, record: ConversationRecord) -> None:
    """Writes title, system prompt, parameters, preset and draft; leaves the messages alone."""
    db.execute(
        "UPDATE conversations SET title = ?, title_is_auto = ?, system_prompt = ?, params = ?, preset_name = ?, "
        "draft = ? WHERE id = ?",
        (
            record.title,
            record.title_is_auto,
            record.system_prompt,
            encode_params(record.params),
            record.preset_name,
            record.draft,
            record.id,
        ),
    )


def rename(db: Database, conversation_id: str, title: str) -> None:
    """Gives a conversation a title of a person's choice."""
    db.execute("UPDATE conversations SET title = ?, title_is_auto = 0 WHERE id = ?", (title, conversation_id))


def add_messages(db: Database, conversation_id: str, messages: Sequence[MessageRecord], updated_at: float) -> None:
    """Adds messages with their runs; parents come before children or are there already."""
    db.conn.executemany(
        "INSERT INTO messages (id, conversation_id, parent_id, role, text, complete, created_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(m.id, conversation_id, m.parent_id, m.role, m.text, m.complete, m.created_at) for m in messages],
    )
    db.conn.executemany(
        f"INSERT INTO runs ({_RUN_COLUMNS}) VALUES ({_marks(len(_RUN_FIELDS))})",
        [_run_row(m.run) for m in messages if m.run is not None],
    )
    db.execute("UPDATE conversations SET updated_at = ? WHERE id = ?", (updated_at, conversation_id))


def set_active_leaf(db: Database, conversation_id: str, leaf_id: int | None, visited_at: float) -> None:
    """Makes the branch that ends in `leaf_id` the visible one."""
    db.execute("UPDATE conversations SET active_leaf_id = ? WHERE id = ?", (leaf_id, conversation_id))
    if leaf_id is None:
        return
    db.execute(
        "INSERT INTO branches (leaf_id, conversation_id, visited_at) VALUES (?, ?, ?) "
        "ON CONFLICT (leaf_id) DO UPDATE SET visited_at = excluded.visited_at",
        (leaf_id, conversation_id, visited_at),
    )
    # A branch that grew on is named by its new end; it grows by a question and its answer at a time.
    parent = "SELECT parent_id FROM messages WHERE id = ?"
    db.execute(
        f"DELETE FROM branches WHERE leaf_id IN (({parent}), (SELECT parent_id FROM messages WHERE id = ({parent})))",
        (leaf_id, leaf_id),
    )


def save_answer(
    db: Database, message_id: int, text: str, *, complete: bool, run: RunRecord, traces: Sequence[TokenLogprob] = ()
) -> None:
    """Writes an answer as far as it has come. `traces` are the log-probabilities of its latest tokens."""
    db.execute("UPDATE messages SET text = ?, complete = ? WHERE id = ?", (text, complete, message_id))
    assignments = ", ".join(f"{name} = ?" for name in _RUN_FIELDS)
    db.execute(f"UPDATE runs SET {assignments} WHERE id = ?", (*_run_row(run), run.id))
    if not traces:
        return
    count = db.execute("SELECT count(*) FROM token_traces WHERE run_id = ?", (run.id,)).fetchone()[0]
    db.conn.executemany(
        "INSERT INTO token_traces (run_id, position, token_id, text, logprob, alternatives) VALUES (?, ?, ?, ?, ?, ?)",
        [
            (run.id, position, t.token_id, t.text, t.logprob, msgspec.json.encode(t.top).decode())
            for position, t in enumerate(traces, start=count)
        ],
    )


def mark_messages_deleted(db: Database, message_ids: Iterable[int], deleted_at: float | None) -> None:
    """Hides messages, or shows them again with None. The ids are those of a whole subtree."""
    db.conn.executemany("UPDATE messages SET deleted_at = ? WHERE id = ?", [(deleted_at, i) for i in message_ids])


def mark_conversation_deleted(db: Database, conversation_id: str, deleted_at: float | None) -> None:
    db.execute("UPDATE conversations SET deleted_at = ? WHERE id = ?", (deleted_at, conversation_id))


def purge_deleted(db: Database) -> None:
    """Removes for good what was marked deleted."""
    db.execute("DELETE FROM conversations WHERE deleted_at IS NOT NULL")
    db.execute("DELETE FROM messages WHERE deleted_at IS NOT NULL")


def delete_conversation(db: Database, conversation_id: str) -> None:
    db.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))


def repair_open_runs(db: Database) -> int:
    """Marks what a killed process left being written as interrupted. Returns how many runs there were."""
    open_runs = "SELECT message_id FROM runs WHERE status IN ('waiting', 'streaming')"
    db.execute(f"UPDATE messages SET complete = 1 WHERE complete = 0 OR id IN ({open_runs})")
    return db.execute(
        "UPDATE runs SET status = 'interrupted', error = ?, finished_at = ? WHERE status IN ('waiting', 'streaming')",
        (INTERRUPTED_ERROR, time.time()),
    ).rowcount


def list_conversations(db: Database) -> list[ConversationSummary]:
    """All conversations that are not deleted, newest first."""
    rows = db.execute(
        "SELECT c.id, c.title, c.updated_at, (SELECT count(*) FROM messages m WHERE m.conversation_id = c.id) "
        "FROM conversations c WHERE c.deleted_at IS NULL ORDER BY c.updated_at DESC"
    )
    return [ConversationSummary(*row) for row in rows]


def load_conversation(db: Database, conversation_id: str) -> Conversation | None:
    """One conversation with its whole tree, oldest message first; None if there is none or it is deleted."""
    row = db.execute(
        f"SELECT {_CONVERSATION_COLUMNS} FROM conversations WHERE id = ? AND deleted_at IS NULL", (conversation_id,)
    ).fetchone()
    if row is None:
        return None
    runs = {run.message_id: run for run in map(_run_record, _runs_of(db, conversation_id))}
    messages = [
        MessageRecord(id_, parent_id, role, text, created_at, bool(complete), runs.get(id_))
        for id_, parent_id, role, text, complete, created_at in db.execute(
            "SELECT id, parent_id, role, text, complete, created_at FROM messages "
            "WHERE conversation_id = ? AND deleted_at IS NULL ORDER BY id",
            (conversation_id,),
        )
    ]
    visited = dict(
        db.execute("SELECT leaf_id, visited_at FROM branches WHERE conversation_id = ?", (conversation_id,)).fetchall()
    )
    return Conversation(_conversation_record(row), messages, visited)


def encode_params(params: SamplingParams) -> str:
    return msgspec.json.encode(params).decode()


@functools.lru_cache(maxsize=1024)
def decode_params(stored: str) -> SamplingParams:
    """The stored parameters; the defaults, with a warning in the log, where they are not valid any more."""
    try:
        return msgspec.json.decode(stored, type=SamplingParams)
    except (msgspec.DecodeError, ValueError) as error:
        logger.warning("stored sampling parameters are replaced by the defaults: %s", error)
        return SamplingParams()


def _runs_of(db: Database, conversation_id: str) -> sqlite3.Cursor:
    columns = ", ".join(f"r.{name}" for name in _RUN_FIELDS)
    return db.execute(
        f"SELECT {columns} FROM messages m JOIN runs r ON r.message_id = m.id WHERE m.conversation_id = ?",
        (conversation_id,),
    )


def _conversation_record(row: tuple[Any, ...]) -> ConversationRecord:
    id_, title, title_is_auto, system_prompt, params, *rest = row
    return ConversationRecord(id_, title, bool(title_is_auto), system_prompt, decode_params(params), *rest)


def _run_record(row: tuple[Any, ...]) -> RunRecord:
    values = list(row)
    values[_RUN_FIELDS.index("params")] = decode_params(values[_RUN_FIELDS.index("params")])
    stop_reason = values[_RUN_FIELDS.index("stop_reason")]
    if stop_reason is not None:
        values[_RUN_FIELDS.index("stop_reason")] = msgspec.json.decode(stop_reason)
    return RunRecord(*values)


def _run_row(run: RunRecord) -> tuple[Any, ...]:
    values = [getattr(run, name) for name in _RUN_FIELDS]
    values[_RUN_FIELDS.index("params")] = encode_params(run.params)
    if run.stop_reason is not None:  # JSON keeps a token id apart from a stop string of digits
        values[_RUN_FIELDS.index("stop_reason")] = msgspec.json.encode(run.stop_reason).decode()
    return tuple(values)


def _marks(count: int) -> str:
    return ", ".join("?" * count)
