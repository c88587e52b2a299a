"""The engine keeps its promises when requests are cancelled, fail, or ask for what cannot be."""

from __future__ import annotations

import gc
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from engine import memory
from engine.answer import RequestOutput
from engine.engine import Engine
from engine.loading.gguf import GGUFFile
from engine.models import LoadCancelled
from engine.protocol import (
    BLOCK_ACTIVE,
    BLOCK_CACHED,
    BLOCK_SHARED,
    EngineConfig,
    SamplingParams,
    Telemetry,
    decode_event,
    encode,
    unpack_block_state,
)
from engine.runner import ModelRunner
from engine.telemetry import unpack_block_update

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def engine(starter) -> Engine:
    return starter.engine()


def run(engine: Engine, max_steps: int = 200) -> dict[str, RequestOutput]:
    """Steps until nothing is left; returns the last output of each request with all its text and tokens."""
    texts: dict[str, str] = {}
    tokens: dict[str, list[int]] = {}
    last: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return {
                request_id: RequestOutput(
                    request_id,
                    texts[request_id],
                    tokens[request_id],
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                    error=output.error,
                    metrics=output.metrics,
                )
                for request_id, output in last.items()
            }
        for output in engine.step():
            previous = last.get(output.request_id)
            assert previous is None or previous.finish_reason is None, "an output after the last"
            texts[output.request_id] = texts.get(output.request_id, "") + output.text
            tokens[output.request_id] = tokens.get(output.request_id, []) + output.token_ids
            last[output.request_id] = output
        engine.check_integrity()
    raise AssertionError("still working")


def telemetry_of(engine: Engine) -> Telemetry:
    return engine.telemetry(memory.measure_ram(engine.memory_parts()))


class SpoilingRunner:
    """The real runner, with one request's logits or whole steps spoiled."""

    def __init__(self, runner: ModelRunner, spoil: str, message: str = "") -> None:
        self._runner, self._spoil, self._message = runner, spoil, message

    def execute(self, plan, all_logits: bool = False, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._runner.execute(plan, all_logits, token_ids).clone()
        names = [entry.request.request_id for entry in plan.scheduled if entry.samples]
        if self._spoil in names:
            if self._message:
                raise RuntimeError(self._message)
            logits[names.index(self._spoil), 7] = torch.nan
        return logits


def test_a_row_of_nan_fails_that_request_only(engine):
    prompt = engine.tokenizer.encode("The sky is")
    engine.add_request("alone", prompt, GREEDY)
    alone = run(engine)["alone"]
    engine._runner = SpoilingRunner(engine._runner, "bad")
    for name in ("bad", "good"):
        engine.add_request(name, prompt, GREEDY)
    outputs = run(engine)
    assert outputs["bad"].finish_reason == "error" and "NaN" in (outputs["bad"].error or "")
    assert outputs["bad"].token_ids == []
    assert outputs["good"].token_ids == alone.token_ids


def test_an_exception_in_a_step_fails_its_requests_and_leaves_the_engine_usable(engine):
    prompt = engine.tokenizer.encode("The sky is")
    real = engine._runner
    engine._runner = SpoilingRunner(real, "second", "no memory left")
    for name in ("first", "second"):
        engine.add_request(name, prompt, GREEDY)
    outputs = run(engine)
    for name in ("first", "second"):
        assert outputs[name].finish_reason == "error" and "no memory left" in (outputs[name].error or "")
    engine._runner = real
    engine.add_request("after", prompt, GREEDY)
    after = run(engine)["after"]
    assert after.finish_reason == "length" and after.metrics is not None
    assert after.metrics.cached_tokens == 0, "blocks of a failed step must not be offered"


def test_tokens_beyond_the_tokenizers_vocabulary_disturb_nobody(engine):
    """The weights of the model have 49152 rows; a tokenizer may know fewer tokens."""
    engine._vocab_size = 49000
    prompt = engine.tokenizer.encode("The sky is")
    engine.add_request("alone", prompt, GREEDY)
    alone = run(engine)["alone"]
    for params, place in (
        (SamplingParams(logit_bias={49100: 5.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=(49100,)), "stop_token"),
    ):
        with pytest.raises(ValueError, match=rf"49100 in {place}.* \(0 to 48999\)"):
            engine.add_request("bad", prompt, params)
    padded = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=4, repetition_penalty=1.3)
    engine.add_request("padded", [49100, *prompt], padded)
    engine._answers["padded"].sampling._ending_token_ids += (49101,)
    engine.add_request("good", prompt, GREEDY)
    outputs = run(engine)
    assert outputs["padded"].finish_reason == "length" and len(outputs["padded"].token_ids) == 4
    assert outputs["good"].token_ids == alone.token_ids


def test_cancelling_ends_a_request_before_the_next_step_and_keeps_its_text(engine):
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    engine.add_request("running", engine.tokenizer.encode("One, two, three,"), params)
    outputs = [output for _ in range(4) for output in engine.step()]
    text = "".join(output.text for output in outputs)
    assert engine.cancel("running")
    assert engine.pool.num_used == 0
    (last,) = engine.step()
    assert last.finish_reason == "cancelled" and last.metrics is not None
    assert last.metrics.output_tokens == sum(len(output.token_ids) for output in outputs) >= 4
    assert text + last.text == engine.tokenizer.decode(engine.tokenizer.encode(text + last.text))
    assert not engine.has_work and not engine.cancel("running")


def test_a_waiting_request_can_be_cancelled_and_its_id_used_again(starter):
    engine = starter.engine(max_num_seqs=1)
    prompt = engine.tokenizer.encode("Hello")
    engine.add_request("first", prompt, GREEDY)
    engine.add_request("second", prompt, GREEDY)
    engine.step()
    engine.cancel("second")
    engine.add_request("second", prompt, GREEDY)
    outputs = [output for _ in range(60) for output in engine.step()]
    reasons = [o.finish_reason for o in outputs if o.request_id == "second" and o.finish_reason]
    assert reasons == ["cancelled", "length"]


def test_a_stop_string_ends_the_answer_and_is_not_shown(engine):
    prompt = engine.tokenizer.encode("Count: one, two, three, four,")
    engine.add_request("free", prompt, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    text = run(engine)["free"].text
    stop = text[5:12]  # spans tokens
    engine.add_request("stopped", prompt, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, stop=(stop,)))
    stopped = run(engine)["stopped"]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert engine.pool.num_used == 0


def test_a_stop_string_completed_by_the_last_token_allowed_is_a_stop(engine):
    prompt = engine.tokenizer.encode("Count: one, two, three, four,")
    engine.add_request("free", prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    free = run(engine)["free"]
    tail = engine.tokenizer.decode(free.token_ids[-1:])
    engine.add_request(
        "stopped", prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop=(free.text[-4:],))
    )
    stopped = run(engine)["stopped"]
    assert tail and stopped.finish_reason == "stop" and free.text == stopped.text + free.text[-4:]


def test_an_end_token_is_counted_but_not_shown_and_min_tokens_puts_it_off(engine):
    (end, *_) = engine.tokenizer.eos_token_ids
    prompt = engine.tokenizer.encode("Hello")
    certain = {end: 100.0}
    engine.add_request("ends", prompt, SamplingParams(temperature=0.0, max_tokens=9, logit_bias=certain))
    params = SamplingParams(temperature=0.0, max_tokens=9, logit_bias=certain, min_tokens=3)
    engine.add_request("later", prompt, params)
    params = SamplingParams(temperature=0.0, max_tokens=4, logit_bias=certain, ignore_eos=True)
    engine.add_request("never", prompt, params)
    outputs = run(engine)
    assert (outputs["ends"].token_ids, outputs["ends"].text, outputs["ends"].finish_reason) == ([end], "", "stop")
    assert outputs["ends"].stop_reason is None
    assert len(outputs["later"].token_ids) == 4 and outputs["later"].token_ids[-1] == end
    assert outputs["later"].token_ids.count(end) == 1
    assert outputs["never"].token_ids == [end] * 4 and outputs["never"].finish_reason == "length"


def test_a_stop_token_is_reported(engine):
    params = SamplingParams(temperature=0.0, max_tokens=9, logit_bias={42: 100.0}, stop_token_ids=(42,))
    engine.add_request("stopped", engine.tokenizer.encode("Hello"), params)
    stopped = run(engine)["stopped"]
    assert (stopped.finish_reason, stopped.stop_reason, stopped.text) == ("stop", 42, "")


def test_a_split_character_is_held_back_until_it_is_whole(engine):
    emoji = engine.tokenizer.encode("🥳")
    assert len(emoji) > 1
    prompt = engine.tokenizer.encode("Repeat: 🥳🥳🥳🥳🥳🥳🥳🥳")
    engine.add_request("party", prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    shown = [output.text for _ in range(12) for output in engine.step()]
    assert "🥳" in "".join(shown)
    assert all("\ufffd" not in text for text in shown[:-1])


@pytest.mark.parametrize(
    ("token_ids", "params", "message"),
    [
        ([], GREEDY, "empty"),
        ([1, 49152], GREEDY, r"token id 49152 in the prompt is outside the vocabulary \(0 to 49151\)"),
        ([1, -1], GREEDY, "token id -1"),
        ([1], SamplingParams(logit_bias={60000: 1.0}), "60000 in logit_bias"),
        ([1], SamplingParams(stop_token_ids=(60000,)), "60000 in stop_token_ids"),
        ([1] * 8200, GREEDY, "8200 tokens .* context holds 8192"),
        ([1] * 1000, SamplingParams(max_tokens=100), "lower max_tokens to at most 25, or load the model with num_kv_b"),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_the_reason(engine, token_ids, params, message):
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", token_ids, params)
    assert not engine.has_work


def test_an_answer_is_cut_to_the_cache_as_to_the_context_and_its_least_length_with_it(starter):
    engine = starter.engine(num_kv_blocks=4)
    added = engine.add_request("long", [1] * 40, SamplingParams(max_tokens=500, min_tokens=400))
    assert added.max_tokens == 25
    assert len(run(engine)["long"].token_ids) == 25
    with pytest.raises(ValueError, match="lower max_tokens to at most 15"):
        engine.add_request("longer", [1] * 50, SamplingParams(max_tokens=500))


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": None},
        {"max_tokens": 1000, "overflow": "stop_at_limit"},
        {"max_tokens": 1000, "overflow": "drop_oldest"},
    ],
)
def test_an_answer_without_a_limit_of_its_own_ends_where_the_cache_does(starter, params):
    engine = starter.engine(num_kv_blocks=4)
    added = engine.add_request("long", [1] * 50, SamplingParams(ignore_eos=True, **params))
    assert added.max_tokens == 15
    outputs = run(engine)
    assert outputs["long"].finish_reason == "length" and len(outputs["long"].token_ids) == 15


def test_a_prompt_larger_than_the_cache_is_refused_with_advice(starter):
    engine = starter.engine(num_kv_blocks=4)
    with pytest.raises(ValueError, match="shorten the prompt to at most 64 tokens"):
        engine.add_request("long", [1] * 70, SamplingParams(max_tokens=None))


def test_an_id_in_use_is_refused(engine):
    engine.add_request("twin", [1], GREEDY)
    with pytest.raises(ValueError, match="twin"):
        engine.add_request("twin", [1], GREEDY)
    engine.cancel("twin")


def test_a_drawn_seed_reproduces_the_answer_alone_and_in_company(engine):
    prompt = engine.tokenizer.encode("My favourite animal is")
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=8, ignore_eos=True)
    seed = engine.add_request("drawn", prompt, params).seed
    for index in range(3):
        engine.add_request(f"company {index}", prompt, params)
    first = run(engine)
    engine.add_request("again", prompt, msgspec.structs.replace(params, seed=seed))
    assert run(engine)["again"].token_ids == first["drawn"].token_ids
    assert len({tuple(output.token_ids) for output in first.values()}) > 1


def test_telemetry_tells_the_story_of_a_shared_prefix(engine):
    first = telemetry_of(engine)
    assert first.blocks.full and not first.blocks.block_ids and first.steps == []
    prompt = engine.tokenizer.encode("a b c d e f g h i j k l m n o p q r s t u v w x y z")
    assert len(prompt) > 16
    long = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    engine.add_request("one", prompt, long, owner="tab A")
    engine.step()
    engine.add_request("two", prompt, long, owner="tab B")
    engine.step()
    figures = telemetry_of(engine)
    assert not figures.blocks.full
    assert set(figures.owners.values()) == {"tab A", "tab B"}
    states = [unpack_block_state(state) for _, state in unpack_block_update(figures.blocks)]
    slots = {owner: slot for slot, owner in figures.owners.items()}
    assert sorted(states) == sorted(
        [(BLOCK_SHARED, slots["tab A"])] * (len(prompt) // 16)
        + [(BLOCK_ACTIVE, slots["tab A"]), (BLOCK_ACTIVE, slots["tab B"])]
    )
    assert (figures.running, figures.waiting, figures.kv_blocks_used) == (2, 0, len(prompt) // 16 + 2)
    assert [[(e.request_id, e.prefill_tokens, e.decode_tokens) for e in step.entries] for step in figures.steps] == [
        [("one", len(prompt), 0)],
        [("one", 0, 1), ("two", len(prompt) % 16, 0)],
    ]
    assert figures.prefix_hit_tokens == len(prompt) // 16 * 16
    assert figures.ttft.count == 2 and figures.tpot.count == 1 and figures.queue.count == 2
    for name in ("one", "two"):
        engine.cancel(name)
    engine.step()
    after = telemetry_of(engine)
    kinds = {unpack_block_state(state)[0] for _, state in unpack_block_update(after.blocks)}
    assert BLOCK_CACHED in kinds and BLOCK_ACTIVE not in kinds
    assert after.kv_blocks_used == 0 and after.kv_blocks_cached == len(prompt) // 16


def test_the_last_token_of_a_prompt_computed_alone_is_prefill(engine):
    prompt = list(range(17))
    for name in ("first", "again"):
        engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        run(engine)
    steps = [[(e.prefill_tokens, e.decode_tokens) for e in step.entries] for step in telemetry_of(engine).steps]
    assert steps == [[(17, 0)], [(0, 1)], [(1, 0)], [(0, 1)]]
    assert (engine.metrics.num_prefill_tokens, engine.metrics.num_decode_tokens) == (18, 2)


def test_telemetry_travels_down_the_pipe(engine):
    engine.add_request("one", [1, 2, 3], GREEDY, owner="tab")
    run(engine)
    event = telemetry_of(engine)
    assert decode_event(encode(event)) == event
    assert event.memory.weights == engine.info.weight_bytes
    assert event.memory.kv_cache == 64 * 16 * engine.info.kv_bytes_per_token


def test_owner_slots_are_reused_and_their_old_blocks_lose_the_colour(engine):
    prompt = list(range(20))
    one = SamplingParams(temperature=0.0, max_tokens=1)
    for index in range(64):
        engine.add_request(f"r{index}", [index, *prompt], one, owner=f"tab {index}")
        engine.cancel(f"r{index}")
    assert len(telemetry_of(engine).owners) == 63


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculation": "draft"}, "speculation='draft' needs a draft_model"),
        ({"draft_model": "x"}, "draft_model='x' is only used with speculation='draft'"),
        ({"speculation": "ngram", "num_draft_tokens": 17}, r"num_draft_tokens must lie in \[1, 16\], got 17"),
        ({"backend": "transformers"}, "backend='transformers' needs a model folder"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"device": "mps"}, "device='mps'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"num_kv_blocks": 10**9}, "num_kv_blocks=1000000000 takes"),
        ({"max_context": 9000}, "max_context=9000"),
        ({"max_batched_tokens": 4}, r"max_batched_tokens \(4\) must be at least max_num_seqs \(8\)"),
    ],
)
def test_options_that_cannot_be_are_refused_and_not_ignored(starter, changes, message):
    config = EngineConfig(model=str(starter.path), **{"device": "cpu", **changes})
    with pytest.raises(ValueError, match=message):
        Engine.load(config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_said_to_be_missing(starter):
    with pytest.raises(ValueError, match="device='cuda' cannot be used"):
        Engine.load(EngineConfig(model=str(starter.path), device="cuda"))


def test_a_model_that_is_not_there_is_named_with_near_ones():
    with pytest.raises(LookupError, match="SmolLM2-135M-Instruct"):
        Engine.load(EngineConfig(model="SmolLM2-135M-Instruct.Q4_2"))


def test_loading_can_be_cancelled(starter):
    calls = 0

    def cancelled() -> bool:
        nonlocal calls
        calls += 1
        return calls > 20

    with pytest.raises(LoadCancelled):
        Engine.load(EngineConfig(model=str(starter.path), device="cpu"), cancelled=cancelled)
    assert gc.isenabled()


def test_a_load_reads_the_header_once_and_leaves_the_collector_running(starter, monkeypatch):
    read: list[Path] = []
    parse = GGUFFile._parse

    def parse_and_tell(file: GGUFFile) -> None:
        read.append(file.path)
        parse(file)

    monkeypatch.setattr(GGUFFile, "_parse", parse_and_tell)
    engine = Engine.load(EngineConfig(model=str(starter.path), device="cpu", num_kv_blocks=16))
    # How much the steps of the other kernels take is estimated from a description.
    assert read == [starter.path] * (1 if engine.info.kernels.startswith("native") else 2)
    assert gc.isenabled()
    engine.close()


def test_closing_gives_the_memory_back(starter):
    process = psutil.Process()
    config = EngineConfig(model=str(starter.path), device="cpu", num_kv_blocks=512)
    stages: list[str] = []
    engine = Engine.load(config, on_progress=lambda stage, done, total: stages.append(stage))
    assert stages[0] == "Reading the tokenizer" and "Loading weights" in stages
    engine.add_request("held", [1] * 4000, SamplingParams(max_tokens=10))
    for _ in range(3):
        engine.step()
    parts = engine.memory_parts()
    loaded = process.memory_info().rss
    engine.close()
    (last,) = engine.step()
    assert last.finish_reason == "cancelled"
    assert engine.memory_parts().weights == 0
    with pytest.raises(ValueError, match="unloaded"):
        engine.add_request("late", [1], GREEDY)
    del engine
    gc.collect()
    assert loaded - process.memory_info().rss > 0.9 * parts.weights
