"""The whole engine on the Triton kernels, in the interpreter: the reference's tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP, MixtureOfExperts
from engine.llm import LLM
from engine.protocol import SamplingParams
from engine.quantization import DenseWeight
from engine.quantization.int4 import quantize_int4
from engine.quantization.int8 import quantize_int8
from engine.quantization.triton_tiles import TritonWeight, triton_affine
from kernels import ops
from tests.engine.families import FAMILIES, save_family
from tests.engine.gguf_writer import write_gguf_model

pytest.importorskip("triton", reason="triton is made for Linux only")

PROMPTS = [[5, 9, 3], list(range(2, 9))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


def tokens(path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[list[int]]:
    """The answers to all prompts at once, prefilled in chunks."""
    monkeypatch.setenv(ops.BACKEND_VARIABLE, kernels)
    ops._backend.cache_clear()
    try:
        with LLM(path, num_kv_blocks=24, max_batched_tokens=8, **options) as llm:
            assert llm.info.kernels == kernels
            return [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]
    finally:
        monkeypatch.delenv(ops.BACKEND_VARIABLE)
        ops._backend.cache_clear()


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_families_give_the_references_tokens(family, tmp_path, monkeypatch):
    """Between them: norms of queries and keys, windows, soft caps, GELU, sinks, experts."""
    save_family(family, tmp_path)
    assert tokens(tmp_path, "triton", monkeypatch) == tokens(tmp_path, "reference", monkeypatch)


@pytest.mark.parametrize(
    "options", [{"quantization": "int4"}, {"quantization": "int8", "kv_dtype": "int8"}, {"speculation": "ngram"}]
)
def test_integer_weights_integer_caches_and_drafts_give_the_references_tokens(options, tmp_path, monkeypatch):
    save_family("llama", tmp_path)
    expected = tokens(tmp_path, "reference", monkeypatch, **options)
    assert tokens(tmp_path, "triton", monkeypatch, **options) == expected


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
    write_gguf_model(path, FAMILIES["llama"](), tensor_type)
    expected = tokens(path, "reference", monkeypatch)
    assert tokens(path, "triton", monkeypatch) == expected
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "triton")
    with LLM(path, num_kv_blocks=8) as llm:
        runner: Any = llm.engine._runner
        weight = runner.loaded.model.layers[0].attention.qkv.weight
        assert isinstance(weight, TritonWeight)
        assert weight.dequantize().shape == weight.shape
        rows = torch.tensor([3, 0])
        assert torch.equal(weight.rows(rows), weight.dequantize()[rows])
