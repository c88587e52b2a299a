"""Rotary embedding: every kind is transformers' own, and each request's depends on its own length alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.layers.rope import RotaryTable, no_rotation
from engine.llm import LLM
from engine.models.config import ModelError, RopeConfig
from engine.models.hf_config import config_from_hf
from engine.protocol import SamplingParams
from kernels import ops
from kernels.kv import KVLayer
from tests.engine.families import (
    LLAMA3_ROPE,
    MAX_POSITIONS,
    ORIGINAL_POSITIONS,
    VOCAB_SIZE,
    YARN_ROPE,
    expected_logits,
    make_config,
    randomised,
    save_family,
    save_tokenizer,
)
from tests.engine.tiny_llama import CPU, random_tokens

TRAINED = 48
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * j for j in range(16)],
    "long_factor": [2.0 + 0.5 * j for j in range(16)],
    "original_max_position_embeddings": TRAINED,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN_ROPE,
    "yarn_untruncated": YARN_ROPE | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_attention_factor": YARN_ROPE | {"attention_factor": 1.3},
    "yarn_mscale": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.4},
    "yarn_factor_below_one": YARN_ROPE | {"factor": 0.5},
    "longrope": LONGROPE,
    "longrope_attention_factor": LONGROPE | {"attention_factor": 1.25},
    "longrope_factor": LONGROPE | {"factor": 8.0},
    "dynamic": DYNAMIC,
}


def rope_of(parameters: dict[str, Any]) -> tuple[LlamaConfig, RopeConfig]:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=TRAINED,
        rope_parameters=dict(parameters),
    )
    return config, config_from_hf(config.to_dict()).rope


@pytest.mark.parametrize("length", [TRAINED - 5, TRAINED, TRAINED + 1, 120])
@pytest.mark.parametrize("kind", ROPES)
def test_angles_are_those_of_transformers(kind, length):
    config, rope = rope_of(ROPES[kind])
    positions = torch.arange(length)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    own_cos, own_sin = RotaryTable(rope, 128, CPU)(positions, torch.full((length,), length), torch.float32)
    torch.testing.assert_close(own_cos, cos[0], atol=2e-5, rtol=0)
    # The first half of ours is negated.
    torch.testing.assert_close(own_sin[:, 16:], sin[0, :, 16:], atol=2e-5, rtol=0)
    assert torch.equal(own_sin[:, :16], -own_sin[:, 16:])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_tokens_of_sequences_of_different_lengths_are_rotated_side_by_side(kind):
    _, rope = rope_of(ROPES[kind])
    table = RotaryTable(rope, 128, CPU)
    parts = [(torch.arange(length), torch.full((length,), length)) for length in (20, 60, 110, TRAINED)]
    together = table(torch.cat([p for p, _ in parts]), torch.cat([n for _, n in parts]), torch.float32)
    for index in range(2):
        alone = torch.cat([table(positions, lengths, torch.float32)[index] for positions, lengths in parts])
        assert torch.equal(together[index], alone)


@pytest.mark.parametrize("kind", ROPES)
def test_no_kind_of_rope_waits_for_the_device(kind):
    """Tensors without numbers can answer nothing."""
    positions = torch.arange(5, device="meta")
    table = RotaryTable(rope_of(ROPES[kind])[1], 128, torch.device("meta"))
    assert table(positions, positions + 60, torch.float32)[0].shape == (5, 32)


def test_a_cut_context_needs_no_long_table():
    _, rope = rope_of(LONGROPE)
    assert RotaryTable(rope, TRAINED, CPU).cos.shape[0] == TRAINED
    assert RotaryTable(rope, TRAINED + 1, CPU).cos.shape[0] == 2 * (TRAINED + 1)


def test_a_position_beyond_the_table_is_an_error():
    _, rope = rope_of(ROPES["default"])
    with pytest.raises(IndexError):
        RotaryTable(rope, 16, CPU)(torch.tensor([16]), torch.tensor([17]), torch.float32)


def test_a_layer_without_positions_keeps_its_queries_and_keys():
    qkv = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(0))
    cache = KVLayer(torch.zeros(1, 16, 2, 1, 16))
    queries = ops.rope_and_write_kv(qkv, *no_rotation(5, torch.float32, CPU), cache, torch.arange(5))
    assert torch.equal(queries, qkv[:, :2])
    assert torch.equal(cache.read(torch.arange(5), torch.float32).flatten(1, 2), qkv[:, 2:])


def test_dynamic_and_yarn_reach_beyond_the_trained_context():
    def context(parameters: dict[str, Any]) -> int:
        return config_from_hf(rope_of(parameters)[0].to_dict()).max_context

    assert context(ROPES["default"]) == context(LONGROPE) == context(ROPES["linear"]) == TRAINED
    assert context(DYNAMIC) == 4 * TRAINED
    assert context(YARN_ROPE) == 4 * 32


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "mrope"}, "rope scaling 'mrope' is not supported"),
        ({"rope_type": 7}, "rope_parameters.rope_type is 7, no text"),
        ({"rope_type": "linear"}, "rope_parameters.factor is missing"),
        ({"rope_type": "linear", "factor": 0}, "rope factor is 0.0"),
        ({"rope_type": "default", "rope_theta": -1}, "rope base is -1.0"),
        ({"rope_type": "default", "rope_theta": float("nan")}, "rope_theta is nan, a number no model has"),
        ({"rope_type": "default", "partial_rotary_factor": 2.0}, "rope covers 64 of 32 dimensions"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "yarn needs more than 1"),
        (YARN_ROPE | {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        (LLAMA3_ROPE | {"low_freq_factor": 4.0}, "from 4.0 to 4.0 are no rising range"),
        (LONGROPE | {"long_factor": [1.0]}, "longrope needs 16 positive factors, 1 are given"),
        (LONGROPE | {"short_factor": ["x"] * 16}, "short_factor is 'x', not a number"),
        (LONGROPE | {"short_factor": None}, "short_factor is missing"),
    ],
)
def test_a_rope_that_cannot_be_is_refused(parameters, message):
    values = rope_of(ROPES["default"])[0].to_dict() | {"rope_parameters": parameters}
    with pytest.raises(ModelError, match=message):
        config_from_hf(values)


# ---------------------------------------------------------------- requests that grow beyond the trained context


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("longrope")
    return folder, save_family("phi3", folder)


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    config = make_config(
        "LlamaConfig",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TRAINED,
        rope_parameters=dict(DYNAMIC),
    )
    folder = tmp_path_factory.mktemp("dynamic")
    model = randomised(LlamaForCausalLM(config))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder, model


NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def open_llm(folder: Path, **changes: Any) -> LLM:
    options: dict[str, Any] = {"max_num_seqs": 4, "max_batched_tokens": 24, "block_size": 4, "num_kv_blocks": 120}
    return LLM(folder, device="cpu", **(options | changes))


def greedy_longrope(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Each token the last of a sequence of its own: transformers computes Phi-3's cache anew where it has to."""
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(int(expected_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@torch.inference_mode()
def greedy_dynamic(model: Any, prompt: list[int]) -> list[int]:
    model(torch.tensor([[1]]))  # forgets the frequencies of longer sequences
    tokens = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    generated = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return generated[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "changes",
    [{}, {"prefix_caching": False}, {"speculation": "ngram"}],
    ids=["batch", "preempted", "speculative"],
)
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_answers_that_cross_the_trained_context_are_those_of_transformers(kind, changes, request, monkeypatch):
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "reference")
    folder, model = request.getfixturevalue(kind)
    trained = ORIGINAL_POSITIONS if kind == "longrope" else TRAINED
    greedy = greedy_longrope if kind == "longrope" else greedy_dynamic
    prompts = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (trained - 4, trained + 20, trained, 9)]
    is_short_of_blocks = "prefix_caching" in changes
    if is_short_of_blocks:
        changes = changes | {"num_kv_blocks": 28 if kind == "longrope" else 32}
    with open_llm(folder, **changes) as llm:
        completions = llm.generate(prompts, GREEDY)
        assert (llm.stats()["preemptions"] > 0) == is_short_of_blocks
        llm.engine.check_integrity()
    assert [completion.token_ids for completion in completions] == [greedy(model, prompt) for prompt in prompts]


def test_keys_of_the_short_sequence_are_not_taken_for_those_of_the_long_one(longrope, monkeypatch):
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "reference")
    folder, model = longrope
    prompt = random_tokens(ORIGINAL_POSITIONS - 8, VOCAB_SIZE, seed=1)
    with open_llm(folder) as llm:
        (first,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
        longer = prompt + first.token_ids + random_tokens(20, VOCAB_SIZE, seed=2)
        cached = []
        for _ in range(2):
            (completion,) = llm.generate(longer, GREEDY)
            assert completion.token_ids == greedy_longrope(model, longer)
            assert completion.metrics is not None
            cached.append(completion.metrics.cached_tokens)
    assert cached == [0, (len(longer) - 1) // 4 * 4]
    assert len(longer) + NUM_TOKENS < MAX_POSITIONS
