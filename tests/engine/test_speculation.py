"""Speculation end to end: tiny models, real drafting, real verification, and the very tokens of plain decoding."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from scipy import stats

from engine import memory
from engine.llm import LLM
from engine.parameters import SamplingParams
from engine.request import Request
from engine.sampling.counts import CountTables
from engine.sampling.rows import RequestSampling
from engine.speculation.draft_model import DraftModel
from engine.speculation.policy import DraftPolicy
from tests.engine.families import VOCAB_SIZE, save_tokenizer
from tests.engine.gguf_writer import write_gguf_model
from tests.engine.sampling_rows import logits_to_probs
from tests.engine.tiny_llama import random_llama, random_tokens, tiny_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SHAPE = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


class Models:
    """A model that soon repeats itself, and a draft model that agrees with it most of the time."""

    def __init__(self, folder: Path) -> None:
        self.target, self.draft = folder / "target", folder / "draft"
        model = random_llama(tiny_config(**SHAPE, num_hidden_layers=2))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "o_proj" in name:  # what was said last decides most
                    parameter *= 0.005
            model.save_pretrained(self.target)
            generator = torch.Generator().manual_seed(4)
            for parameter in model.parameters():
                parameter += 0.002 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(self.draft)
        for each in (self.target, self.draft):
            save_tokenizer(each)
        self.other = write_gguf_model(folder / "other.gguf", model)

    def llm(self, speculation: str | None = None, policy: DraftPolicy | None = None, **config) -> LLM:
        if speculation == "draft":
            config.setdefault("draft_model", str(self.draft))
        llm = LLM(
            self.target,
            device="cpu",
            speculation=speculation,  # pyright: ignore[reportArgumentType]
            **{"num_kv_blocks": 128, **config},
        )
        if llm.engine.speculation is not None:
            llm.engine.speculation.policy = policy or Always()
        return llm


class Always(DraftPolicy):
    """Drafts whatever there is room for."""

    def choose(self, available: Mapping[Request, int], num_decodes: int) -> dict[Request, int]:
        return dict(available)


class AtRandom(DraftPolicy):
    """Any number of drafts, as budgets and costs may have it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def choose(self, available: Mapping[Request, int], num_decodes: int) -> dict[Request, int]:
        counts = {request: self._random.randint(0, limit) for request, limit in available.items()}
        return {request: count for request, count in counts.items() if count > 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("speculation"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Some repeat themselves, some do not."""
    fresh = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (5, 17, 40)]
    return [*fresh, random_tokens(9, VOCAB_SIZE) * 3, [7, 8, 9] * 11, [3] * 20]


@pytest.fixture(scope="module")
def expected(models, prompts) -> list[list[int]]:
    with models.llm(prefix_caching=False) as llm:
        return [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]


KINDS = pytest.mark.parametrize("kind", ["ngram", "draft"])


@KINDS
@pytest.mark.parametrize(
    ("policy", "config"),
    [
        (AtRandom(1), {}),
        (Always(), {"num_draft_tokens": 16, "block_size": 8}),
        (Always(), {"max_batched_tokens": 12, "max_num_seqs": 6, "block_size": 8}),
        (AtRandom(2), {"num_kv_blocks": 13, "block_size": 8}),
        (Always(), {"prefix_caching": False, "max_num_seqs": 3}),
    ],
    ids=["batch", "many drafts", "chunks", "preemption", "no prefix cache"],
)
def test_greedy_tokens_are_the_same_with_and_without(
    models, prompts, expected, check_after_each_step, kind, policy, config
):
    with models.llm(kind, policy, **config) as llm:
        check_after_each_step(llm.engine)
        completions = llm.generate(prompts, GREEDY)
        assert [c.token_ids for c in completions] == expected
        figures = llm.stats()
        assert 0 < figures["accepted_tokens"] < figures["drafted_tokens"]
        assert (figures["preemptions"] > 0) == ("num_kv_blocks" in config)
        assert figures["kv_blocks_used"] == 0
        assert llm.engine.speculation is not None and llm.engine.speculation.note == ""
        if isinstance(drafter := llm.engine.speculation.drafter, DraftModel):
            assert drafter.pool.num_used == 0


@KINDS
def test_fewer_steps_are_taken(models, prompts, kind, monkeypatch):
    monkeypatch.setattr("engine.pace.MOST_STEPS", 1)  # several plain ones in a row count as one
    steps = {}
    for speculation in (None, kind):
        with models.llm(speculation) as llm:
            llm.generate(prompts, GREEDY)
            steps[speculation] = llm.stats()["steps"]
    assert steps[kind] < 0.9 * steps[None]


@KINDS
def test_a_seed_says_the_same_alone_in_company_and_without_speculation(models, prompts, kind):
    params = [
        SamplingParams(seed=seed, temperature=0.5, top_p=0.95, min_p=0.02, frequency_penalty=-0.3, max_tokens=24)
        for seed in range(len(prompts))
    ]
    with models.llm() as llm:
        plain = [llm.generate(prompt, own)[0].token_ids for prompt, own in zip(prompts, params)]
    with models.llm(kind, AtRandom(2), max_batched_tokens=20) as llm:
        assert [c.token_ids for c in llm.generate(prompts, params)] == plain
        assert [llm.generate(prompt, own)[0].token_ids for prompt, own in zip(prompts, params)] == plain
        assert llm.stats()["accepted_tokens"] > 0


def test_drawn_drafts_follow_the_models_distribution_end_to_end(models, monkeypatch):
    """Without a seed of its own a request's drafts are drawn, and accepted or replaced by chance."""
    monkeypatch.setattr("engine.engine.secrets.randbits", random.Random(7).getrandbits)
    prompt = [4, 9, 4, 9]
    params = SamplingParams(
        temperature=1.2, top_k=4, top_p=0.97, min_p=0.02, presence_penalty=0.6, repetition_penalty=1.2, max_tokens=3
    )
    with models.llm("draft", AtRandom(3), max_num_seqs=64, max_batched_tokens=512, num_draft_tokens=2) as llm:
        expected = exact_distribution(llm, prompt, params)
        completions = llm.generate([prompt] * 1000, params)
        figures = llm.stats()
    outputs = Counter(tuple(c.token_ids) for c in completions)
    assert 0.2 < figures["accepted_tokens"] / figures["drafted_tokens"] < 0.95
    assert set(outputs) <= set(expected)
    common = [tokens for tokens, p in expected.items() if p * 1000 >= 5]
    observed = [outputs[tokens] for tokens in common] + [1000 - sum(outputs[tokens] for tokens in common)]
    share = [expected[tokens] for tokens in common] + [1 - sum(expected[tokens] for tokens in common)]
    assert len(common) > 12
    assert stats.chisquare(observed, [p * 1000 for p in share]).pvalue > 1e-3


def exact_distribution(llm: LLM, prompt: list[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Of all three-token answers, from teacher-forced logits."""
    result: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, probability in result.items():
            request = Request("r", [*prompt, *tokens], params, num_prompt_tokens=len(prompt))
            rows = RequestSampling(request, CountTables()).rows()
            probs = logits_to_probs(llm.logits(request.token_ids)[-1:], rows, VOCAB_SIZE)[0]
            for token_id in probs.nonzero().flatten().tolist():
                longer[(*tokens, token_id)] = probability * float(probs[token_id])
        result = longer
    return result


@KINDS
def test_requests_that_opt_out_run_beside_those_that_draft(models, prompts, expected, kind):
    params = [GREEDY, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, speculation=False)] * 3
    with models.llm(kind) as llm:
        completions = llm.generate(prompts, params)
        assert [c.token_ids for c in completions] == expected
        drafted = [c.metrics.drafted_tokens for c in completions if c.metrics]
    assert drafted[1::2] == [0, 0, 0] and all(drafted[4::2])


@KINDS
def test_stops_inside_accepted_drafts_end_the_answer_where_plain_decoding_ends(models, prompts, kind):
    with models.llm() as plain, models.llm(kind, num_draft_tokens=8) as llm:
        for prompt in prompts[3:]:
            free = plain.generate(prompt, GREEDY)[0]
            for stop in (free.text[9:11], free.text[20:23]):
                params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=(stop,), logprobs=0)
                one, other = plain.generate(prompt, params)[0], llm.generate(prompt, params)[0]
                assert (one.text, one.token_ids, one.stop_reason) == (other.text, other.token_ids, other.stop_reason)
                assert other.finish_reason == "stop" and len(other.logprobs or []) == len(other.token_ids)
            ending = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=(free.token_ids[25],))
            one, other = plain.generate(prompt, ending)[0], llm.generate(prompt, ending)[0]
            assert (one.text, one.token_ids, one.stop_reason) == (other.text, other.token_ids, other.stop_reason)
        assert llm.stats()["accepted_tokens"] > 0


@KINDS
def test_penalties_min_tokens_and_logprobs_are_those_of_plain_decoding(models, prompts, kind):
    params = SamplingParams(
        temperature=0.0,
        max_tokens=30,
        min_tokens=12,
        repetition_penalty=0.9,
        frequency_penalty=-0.2,
        presence_penalty=0.1,
        penalty_window=9,
        logit_bias={1: 4.0, 5: -2.0},
        logprobs=3,
    )
    with models.llm() as plain, models.llm(kind) as llm:
        for one, other in zip(plain.generate(prompts, params), llm.generate(prompts, params)):
            assert one.token_ids == other.token_ids
            for a, b in zip(one.logprobs or [], other.logprobs or [], strict=True):
                assert (a.token_id, [t for t, _, _ in a.top]) == (b.token_id, [t for t, _, _ in b.top])
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert llm.stats()["accepted_tokens"] > 0


@KINDS
def test_answers_end_at_the_limit_of_tokens_and_of_the_context(models, prompts, kind):
    for max_tokens in (1, 2, 7):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        with models.llm(kind, num_draft_tokens=8) as llm:
            assert {len(c.token_ids) for c in llm.generate(prompts, params)} == {max_tokens}
    with models.llm(kind, max_context=64, num_draft_tokens=8) as llm, models.llm(max_context=64) as plain:
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        ends = llm.generate(prompts, params)
        assert [len(p) + len(c.token_ids) for p, c in zip(prompts, ends)] == [64] * 6
        assert [c.token_ids for c in ends] == [c.token_ids for c in plain.generate(prompts, params)]


@KINDS
def test_cancelled_and_failed_requests_leave_the_others_and_no_blocks(models, prompts, expected, kind):
    with models.llm(kind) as llm:
        streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
        for stream in streams[1::2]:
            next(stream)
            stream.close()
        runner, engine = llm.engine._runner, llm.engine
        assert runner is not None
        execute, spoiled = runner.execute, "llm-2"

        def spoil(plan, **options):
            logits = execute(plan, **options).clone()
            row = 0
            for entry in plan.scheduled:
                if entry.request.request_id == spoiled and entry.num_drafts:
                    logits[row] = torch.nan
                row += (entry.num_drafts + 1) * entry.samples
            return logits

        runner.execute = spoil  # type: ignore[method-assign]
        outputs = [list(streams[i]) for i in (0, 2, 4)]
        ends = [out[-1].finish_reason for out in outputs]
        tokens = [[t for each in out for t in each.token_ids] for out in outputs]
        assert tokens[0] == expected[0] and tokens[2] == expected[4]
        assert ends == ["length", "error", "length"] and "NaN" in (outputs[1][-1].error or "")
        engine.check_integrity()
        assert llm.stats()["kv_blocks_used"] == 0


def test_a_draft_model_that_fails_is_switched_off_and_says_so(models, prompts, expected, capsys):
    with models.llm("draft") as llm:
        speculation = llm.engine.speculation
        assert speculation is not None and isinstance(speculation.drafter, DraftModel)

        def fail(plan, **options):
            raise RuntimeError("out of memory")

        speculation.drafter.runner.execute = fail  # type: ignore[method-assign]
        assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == expected
        note = llm.engine.telemetry(memory.measure_ram(llm.engine.memory_parts())).speculation_note
        assert note == "Switched off, because drafting failed: RuntimeError: out of memory"
    assert "out of memory" in capsys.readouterr().err


def test_telemetry_and_step_records_tell_what_was_drafted_and_accepted(models, prompts):
    with models.llm("draft", num_draft_tokens=3) as llm:
        (completion,) = llm.generate(prompts[3], GREEDY)
        figures = llm.engine.telemetry(memory.measure_ram(llm.engine.memory_parts()))
        assert completion.metrics is not None
        assert figures.drafted_tokens == completion.metrics.drafted_tokens == sum(figures.drafted_by_position) > 0
        assert figures.accepted_tokens == completion.metrics.accepted_tokens == sum(figures.accepted_by_position) > 0
        assert len(figures.drafted_by_position) == 3
        assert figures.drafted_by_position == sorted(figures.drafted_by_position, reverse=True)
        assert figures.accepted_by_position == sorted(figures.accepted_by_position, reverse=True)
        entries = [entry for step in figures.steps for entry in step.entries]
        assert sum(entry.draft_tokens for entry in entries) == figures.drafted_tokens
        assert sum(entry.decode_tokens + entry.accepted_tokens for entry in entries) == len(completion.token_ids) - 1


def test_the_draft_models_weights_and_cache_are_accounted_for(models):
    with models.llm() as plain, models.llm("draft") as llm:
        info = llm.info
        assert (info.speculation, info.draft_model) == ("draft", "draft")
        alone, both = plain.engine.memory_parts(), llm.engine.memory_parts()
        assert both.kv_cache == 2 * alone.kv_cache  # two models of one shape
        assert both.weights == pytest.approx(2 * alone.weights, rel=0.01)
    with models.llm("ngram") as llm:
        assert (llm.info.speculation, llm.info.draft_model) == ("ngram", None)
        assert llm.engine.memory_parts().kv_cache == alone.kv_cache


def test_the_caches_of_both_models_share_the_memory_there_is(models, monkeypatch):
    def free(size: int) -> None:
        ram = memory.DeviceMemory("RAM", "system memory", 1 << 36, size)
        monkeypatch.setattr(memory, "ram", lambda: ram)

    free(40_000_000)
    with models.llm(num_kv_blocks=None, max_num_seqs=64) as plain:
        alone = plain.info.num_kv_blocks
    free(2 * plain.info.kv_bytes_per_token * 16 * 20)
    with models.llm(num_kv_blocks=None) as plain, models.llm("draft", num_kv_blocks=None) as both:
        assert both.info.num_kv_blocks <= plain.info.num_kv_blocks / 2 + 1 <= alone


def test_a_draft_model_with_another_tokenizer_is_refused_with_the_reason(models):
    with pytest.raises(ValueError, match=r"other\.gguf cannot draft for this model, because it has another tokenizer"):
        models.llm("draft", draft_model=str(models.other))


def test_a_draft_model_of_a_shorter_context_drafts_as_far_as_it_reaches(models, prompts, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(models.target, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 48}))
    with models.llm("draft", draft_model=str(short)) as llm:
        long, brief = llm.generate([prompts[2] * 2, prompts[0]], GREEDY)
        assert long.metrics is not None and brief.metrics is not None
        assert long.metrics.drafted_tokens == 0 < brief.metrics.accepted_tokens
        assert brief.metrics.accepted_tokens == brief.metrics.drafted_tokens  # it is the same model


def test_a_chats_next_turn_finds_its_draft_kv_in_the_draft_models_own_cache(models, prompts):
    with models.llm("draft") as llm:
        assert llm.engine.speculation is not None
        drafter = llm.engine.speculation.drafter
        assert isinstance(drafter, DraftModel)
        (first,) = llm.generate(prompts[2], GREEDY)
        computed = count_rows(drafter)
        llm.generate([*prompts[2], *first.token_ids, 5, 6], SamplingParams(temperature=0.0, max_tokens=2))
        assert sum(computed) < 40, "all but the last block and the new tokens"


def count_rows(drafter: DraftModel) -> list[int]:
    """Tokens that the draft model computes from now on, step by step."""
    execute, counts = drafter.runner.execute, []

    def counted(plan, **options):
        counts.append(sum(entry.num_new_tokens for entry in plan.scheduled))
        return execute(plan, **options)

    drafter.runner.execute = counted  # type: ignore[method-assign]
    return counts


@pytest.fixture
def tiny_draft_pool(models) -> Iterator[LLM]:
    """The draft model has blocks for about two of the requests at once."""
    with models.llm("draft", block_size=8, num_kv_blocks=128) as llm:
        assert llm.engine.speculation is not None
        drafter = llm.engine.speculation.drafter
        assert isinstance(drafter, DraftModel)
        drafter.pool.allocate(drafter.pool.num_free - 20)
        yield llm


def test_where_the_draft_models_blocks_run_out_some_requests_go_on_without(tiny_draft_pool, prompts, expected):
    assert [c.token_ids for c in tiny_draft_pool.generate(prompts, GREEDY)] == expected
    drafted = tiny_draft_pool.stats()["drafted_tokens"]
    assert drafted > 0
