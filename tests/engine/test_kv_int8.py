"""A cache of bytes on both paths: close to a full one, and the same however the work is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.models import LoadedModel
from engine.protocol import SamplingParams
from engine.runner import ModelRunner, NativeRunner
from engine.scheduler import ScheduledRequest, StepPlan
from tests.engine.conftest import Starter
from tests.engine.tiny_llama import Harness, load, random_llama, random_tokens, tiny_config

RUNNERS = {"reference": ModelRunner, "cpu": NativeRunner}


@pytest.fixture(scope="module", params=RUNNERS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("tiny")
    config = tiny_config(hidden_size=96, num_attention_heads=6, num_key_value_heads=2)
    random_llama(config).save_pretrained(folder)
    model = load(folder, kernels=request.param)
    assert isinstance(harness(model).runner, RUNNERS[request.param])
    return model


def harness(loaded: LoadedModel) -> Harness:
    return Harness(loaded, kv_dtype=torch.int8)


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of the rows' distributions."""
    exact, other = (logits.double().log_softmax(-1) for logits in (exact, other))
    return (exact.exp() * (exact - other)).sum(-1).mean().item()


def test_logits_move_little_and_memory_shrinks(loaded):
    token_ids = random_tokens(100)
    exact = Harness(loaded).logits(token_ids)
    # Random weights attend sharply, so that rounding shows more than in a trained model.
    assert 0 < divergence(exact, harness(loaded).logits(token_ids)) < 0.02
    assert harness(loaded).runner.kv_bytes < 0.35 * Harness(loaded).runner.kv_bytes


def test_the_starter_models_distributions_barely_move(starter: Starter):
    token_ids = starter.tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text()[:800])
    exact = Harness(starter.loaded).logits(token_ids)
    assert 0 < divergence(exact, harness(starter.loaded).logits(token_ids)) < 0.03


def test_both_paths_round_alike(tmp_path):
    random_llama(tiny_config(hidden_size=96, num_attention_heads=6, num_key_value_heads=2)).save_pretrained(tmp_path)
    token_ids = random_tokens(100)
    native, eager = (harness(load(tmp_path, kernels=kernels)).logits(token_ids) for kernels in ("cpu", "reference"))
    # Where a value lies just between two steps, the paths may round it apart: then one key moves by a step.
    torch.testing.assert_close(native, eager, atol=0.05, rtol=0)
    assert (native - eager).abs().mean() < 1e-3


def test_chunked_is_whole_and_batched_is_alone(loaded):
    tokens = [random_tokens(length, seed=length) for length in (33, 17, 5, 64)]
    alone = [harness(loaded).logits(token_ids) for token_ids in tokens]
    for token_ids, expected in zip(tokens, alone):
        torch.testing.assert_close(harness(loaded).logits(token_ids, chunk=7), expected, atol=0.05, rtol=0)
    together = harness(loaded)
    requests = [together.request(token_ids) for token_ids in tokens]
    logits = together.runner.execute(
        StepPlan([ScheduledRequest(request, 0, request.num_tokens, True) for request in requests], [])
    )
    for row, expected in zip(logits, alone):
        torch.testing.assert_close(row, expected[-1], atol=0.05, rtol=0)


def test_hit_is_miss_and_the_tokens_are_nearly_those_of_a_full_cache(starter: Starter):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompt = starter.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 8)
    half = starter.llm(num_kv_blocks=64)
    llm = starter.llm(kv_dtype="int8", num_kv_blocks=64)
    assert llm.engine.info.kv_dtype == "int8"
    assert llm.engine.info.kv_bytes_per_token < 0.54 * half.engine.info.kv_bytes_per_token
    (miss,) = llm.generate(prompt, params)
    (hit,) = llm.generate(prompt, params)
    assert miss.metrics and hit.metrics
    assert miss.metrics.cached_tokens == 0 and hit.metrics.cached_tokens >= 0.8 * len(prompt)
    assert hit.token_ids == miss.token_ids
    (expected,) = half.generate(prompt, params)
    assert miss.token_ids[:4] == expected.token_ids[:4]
