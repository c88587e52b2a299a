"""The decoder compiled for the native CPU kernels against its eager form, transformers, and itself in other company."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from engine.kv_cache import KVCache
from engine.layers.mlp import MixtureOfExperts
from engine.models import LoadedModel
from engine.models.config import UnsupportedModelError
from engine.models.decoder import Decoder
from engine.models.native_decoder import why_not_native
from engine.quantization import DenseWeight
from engine.quantization.native import NativeWeight
from engine.runner import ModelRunner, NativeRunner, make_runner, runner_kv_dtype
from engine.scheduler import ScheduledRequest, StepPlan
from kernels.cpu.library import WeightFormat
from kernels.cpu.packing import pack
from tests.engine.families import FAMILIES, expected_logits, save_family
from tests.engine.tiny_llama import (
    CPU,
    Harness,
    gguf_tensors,
    load,
    oracle_logits,
    random_llama,
    random_tokens,
    randomised,
    tiny_config,
    write_gguf,
)

SHAPE: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}


def packed(folder: Path, tensor_type: str, **changes) -> LoadedModel:
    config = tiny_config(**SHAPE, **changes)
    path = write_gguf(folder / "tiny.gguf", config, gguf_tensors(random_llama(config)), tensor_type)
    return load(path, kernels="cpu")


@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": True}, {"tie_word_embeddings": True}], ids=["plain", "bias", "tied"]
)
def test_float_weights_give_the_logits_of_transformers(tmp_path, changes):
    oracle = random_llama(tiny_config(**SHAPE, **changes))
    oracle.save_pretrained(tmp_path)
    harness = Harness(load(tmp_path, kernels="cpu"))
    assert isinstance(harness.runner, NativeRunner)
    for length, chunk in ((1, None), (17, None), (100, 7)):
        token_ids = random_tokens(length)
        logits = harness.logits(token_ids, chunk)
        torch.testing.assert_close(logits, oracle_logits(oracle, token_ids), atol=1e-4, rtol=1e-4)


def test_a_sliding_window_is_kept(tmp_path):
    shape: dict[str, Any] = SHAPE | {"intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    config = MistralConfig(vocab_size=97, sliding_window=7, **shape)
    oracle = randomised(MistralForCausalLM(config))
    oracle.save_pretrained(tmp_path)
    token_ids = random_tokens(90)
    logits = Harness(load(tmp_path, kernels="cpu", max_context=128)).logits(token_ids, chunk=11)
    torch.testing.assert_close(logits, oracle_logits(oracle, token_ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tensor_type", ["F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_packed_weights_stay_packed_and_agree_with_their_dequantised_selves(tmp_path, tensor_type):
    loaded = packed(tmp_path, tensor_type)
    exact = load(tmp_path / "tiny.gguf")
    assert loaded.weight_bytes < 0.6 * exact.weight_bytes
    token_ids = random_tokens(60)
    native, reference = Harness(loaded).logits(token_ids, 16), Harness(exact).logits(token_ids)
    probabilities = reference.double().log_softmax(-1)
    divergence = (probabilities.exp() * (probabilities - native.double().log_softmax(-1))).sum(-1).mean()
    assert divergence < (1e-2 if tensor_type.startswith("Q4") else 1e-6)


def test_one_list_of_operations_computes_what_the_layers_do_one_by_one(tmp_path):
    loaded = packed(tmp_path, "Q8_0")
    harness = Harness(loaded)
    token_ids = random_tokens(40)
    compiled = harness.logits(token_ids)
    harness.runner = ModelRunner(loaded, KVCache(loaded.config, 64, 16, torch.float32, CPU), 2048)
    torch.testing.assert_close(compiled, harness.logits(token_ids), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("tensor_type", ["Q4_1", "Q8_0", "F32"])
def test_logits_are_the_same_bits_alone_chunked_and_in_company(tmp_path, tensor_type):
    assert_same_bits_in_company(packed(tmp_path, tensor_type), torch.float32)


def assert_same_bits_in_company(loaded: LoadedModel, kv_dtype: torch.dtype) -> None:
    """Compares whole prefills alone with one step of a decode and the last chunks of others."""
    tokens = [random_tokens(length, seed=length) for length in (33, 17, 5, 64)]
    alone = [Harness(loaded, kv_dtype=kv_dtype).logits(token_ids)[-1] for token_ids in tokens]
    harness = Harness(loaded, kv_dtype=kv_dtype)
    requests = [harness.request(token_ids) for token_ids in tokens]
    for request, computed in zip(requests, (32, 10, 0, 50)):
        if computed:
            harness.runner.execute(StepPlan([ScheduledRequest(request, 0, computed, False)], []))
    plan = [
        ScheduledRequest(request, computed, request.num_tokens - computed, True)
        for request, computed in zip(requests, (32, 10, 0, 50))
    ]
    together = harness.runner.execute(StepPlan(plan, []))
    for row, expected in zip(together, alone):
        assert torch.equal(row, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_computed_in_whole_steps(tmp_path, family):
    oracle = save_family(family, tmp_path)
    loaded = load(tmp_path, kernels="cpu")
    harness, token_ids = Harness(loaded), random_tokens(100)
    assert isinstance(harness.runner, NativeRunner)
    whole = harness.logits(token_ids)
    torch.testing.assert_close(whole, expected_logits(oracle, token_ids), atol=3e-4, rtol=3e-4)
    assert torch.equal(Harness(loaded).logits(token_ids, chunk=7), whole)
    for kv_dtype in (torch.float32, torch.int8):
        assert_same_bits_in_company(loaded, kv_dtype)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_packed_families_agree_with_their_layers_called_one_by_one(tmp_path, family):
    save_family(family, tmp_path)
    loaded = load(tmp_path, kernels="cpu", quantization="int8")
    token_ids = random_tokens(60)
    compiled = Harness(loaded).logits(token_ids)
    harness = Harness(loaded, block_size=12)  # which the compiled decoder does not have
    assert loaded.native and not loaded.whole_step(12) and isinstance(harness.runner, ModelRunner)
    assert loaded.kernels(12) == f"{loaded.kernels(16)} (eager)"
    torch.testing.assert_close(harness.logits(token_ids), compiled, atol=5e-3, rtol=5e-3)


def test_weights_in_other_forms_than_tiles_are_computed_one_by_one(tmp_path):
    random_llama(tiny_config(**SHAPE)).save_pretrained(tmp_path)
    loaded = load(tmp_path, kernels="cpu")
    token_ids = random_tokens(30)
    expected = Harness(loaded).logits(token_ids)
    assert isinstance(loaded.model, Decoder)
    output = loaded.model.layers[1].attention.output
    output.weight = DenseWeight(output.weight.dequantize())
    assert not loaded.whole_step(16) and runner_kv_dtype(loaded, "auto") == torch.float16
    harness = Harness(loaded)
    assert isinstance(harness.runner, ModelRunner)
    torch.testing.assert_close(harness.logits(token_ids), expected, atol=1e-4, rtol=1e-4)


def test_products_from_several_threads_take_turns(tmp_path):
    model = packed(tmp_path, "Q4_1").model
    assert isinstance(model, Decoder)
    weights = [layer.attention.output.weight for layer in model.layers]
    x = torch.randn(300, weights[0].shape[1], generator=torch.Generator().manual_seed(0))
    alone = [weight.matmul(x) for weight in weights]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda weight: weight.matmul(x), weights * 20))
    assert all(torch.equal(result, expected) for result, expected in zip(together, alone * 20))
    assert torch.equal(weights[0].matmul(x[299:]), alone[0][299:])
    assert weights[0].matmul(x[:0]).shape == (0, weights[0].shape[0])


def test_more_rows_of_logits_than_the_head_computes_at_once(tmp_path):
    loaded = packed(tmp_path, "F32")
    token_ids = random_tokens(100)
    every = Harness(loaded).logits(token_ids)
    assert every.shape == (100, 97)
    torch.testing.assert_close(every[31:33], torch.stack([Harness(loaded).logits(token_ids[:n])[-1] for n in (32, 33)]))


def test_a_half_cache_takes_half_the_memory_and_barely_moves_the_logits(tmp_path):
    loaded = packed(tmp_path, "F32")
    harness, token_ids = Harness(loaded), random_tokens(50)
    exact, whole = harness.logits(token_ids), harness.runner.kv_bytes
    harness.runner = make_runner(loaded, 64, 16, torch.float16, budget=2048)
    assert harness.runner.kv_bytes * 2 == whole
    assert 0 < (harness.logits(token_ids) - exact).abs().max() < 0.05


def test_what_the_native_kernels_cannot_do_is_named_and_refused_where_they_are_forced(tmp_path):
    config = tiny_config()  # 72 columns: no multiple of 32
    random_llama(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="72"):
        load(tmp_path, kernels="cpu")
    loaded = load(tmp_path)
    assert "72" in (why_not_native(loaded.config, 16) or "")
    assert "KV blocks of 12" in (why_not_native(packed(tmp_path, "F32").config, 12) or "")
    with pytest.raises(UnsupportedModelError, match="bfloat16"):
        load(tmp_path / "tiny.gguf", kernels="cpu", dtype="bf16")


def test_experts_of_unlike_formats_are_computed_one_by_one(tmp_path):
    save_family("mixtral", tmp_path)
    loaded = load(tmp_path, kernels="cpu")
    assert isinstance(loaded.model, Decoder)
    mlp = loaded.model.layers[0].mlp
    assert isinstance(mlp, MixtureOfExperts)
    token_ids = random_tokens(30)
    expected = Harness(loaded).logits(token_ids)
    down = mlp.experts[1].down
    rows = torch.from_numpy(gguf.quantize(down.weight.dequantize().numpy(), gguf.GGMLQuantizationType.Q8_0))
    down.weight = NativeWeight(pack([rows], WeightFormat.Q8_0, down.weight.shape[1]))
    assert not loaded.whole_step(16)
    torch.testing.assert_close(Harness(loaded).logits(token_ids), expected, atol=0.1, rtol=0.1)
