"""A model without tensors that drives the scheduler through the same block tables as the real one.

The KV of a token depends on the token and on the KV of everything before it, read through the
block table, and the next token is a function of all of that. A block that holds anything else
than it should, through a wrong prefix hit or a lost write, therefore changes the output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from engine.request import Request
from engine.scheduler import Scheduler, StepPlan

VOCAB_SIZE = 4
END_TOKEN = 3


def digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()


def next_token(kv: list[bytes]) -> int:
    return int.from_bytes(digest("next", *kv)) % VOCAB_SIZE


def expected_output(prompt: list[int], max_tokens: int, end_token_ids: frozenset[int]) -> list[int]:
    """What the model says to a prompt, computed without blocks."""
    kv: list[bytes] = []
    output: list[int] = []
    for token_id in prompt:
        kv.append(digest(token_id, *kv))
    while True:
        token_id = next_token(kv)
        output.append(token_id)
        if token_id in end_token_ids or len(output) == max_tokens:
            return output
        kv.append(digest(token_id, *kv))


class SimulatedModel:
    """Executes plans over one KV value per slot."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[bytes] = [b"never written"] * (num_blocks * block_size)

    def slot(self, request: Request, position: int) -> int:
        return request.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def execute(self, plan: StepPlan, before: list[list[int]] | None = None) -> list[list[int]]:
        """Writes the KV of known tokens and drafts alike, then verifies the drafts.

        `before` is what the step before gave, from which a plan made ahead takes its tokens.
        """
        sampled = []
        rows = [tokens[-1] for tokens in before or [] if tokens]
        for entry in plan.scheduled:
            request, end = entry.request, entry.start + entry.num_new_tokens
            tokens = request.token_ids + request.draft_token_ids
            if entry.source_row is not None:
                tokens = [*request.token_ids, rows[entry.source_row]]
            kv = [self.slots[self.slot(request, position)] for position in range(entry.start)]
            for position in range(entry.start, end):
                kv.append(digest(tokens[position], *kv))
                self.slots[self.slot(request, position)] = kv[-1]
            new = [next_token(kv[: end - entry.num_drafts])] if entry.samples else []
            for position in range(end - entry.num_drafts, end):
                if tokens[position] != new[-1]:
                    break
                new.append(next_token(kv[: position + 1]))
            sampled.append(new)
        return sampled


def step(scheduler: Scheduler, model: SimulatedModel, draft: Callable[[Request], list[int]] | None = None) -> StepPlan:
    """One step; `draft` guesses for the requests that may draft."""
    if draft is not None:
        for request, room in scheduler.draft_room(8).items():
            request.draft_token_ids = draft(request)[:room]
    plan = scheduler.schedule()
    scheduler.commit(plan, model.execute(plan))
    scheduler.check_integrity()
    return plan
