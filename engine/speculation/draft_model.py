"""A small model of the same vocabulary drafts for a large one, with a paged KV cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.block_pool import BlockPool
from engine.request import Request
from engine.runner import Runner
from engine.sampling.rows import RequestSampling, is_greedy
from engine.sampling.verify import draw_drafts
from engine.scheduler import LengthFloor, ScheduledRequest, StepPlan

MAX_LAG = 8
"""Tokens the draft model may be behind and still draft in the same step."""


def draft_budget(max_batched_tokens: int, max_num_seqs: int) -> int:
    """The most tokens the draft model computes at once, if the model it drafts for computes `max_batched_tokens`."""
    return max(max_batched_tokens, max_num_seqs * (MAX_LAG + 1))


@dataclass(slots=True, eq=False)
class _Followed:
    """A request as the draft model sees it: `shadow` has the same tokens and the draft model's own blocks.

    While drafting its tokens are followed by the drafts, afterwards no longer; `drafts` remembers them, because
    what was computed of them stays good if they are accepted. `num_registered` counts findable blocks.
    """

    shadow: Request
    drafts: list[int] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)
    num_registered: int = 0

    @property
    def lag(self) -> int:
        """Tokens to compute before the latest one."""
        return self.shadow.num_tokens - 1 - self.shadow.num_computed_tokens

    def take_in(self, token_ids: Sequence[int]) -> None:
        """Adds the tokens that came since; of the KV only that of accepted drafts stays."""
        shadow = self.shadow
        new = token_ids[shadow.num_tokens :]
        good = shadow.num_tokens
        for draft, token_id in zip(self.drafts, new):
            if draft != token_id:
                break
            good += 1
        shadow.token_ids += new
        shadow.num_computed_tokens = min(shadow.num_computed_tokens, good, shadow.num_tokens - 1)
        self.drafts, self.probs = [], []


class DraftModel:
    """Follows requests at its own pace and drafts for those it has caught up with.

    `budget` is the most tokens its runner computes at once. `vocab_size` is that of the model it drafts for, of
    which it knows the first `own_vocab_size` tokens; logits beyond either mean nothing. `sampling` tells how a
    request samples, because the draft model draws as the model itself will. Where blocks run out, the newest
    other request loses its own; none waits for any.
    """

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        budget: int,
        max_context: int,
        length_floor: LengthFloor,
        vocab_size: int,
        own_vocab_size: int,
        sampling: Callable[[Request], RequestSampling],
    ) -> None:
        self.runner = runner
        self.pool = pool
        self._budget = budget
        self._max_context = max_context
        self._length_floor = length_floor
        self._vocab_size = vocab_size
        self._own_vocab_size = own_vocab_size
        self._sampling = sampling
        # In order of arrival.
        self._followed: dict[Request, _Followed] = {}

    def follow(self, requests: Sequence[Request], wanted: Collection[Request]) -> None:
        """As `Drafter.follow`. A prompt is computed in chunks, all chunks of a step within the budget."""
        for request in self._followed.keys() - set(requests):
            self.forget(request)
        entries: list[ScheduledRequest] = []
        left = self._budget
        for request in requests:
            followed = self._followed.get(request)
            if followed is not None and followed.shadow.length_floor != self._floor(request):
                self.forget(request)  # what was computed is that of a shorter text
                followed = None
            if followed is None:
                followed = self._followed[request] = self._start(request)
            followed.take_in(request.token_ids)
            if request not in wanted or followed.lag <= MAX_LAG or request.num_tokens > self._max_context:
                continue
            start, count = followed.shadow.num_computed_tokens, min(followed.lag, left)
            if count > 0 and self._grow(request, start + count):
                entries.append(ScheduledRequest(followed.shadow, start, count, samples=False))
                left -= count
        if entries:
            self.runner.execute(StepPlan(entries, []))
            for entry in entries:
                entry.request.num_computed_tokens += entry.num_new_tokens
        for followed in self._followed.values():
            num_full = followed.shadow.num_computed_tokens // self.pool.block_size
            self.pool.register(followed.shadow, followed.num_registered, num_full)
            followed.num_registered = max(followed.num_registered, num_full)

    def forget(self, request: Request) -> None:
        followed = self._followed.pop(request, None)
        if followed is not None:
            self.pool.release(followed.shadow.block_table)

    def available(self, request: Request, limit: int) -> int:
        """As `Drafter.available`; nothing before the draft model has caught up or beyond its context."""
        followed = self._followed.get(request)
        if followed is None or followed.lag > MAX_LAG:
            return 0
        # The last draft is not fed back.
        return max(0, min(limit, self._max_context - followed.shadow.num_tokens + 1))

    def draft(self, counts: Mapping[Request, int]) -> None:
        """As `Drafter.draft`; all requests together, one token each at a time."""
        active: dict[Request, int] = {}
        for request in sorted(counts, key=lambda request: request.arrival_index):  # the older may take from the newer
            if self.available(request, counts[request]) > 0 and self._grow(
                request, request.num_tokens + counts[request] - 1
            ):
                active[request] = counts[request]
        known = {request: request.num_tokens for request in active}
        drafting = dict(active)
        try:
            while drafting:
                self._draft_one(list(drafting))
                drafting = {
                    request: count
                    for request, count in drafting.items()
                    if len(request.draft_token_ids) < count and self._followed[request].lag == 0
                }
        finally:
            for request in active:
                followed = self._followed[request]
                followed.drafts = list(request.draft_token_ids)
                del followed.shadow.token_ids[known[request] :]

    def probabilities(self, request: Request) -> torch.Tensor | None:
        followed = self._followed.get(request)
        if followed is None or not followed.probs or _is_certain(request):
            return None
        return torch.stack(followed.probs[: len(request.draft_token_ids)])

    # ------------------------------------------------------------ inside

    def _draft_one(self, requests: Sequence[Request]) -> None:
        """Adds one draft to each request; one whose logits are no numbers gets none."""
        shadows = [self._followed[request].shadow for request in requests]
        entries = [
            ScheduledRequest(s, s.num_computed_tokens, s.num_tokens - s.num_computed_tokens, True) for s in shadows
        ]
        logits = self.runner.execute(StepPlan(entries, []))[:, : min(self._vocab_size, self._own_vocab_size)]
        missing = self._vocab_size - logits.shape[-1]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        rows = [self._sampling(request).row(request.draft_token_ids) for request in requests]
        token_ids, probs = draw_drafts(logits, rows, [_is_certain(request) for request in requests])
        for row, (request, shadow, token_id) in enumerate(zip(requests, shadows, token_ids)):
            shadow.num_computed_tokens = shadow.num_tokens
            if token_id is not None:
                shadow.token_ids.append(token_id)
                request.draft_token_ids.append(token_id)
                if probs is not None:
                    self._followed[request].probs.append(probs[row])

    def _start(self, request: Request) -> _Followed:
        shadow = Request(request.request_id, list(request.token_ids), num_prompt_tokens=request.num_prompt_tokens)
        shadow.length_floor = self._floor(request)
        hits = self.pool.match_prefix(shadow)
        self.pool.acquire(hits)
        shadow.block_table = list(hits)
        shadow.num_computed_tokens = len(hits) * self.pool.block_size
        return _Followed(shadow, num_registered=len(hits))

    def _floor(self, request: Request) -> int:
        return self._length_floor(request.num_prompt_tokens, request.num_tokens)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Takes the blocks for so many tokens, from newer requests if need be; False if there are too few."""
        shadow = self._followed[request].shadow
        missing = self.pool.blocks_for(num_tokens) - len(shadow.block_table)
        while missing > self.pool.num_free:
            newest = max(
                (
                    other
                    for other in self._followed
                    if other is not request and self._followed[other].shadow.block_table
                ),
                key=lambda other: other.arrival_index,
                default=None,
            )
            if newest is None or newest.arrival_index < request.arrival_index:
                return False
            self.forget(newest)  # what it had computed can still be found while nobody needs the blocks
        if missing > 0:
            shadow.block_table += self.pool.allocate(missing)
        return True

    def check_integrity(self) -> None:
        """Asserts that no block is lost and none owned twice."""
        self.pool.check_integrity(followed.shadow.block_table for followed in self._followed.values())


def _is_certain(request: Request) -> bool:
    """Whether drafts are taken as they come and not drawn: the answer is then the same whatever was drafted.

    That is so for the likeliest token, and for a seed that was asked for, because it promises the same answer
    in any company and at any number of drafts.
    """
    return request.params.seed is not None or is_greedy(request.params)
