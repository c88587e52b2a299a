"""One generation in the engine: its tokens, its counters and where its KV lives."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from engine.parameters import SamplingParams
from engine.protocol import FinishReason


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    """Not admitted yet, or preempted; holds no block."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A request is a list of tokens and the count of those whose KV is computed.

    Scheduling lets `num_computed_tokens` chase `num_tokens`. `token_ids` holds the prompt and then
    the output and only ever grows. `block_table[i]` is the block that holds the KV of tokens
    `[i * block_size, (i + 1) * block_size)`. Times are seconds on the monotonic clock.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    num_prompt_tokens: int = -1
    """Defaults to the length of `token_ids`."""
    max_tokens: int = 2**31
    """Output tokens at most; already cut to the context."""
    seed: int = 0
    end_token_ids: frozenset[int] = frozenset()
    """Tokens of the model that end the answer; empty when `params.ignore_eos`."""
    owner: str = ""
    owner_slot: int = 0
    arrival_time: float = 0.0

    status: RequestStatus = RequestStatus.WAITING
    arrival_index: int = -1
    """Order of arrival, given by the scheduler; preemption takes the highest first."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request was first admitted."""
    block_table: list[int] = field(default_factory=list)
    length_floor: int = 0
    """What its KV depends on besides its tokens: how long its sequence counts as at least."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of `token_ids`, extended on demand by the block pool."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Proposed tokens not yet verified; never part of `token_ids` and never hashed."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0

    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that ended it; None for an end token of the model."""
    error: str | None = None

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 0:
            self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def is_end(self, token_id: int) -> bool:
        """Whether the token ends the answer: an end token of the model or a stop token asked for."""
        return token_id in self.end_token_ids or token_id in self.params.stop_token_ids

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
