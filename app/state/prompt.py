"""From a conversation's visible path to what the model is asked, and from its first question to a title."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from app.state.conversation_tree import Node
from engine.protocol import ChatMessage, SamplingParams

MAX_TITLE_LENGTH = 48


def build_messages(system_prompt: str, path: Iterable[Node]) -> list[ChatMessage]:
    """System prompt and turns, oldest first.

    A partial answer is kept as the turn it is. One that failed before its first word is left out, and the
    questions around it become one turn, as many templates insist on alternating roles.
    """
    messages = [ChatMessage(role="system", content=system_prompt)] if system_prompt.strip() else []
    for node in path:
        if not node.text.strip():
            continue
        previous = messages[-1] if messages else None
        if previous is not None and previous.role == node.role:
            messages[-1] = ChatMessage(role=node.role, content=f"{previous.content}\n\n{node.text}")
        else:
            messages.append(ChatMessage(role=node.role, content=node.text))
    return messages


def title_from_question(text: str) -> str:
    """The first line with words in it, without Markdown marks, cut at a word's end; empty if there is none."""
    for line in text.splitlines():
        title = " ".join(re.sub(r"^[\s#>*`\-]+|[`*]+", " ", line).split())
        if title:
            return _shortened(title)
    return ""


def _shortened(title: str) -> str:
    if len(title) <= MAX_TITLE_LENGTH:
        return title
    cut = title[:MAX_TITLE_LENGTH]
    head, space, _ = cut.rpartition(" ")
    # A language without spaces, or one endless word, is cut where it is.
    return (head if space and len(head) >= MAX_TITLE_LENGTH // 2 else cut).rstrip(" ,.;:") + "…"


def clean_text(text: str) -> str:
    """Replaces what neither UTF-8 nor SQLite's text functions can carry: lone surrogates and NUL characters."""
    return text.replace("\0", "\ufffd").encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def clean_params(params: SamplingParams) -> SamplingParams:
    """The same parameters with stop strings that can be stored and sent, none of them twice."""
    stop = tuple(dict.fromkeys(clean_text(text) for text in params.stop))
    return params if stop == params.stop else msgspec.structs.replace(params, stop=stop)
