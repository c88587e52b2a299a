"""The Python API answers as its description says."""

from __future__ import annotations

import pytest
import torch

from engine.llm import LLM
from engine.protocol import ChatMessage, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(starter) -> LLM:
    return starter.llm()


def test_generate_takes_one_prompt_or_many_as_text_or_tokens(llm):
    ids = llm.engine.tokenizer.encode("The sun is")
    alone = llm.generate("The sun is", GREEDY)
    assert len(alone) == 1 and len(alone[0].token_ids) == 6
    assert [c.token_ids for c in llm.generate(["The sun is", ids], GREEDY)] == [alone[0].token_ids] * 2
    assert llm.generate(ids, GREEDY)[0].token_ids == alone[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_parameters(llm):
    short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    first, second = llm.generate(["The sun is", "The moon is"], [GREEDY, short])
    assert (len(first.token_ids), len(second.token_ids)) == (6, 2)
    with pytest.raises(ValueError, match="2 prompts need one set of sampling parameters or one each, not 3"):
        llm.generate(["a", "b"], [GREEDY] * 3)


def test_more_prompts_than_seats_are_answered_in_order(llm):
    prompts = [f"Number {index} is" for index in range(11)]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    together = llm.generate(prompts, params)
    assert [c.token_ids for c in together] == [llm.generate(p, params)[0].token_ids for p in prompts]


def test_chat_answers_a_conversation_with_its_figures(llm):
    (answer,) = llm.chat(
        [{"role": "user", "content": "Name three fruits."}], SamplingParams(temperature=0.0, max_tokens=24)
    )
    assert "Bananas" in answer.text and answer.finish_reason == "stop" and answer.stop_reason is None
    assert answer.metrics is not None
    assert answer.metrics.output_tokens == len(answer.token_ids)
    assert answer.metrics.ttft_ms is not None and answer.metrics.tpot_ms is not None
    again, other = llm.chat(
        [
            [ChatMessage(role="user", content="Name three fruits.")],
            [{"role": "user", "content": "Name three colours."}],
        ],
        SamplingParams(temperature=0.0, max_tokens=24),
    )
    assert again.text == answer.text != other.text
    assert again.metrics is not None and again.metrics.cached_tokens > 0


def test_stream_gives_the_same_answer_piece_by_piece(llm):
    whole = llm.generate("The sun is", GREEDY)[0]
    pieces = list(llm.stream("The sun is", GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert len(pieces) > 1
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_a_stream_that_is_let_go_is_cancelled(llm):
    stream = llm.stream("The sun is", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert llm.stats()["running"] == 0 and llm.stats()["kv_blocks_used"] == 0


def test_streams_are_read_in_turn_with_other_calls_between(llm):
    whole = [llm.generate(prompt, GREEDY)[0] for prompt in ("The sun is", "The moon is", "The sea is")]
    one, two = llm.stream("The sun is", GREEDY), llm.stream("The moon is", GREEDY)
    pieces = {one: [next(one)], two: [next(two), next(two)]}
    assert llm.generate("The sea is", GREEDY)[0].token_ids == whole[2].token_ids
    for stream in (one, two):
        pieces[stream] += stream
        assert list(stream) == []
    for stream, expected in zip((one, two), whole):
        assert [token for piece in pieces[stream] for token in piece.token_ids] == expected.token_ids
        assert "".join(piece.text for piece in pieces[stream]) == expected.text


def test_a_stream_nobody_reads_is_cancelled_when_it_is_let_go(llm):
    stream = llm.stream("The sun is", SamplingParams(max_tokens=100, ignore_eos=True))
    llm.generate("The moon is", GREEDY)
    assert llm.stats()["running"] == 1
    del stream
    assert llm.stats()["running"] == llm.stats()["kv_blocks_used"] == 0


def test_a_chat_fits_a_cache_smaller_than_the_context(starter):
    llm = starter.llm(num_kv_blocks=8)  # 128 tokens of a context of 8192
    question = {"role": "user", "content": "Name three fruits."}
    (answer,) = llm.chat([question], SamplingParams(temperature=0.0, max_tokens=None, min_tokens=300))
    assert answer.metrics is not None and answer.finish_reason == "length"
    assert answer.metrics.prompt_tokens + answer.metrics.output_tokens == 8 * 16 + 1
    past = [{"role": role, "content": "word " * 20} for _ in range(4) for role in ("user", "assistant")]
    (answer,) = llm.chat([*past, question], SamplingParams(temperature=0.0, max_tokens=24, overflow="drop_oldest"))
    assert answer.metrics is not None and answer.metrics.prompt_tokens <= 8 * 16 + 1 - 24


def test_logits_agree_with_what_is_generated_and_do_not_depend_on_chunks(starter, llm):
    ids = llm.engine.tokenizer.encode("The quick brown fox jumps over the lazy dog. The quick brown fox")
    logits = llm.logits(ids)
    assert logits.shape == (len(ids), 49152) and logits.dtype == torch.float32
    (completion,) = llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=1))
    assert completion.token_ids == [int(logits[-1].argmax())]
    chunked = starter.llm(max_batched_tokens=8, max_num_seqs=1).logits(ids)
    torch.testing.assert_close(chunked, logits, atol=1e-3, rtol=0)
    assert llm.stats()["kv_blocks_used"] == 0
    with pytest.raises(ValueError, match="KV blocks"):
        llm.logits([1] * 2000)


def test_logprobs_come_with_the_text_of_their_tokens(llm):
    ids = llm.engine.tokenizer.encode("The sun is")
    (completion,) = llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=2, logprobs=3, ignore_eos=True))
    assert completion.logprobs is not None and len(completion.logprobs) == 2
    assert "".join(each.text for each in completion.logprobs) == completion.text
    expected = torch.log_softmax(llm.logits(ids)[-1], -1)
    first = completion.logprobs[0]
    assert first.logprob == pytest.approx(float(expected.max()), abs=1e-4)
    assert [token for token, _, _ in first.top] == torch.topk(expected, 3).indices.tolist()
    assert llm.generate("Hi", GREEDY)[0].logprobs is None


def test_a_refused_prompt_leaves_nothing_behind(llm):
    with pytest.raises(ValueError, match="max_tokens"):
        llm.generate([[1], [1] * 1000], SamplingParams(max_tokens=5000))
    assert llm.stats()["waiting"] == llm.stats()["running"] == 0


def test_prefix_caching_can_be_switched_off(starter):
    llm = starter.llm(prefix_caching=False)
    for _ in range(2):
        (completion,) = llm.generate([1] * 40, GREEDY)
        assert completion.metrics is not None and completion.metrics.cached_tokens == 0


def test_a_model_is_found_by_name_and_closed_at_the_end(starter):
    with LLM(starter.path.stem, device="cpu", max_context=256, num_kv_blocks=16) as llm:
        assert (llm.info.name, llm.info.max_context, llm.info.num_kv_blocks) == (starter.path.stem, 256, 16)
        assert llm.generate("The sun is", GREEDY)[0].finish_reason == "length"
    with pytest.raises(ValueError, match="unloaded"):
        llm.generate("The sun is", GREEDY)


def test_an_option_of_the_wrong_kind_is_refused():
    with pytest.raises(ValueError, match="dtype"):
        LLM("any", dtype="fp8")  # pyright: ignore[reportArgumentType]
