"""Steps are planned fairly, within budget, and end with every block back in the pool."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_pool import BlockPool, hash_block
from engine.parameters import SamplingParams
from engine.request import Request, RequestStatus
from engine.scheduler import Scheduler
from tests.engine.simulation import END_TOKEN, VOCAB_SIZE, SimulatedModel, expected_output, step


def make(num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8, max_batched_tokens: int = 32):
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(pool, max_num_seqs, max_batched_tokens), SimulatedModel(num_blocks, block_size)


def request(name: str, prompt: list[int], max_tokens: int = 8, **kwargs) -> Request:
    return Request(name, list(prompt), max_tokens=max_tokens, **kwargs)


def run(scheduler: Scheduler, model: SimulatedModel, max_steps: int = 1000) -> None:
    for _ in range(max_steps):
        if not scheduler.has_work:
            return
        step(scheduler, model)
    raise AssertionError(f"still working after {max_steps} steps")


def output_of(request: Request) -> list[int]:
    return request.token_ids[request.num_prompt_tokens :]


def tokens_of(plan) -> dict[str, int]:
    return {entry.request.request_id: entry.num_new_tokens for entry in plan.scheduled}


def test_a_long_prompt_is_computed_in_chunks_and_samples_only_at_its_end():
    scheduler, model = make(max_batched_tokens=16)
    long = request("long", [0] * 40)
    scheduler.add(long)
    chunks = [step(scheduler, model).scheduled[0] for _ in range(4)]
    assert [(c.start, c.num_new_tokens, c.samples) for c in chunks] == [
        (0, 16, False),
        (16, 16, False),
        (32, 8, True),
        (40, 1, True),
    ]


def test_decodes_go_first_and_a_prefill_takes_what_is_left():
    scheduler, model = make(max_batched_tokens=16)
    for name in ("a", "b", "c"):
        scheduler.add(request(name, [1, 2], max_tokens=50))
    step(scheduler, model)
    scheduler.add(request("long", [0] * 100))
    for _ in range(3):
        plan = step(scheduler, model)
        assert tokens_of(plan) == {"a": 1, "b": 1, "c": 1, "long": 13}
        assert plan.scheduled[-1].request.request_id == "long"


def test_new_requests_wait_for_a_free_seat_and_come_in_order():
    scheduler, model = make(max_num_seqs=2)
    requests = [request(name, [1], max_tokens=3) for name in "abcd"]
    for each in requests:
        scheduler.add(each)
    assert list(tokens_of(step(scheduler, model))) == ["a", "b"]
    run(scheduler, model)
    assert all(each.finish_reason == "length" for each in requests)


def test_a_second_turn_finds_the_first_in_the_prefix_cache():
    scheduler, model = make()
    first = request("first", [0, 1, 2] * 4, max_tokens=7)
    scheduler.add(first)
    run(scheduler, model)
    # 12 + 7 tokens, the last never computed: 18 computed, 4 full blocks of 4.
    second = request("second", [*first.token_ids, 1, 1])
    scheduler.add(second)
    step(scheduler, model)
    assert second.num_cached_tokens == 16
    assert (scheduler.prefix_hit_tokens, scheduler.prefix_query_tokens) == (16, 12 + 21)


def test_running_requests_share_the_blocks_of_a_common_prefix():
    scheduler, model = make()
    a = request("a", [0] * 12, max_tokens=20)
    scheduler.add(a)
    step(scheduler, model)
    b = request("b", [0] * 12 + [1], max_tokens=20)
    scheduler.add(b)
    step(scheduler, model)
    assert b.block_table[:3] == a.block_table[:3]
    assert scheduler.pool.ref_count(a.block_table[0]) == 2


def test_the_newest_is_preempted_and_nobody_is_admitted_in_that_step():
    scheduler, model = make(num_blocks=6, block_size=2)
    old, new = request("old", [0] * 4, max_tokens=9), request("new", [1] * 4, max_tokens=9)
    scheduler.add(old)
    scheduler.add(new)
    late = request("late", [2], max_tokens=2)
    plan = step(scheduler, model)
    scheduler.add(late)
    while not plan.preempted:
        admitted = len(scheduler.running)
        plan = step(scheduler, model)
    assert plan.preempted == [new]
    assert len(scheduler.running) < admitted
    assert new.status is RequestStatus.WAITING and new.num_preemptions == 1 and not new.block_table
    assert scheduler.waiting[0] is new
    run(scheduler, model)
    for each in (old, new, late):
        assert output_of(each) == expected_output(
            each.token_ids[: each.num_prompt_tokens], each.max_tokens, frozenset()
        )


def test_a_preempted_request_already_in_the_plan_leaves_it():
    """A running prefill that needs room takes it from a newer decode planned before it."""
    scheduler, model = make(num_blocks=12, block_size=2, max_batched_tokens=4, max_num_seqs=2)
    prefill, decode = request("prefill", [0] * 11, max_tokens=2), request("decode", [1], max_tokens=20)
    scheduler.add(prefill)
    step(scheduler, model)
    step(scheduler, model)  # 8 of 11 tokens
    scheduler.add(decode)
    step(scheduler, model)  # the last 3, and the decode's prompt
    # Take the prefill back to its middle and the free blocks away, as if others had grown meanwhile.
    prefill.num_computed_tokens = 7
    scheduler.pool.release(prefill.block_table[4:])
    del prefill.block_table[4:]
    taken = scheduler.pool.allocate(scheduler.pool.num_free)
    plan = scheduler.schedule()
    scheduler.pool.release(taken)
    assert plan.preempted == [decode]
    assert [entry.request for entry in plan.scheduled] == [prefill]
    scheduler.commit(plan, model.execute(plan))
    scheduler.check_integrity()
    run(scheduler, model)
    assert output_of(decode) == expected_output([1], 20, frozenset())


def test_cancelling_frees_the_blocks_at_once_whether_waiting_or_running():
    scheduler, model = make(max_num_seqs=1)
    running, waiting = request("running", [0] * 9), request("waiting", [1])
    scheduler.add(running)
    scheduler.add(waiting)
    step(scheduler, model)
    for each in (waiting, running):
        scheduler.finish(each, "cancelled")
        scheduler.check_integrity()
    assert not scheduler.has_work and scheduler.pool.num_used == 0


def test_a_request_cancelled_while_its_step_runs_takes_no_token():
    scheduler, _ = make()
    cancelled, other = request("cancelled", [0]), request("other", [1])
    scheduler.add(cancelled)
    scheduler.add(other)
    plan = scheduler.schedule()
    scheduler.finish(cancelled, "cancelled")
    scheduler.commit(plan, [[2], [2]])
    assert cancelled.num_output_tokens == 0 and output_of(other) == [2]
    scheduler.check_integrity()


def test_what_a_failed_request_computed_is_not_offered_to_others():
    scheduler, model = make()
    failed = request("failed", [0] * 12)
    scheduler.add(failed)
    step(scheduler, model)
    scheduler.finish(failed, "error", error="NaN")
    again = request("again", [0] * 12)
    scheduler.add(again)
    step(scheduler, model)
    assert again.num_cached_tokens == 0


def test_end_tokens_stop_tokens_and_the_limit_end_a_request():
    scheduler, _ = make()
    ended = request("ended", [0], end_token_ids=frozenset({7}))
    stopped = request("stopped", [0], params=SamplingParams(stop_token_ids=(8,)))
    limited = request("limited", [0], max_tokens=1)
    for each in (ended, stopped, limited):
        scheduler.add(each)
    scheduler.commit(scheduler.schedule(), [[7], [8], [9]])
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", 8)
    assert (limited.finish_reason, limited.stop_reason) == ("length", None)
    assert scheduler.pool.num_used == 0


def test_tokens_after_an_end_token_are_dropped():
    scheduler, _ = make()
    ended = request("ended", [0], end_token_ids=frozenset({7}))
    scheduler.add(ended)
    scheduler.commit(scheduler.schedule(), [[5, 7, 6]])
    assert output_of(ended) == [5, 7]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "advice"),
    [
        (10, 100, "need 28 KV blocks of 4 tokens, but the KV cache has 4: lower max_tokens to at most 7"),
        (30, 5, "shorten the prompt to at most 16 tokens, or load the model with num_kv_blocks of at least 9"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_advice(num_prompt_tokens, max_tokens, advice):
    scheduler, _ = make(num_blocks=4)
    with pytest.raises(ValueError, match=advice):
        scheduler.add(request("big", [0] * num_prompt_tokens, max_tokens=max_tokens))
    assert not scheduler.has_work


def test_a_request_that_fits_exactly_runs():
    scheduler, model = make(num_blocks=4)
    exact = request("exact", [0] * 10, max_tokens=7)
    scheduler.add(exact)
    run(scheduler, model)
    assert exact.num_output_tokens == 7


def test_an_empty_prompt_is_refused():
    scheduler, _ = make()
    with pytest.raises(ValueError, match="empty"):
        scheduler.add(request("empty", []))


def test_a_budget_below_the_number_of_seats_is_refused():
    with pytest.raises(ValueError, match=r"max_batched_tokens \(4\) must be at least max_num_seqs \(8\)"):
        Scheduler(BlockPool(8, 4), max_num_seqs=8, max_batched_tokens=4)


def test_admission_leaves_room_for_running_prompts_and_the_watermark():
    scheduler, model = make(num_blocks=20, block_size=4, max_batched_tokens=16)
    scheduler.add(request("long", [0] * 60, max_tokens=2))  # 15 blocks, 4 of them in the first step
    scheduler.add(request("second", [1] * 18, max_tokens=2))  # 5 blocks: nothing would be left
    step(scheduler, model)
    assert [r.request_id for r in scheduler.running] == ["long"]
    run(scheduler, model)
    assert scheduler.num_preemptions == 0


def test_a_cached_block_that_a_new_request_would_hold_is_no_longer_room():
    scheduler, model = make(num_blocks=8, block_size=4)
    scheduler.add(request("earlier", [0] * 12, max_tokens=1))
    run(scheduler, model)
    running = request("running", [1] * 14, max_tokens=3)
    scheduler.add(running)
    step(scheduler, model)
    # 4 blocks are left, 3 of them the cached prefix; the new one needs all 4, and the watermark is 1.
    scheduler.add(request("new", [0] * 12 + [1, 1], max_tokens=2))
    step(scheduler, model)
    assert scheduler.running == [running] and scheduler.pool.num_cached == 3
    run(scheduler, model)


def test_nobody_is_admitted_in_a_step_that_preempted_whatever_room_there_seems_to_be(monkeypatch):
    scheduler, model = make(num_blocks=6, block_size=2)
    for name, token in (("old", 0), ("new", 1)):
        scheduler.add(request(name, [token] * 4, max_tokens=9))
    step(scheduler, model)
    scheduler.add(request("late", [2], max_tokens=2))
    monkeypatch.setattr(scheduler, "_most_running", 2)
    while not (plan := scheduler.schedule()).preempted:
        scheduler.commit(plan, model.execute(plan))
        monkeypatch.setattr(scheduler, "_has_room", lambda request, hits: True)
    assert [entry.request.request_id for entry in plan.scheduled] == ["old"]
    assert [each.request_id for each in scheduler.waiting] == ["new", "late"]


def test_a_step_is_planned_ahead_where_all_there_is_to_do_is_one_more_token_for_everybody():
    scheduler, _ = make(num_blocks=8, block_size=4, max_num_seqs=2, max_batched_tokens=8)
    for name, max_tokens in (("a", 2), ("b", 9)):
        scheduler.add(request(name, [0] * 4, max_tokens))
    first = scheduler.schedule()
    second = scheduler.schedule_ahead(first)
    assert second is not None
    planned = [(e.request.request_id, e.start, e.num_new_tokens, e.source_row, e.num_drafts) for e in second.scheduled]
    assert planned == [("a", 4, 1, 0, 0), ("b", 4, 1, 1, 0)]
    scheduler.commit(first, [[1], [1]])
    third = scheduler.schedule_ahead(second)
    assert third is not None
    # "a" has its two tokens then.
    assert [(e.request.request_id, e.start, e.source_row) for e in third.scheduled] == [("b", 5, 1)]
    scheduler.commit(second, [[1], [1]])
    scheduler.add(request("c", [0] * 4))
    assert scheduler.schedule_ahead(third) is None, "somebody could be admitted"


@pytest.mark.parametrize("obstacle", ["a chunk in the middle of a prompt", "drafts", "no free block", "the limit"])
def test_no_step_is_planned_ahead_where_another_may_be_needed(obstacle):
    num_blocks = 2 if obstacle == "no free block" else 16
    scheduler, _ = make(num_blocks=num_blocks, block_size=4, max_batched_tokens=8)
    length = 12 if obstacle == "a chunk in the middle of a prompt" else 8 if obstacle == "no free block" else 5
    scheduler.add(request("a", [0] * length, max_tokens=1 if obstacle in ("the limit", "no free block") else 9))
    plan = scheduler.schedule()
    if obstacle == "no free block":
        plan.scheduled[0].request.max_tokens = 9
    if obstacle == "drafts":
        scheduler.commit(plan, [[0]])
        plan.scheduled[0].request.draft_token_ids = [1, 2]
        plan = scheduler.schedule()
    assert scheduler.schedule_ahead(plan) is None


def test_a_step_without_memory_is_tried_again_with_less():
    scheduler, model = make(num_blocks=32, block_size=4, max_num_seqs=4, max_batched_tokens=16)
    for name in ("a", "b"):
        scheduler.add(request(name, [0] * 8))

    def planned(plan):
        return plan, tokens_of(plan)

    plan, tokens = planned(scheduler.schedule())
    assert tokens == {"a": 8, "b": 8}
    assert scheduler.retreat(plan)
    plan, tokens = planned(scheduler.schedule())
    assert tokens == {"a": 8}
    scheduler.commit(plan, model.execute(plan))
    plan, tokens = planned(scheduler.schedule())
    assert tokens == {"a": 1, "b": 7}
    assert scheduler.retreat(plan)
    plan, tokens = planned(scheduler.schedule())
    assert tokens == {"a": 1, "b": 3}
    while tokens != {"a": 1, "b": 1}:
        scheduler.commit(plan, model.execute(plan))
        plan, tokens = planned(scheduler.schedule())
    assert scheduler.retreat(plan), "the newest waits"
    plan, tokens = planned(scheduler.schedule())
    assert tokens == {"a": 1} and scheduler.num_preemptions == 1
    assert not scheduler.retreat(plan), "one token of one request is the least"
    run(scheduler, model)
    scheduler.add(request("c", [1] * 16, max_tokens=1))
    assert tokens_of(scheduler.schedule()) == {"c": 16}, "the budget is whole again"


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, cancels, failures, drafts, steps ahead and short memory over small pools of shared prefixes."""

    @initialize(
        num_blocks=st.integers(3, 24),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 12),
        weak_hash=st.booleans(),
        prefix_caching=st.booleans(),
        luck=st.integers(0, 1000),
    )
    def start(self, num_blocks, block_size, max_num_seqs, extra_budget, weak_hash, prefix_caching, luck):
        # A hash of two bits collides all the time: hits must be verified to be right.
        weak = lambda parent, tokens: bytes([hash_block(parent, tokens)[0] & 3])  # noqa: E731
        pool = BlockPool(
            num_blocks, block_size, prefix_caching=prefix_caching, block_hash=weak if weak_hash else hash_block
        )
        self.scheduler = Scheduler(pool, max_num_seqs, max_num_seqs + extra_budget)
        self.model = SimulatedModel(num_blocks, block_size)
        self.requests: list[Request] = []
        self.dropped: set[str] = set()
        self.luck = random.Random(luck)

    def alive(self) -> list[Request]:
        return [r for r in self.requests if not r.is_finished]

    def arrive(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> None:
        new = request(
            f"r{len(self.requests)}",
            prompt,
            max_tokens,
            end_token_ids=frozenset() if ignore_eos else frozenset({END_TOKEN}),
            owner_slot=len(self.requests) % 3,
        )
        pool = self.scheduler.pool
        if pool.blocks_for(len(prompt) + max_tokens - 1) > pool.num_blocks:
            with pytest.raises(ValueError, match="KV blocks"):
                self.scheduler.add(new)
            return
        self.scheduler.add(new)
        self.requests.append(new)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        max_tokens=st.integers(1, 24),
        ignore_eos=st.booleans(),
    )
    def add(self, prompt, max_tokens, ignore_eos):
        self.arrive(prompt, max_tokens, ignore_eos)

    @precondition(lambda self: self.requests)
    @rule(
        data=st.data(),
        more=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6),
        max_tokens=st.integers(1, 12),
    )
    def continue_an_earlier_one(self, data, more, max_tokens):
        earlier = data.draw(st.sampled_from(self.requests))
        self.arrive([*earlier.token_ids, *more], max_tokens, True)

    def guess(self, request: Request) -> list[int]:
        """Right for a while and then wrong, as far as `luck` says."""
        output = expected_output(request.token_ids, 8, frozenset())
        return [token if self.luck.random() < 0.8 else (token + 1) % VOCAB_SIZE for token in output]

    @rule(count=st.integers(1, 6), drafts=st.booleans())
    def run_steps(self, count, drafts):
        for _ in range(count):
            running = list(self.scheduler.running)
            plan = step(self.scheduler, self.model, self.guess if drafts else None)
            assert sum(entry.num_new_tokens for entry in plan.scheduled) <= self.scheduler.max_batched_tokens
            if plan.preempted:
                assert all(entry.request in running for entry in plan.scheduled), "admitted in a step that preempted"
            if running or self.scheduler.waiting:
                assert plan.scheduled, "a step without progress"

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), reason=st.sampled_from(["cancelled", "error"]))
    def drop_one(self, data, reason):
        victim = data.draw(st.sampled_from(self.alive()))
        self.dropped.add(victim.request_id)
        self.scheduler.finish(victim, reason)

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def drop_one_while_a_step_runs(self, data):
        for request in self.scheduler.running:  # beyond any room: the scheduler has to trim them
            request.draft_token_ids = self.guess(request)
        plan = self.scheduler.schedule()
        sampled = self.model.execute(plan)
        if self.alive():
            victim = data.draw(st.sampled_from(self.alive()))
            self.dropped.add(victim.request_id)
            self.scheduler.finish(victim, "cancelled")
        self.scheduler.commit(plan, sampled)

    @rule(data=st.data(), count=st.integers(1, 6))
    def run_ahead(self, data, count):
        """Every step is planned and computed before the one in front of it is committed."""
        plan = self.scheduler.schedule()
        sampled = self.model.execute(plan)
        for _ in range(count):
            ahead = self.scheduler.schedule_ahead(plan)
            going_on = None if ahead is None else self.model.execute(ahead, sampled)
            if self.alive() and data.draw(st.integers(0, 9)) == 0:
                victim = data.draw(st.sampled_from(self.alive()))
                self.dropped.add(victim.request_id)
                self.scheduler.finish(victim, "cancelled")
            self.scheduler.commit(plan, sampled)
            self.scheduler.check_integrity()
            if ahead is None or going_on is None:
                return
            plan, sampled = ahead, going_on
        self.scheduler.commit(plan, sampled)

    @precondition(lambda self: self.scheduler.running)
    @rule()
    def memory_is_short(self):
        for request in self.scheduler.running:
            request.draft_token_ids = self.guess(request)
        if not self.scheduler.retreat(self.scheduler.schedule()):
            (last,) = self.scheduler.running
            self.dropped.add(last.request_id)
            self.scheduler.finish(last, "error")

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        run(self.scheduler, self.model, max_steps=20_000)
        for each in self.requests:
            assert each.is_finished
            if each.request_id not in self.dropped:
                prompt = each.token_ids[: each.num_prompt_tokens]
                assert output_of(each) == expected_output(prompt, each.max_tokens, each.end_token_ids)
        assert self.scheduler.pool.num_used == 0
        self.scheduler.pool.check_integrity([])


TestRandomTraffic = SchedulerMachine.TestCase
TestRandomTraffic.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
