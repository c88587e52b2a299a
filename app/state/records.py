"""What a conversation, its messages, runs and presets are made of: immutable values without behaviour.

Those there are ten thousands of are structs that the garbage collector need not look at; they cannot be in a cycle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from engine.protocol import FinishReason, SamplingParams

MessageRole = Literal["user", "assistant"]

RunStatus = Literal["waiting", "streaming", "finished", "interrupted", "failed"]
"""`waiting` until the first text, `interrupted` when the application or a person's quit ended it,
`failed` when the engine did (see `RunRecord.error`), `finished` otherwise, stopped ones included."""

OPEN_STATUSES: frozenset[RunStatus] = frozenset({"waiting", "streaming"})

NEW_CHAT_TITLE = "New chat"


class RunRecord(msgspec.Struct, frozen=True, gc=False):
    """One generation: what was asked for and what it measured. Times are `time.time()` seconds or milliseconds."""

    id: int
    message_id: int
    status: RunStatus
    model: str
    params: SamplingParams
    started_at: float
    seed: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    dropped_messages: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    queue_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    finished_at: float | None = None

    @property
    def is_open(self) -> bool:
        return self.status in OPEN_STATUSES

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed after the first token; None for fewer than two tokens."""
        return 1000.0 / self.tpot_ms if self.tpot_ms else None


class MessageRecord(msgspec.Struct, frozen=True, gc=False):
    """One node of a conversation's tree. `complete` is false while its answer is being written."""

    id: int
    parent_id: int | None
    role: MessageRole
    text: str
    created_at: float
    complete: bool = True
    run: RunRecord | None = None


@dataclass(frozen=True, slots=True)
class MessageView:
    """One message of the visible path. Siblings are the alternatives at the same place, oldest first."""

    id: int
    role: MessageRole
    text: str
    run: RunRecord | None
    sibling_index: int
    sibling_count: int
    is_streaming: bool
    created_at: float


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """A conversation without its messages."""

    id: str
    title: str
    title_is_auto: bool
    system_prompt: str
    params: SamplingParams
    preset_name: str
    draft: str
    active_leaf_id: int | None
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation with all its messages, oldest first, and when each leaf was last looked at."""

    record: ConversationRecord
    messages: list[MessageRecord]
    visited: dict[int, float]


@dataclass(frozen=True, slots=True)
class ConversationSummary:
    """A line of the sidebar."""

    id: str
    title: str
    updated_at: float
    num_messages: int


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A place where all search terms were found; `message_id` is None for a title.

    `matches` are (start, end) positions in `snippet`.
    """

    conversation_id: str
    message_id: int | None
    title: str
    snippet: str
    matches: tuple[tuple[int, int], ...]
    updated_at: float


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of sampling parameters with its system prompt. Built-in ones cannot be deleted or overwritten."""

    name: str
    params: SamplingParams
    system_prompt: str = ""
    is_builtin: bool = False
