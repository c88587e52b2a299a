"""Brings a conversation into the shape a chat template accepts, without losing a word of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.protocol import ChatMessage

_SEPARATOR = "\n\n"


def without_empty_answers(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Leaves out answers that failed before their first word: as turns they would teach the model to be silent."""
    return [message for message in messages if message.role != "assistant" or message.content.strip()]


def fold_system(messages: Sequence[ChatMessage], keep_first: bool) -> list[ChatMessage]:
    """Puts system messages in front of the user turn that follows, for templates that know no system role.

    With `keep_first` a system message at the very start stays one.
    """
    folded: list[ChatMessage] = []
    pending: list[str] = []
    for index, message in enumerate(messages):
        if message.role == "system" and not (keep_first and index == 0):
            pending.append(message.content)
        elif message.role == "user" and pending:
            folded.append(ChatMessage(role="user", content=_SEPARATOR.join([*pending, message.content])))
            pending = []
        else:
            folded.append(message)
    if pending:
        folded.append(ChatMessage(role="user", content=_SEPARATOR.join(pending)))
    return folded


def merge_neighbours(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Joins neighbours of the same role, and lets a user speak first, for templates that insist on alternating."""
    merged: list[ChatMessage] = []
    for message in messages:
        if merged and merged[-1].role == message.role:
            content = _SEPARATOR.join(part for part in (merged[-1].content, message.content) if part)
            merged[-1] = ChatMessage(role=message.role, content=content)
        else:
            merged.append(message)
    first = next((index for index, message in enumerate(merged) if message.role != "system"), None)
    if first is not None and merged[first].role == "assistant":
        merged.insert(first, ChatMessage(role="user", content=""))
    return merged
