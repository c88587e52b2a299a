"""Decides what the next step computes. One token budget; no prefill phase and no decode phase."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.protocol import FinishReason
from engine.request import Request, RequestStatus

WATERMARK = 0.01

LengthFloor = Callable[[int, int], int]
"""(num_prompt_tokens, num_tokens) -> how long a sequence counts as at least, see `RopeConfig.length_floor`."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """`num_new_tokens` tokens of a request, from position `start`, computed in one step.

    `samples` is true when the chunk reaches the request's last token, so that its last row of
    logits chooses the next token; a prefill chunk in the middle of a prompt yields none. Tokens
    beyond the request's own are its drafts. With a `source_row` the one token is none of those: it is
    what that row of the step before chooses, which nobody but the device may know yet.
    """

    request: Request
    start: int
    num_new_tokens: int
    samples: bool
    source_row: int | None = None

    @property
    def num_drafts(self) -> int:
        """How many of the tokens are drafts; holds until the step is committed."""
        if self.source_row is not None:
            return 0
        return max(0, self.start + self.num_new_tokens - self.request.num_tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes, decodes first, and which requests lost their blocks to make room.

    With `num_steps` > 1 it is that many steps in a row, each of which computes the token that every entry, which has
    one row, got from the one before.
    """

    scheduled: list[ScheduledRequest]
    preempted: list[Request]
    num_steps: int = 1


def check_budget(max_batched_tokens: int, max_num_seqs: int) -> None:
    """Raises `ValueError` for limits under which a running request could starve."""
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
    if max_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_batched_tokens ({max_batched_tokens}) must be at least max_num_seqs ({max_num_seqs}), "
            "so that every running request gets a token in each step"
        )


def _is_decode(request: Request) -> bool:
    """Whether only the latest token is left to compute."""
    return request.num_tokens - request.num_computed_tokens == 1


class Scheduler:
    """Lets every request's computed tokens chase its known tokens under `max_batched_tokens` a step.

    Requests are admitted in order of arrival. Decodes go first, then running prefills, then new
    requests. When blocks run out the newest running request gives all of its own back and waits at
    the front; its KV is computed again later, mostly from the prefix cache. So is that of a request which
    has grown to a length that changes it.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_batched_tokens: int,
        length_floor: LengthFloor = lambda num_prompt_tokens, num_tokens: 0,
    ) -> None:
        check_budget(max_batched_tokens, max_num_seqs)
        self.pool = pool
        self._length_floor = length_floor
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.watermark_blocks = max(1, math.ceil(WATERMARK * pool.num_blocks))
        self.waiting: deque[Request] = deque()
        # Both queues are in order of arrival, and every running request arrived before every waiting one.
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._num_arrived = 0
        # How much is attempted at once; less than the limits only after a step for which memory was short.
        self._budget = max_batched_tokens
        self._most_running = max_num_seqs

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # ------------------------------------------------------------ arrival

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises `ValueError`, saying what would help, for a request that could not run even alone."""
        num_slots = num_prompt_tokens + max_tokens - 1  # the last token is never fed back
        needed = self.pool.blocks_for(num_slots)
        if needed <= self.pool.num_blocks:
            return
        capacity = self.pool.num_blocks * self.pool.block_size
        allowed = capacity - num_prompt_tokens + 1
        shorten = (
            f"lower max_tokens to at most {allowed}"
            if allowed >= 1
            else f"shorten the prompt to at most {capacity} tokens"
        )
        raise ValueError(
            f"{num_prompt_tokens} prompt tokens and up to {max_tokens} new ones need {needed} KV blocks of "
            f"{self.pool.block_size} tokens, but the KV cache has {self.pool.num_blocks}: "
            f"{shorten}, or load the model with num_kv_blocks of at least {needed}"
        )

    def add(self, request: Request) -> None:
        """Queues a request. Raises `ValueError` if it is empty or can never fit."""
        if request.num_tokens == 0:
            raise ValueError("the prompt is empty: at least one token is needed")
        self.check_fits(request.num_prompt_tokens, request.max_tokens)
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        request.status = RequestStatus.WAITING
        self.waiting.append(request)

    # ------------------------------------------------------------ one step

    def draft_room(self, num_draft_tokens: int) -> dict[Request, int]:
        """How many drafts the next step has room for, up to `num_draft_tokens`, by request that may draft.

        These are the running ones that ask for it and have caught up: only their latest token is left to
        compute. All share what the budget leaves after one token for every running request, and half of
        that while prompts wait to be computed.
        """
        drafting = [r for r in self.running if r.params.speculation and _is_decode(r)]
        left = self._budget - len(self.running)
        if self.waiting or not all(map(_is_decode, self.running)):
            left //= 2
        room: dict[Request, int] = {}
        for index, request in enumerate(drafting):
            share = -(-left // (len(drafting) - index))
            room[request] = self._fitting_drafts(request, min(num_draft_tokens, share))
            left -= room[request]
        return room

    def schedule(self) -> StepPlan:
        """Plans one step and takes the blocks it needs. Every plan must be given to `commit` or abandoned
        by finishing its requests.

        Drafts that find no room are taken from their request's `draft_token_ids`; nobody is preempted for them.
        """
        chosen: dict[Request, ScheduledRequest] = {}
        preempted: list[Request] = []
        if not self.running:
            self._budget, self._most_running = self.max_batched_tokens, self.max_num_seqs
        for request in self.running:
            if self._update_floor(request):
                self._release(request)
                self._begin(request, self.pool.match_prefix(request))
        decodes = [request for request in self.running if _is_decode(request)]
        prefills = [request for request in self.running if not _is_decode(request)]
        for request in prefills:
            request.draft_token_ids.clear()
        budget = self._schedule_running(decodes, self._budget, chosen, preempted)
        budget = self._schedule_drafts(decodes, budget, chosen, preempted)
        budget = self._schedule_running(prefills, budget, chosen, preempted)
        if not preempted:
            self._admit(chosen, budget)
        return StepPlan(list(chosen.values()), preempted)

    def prolong(self, plan: StepPlan, num_steps: int) -> StepPlan:
        """As many steps in a row as can be, up to `num_steps`, where `plan` computes only everybody's latest token.

        No answer may reach its limit before the last of them, nobody is preempted, and nobody waits longer for them,
        be it for the first token of an answer.
        """
        entries = plan.scheduled
        requests = [entry.request for entry in entries]
        if self.waiting or not entries or not all(request.num_output_tokens for request in requests):
            return plan
        if any(entry.num_new_tokens != 1 or not entry.samples for entry in entries):
            return plan
        num_steps = min([num_steps, *(r.max_tokens - r.num_output_tokens for r in requests)])
        while num_steps > 1 and not self._has_room_for(requests, num_steps - 1):
            num_steps -= 1
        for request in requests if num_steps > 1 else ():
            grown = self._grow(request, request.num_tokens + num_steps - 1)
            assert grown, "room was checked"
        return StepPlan(entries, plan.preempted, num_steps)

    def _has_room_for(self, requests: list[Request], num_more_tokens: int) -> bool:
        """Whether each of them can get so many tokens more, and what it has computed stays what it is."""
        unchanged = all(self._floor(r, num_more_tokens) == r.length_floor for r in requests)
        needed = (self.pool.blocks_for(r.num_tokens + num_more_tokens) - len(r.block_table) for r in requests)
        return unchanged and sum(max(0, missing) for missing in needed) <= self.pool.num_free

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plans the step after `plan`, which is not committed yet: every answer goes on from the token it will get.

        None where another step may be better: a prompt is not computed to its end, drafts are verified, somebody
        could be admitted, or blocks are short. An answer that ends with the token it gets computes one in vain, for
        which `commit` has no use; one that ends there for sure, by its limit, is left out.
        """
        rows = {entry.request: row for row, entry in enumerate(e for e in plan.scheduled if e.samples)}
        if any(entry.num_drafts for entry in plan.scheduled) or any(r not in rows for r in self.running):
            return None
        going_on = [r for r in self.running if r.num_output_tokens + 1 < r.max_tokens]
        if not self._has_room_for(going_on, 1):
            return None
        if not going_on or self._admissible() is not None:
            return None
        for request in going_on:
            grown = self._grow(request, request.num_tokens + 1)
            assert grown, "room was checked"
        return StepPlan([ScheduledRequest(r, r.num_tokens, 1, True, source_row=rows[r]) for r in going_on], [])

    def retreat(self, plan: StepPlan) -> bool:
        """Gives up a planned step for which the device had no memory, and attempts less at once until all is done.

        The budget shrinks to half of what was tried; where every request had its one token only, the newest is
        preempted and waits for the others. False if nothing is left to give up.
        """
        num_tokens = sum(entry.num_new_tokens for entry in plan.scheduled)
        for request in self.running:
            request.draft_token_ids.clear()
            self._return_unneeded(request)
        if num_tokens > len(self.running):
            self._budget = max(len(self.running), num_tokens // 2)
        elif len(self.running) > 1:
            self._preempt(self.running[-1])
            self._most_running = len(self.running)
        else:
            return False
        return True

    def _schedule_running(
        self,
        requests: list[Request],
        budget: int,
        chosen: dict[Request, ScheduledRequest],
        preempted: list[Request],
    ) -> int:
        """Returns what is left of the budget."""
        for request in requests:
            if request.status is not RequestStatus.RUNNING:
                continue
            num_new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if num_new_tokens == 0:
                break
            while not self._grow(request, request.num_computed_tokens + num_new_tokens):
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim)
                if victim in chosen:
                    budget += chosen.pop(victim).num_new_tokens
                if victim is request:
                    break
            else:
                chosen[request] = self._planned(request, num_new_tokens)
                budget -= num_new_tokens
        return budget

    def _schedule_drafts(
        self,
        decodes: list[Request],
        budget: int,
        chosen: dict[Request, ScheduledRequest],
        preempted: list[Request],
    ) -> int:
        left = budget - sum(request not in chosen for request in self.running)
        for request in decodes:
            wanted = len(request.draft_token_ids)
            if request not in chosen or preempted:
                wanted = 0
            num_drafts = self._fitting_drafts(request, min(wanted, left))
            del request.draft_token_ids[num_drafts:]
            if num_drafts > 0:
                grown = self._grow(request, request.num_tokens + num_drafts)
                assert grown, "room was checked"
                chosen[request] = self._planned(request, 1 + num_drafts)
                left -= num_drafts
                budget -= num_drafts
        return budget

    def _fitting_drafts(self, request: Request, wanted: int) -> int:
        """At most `wanted`; each may become a token of the answer before the one that follows them, so the
        answer's limit counts. Blocks that running requests need for known tokens are no room for drafts.
        """
        wanted = min(wanted, request.max_tokens - request.num_output_tokens - 1)
        while wanted > 0 and self._floor(request, wanted) != request.length_floor:
            wanted -= 1
        if wanted <= 0:
            return 0
        blocks = max(len(request.block_table), self.pool.blocks_for(request.num_tokens))
        spare = self.pool.num_free - self._outstanding_blocks()
        return max(0, min(wanted, (blocks + max(0, spare)) * self.pool.block_size - request.num_tokens))

    def _admit(self, chosen: dict[Request, ScheduledRequest], budget: int) -> None:
        while budget > 0 and (hits := self._admissible()) is not None:
            request = self.waiting.popleft()
            self._begin(request, hits)
            if request.num_preemptions == 0:
                request.num_cached_tokens = request.num_computed_tokens
                self.prefix_hit_tokens += request.num_computed_tokens
                self.prefix_query_tokens += request.num_tokens
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            num_new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            grown = self._grow(request, request.num_computed_tokens + num_new_tokens)
            assert grown, "room was checked"
            chosen[request] = self._planned(request, num_new_tokens)
            budget -= num_new_tokens

    def _admissible(self) -> list[int] | None:
        """The cached blocks that the first waiting request starts with, if it may run now."""
        if not self.waiting or len(self.running) >= self._most_running:
            return None
        request = self.waiting[0]
        self._update_floor(request)
        hits = self.pool.match_prefix(request)
        return hits if self._has_room(request, hits) else None

    def _begin(self, request: Request, hits: list[int]) -> None:
        self.pool.acquire(hits, request.owner_slot)
        request.block_table = list(hits)
        request.num_computed_tokens = len(hits) * self.pool.block_size

    def _floor(self, request: Request, num_more_tokens: int = 0) -> int:
        return self._length_floor(request.num_prompt_tokens, request.num_tokens + num_more_tokens)

    def _update_floor(self, request: Request) -> bool:
        """Whether it has changed, and with it what the request's keys have to be."""
        floor = self._floor(request)
        if floor == request.length_floor:
            return False
        request.length_floor = floor
        request.block_hashes.clear()
        return True

    def _has_room(self, request: Request, hits: list[int]) -> bool:
        """Whether all known tokens fit beside what the running requests still need and the watermark.

        Counting whole prompts, not just first chunks, keeps long prompts from preempting each other.
        """
        held_hits = sum(self.pool.ref_count(block_id) > 0 for block_id in hits)
        room = self.pool.num_free - (self.pool.blocks_for(request.num_tokens) - held_hits)
        if not self.running:
            return room >= 0
        return room - self._outstanding_blocks() >= self.watermark_blocks

    def _outstanding_blocks(self) -> int:
        """Blocks that running requests do not hold yet and need for tokens they know already."""
        return sum(max(0, self.pool.blocks_for(r.num_tokens) - len(r.block_table)) for r in self.running)

    def _planned(self, request: Request, num_new_tokens: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        return ScheduledRequest(request, start, num_new_tokens, start + num_new_tokens >= request.num_tokens)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        missing = self.pool.blocks_for(num_tokens) - len(request.block_table)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            request.block_table += self.pool.allocate(missing, request.owner_slot)
        return True

    def _preempt(self, request: Request) -> None:
        assert self.running[-1] is request, "the newest is preempted first"
        self.running.pop()
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def commit(self, plan: StepPlan, new_token_ids: Sequence[Sequence[int]]) -> None:
        """Takes in what a step produced: one sequence of tokens for each entry of `plan.scheduled`, empty
        where it did not sample. All but the last token of a sequence are accepted drafts of the entry, or what the
        first of several steps drew.

        Counters move, full blocks become findable, and requests that reached an end finish and give
        their blocks back; blocks that only rejected drafts needed are given back too. Entries whose
        request was finished meanwhile are passed over.
        """
        for entry, token_ids in zip(plan.scheduled, new_token_ids, strict=True):
            request = entry.request
            if request.status is not RequestStatus.RUNNING:
                continue
            num_drafts, first_block = entry.num_drafts, request.num_computed_tokens // self.pool.block_size
            end, num_taken = None, 0
            for token_id in token_ids:
                request.token_ids.append(token_id)
                num_taken += 1
                end = self._end(request, token_id)
                if end is not None:
                    break
            # All but the last one taken are computed.
            num_followed = max(0, num_taken - 1)
            num_accepted = min(num_drafts, num_followed)
            request.num_drafted_tokens += num_drafts
            request.num_accepted_tokens += num_accepted
            request.draft_token_ids.clear()
            request.num_computed_tokens = entry.start + entry.num_new_tokens - num_drafts + num_followed
            self.pool.register(request, first_block, request.num_computed_tokens // self.pool.block_size)
            if end is not None:
                self.finish(request, *end)
                continue
            self._return_unneeded(request)

    def _return_unneeded(self, request: Request) -> None:
        """Gives the blocks back that only drafts, or tokens after an end, needed."""
        unneeded = request.block_table[self.pool.blocks_for(request.num_tokens) :]
        if unneeded:
            self.pool.release(unneeded, request.owner_slot)
            del request.block_table[-len(unneeded) :]

    def _end(self, request: Request, token_id: int) -> tuple[FinishReason, int | None] | None:
        """Why the answer ends with its newest token, if it does."""
        if token_id in request.end_token_ids:
            return "stop", None
        if token_id in request.params.stop_token_ids:
            return "stop", token_id
        return ("length", None) if request.num_output_tokens >= request.max_tokens else None

    # ------------------------------------------------------------ leaving

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """Ends a request that waits or runs and frees its blocks at once.

        What a failed request computed is not offered to others.
        """
        if request.is_finished:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        if reason == "error":
            self.pool.forget(request.block_table)
        self._release(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.error = error

    def _release(self, request: Request) -> None:
        self.pool.release(request.block_table, request.owner_slot)
        request.block_table = []
        request.draft_token_ids.clear()

    # ------------------------------------------------------------ invariants

    def check_integrity(self) -> None:
        """Asserts what must hold between two steps."""
        arrivals = [request.arrival_index for request in (*self.running, *self.waiting)]
        assert arrivals == sorted(arrivals), f"the queues are out of order: {arrivals}"
        assert len(self.running) <= self.max_num_seqs
        for request in self.running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens < request.num_tokens, f"{request.request_id} has nothing to compute"
            num_blocks = len(request.block_table)
            assert self.pool.blocks_for(request.num_computed_tokens) <= num_blocks
            assert num_blocks <= self.pool.blocks_for(request.num_tokens), f"{request.request_id} holds spare blocks"
        for request in self.waiting:
            assert request.status is RequestStatus.WAITING
            assert not request.block_table and request.num_computed_tokens == 0
        self.pool.check_integrity(request.block_table for request in self.running)
