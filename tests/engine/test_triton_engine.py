"""The whole engine on the Triton kernels, in the interpreter: the reference's tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP, MixtureOfExperts
from engine.llm import LLM
from engine.protocol import SamplingParams
from engine.quantization import DenseWeight
from engine.quantization.int4 import quantize_int4
from engine.quantization.int8 import quantize_int8
from engine.quantization.triton_tiles import TritonWeight, triton_affine
from kernels import ops
from tests.engine.families import FAMILIES, VOCAB_SIZE, save_model
from tests.engine.gguf_writer import write_gguf_model
from tests.engine.test_equivalence_matrix import draft_from
from tests.engine.tiny_llama import random_tokens

pytest.importorskip("triton", reason="triton is made for Linux only")

PROMPTS = [[5, 9, 3], list(range(2, 9))]


def shallow(family: str, num_layers: int) -> PreTrainedModel:
    """The family's model with its first layers only: the interpreter is slow."""
    model: Any = FAMILIES[family]()
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    if getattr(model.config, "layer_types", None) is not None:
        model.config.layer_types = model.config.layer_types[:num_layers]
    return model


@contextmanager
def llm_on(kernels: str, path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[LLM]:
    """The model in `path`, which computes longer prompts in chunks."""
    monkeypatch.setenv(ops.BACKEND_VARIABLE, kernels)
    ops._backend.cache_clear()
    try:
        with LLM(path, num_kv_blocks=24, max_batched_tokens=8, **options) as llm:
            assert llm.info.kernels == kernels
            yield llm
    finally:
        monkeypatch.delenv(ops.BACKEND_VARIABLE)
        ops._backend.cache_clear()


def answers(llm: LLM, max_tokens: int = 2) -> list[list[int]]:
    """To all prompts at once."""
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [completion.token_ids for completion in llm.generate(PROMPTS, greedy)]


@pytest.mark.parametrize(("family", "num_layers"), [("qwen3", 2), ("gemma2", 2), ("gpt_oss", 1)])
def test_families_give_the_references_logits_and_tokens(family, num_layers, tmp_path, monkeypatch):
    """Between them: norms of queries and keys, windows, soft caps, GELU, sinks, experts."""
    save_model(shallow(family, num_layers), tmp_path)
    beyond_the_windows = random_tokens(22, VOCAB_SIZE)
    with llm_on("reference", tmp_path, monkeypatch) as llm:
        expected, tokens = llm.logits(beyond_the_windows), answers(llm)
    with llm_on("triton", tmp_path, monkeypatch) as llm:
        torch.testing.assert_close(llm.logits(beyond_the_windows), expected, atol=1e-3, rtol=1e-4)
        assert answers(llm) == tokens


@pytest.mark.parametrize("options", [{"quantization": "int4"}, {"quantization": "int8", "kv_dtype": "int8"}])
def test_integer_weights_and_integer_caches_give_the_references_tokens(options, tmp_path, monkeypatch):
    save_model(shallow("llama", 2 if "kv_dtype" in options else 1), tmp_path)
    with llm_on("reference", tmp_path, monkeypatch, **options) as llm:
        expected = answers(llm)
    with llm_on("triton", tmp_path, monkeypatch, **options) as llm:
        assert answers(llm) == expected


def test_drafts_right_and_wrong_give_the_references_tokens(tmp_path, monkeypatch):
    save_model(shallow("llama", 2), tmp_path)
    with llm_on("reference", tmp_path, monkeypatch) as llm:
        expected = answers(llm, max_tokens=4)
    draft_from(monkeypatch, [prompt + answer for prompt, answer in zip(PROMPTS, expected)])
    with llm_on("triton", tmp_path, monkeypatch, speculation="ngram", num_draft_tokens=2) as llm:
        assert answers(llm, max_tokens=4) == expected
        assert 0 < llm.stats()["accepted_tokens"] < llm.stats()["drafted_tokens"]


# ---------------------------------------------------------------- experts


def expert(formats: tuple[str, str], seed: int, permutation: torch.Tensor | None = None) -> GatedMLP:
    generator = torch.Generator().manual_seed(seed)

    def linear(kind: str, out: int) -> Linear:
        weight = torch.randn(out, 32, generator=generator)
        bias = torch.randn(out, generator=generator)
        if kind == "dense":
            return Linear(DenseWeight(weight), bias)
        matrix = replace(
            quantize_int4(weight, 16) if kind == "int4" else quantize_int8(weight), permutation=permutation
        )
        tiled = triton_affine(matrix, torch.float32)
        assert tiled is not None
        return Linear(tiled, bias)

    gate = functools.partial(ops.clamped_swiglu, alpha=1.702, limit=2.0)
    return GatedMLP(linear(formats[0], 64), linear(formats[1], 32), gate)


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "triton")
    ops._backend.cache_clear()
    yield
    ops._backend.cache_clear()


def mixture(experts: list[GatedMLP]) -> MixtureOfExperts:
    router = torch.randn(len(experts), 32, generator=torch.Generator().manual_seed(9))
    return MixtureOfExperts(Linear(DenseWeight(router)), experts, num_chosen=2, normalize=True)


@pytest.mark.parametrize("formats", [("dense", "int8"), ("int4", "dense")])
def test_experts_of_one_format_are_stacked_and_share_the_memory(formats, triton_kernels):
    experts = [expert(formats, seed) for seed in range(3)]
    apart = [each.gate_up.weight.dequantize().clone() for each in experts]
    nbytes = sum(each.nbytes for each in experts)
    layer = mixture(experts)
    assert layer.is_capturable and layer.grouped is not None
    assert all(torch.equal(each.gate_up.weight.dequantize(), own) for each, own in zip(experts, apart))
    stack = layer.grouped.down if formats[1] == "dense" else layer.grouped.gate_up
    last = experts[-1].down.weight if formats[1] == "dense" else experts[-1].gate_up.weight
    assert isinstance(stack, torch.Tensor) and stack[-1].data_ptr() == last.dequantize().data_ptr()
    assert layer.nbytes == layer.router.nbytes + nbytes
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    together = layer(hidden)
    layer.grouped = None
    torch.testing.assert_close(together, layer(hidden), atol=1e-4, rtol=1e-4)


def test_experts_that_cannot_be_one_stack_are_computed_one_after_another(triton_kernels):
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    mixed = [expert(("dense", "dense"), 0), expert(("dense", "int4"), 1)]
    act_order = [expert(("int4", "int4"), seed, order) for seed in range(2)]
    for experts in (mixed, act_order):
        kept = [each.down.weight for each in experts]
        layer = mixture(experts)
        assert not layer.is_capturable
        assert [each.down.weight for each in experts] == kept


@pytest.mark.parametrize("tensor_type", ["Q4_0"])
def test_a_gguf_file_stays_packed(tensor_type, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    write_gguf_model(path, shallow("llama", 1), tensor_type)
    with llm_on("reference", path, monkeypatch) as llm:
        expected = answers(llm)
    with llm_on("triton", path, monkeypatch) as llm:
        assert answers(llm) == expected
        runner: Any = llm.engine._runner
        weight = runner.loaded.model.layers[0].attention.qkv.weight
        assert isinstance(weight, TritonWeight)
        assert weight.dequantize().shape == weight.shape
        rows = torch.tensor([3, 0])
        assert torch.equal(weight.rows(rows), weight.dequantize()[rows])
