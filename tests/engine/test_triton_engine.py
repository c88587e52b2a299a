"""The whole engine on the Triton kernels, in the interpreter: the reference's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.llm import LLM
from engine.protocol import SamplingParams
from engine.quantization.triton_tiles import TritonWeight
from kernels import ops
from tests.engine.families import FAMILIES, save_family
from tests.engine.gguf_writer import write_gguf_model

pytest.importorskip("triton", reason="triton is made for Linux only")

PROMPTS = [[5, 9, 3, 7], list(range(2, 12))]
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
