"""Steps that are queued before the tokens in front of them are known say what they would have said otherwise."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.llm import LLM
from engine.parameters import SamplingParams
from engine.scheduler import StepPlan
from kernels import ops
from tests.engine.families import VOCAB_SIZE
from tests.engine.test_soak import CONTEXT, Soak
from tests.engine.test_speculation import Models
from tests.engine.tiny_llama import random_tokens

PROMPTS = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (1, 3, 17, 40, 16, 5, 9, 30)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=30),
    SamplingParams(temperature=1.2, seed=2, max_tokens=19, repetition_penalty=1.4, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, seed=3, max_tokens=26, presence_penalty=0.8, penalty_window=5, logprobs=2),
    SamplingParams(temperature=1.0, seed=4, max_tokens=21, min_tokens=12, stop_token_ids=(5, 6, 7, 8, 9, 10)),
    SamplingParams(temperature=1.5, seed=5, max_tokens=25, stop=("e", "a"), min_p=0.01),
    SamplingParams(temperature=0.9, seed=6, max_tokens=1),
    SamplingParams(
        temperature=2.0,
        seed=7,
        max_tokens=28,
        top_k=40,
        logit_bias={3: -100.0, 4: 2.0},
        penalty_window=1,
        repetition_penalty=2.0,
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("look ahead"))


@pytest.fixture(autouse=True)
def _eager(monkeypatch) -> None:
    """The runner of GPUs, on the CPU: its kernels are computed when they are queued."""
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "reference")


def ahead(llm: LLM) -> tuple[Engine, list[StepPlan]]:
    """Lets steps be queued ahead, and collects their plans."""
    engine, plans = llm.engine, []
    plan_ahead = engine.scheduler.schedule_ahead

    def collect(plan: StepPlan) -> StepPlan | None:
        next_plan = plan_ahead(plan)
        plans.extend([] if next_plan is None else [next_plan])
        return next_plan

    engine.scheduler.schedule_ahead = collect
    engine.looks_ahead = True
    return engine, plans


@pytest.mark.parametrize(
    "config",
    [{}, {"max_num_seqs": 3}, {"max_batched_tokens": 12}, {"num_kv_blocks": 14, "block_size": 8}],
    ids=["batch", "queue", "chunks", "preemption"],
)
def test_answers_are_the_same_with_and_without(models, config):
    with models.llm(**config) as llm:
        plain = llm.generate(PROMPTS, PARAMS)
        steps = llm.stats()["steps"]
    with models.llm(**config) as llm:
        engine, plans = ahead(llm)
        completions = llm.generate(PROMPTS, PARAMS)
        assert len(plans) > 0.4 * steps
        engine.check_integrity()
        assert llm.stats()["kv_blocks_used"] == 0 and not engine.has_work
        assert (llm.stats()["preemptions"] > 0) == ("num_kv_blocks" in config)
    for one, other in zip(plain, completions, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert one.stop_reason == other.stop_reason and one.metrics.output_tokens == other.metrics.output_tokens
        for mine, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert mine.token_id == theirs.token_id and mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_a_conversation_finds_the_same_blocks_again(models):
    texts = []
    for looks_ahead in (False, True):
        with models.llm() as llm:
            if looks_ahead:
                ahead(llm)
            prompt = list(PROMPTS[3])
            for _ in range(3):
                answer = llm.generate(prompt, PARAMS[0])[0]
                prompt = [*prompt, *answer.token_ids, 4]
            texts.append((prompt, llm.stats()["prefix_hit_tokens"]))
    assert texts[0] == texts[1]


def test_requests_of_all_kinds_come_and_go(models):
    room: dict[str, Any] = {"num_kv_blocks": 26, "max_context": CONTEXT, "max_num_seqs": 6, "block_size": 8}
    with models.llm(**room, max_batched_tokens=40) as llm:
        engine, plans = ahead(llm)
        soak = Soak(engine, seed=3)
        soak.run(80)
        assert len(soak.check_answers()) == 80
        assert len(plans) > 80
        in_vain = sum(entry.request.num_tokens <= entry.start + 1 for plan in plans for entry in plan.scheduled)
        assert in_vain > 3, "nobody ended while a step was queued"


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it")
NO_WORKSPACE = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


class ShortOfMemory:
    """The real runner, with a device that has room for so many tokens a step."""

    def __init__(self, runner: Any, max_tokens: int, error: Exception = OUT_OF_MEMORY) -> None:
        self.runner, self.max_tokens, self.error, self.failures = runner, max_tokens, error, 0

    def execute(self, plan: StepPlan, all_logits: bool = False, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        if sum(entry.num_new_tokens for entry in plan.scheduled) > self.max_tokens:
            self.failures += 1
            raise self.error
        return self.runner.execute(plan, all_logits, token_ids)


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize(
    ("max_tokens", "chosen", "error"),
    [(9, slice(None), OUT_OF_MEMORY), (3, slice(4, 8), NO_WORKSPACE)],
    ids=["budget", "preemption"],
)
def test_a_step_without_memory_is_made_smaller_until_it_fits(models, max_tokens, chosen, error, looks_ahead):
    prompts, params = PROMPTS[chosen], PARAMS[chosen]
    with models.llm() as llm:
        plain = llm.generate(prompts, params)
    with models.llm() as llm:
        if looks_ahead:
            ahead(llm)
        llm.engine._runner = short = ShortOfMemory(llm.engine._runner, max_tokens, error)
        completions = llm.generate(prompts, params)
        assert short.failures > 0 and (llm.stats()["preemptions"] > 0) == (max_tokens < len(prompts))
        assert llm.stats()["kv_blocks_used"] == 0
        assert [c.token_ids for c in completions] == [c.token_ids for c in plain]


def test_a_request_that_finds_no_memory_even_alone_fails_and_the_engine_goes_on(models):
    with models.llm() as llm:
        real = llm.engine._runner
        llm.engine._runner = ShortOfMemory(real, 0)
        failed = llm.generate(PROMPTS[:2], PARAMS[0])
        for completion in failed:
            assert completion.finish_reason == "error"
            assert "Tried to allocate 2.00 GiB" in completion.error and "More of it" not in completion.error
        llm.engine._runner = real
        assert llm.generate(PROMPTS[0], PARAMS[0])[0].finish_reason == "length"


def test_an_error_in_a_step_that_was_queued_ahead_fails_nobody_whose_next_step_works(models):
    with models.llm() as llm:
        plain = llm.generate(PROMPTS[0], PARAMS[0])[0]
    with models.llm() as llm:
        engine, plans = ahead(llm)
        assert engine._runner is not None
        execute, calls = engine._runner.execute, itertools.count()

        def hiccup(plan: StepPlan, **options: Any) -> torch.Tensor:
            if options["token_ids"] is not None and next(calls) == 3:
                raise RuntimeError("a hiccup")
            return execute(plan, **options)

        engine._runner.execute = hiccup  # type: ignore[method-assign]
        assert llm.generate(PROMPTS[0], PARAMS[0])[0].token_ids == plain.token_ids
        assert len(plans) > 10


def test_a_queued_step_that_fails_spares_a_new_request_with_the_id_of_a_cancelled_one(models):
    with models.llm() as llm:
        plain = llm.generate(PROMPTS[1], PARAMS[0])[0]
    with models.llm() as llm:
        engine, _ = ahead(llm)
        for name in ("again", "stays"):
            engine.add_request(name, PROMPTS[0], PARAMS[0])
        for _ in range(4):
            engine.step()
        queued = engine._ahead
        assert queued is not None and len(queued.plan.scheduled) == 2

        def lost() -> list[Any]:
            raise RuntimeError("the device was lost")

        queued.sampled.result = lost  # type: ignore[method-assign]
        engine.cancel("again")
        engine.add_request("again", PROMPTS[1], PARAMS[0])
        ends, token_ids = {}, []
        while engine.has_work:
            for output in engine.step():
                ends.setdefault(output.request_id, []).append(output.finish_reason)
                token_ids += output.token_ids if "cancelled" in ends.get("again", ()) else []
            engine.check_integrity()
        assert ends["stays"][-1] == "error"
        assert [reason for reason in ends["again"] if reason is not None] == ["cancelled", "length"]
        assert token_ids == plain.token_ids
