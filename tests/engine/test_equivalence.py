"""The starter model's logits and greedy tokens are Hugging Face's, however the work is cut: alone, batched, chunked,
cached, preempted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.protocol import ChatMessage, SamplingParams
from engine.text.prompt import encode_chat
from kernels import ops
from tests.engine.conftest import Starter
from tests.engine.hugging_face import hugging_face_llama
from tests.engine.tiny_llama import Harness, load, oracle_logits, random_tokens

pytestmark = pytest.mark.timeout(600)

NUM_TOKENS = 48
RAW_PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "人工智能是计算机科学的一个分支,它",
    "从前有一座山,山里有一座庙,庙里有",
    "🎉🎂 Happy birthday! 🥳 Here are some emoji for you: 🍕🚀",
]
CHATS = ["What is the difference between a list and a tuple in Python?", "用中文介绍一下北京。😀"]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def beginnings(outputs: list[list[int]], count: int) -> list[list[int]]:
    return [output[:count] for output in outputs]


@pytest.fixture(scope="module")
def reference(starter_model: Path, starter: Starter) -> Iterator[Starter]:
    """The starter model on the reference kernels, whatever is the default here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ops.BACKEND_VARIABLE, "reference")
        loaded = load(starter_model)
        assert ops.kernel_backend() == "reference" and not loaded.native
        yield Starter(starter_model, loaded, starter.tokenizer)


@pytest.fixture(scope="module")
def prompts(starter: Starter) -> list[list[int]]:
    raw = [starter.tokenizer.encode(text) for text in RAW_PROMPTS]
    return raw + [encode_chat(starter.tokenizer, [ChatMessage(role="user", content=text)]) for text in CHATS]


@pytest.fixture(scope="module")
def expected(starter: Starter, prompts: list[list[int]]) -> list[list[int]]:
    """What Hugging Face generates in float32, all prompts in one left-padded batch to save time."""
    model: Any = hugging_face_llama(starter.path)
    model.generation_config.eos_token_id = None
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    full = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0)
    outputs = full[:, width:].tolist()
    assert all(len(output) == NUM_TOKENS for output in outputs)
    return outputs


def test_logits_are_within_a_thousandth_of_hugging_faces_on_512_tokens(reference):
    token_ids = random_tokens(512, vocab_size=49152, seed=3)
    expected = oracle_logits(hugging_face_llama(reference.path), token_ids)
    for block_size, chunk in ((16, None), (7, 100)):
        logits = Harness(reference.loaded, block_size, num_blocks=600 // block_size).logits(token_ids, chunk)
        assert (logits - expected).abs().max().item() < 1e-3
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_tokens_are_hugging_faces_alone(reference, prompts, expected, check_after_each_step):
    """A plain text, one of another script, and a chat; in a batch come all."""
    llm = reference.llm()
    check_after_each_step(llm.engine)
    for index in (0, 5, 9):
        (completion,) = llm.generate(prompts[index], greedy(NUM_TOKENS))
        assert completion.token_ids == expected[index]


def test_tokens_are_the_same_in_a_batch_of_eight(reference, prompts, expected, check_after_each_step):
    llm = reference.llm(max_num_seqs=8, num_kv_blocks=128)
    check_after_each_step(llm.engine)
    assert [c.token_ids for c in llm.generate(prompts[2:], greedy(NUM_TOKENS))] == expected[2:]
    assert max(len(step.entries) for step in llm.engine.metrics.take_step_records()) == 8


def test_tokens_are_the_same_with_prefill_chunks_of_sixteen(reference, prompts, expected, check_after_each_step):
    llm = reference.llm(max_batched_tokens=16, max_num_seqs=10, block_size=5, num_kv_blocks=256)
    check_after_each_step(llm.engine)
    completions = llm.generate(prompts, greedy(24))
    outputs = beginnings(expected, 24)
    assert [c.token_ids for c in completions] == outputs
    assert [c.text for c in completions] == [reference.tokenizer.decode(output) for output in outputs]
    assert all(entry.prefill_tokens <= 16 for step in llm.engine.metrics.take_step_records() for entry in step.entries)


def test_tokens_are_the_same_with_prefix_cache_hits(reference, prompts, expected, check_after_each_step):
    """Every prompt with half of its answer, over blocks that other requests computed."""
    llm = reference.llm(num_kv_blocks=256, max_num_seqs=10)
    check_after_each_step(llm.engine)
    half = NUM_TOKENS // 2
    llm.generate(prompts, greedy(half))
    continued = [prompt + output[:half] for prompt, output in zip(prompts, expected)]
    completions = llm.generate(continued, greedy(12))
    assert [c.token_ids for c in completions] == [output[half : half + 12] for output in expected]
    for prompt, completion in zip(continued, completions):
        assert completion.metrics is not None
        assert completion.metrics.cached_tokens == (len(prompt) - 1) // 16 * 16


def test_tokens_are_the_same_with_so_few_blocks_that_requests_are_preempted(
    reference, prompts, expected, check_after_each_step
):
    llm = reference.llm(num_kv_blocks=12, max_num_seqs=8)
    check_after_each_step(llm.engine)
    completions = llm.generate(prompts, greedy(24))
    assert [c.token_ids for c in completions] == beginnings(expected, 24)
    assert llm.stats()["preemptions"] > 0
    assert sum(c.metrics.preemptions for c in completions if c.metrics) == llm.stats()["preemptions"]


def test_the_default_kernels_give_the_same_tokens_however_the_work_is_cut(starter, prompts, check_after_each_step):
    """They round otherwise than Hugging Face, but never otherwise from one batch to the next."""
    params = greedy(24)
    alone = starter.llm(prefix_caching=False)
    expected = [alone.generate(prompt, params)[0].token_ids for prompt in prompts]
    for config in (
        {"num_kv_blocks": 128},
        {"max_batched_tokens": 16, "max_num_seqs": 4, "block_size": 8, "num_kv_blocks": 128},
        {"num_kv_blocks": 12},
    ):
        llm = starter.llm(**config)
        check_after_each_step(llm.engine)
        assert [c.token_ids for c in llm.generate(prompts, params)] == expected
    assert llm.stats()["preemptions"] > 0
