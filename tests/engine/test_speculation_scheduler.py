"""Drafts use what room is left, are verified in the same step, and leave nothing behind when they are refused."""

from __future__ import annotations

import pytest

from engine.block_pool import BlockPool
from engine.parameters import SamplingParams
from engine.request import Request, RequestStatus
from engine.scheduler import Scheduler
from tests.engine.simulation import SimulatedModel, expected_output, step


def make(num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 4, max_batched_tokens: int = 32):
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(pool, max_num_seqs, max_batched_tokens), SimulatedModel(num_blocks, block_size)


def running(
    scheduler: Scheduler, model: SimulatedModel, *lengths: int, max_tokens: int = 30, **kwargs
) -> list[Request]:
    """Requests that have computed their prompts and sampled one token."""
    requests = [Request(f"r{n}", [n % 2] * n, max_tokens=max_tokens, **kwargs) for n in lengths]
    for request in requests:
        scheduler.add(request)
    while any(request.num_output_tokens == 0 for request in requests):
        step(scheduler, model)
    return requests


def right_guess(request: Request, count: int = 5) -> list[int]:
    return expected_output(request.token_ids, count, frozenset())


def wrong_guess(request: Request, count: int = 5) -> list[int]:
    first, *rest = right_guess(request, count)
    return [(first + 1) % 4, *rest]


def test_accepted_drafts_become_tokens_and_the_next_one_comes_with_them():
    scheduler, model = make()
    (request,) = running(scheduler, model, 5)
    expected = expected_output(request.token_ids, 6, frozenset())
    plan = step(scheduler, model, right_guess)
    assert [(entry.start, entry.num_new_tokens, entry.samples) for entry in plan.scheduled] == [(5, 6, True)]
    assert request.token_ids[6:] == expected
    assert request.num_computed_tokens == request.num_tokens - 1 == 11
    assert (request.num_drafted_tokens, request.num_accepted_tokens) == (5, 5)
    assert request.draft_token_ids == []


def test_after_a_refusal_only_counters_move_back_and_no_block_stays():
    scheduler, model = make()
    (request,) = running(scheduler, model, 5)
    tokens, blocks = list(request.token_ids), list(request.block_table)
    plan = step(scheduler, model, wrong_guess)
    assert plan.scheduled[0].num_new_tokens == 6
    assert request.token_ids == tokens + right_guess(Request("", tokens), 1)
    assert request.num_computed_tokens == 6 and request.block_table == blocks
    assert (request.num_drafted_tokens, request.num_accepted_tokens) == (5, 0)


def test_refused_drafts_are_never_found_in_the_prefix_cache():
    scheduler, model = make()
    (request,) = running(scheduler, model, 5)
    drafts = wrong_guess(request, 7)
    step(scheduler, model, lambda request: wrong_guess(request, 7))
    assert (
        scheduler.pool.match_prefix(Request("thief", request.token_ids[:6] + drafts + [0, 0]))
        == request.block_table[:1]
    )
    step(scheduler, model, lambda request: right_guess(request, 7))
    known = Request("heir", [*request.token_ids, 0])
    assert scheduler.pool.match_prefix(known) == request.block_table[: request.num_computed_tokens // 4]


def test_a_request_drafts_only_when_it_has_caught_up_and_wants_to():
    scheduler, model = make()
    (silent,) = running(scheduler, model, 3, params=SamplingParams(speculation=False))
    (ready,) = running(scheduler, model, 5)
    prompt = Request("prompt", [0] * 60, max_tokens=4)
    scheduler.add(prompt)
    step(scheduler, model)
    assert prompt.num_computed_tokens > 0 and set(scheduler.draft_room(4)) == {ready}
    assert silent.num_output_tokens > 0


def test_drafts_for_a_prompt_that_is_still_computed_are_dropped():
    scheduler, model = make(max_batched_tokens=8)
    prompt = Request("prompt", [0] * 20, max_tokens=4)
    scheduler.add(prompt)
    step(scheduler, model)
    prompt.draft_token_ids = [1, 2, 3]
    plan = step(scheduler, model)
    assert plan.scheduled[0].num_drafts == 0 and prompt.draft_token_ids == []


@pytest.mark.parametrize(("left", "room"), [(1, 0), (2, 1), (5, 4), (9, 8), (20, 8)])
def test_drafts_are_trimmed_to_the_tokens_the_answer_may_still_get(left, room):
    scheduler, model = make()
    (request,) = running(scheduler, model, 5, max_tokens=1 + left)
    assert scheduler.draft_room(8) == {request: room}
    request.draft_token_ids = [3] * 8
    assert scheduler.schedule().scheduled[0].num_drafts == room


def test_drafts_share_what_the_budget_leaves_after_a_token_for_everybody():
    scheduler, model = make(max_batched_tokens=11)
    requests = running(scheduler, model, 3, 4, 5)
    assert list(scheduler.draft_room(8).values()) == [3, 3, 2]
    plan = step(scheduler, model, lambda request: right_guess(request, 8))
    assert [entry.num_new_tokens for entry in plan.scheduled] == [4, 4, 3]
    for request in requests:
        request.draft_token_ids = [0] * 8
    assert sum(entry.num_new_tokens for entry in scheduler.schedule().scheduled) == 11


def test_drafts_leave_half_of_the_rest_to_prompts_and_every_prompt_moves_on():
    scheduler, model = make(max_batched_tokens=12)
    first, second = running(scheduler, model, 3, 5)
    prompt = Request("prompt", [0] * 60, max_tokens=4)
    scheduler.add(prompt)
    plan = step(scheduler, model, lambda request: right_guess(request, 8))
    assert {entry.request: entry.num_new_tokens for entry in plan.scheduled} == {first: 4, second: 3, prompt: 5}
    for request in (first, second):
        request.draft_token_ids = [0] * 20
    plan = scheduler.schedule()
    assert plan.scheduled[-1].request is prompt and plan.scheduled[-1].num_new_tokens == 1


def test_drafts_take_free_blocks_but_never_those_of_others():
    scheduler, model = make(num_blocks=20, block_size=2)
    old, new = running(scheduler, model, 4, 4)
    assert old.num_tokens == new.num_tokens == 5 and len(old.block_table) == len(new.block_table) == 2
    taken = scheduler.pool.allocate(scheduler.pool.num_free - 3)
    # Two blocks are for the latest tokens; the third may serve either.
    assert list(scheduler.draft_room(8).values()) == [3, 3]
    for request in (old, new):
        request.draft_token_ids = wrong_guess(request)
    plan = scheduler.schedule()
    assert not plan.preempted and [entry.num_drafts for entry in plan.scheduled] == [3, 1]
    scheduler.commit(plan, model.execute(plan))
    assert old.status is new.status is RequestStatus.RUNNING
    scheduler.pool.release(taken)
    scheduler.check_integrity()


def test_drafts_leave_the_blocks_that_a_running_prompt_still_needs():
    scheduler, model = make(num_blocks=9, block_size=4, max_batched_tokens=16)
    (decode,) = running(scheduler, model, 3)
    prompt = Request("prompt", [0] * 28, max_tokens=1)
    scheduler.add(prompt)
    step(scheduler, model)
    assert prompt.status is RequestStatus.RUNNING and scheduler.pool.num_free == 4
    assert scheduler.draft_room(8) == {decode: 3}
    plan = step(scheduler, model, lambda request: right_guess(request, 8))
    assert not plan.preempted and plan.scheduled[0].num_new_tokens == 1 + 3


def test_a_preempted_request_and_a_step_that_preempts_draft_nothing():
    scheduler, model = make(num_blocks=6, block_size=2)
    old, new = running(scheduler, model, 4, 5, max_tokens=7)
    while True:
        for request in (old, new):
            request.draft_token_ids = wrong_guess(request)
        plan = scheduler.schedule()
        if plan.preempted:
            break
        scheduler.commit(plan, model.execute(plan))
    assert plan.preempted == [new] and new.draft_token_ids == []
    assert [entry.num_drafts for entry in plan.scheduled] == [0]


def test_an_end_inside_accepted_drafts_drops_the_rest():
    scheduler, model = make()
    (request,) = running(scheduler, model, 5)
    request.end_token_ids = frozenset({9})
    request.draft_token_ids = [7, 8, 9, 7]
    before = request.num_tokens
    scheduler.commit(scheduler.schedule(), [[7, 8, 9, 7, 7]])
    assert request.token_ids[before:] == [7, 8, 9] and request.finish_reason == "stop"
    assert (request.num_drafted_tokens, request.num_accepted_tokens) == (4, 2)
    assert scheduler.pool.num_used == 0
    scheduler.check_integrity()


def test_the_limit_of_an_answer_holds_whatever_comes_back():
    scheduler, model = make()
    (request,) = running(scheduler, model, 5, max_tokens=3)
    scheduler.commit(scheduler.schedule(), [[0, 0, 0]])
    assert request.num_output_tokens == 3 and request.finish_reason == "length"


def test_cancelling_between_planning_and_commit_leaves_no_drafts():
    scheduler, model = make()
    (request,) = running(scheduler, model, 5)
    request.draft_token_ids = right_guess(request)
    plan = scheduler.schedule()
    sampled = model.execute(plan)
    scheduler.finish(request, "cancelled")
    scheduler.commit(plan, sampled)
    assert request.draft_token_ids == [] and request.num_output_tokens == 1
    assert scheduler.pool.num_used == 0
