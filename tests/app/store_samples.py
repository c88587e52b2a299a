"""Conversations to put into a store."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from sqlite_utils import Database

from app.state.records import ConversationRecord, MessageRecord, RunRecord, SearchResult
from app.store import conversations
from app.store.search import search_slice
from engine.protocol import SamplingParams


def conversation_record(id_: str = "chat", title: str = "A title", **changes: object) -> ConversationRecord:
    fields: dict = {
        "title": title,
        "title_is_auto": False,
        "system_prompt": "",
        "params": SamplingParams(),
        "preset_name": "",
        "draft": "",
        "active_leaf_id": None,
        "created_at": 1_700_000_000.0,
        "updated_at": 1_700_000_000.0,
    }
    return ConversationRecord(id=id_, **{**fields, **changes})


def exchange(texts: list[str], first_id: int = 1, status: str = "finished") -> list[MessageRecord]:
    """A chain of questions and answers; every answer has a run."""
    messages: list[MessageRecord] = []
    for number, text in enumerate(texts):
        id_ = first_id + number
        run = None
        if number % 2:
            run = RunRecord(id_, id_, status, "fake", SamplingParams(), 1_700_000_000.0)  # type: ignore[arg-type]
        complete = run is None or not run.is_open
        role = "assistant" if number % 2 else "user"
        messages.append(MessageRecord(id_, id_ - 1 if number else None, role, text, 1_700_000_000.0, complete, run))
    return messages


_ids = itertools.count(1)


def add_chat(title: str, texts: list[str], first_id: int = 1, **changes: object) -> Callable[[Database], str]:
    """A write that adds a conversation with these questions and answers and returns its id."""
    record = conversation_record(f"chat-{next(_ids)}", title, **changes)

    def write(db: Database) -> str:
        messages = exchange(texts, first_id)
        conversations.insert_conversation(db, record)
        conversations.add_messages(db, record.id, messages, record.updated_at)
        conversations.set_active_leaf(db, record.id, messages[-1].id if messages else None, record.updated_at)
        return record.id

    return write


def search_all(db: Database, text: str, limit: int = 100) -> list[SearchResult]:
    """What all slices of a search find together."""
    results: list[SearchResult] = []
    below: int | None = None
    while True:
        part = search_slice(db, text, below, limit - len(results))
        results += part.results
        below = part.next_below
        if below is None or len(results) >= limit:
            return results
