"""Steps that are computed in a row, before the host looks at their tokens, say what single ones would have said."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.llm import LLM
from engine.pace import FRAME_SECONDS, MOST_STEPS, DecodePace
from engine.parameters import SamplingParams
from engine.protocol import StepEntry
from engine.request import Request
from engine.runner import NativeRunner
from engine.sampling.steps import DrawnSteps
from engine.sampling.verify import Verified
from engine.scheduler import Scheduler, StepPlan
from kernels import ops
from tests.engine import test_soak
from tests.engine.test_look_ahead import PARAMS, PROMPTS
from tests.engine.test_soak import CONTEXT, Soak, random_params
from tests.engine.test_speculation import Models

pytestmark = pytest.mark.skipif(ops.why_no_cpu_kernels() is not None, reason="the native library is not built")

PLAIN = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=30),
    SamplingParams(temperature=1.2, seed=2, max_tokens=19, top_k=30, stop_token_ids=(5, 6, 7, 8, 9, 10)),
    SamplingParams(temperature=1.5, seed=5, max_tokens=25, stop=("e", "a"), min_p=0.01),
    SamplingParams(temperature=0.9, seed=6, max_tokens=1),
    SamplingParams(temperature=1.0, seed=7, max_tokens=22, temperature_last=True, top_p=0.7, min_tokens=9),
    SamplingParams(temperature=0.0, max_tokens=30),
    SamplingParams(temperature=2.0, seed=8, max_tokens=5, ignore_eos=True),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("in a row"))


@pytest.fixture(autouse=True)
def _native(monkeypatch) -> None:
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "cpu")


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.pace.MOST_STEPS", 1)


def in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as possible, however slow this machine is today."""
    monkeypatch.setattr("engine.pace.MOST_STEPS", MOST_STEPS)
    monkeypatch.setattr("engine.pace.FRAME_SECONDS", 1e6)


def watched(llm: LLM) -> list[StepPlan]:
    """The plans of steps in a row, from now on."""
    plans: list[StepPlan] = []
    prolong = llm.engine.scheduler.prolong

    def collect(plan: StepPlan, num_steps: int) -> StepPlan:
        prolonged = prolong(plan, num_steps)
        plans.extend([prolonged] if prolonged.num_steps > 1 else [])
        return prolonged

    llm.engine.scheduler.prolong = collect  # type: ignore[method-assign]
    return plans


@pytest.mark.parametrize(
    "config",
    [{}, {"kv_dtype": "int8"}, {"max_num_seqs": 3}, {"max_batched_tokens": 12}, {"num_kv_blocks": 16, "block_size": 8}],
    ids=["batch", "int8", "queue", "chunks", "few blocks"],
)
def test_answers_are_the_same(models, monkeypatch, config):
    one_by_one(monkeypatch)
    with models.llm(**config) as llm:
        assert isinstance(llm.engine._runner, NativeRunner)
        plain = llm.generate(PROMPTS, PLAIN)
        steps = llm.stats()["steps"]
    in_a_row(monkeypatch)
    with models.llm(**config) as llm:
        plans = watched(llm)
        completions = llm.generate(PROMPTS, PLAIN)
        assert max(plan.num_steps for plan in plans) == MOST_STEPS
        assert llm.stats()["steps"] < steps
        llm.engine.check_integrity()
        assert llm.stats()["kv_blocks_used"] == 0 and not llm.engine.has_work
    for one, other in zip(plain, completions, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert one.stop_reason == other.stop_reason and one.metrics.output_tokens == other.metrics.output_tokens


def test_who_needs_the_host_takes_one_step_at_a_time(models, monkeypatch):
    in_a_row(monkeypatch)
    asks = [
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"logit_bias": {3: 1.0}},
        {"logprobs": 1},
        {"min_tokens": 20},
    ]
    for changes in asks:
        with models.llm() as llm:
            plans = watched(llm)
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20, **changes)
            others = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
            llm.generate(PROMPTS[:2], [params, others])
            assert not plans, changes
    with models.llm("ngram") as llm:
        plans = watched(llm)
        llm.generate(PROMPTS[:2], PLAIN[0])
        assert not plans


def test_requests_of_all_kinds_come_and_go(models, monkeypatch):
    in_a_row(monkeypatch)
    # Most of what would need the host is off, but not for all.
    host = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}}

    def mostly_plain(rng: random.Random) -> SamplingParams:
        params = random_params(rng)
        return replace(params, **host, logprobs=None) if rng.random() < 0.99 else params

    monkeypatch.setattr(test_soak, "random_params", mostly_plain)
    room: dict[str, Any] = {"num_kv_blocks": 700, "max_context": CONTEXT, "max_num_seqs": 64, "block_size": 8}
    with models.llm(**room, max_batched_tokens=400) as llm:
        plans = watched(llm)
        soak = Soak(llm.engine, seed=5)
        soak.run(200)
        assert len(soak.check_answers()) == 200
        assert len(plans) > 10


def test_every_token_is_counted_once(models, monkeypatch):
    in_a_row(monkeypatch)
    with models.llm() as llm:
        plans = watched(llm)
        completions = llm.generate(PROMPTS, [*PARAMS[:1], *PLAIN[1:]])
        metrics = llm.engine.metrics
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        assert plans and metrics.num_decode_tokens == num_tokens - len(completions)  # the first came with the prompt
        assert metrics.tpot.distribution(math.inf).count == 0, "the window is over"
        assert llm.stats()["accepted_tokens"] == llm.stats()["drafted_tokens"] == 0


def test_a_row_of_bad_numbers_ends_what_is_taken(models, monkeypatch):
    in_a_row(monkeypatch)
    with models.llm() as llm:
        plain = [c.token_ids for c in llm.generate(PROMPTS[:2], PLAIN[0])]
    with models.llm() as llm:
        runner, spoiled = llm.engine._runner, []
        decode = runner.decode

        def spoil(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            token_ids, healthy = decode(*arguments)
            healthy[3] = False  # the second step of the second request
            spoiled.append(token_ids)
            return token_ids, healthy

        runner.decode = spoil
        assert [c.token_ids for c in llm.generate(PROMPTS[:2], PLAIN[0])] == plain
        assert len(spoiled) > 2
        llm.engine.check_integrity()


def test_what_was_drawn_before_bad_numbers_counts():
    token_ids, good = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([True] * 6)
    assert DrawnSteps(token_ids, good, 2).result() == [Verified([1, 3, 5]), Verified([2, 4, 6])]
    bad = torch.tensor([True, False, True, True, False, True])
    assert DrawnSteps(token_ids, bad, 2).result() == [Verified([1, 3]), Verified(None)]


def decoding(scheduler: Scheduler, lengths: list[int], max_tokens: int = 20) -> list[Request]:
    """Requests whose prompts are computed and that have their first token."""
    requests = [Request(f"r{i}", list(range(length)), max_tokens=max_tokens) for i, length in enumerate(lengths)]
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.commit(plan, [[7]] * len(requests))
    return requests


def scheduler_of(num_blocks: int) -> Scheduler:
    from engine.block_pool import BlockPool

    return Scheduler(BlockPool(num_blocks, 4, cache_key="", prefix_caching=True), 4, 64)


def test_steps_take_the_blocks_they_need_and_give_back_what_an_early_end_left():
    scheduler = scheduler_of(8)
    first, second = decoding(scheduler, [3, 7])
    plan = scheduler.prolong(scheduler.schedule(), 4)
    assert plan.num_steps == 4
    # 4 tokens are known of the first one, 8 of the second; three more of each will be computed.
    assert (len(first.block_table), len(second.block_table)) == (2, 3)
    second.end_token_ids = frozenset({9})
    scheduler.commit(plan, [[1, 2, 3, 4], [5, 9, 6, 6]])
    assert first.token_ids[3:] == [7, 1, 2, 3, 4] and first.num_computed_tokens == 7
    assert second.is_finished and second.token_ids[7:] == [7, 5, 9]
    scheduler.check_integrity()
    plan = scheduler.prolong(scheduler.schedule(), 3)
    assert plan.num_steps == 3 and len(first.block_table) == 3
    scheduler.commit(plan, [[1]])  # of a step whose second row was no numbers
    assert first.num_computed_tokens == 8 and len(first.block_table) == 3
    scheduler.check_integrity()


def test_no_more_steps_than_limits_and_blocks_allow_and_nobody_waits_for_them():
    scheduler = scheduler_of(4)
    (request,) = decoding(scheduler, [3], max_tokens=4)
    assert scheduler.prolong(scheduler.schedule(), 8).num_steps == 3, "three are left"
    scheduler.finish(request, "cancelled")
    decoding(scheduler, [3, 6], max_tokens=9)
    # Each has one block or two, one is free: the second one fills its own with its eighth token.
    assert scheduler.prolong(scheduler.schedule(), 8).num_steps == 2
    beginning = Request("one token", [1], max_tokens=3)
    scheduler.finish(scheduler.running[-1], "cancelled")
    scheduler.add(beginning)
    plan = scheduler.schedule()
    assert [entry.num_new_tokens for entry in plan.scheduled] == [1, 1]
    assert scheduler.prolong(plan, 8) is plan, "its first token comes at once"
    scheduler.commit(plan, [[1], [2]])
    assert scheduler.prolong(scheduler.schedule(), 8).num_steps == 2
    assert scheduler.prolong(StepPlan([], []), 8).num_steps == 1, "nothing to do"
    waiting = Request("late", [1, 2], max_tokens=3)
    scheduler.add(waiting)
    plan = scheduler.schedule()
    assert scheduler.prolong(plan, 8) is plan


def test_the_pace_fits_a_frame():
    pace, decode = DecodePace(), StepEntry("a", 0, 0, 1, 0)
    assert pace.num_steps == 1, "nothing is known yet"
    pace.observe([decode], 1, FRAME_SECONDS / 2.5)
    assert pace.num_steps == 2
    pace.observe([decode], 2, FRAME_SECONDS / 20)
    assert pace.num_steps == MOST_STEPS
    pace.observe([decode, StepEntry("b", 0, 5, 0, 0)], 1, FRAME_SECONDS / 20)
    assert pace.num_steps == 1, "a prompt says nothing about decoding"
    pace.observe([decode], 1, 2 * FRAME_SECONDS)
    assert pace.num_steps == 1
