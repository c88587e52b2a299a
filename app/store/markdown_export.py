"""A conversation's visible path as a Markdown document."""

from __future__ import annotations

import time

from app.state.records import Conversation, MessageRecord


def to_markdown(conversation: Conversation) -> str:
    """Title, system prompt and the visible messages. Answers are Markdown already and are taken as they are."""
    record = conversation.record
    created = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created_at))
    parts = [f"# {' '.join(record.title.split())}", f"*Kvasir chat of {created}*"]
    if record.system_prompt.strip():
        quoted = "\n".join(f"> {line}".rstrip() for line in record.system_prompt.splitlines())
        parts.append(f"**System prompt**\n\n{quoted}")
    for message in _visible_path(conversation):
        parts.append(f"## {_speaker(message)}")
        if message.text.strip():
            parts.append(message.text.strip("\n"))
        note = _note(message)
        if note:
            parts.append(f"*{note}*")
    return "\n\n".join(parts) + "\n"


def _visible_path(conversation: Conversation) -> list[MessageRecord]:
    by_id = {message.id: message for message in conversation.messages}
    path = []
    message = by_id.get(conversation.record.active_leaf_id) if conversation.record.active_leaf_id is not None else None
    while message is not None:
        path.append(message)
        message = by_id.get(message.parent_id) if message.parent_id is not None else None
    return path[::-1]


def _speaker(message: MessageRecord) -> str:
    if message.role == "user":
        return "You"
    return message.run.model if message.run is not None and message.run.model else "Model"


def _note(message: MessageRecord) -> str:
    run = message.run
    if run is None:
        return ""
    if run.is_open:
        return "This answer was still being written."
    if run.status == "interrupted":
        return "This answer was interrupted."
    if run.status == "failed":
        return f"This answer failed: {' '.join((run.error or '').split())}"
    if run.finish_reason == "cancelled":
        return "This answer was stopped."
    if run.finish_reason == "length":
        return "This answer reached its token limit."
    return ""
