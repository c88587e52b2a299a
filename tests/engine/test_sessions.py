"""A conversation's KV is kept from turn to turn and shared between its branches; nothing falls off in silence."""

from __future__ import annotations

import pytest

from engine.llm import LLM, Completion
from engine.parameters import SamplingParams
from engine.protocol import ChatMessage, Generate, decode_command, encode
from engine.text.prompt import encode_chat

BRIEF = SamplingParams(temperature=0.0, max_tokens=40)
OPENING = (
    "Here is what I know about the sea. It covers most of the earth, it is salty, and it is home to fish, whales, "
    "corals and many other living things. Ships carry goods across it, and people swim in it in summer. The tides "
    "follow the moon, and the waves follow the wind. Its deepest place lies far below the surface, in the dark, and "
    "few people have ever been there. Rivers bring it water, the sun takes water away, and clouds carry it back to "
    "the land as rain. For a long time people thought that it ended somewhere, and that ships would fall off the edge. "
    "Then they sailed around the world and found that it has no edge at all, only coasts. They drew maps of it, gave "
    "names to its parts, fought over its islands and laid cables on its floor. Now satellites measure how high it "
    "stands, to the width of a finger, and everybody can see that it is rising, a little more every year, because it "
    "gets warmer and because the ice on the land melts. Please tell me in one sentence what you think of that."
)
QUESTIONS = [OPENING, "And the moon?", "Why is it salty?", "Is it cold?"]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def answered(answer: Completion) -> dict[str, str]:
    return {"role": "assistant", "content": answer.text}


def test_each_later_turn_of_a_chat_finds_nine_tenths_of_its_prompt_in_the_cache(starter):
    llm = starter.llm(num_kv_blocks=64)
    history: list[dict[str, str]] = []
    shares: list[float] = []
    for question in QUESTIONS:
        history.append(user(question))
        (answer,) = llm.chat(history, BRIEF)
        assert answer.metrics is not None
        shares.append(answer.metrics.cached_tokens / answer.metrics.prompt_tokens)
        history.append(answered(answer))
    assert shares[0] == 0.0
    assert min(shares[1:]) >= 0.9, shares


def test_what_a_turn_finds_is_all_of_the_last_one_but_what_no_block_is_full_of(starter):
    llm = starter.llm(num_kv_blocks=64)
    history = [user(OPENING)]
    (first,) = llm.chat(history, BRIEF)
    (second,) = llm.chat([*history, answered(first), user("Go on.")], BRIEF)
    assert first.metrics is not None and second.metrics is not None
    computed = first.metrics.prompt_tokens + len(first.token_ids) - 1  # the last token was never fed back
    assert computed - second.metrics.cached_tokens < 16


def test_regenerating_and_editing_share_the_blocks_of_the_common_prefix_and_copy_none_of_them(starter):
    """Three branches at once: two answers to the same question and one to an edited one."""
    llm: LLM = starter.llm(num_kv_blocks=128)
    tokenizer, pool = starter.tokenizer, llm.engine.pool
    start = [ChatMessage(role="user", content=OPENING), ChatMessage(role="assistant", content="It is large.")]
    asked = encode_chat(tokenizer, [*start, ChatMessage(role="user", content="Why is it salty, and where does it go?")])
    edited = encode_chat(tokenizer, [*start, ChatMessage(role="user", content="Why is it cold, and who lives there?")])
    common = next(i for i, (a, b) in enumerate(zip(asked, edited)) if a != b)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=30, ignore_eos=True) for seed in (1, 2, 3)]
    alone = [
        starter.llm(prefix_caching=False).generate(prompt, own)[0].token_ids
        for prompt, own in zip((asked, asked, edited), params)
    ]

    original = llm.stream(asked, params[0])
    tokens = [list(next(original).token_ids)]
    again, branch = llm.stream(asked, params[1]), llm.stream(edited, params[2])
    tokens += [list(next(again).token_ids), list(next(branch).token_ids)]
    one, two, three = (request.block_table for request in llm.engine.scheduler.running)
    shared = (len(asked) - 1) // 16
    assert two[:shared] == one[:shared] and three[: common // 16] == one[: common // 16]
    assert {pool.ref_count(block) for block in one[: common // 16]} == {3}
    # What differs lies in blocks of its own: a write of one branch is never seen by another.
    assert not set(one[shared:]) & set(two[shared:]) and not set(one[common // 16 :]) & set(three[common // 16 :])
    assert pool.num_used < len(one) + len(two) + len(three) - 2 * (common // 16) + 1
    for stream, own in zip((original, again, branch), tokens):
        own += [token_id for output in stream for token_id in output.token_ids]
    assert tokens == alone
    llm.engine.check_integrity()


def test_a_chat_that_outgrows_the_context_is_refused_or_says_what_it_dropped_never_shifted_silently(starter):
    llm = starter.llm(num_kv_blocks=16)  # 257 tokens
    history: list[ChatMessage] = []
    for n in range(6):
        history.append(ChatMessage(role="user", content=f"{n}: " + "word " * 20))
        history.append(ChatMessage(role="assistant", content="yes " * 10))
    history.append(ChatMessage(role="user", content="Now answer."))
    assert len(encode_chat(starter.tokenizer, history)) > 257
    for policy in ("refuse", "stop_at_limit"):
        with pytest.raises(ValueError, match=r"tokens"):
            llm.chat(history, SamplingParams(max_tokens=30, overflow=policy))
    (answer,) = llm.chat(history, SamplingParams(temperature=0.0, max_tokens=30, overflow="drop_oldest"))
    assert answer.dropped_messages > 0 and answer.dropped_messages % 2 == 0
    kept = history[answer.dropped_messages :]
    assert answer.metrics is not None and answer.metrics.prompt_tokens == len(encode_chat(starter.tokenizer, kept))
    (short,) = llm.chat([user("Hi")], BRIEF)
    assert short.dropped_messages == 0


def test_an_answer_that_reaches_the_end_of_the_context_stops_there_and_says_length(starter):
    llm = starter.llm(num_kv_blocks=16, speculation="ngram")
    limit = llm.engine.token_limit
    prompt = starter.tokenizer.encode("one two three " * 300)[: limit - 20]
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, overflow="stop_at_limit")
    (answer,) = llm.generate(prompt, params)
    assert answer.finish_reason == "length" and len(prompt) + len(answer.token_ids) == limit
    with pytest.raises(ValueError, match="shorten the prompt to at most 256 tokens"):
        llm.generate(prompt + answer.token_ids, params)


def test_the_draft_cache_of_a_chat_does_not_change_what_is_reported_as_cached(starter):
    """Cached tokens are those of the model itself."""
    plain, speculating = starter.llm(num_kv_blocks=64), starter.llm(num_kv_blocks=64, speculation="ngram")
    history: list[dict[str, str]] = []
    for question in ("Name three colours.", "And three more?"):
        history.append(user(question))
        one, other = plain.chat(history, BRIEF)[0], speculating.chat(history, BRIEF)[0]
        assert one.token_ids == other.token_ids
        assert one.metrics is not None and other.metrics is not None
        assert one.metrics.cached_tokens == other.metrics.cached_tokens
        history.append(answered(one))


def test_a_request_may_opt_out_of_speculation_down_the_pipe():
    command = Generate(request_id="r", owner="tab", params=SamplingParams(speculation=False), prompt="x")
    assert decode_command(encode(command)) == command
