"""One ragged forward pass: whatever else is in the batch, each row is the model's own."""

from __future__ import annotations

import pytest
import torch

from engine.models import LoadedModel
from engine.request import Request
from engine.runner import ModelRunner, make_runner
from engine.scheduler import ScheduledRequest, StepPlan
from kernels import ops
from tests.engine.tiny_llama import Harness, load, oracle_logits, random_llama, random_tokens, tiny_config


@pytest.fixture(scope="module")
def oracle():
    return random_llama(tiny_config())


@pytest.fixture(scope="module")
def tiny(oracle, tmp_path_factory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("tiny")
    oracle.save_pretrained(folder)
    return load(folder)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
@pytest.mark.parametrize(("chunk", "block_size"), [(None, 16), (16, 16), (7, 5), (1, 16)])
def test_logits_of_every_position_are_those_of_transformers(oracle, tiny, length, chunk, block_size):
    token_ids = random_tokens(length)
    logits = Harness(tiny, block_size).logits(token_ids, chunk)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, oracle_logits(oracle, token_ids), atol=1e-4, rtol=1e-4)


def test_decodes_and_prefill_chunks_of_many_requests_share_one_step(oracle, tiny):
    harness = Harness(tiny)
    tokens = [random_tokens(length, seed=length) for length in (33, 17, 5, 64)]
    requests = [harness.request(token_ids) for token_ids in tokens]
    # The first two are computed but for their last token; the third comes whole, the fourth in two chunks.
    for request in requests[:2]:
        harness.runner.execute(StepPlan([ScheduledRequest(request, 0, request.num_tokens - 1, False)], []))
    harness.runner.execute(StepPlan([ScheduledRequest(requests[3], 0, 20, False)], []))
    plan = StepPlan(
        [
            ScheduledRequest(requests[0], 32, 1, True),
            ScheduledRequest(requests[1], 16, 1, True),
            ScheduledRequest(requests[2], 0, 5, True),
            ScheduledRequest(requests[3], 20, 30, False),
        ],
        [],
    )
    logits = harness.runner.execute(plan)
    assert logits.shape == (3, 97)
    for row, token_ids in zip(logits, tokens):
        torch.testing.assert_close(row, oracle_logits(oracle, token_ids)[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("chunk", "block_size"), [(1000, 16), (16, 16), (5, 3)])
def test_greedy_tokens_do_not_depend_on_company_chunks_or_blocks(tiny, chunk, block_size):
    prompts = [random_tokens(length, seed=length) for length in (3, 16, 17, 40, 1, 9, 31, 8)]
    alone = [Harness(tiny).greedy([prompt], 24)[0] for prompt in prompts]
    together = Harness(tiny, block_size, num_blocks=1024 // block_size).greedy(prompts, 24, chunk)
    assert together == alone


def test_a_step_without_a_sampling_row_gives_no_logits(tiny):
    harness = Harness(tiny)
    request = harness.request(random_tokens(20))
    logits = harness.runner.execute(StepPlan([ScheduledRequest(request, 0, 10, False)], []))
    assert logits.shape == (0, 97)
    assert harness.runner.execute(StepPlan([], [])).shape == (0, 97)


def test_draft_tokens_are_computed_after_the_known_ones_with_a_row_each(oracle, tiny):
    harness = Harness(tiny)
    token_ids = random_tokens(23)
    request = harness.request(token_ids[:20], room=3)
    request.draft_token_ids = token_ids[20:]
    harness.runner.execute(StepPlan([ScheduledRequest(request, 0, 19, False)], []))
    logits = harness.runner.execute(StepPlan([ScheduledRequest(request, 19, 4, True)], []))
    torch.testing.assert_close(logits, oracle_logits(oracle, token_ids)[19:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_a_token_may_come_from_a_row_of_the_step_before(tmp_path, kernels):
    if kernels not in ops.available_backends():
        pytest.skip("the native kernels are not built")
    oracle = random_llama(tiny_config(hidden_size=96, num_attention_heads=6, num_key_value_heads=2))
    oracle.save_pretrained(tmp_path)
    harness = Harness(load(tmp_path, kernels))
    tokens = [random_tokens(length, seed=length) for length in (33, 17, 5)]
    requests = [harness.request(token_ids[:-1], room=1) for token_ids in tokens]
    # What the step before chose, as the device has it; the middle request comes from its last row.
    chosen = torch.tensor([tokens[0][-1], 96, tokens[2][-1], tokens[1][-1]])
    prompts = [ScheduledRequest(request, 0, request.num_tokens, False) for request in requests]
    harness.runner.execute(StepPlan(prompts, []))
    extra = harness.request(random_tokens(9))
    entries = [
        ScheduledRequest(request, request.num_tokens, 1, True, source_row=row)
        for request, row in zip(requests, (0, 3, 2))
    ]
    entries.insert(1, ScheduledRequest(extra, 0, 9, True))
    logits = harness.runner.execute(StepPlan(entries, []), token_ids=chosen)
    for row, token_ids in zip(logits, (tokens[0], extra.token_ids, tokens[1], tokens[2]), strict=True):
        torch.testing.assert_close(row, oracle_logits(oracle, token_ids)[-1], atol=1e-4, rtol=1e-4)


def test_a_reused_block_shows_nothing_of_its_last_owner(oracle, tiny):
    harness = Harness(tiny, num_blocks=4)
    assert isinstance(harness.runner, ModelRunner)
    harness.runner.kv_cache.layers[0].data.fill_(float("nan"))
    harness.logits(random_tokens(40, seed=1))
    harness.free_blocks = [2, 0, 3, 1]
    token_ids = random_tokens(30, seed=2)
    torch.testing.assert_close(
        harness.logits(token_ids, chunk=8), oracle_logits(oracle, token_ids), atol=1e-4, rtol=1e-4
    )


def test_a_step_beyond_the_token_limit_or_its_blocks_is_refused(tiny):
    harness = Harness(tiny)
    harness.runner = make_runner(tiny, 64, 16, torch.float32, budget=8)
    request = harness.request(random_tokens(20))
    with pytest.raises(ValueError, match="9 tokens is beyond the limit of 8"):
        harness.runner.execute(StepPlan([ScheduledRequest(request, 0, 9, False)], []))
    blockless = Request("x", random_tokens(5))
    with pytest.raises(ValueError, match="need 1 blocks"):
        harness.runner.execute(StepPlan([ScheduledRequest(blockless, 0, 5, True)], []))
