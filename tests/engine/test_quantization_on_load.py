"""`quantization="int8"` and `"int4"`: how well matrices are rounded, and how little memory loading takes for it."""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.llm import LLM
from engine.models import LoadedModel, load_model, release_memory
from engine.protocol import EngineConfig
from engine.quantization import AffineMatrix, AffineWeight, DenseWeight
from engine.quantization.int4 import quantize_int4
from engine.quantization.int8 import quantize_int8
from engine.quantization.native_affine import native_affine
from engine.quantization.rounding import Rounding
from kernels import ops
from tests.engine.families import save_family
from tests.engine.tiny_llama import (
    CPU,
    Harness,
    decoder_of,
    gguf_tensors,
    load,
    oracle_logits,
    random_llama,
    random_tokens,
    tiny_config,
    write_gguf,
)

native_library = pytest.mark.skipif(ops.why_no_cpu_kernels() is not None, reason="the native library is not built")


def weights(kind: str, rows: int = 64, columns: int = 512) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    normal = torch.randn(rows, columns, generator=generator) * 0.02
    if kind == "outliers":
        normal[torch.rand(rows, columns, generator=generator) < 0.01] *= 8
    if kind == "shifted":
        normal += 0.05
    return normal


def plainly_rounded(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """The codes spread evenly from each group's smallest weight to its largest."""
    groups = weight.view(weight.shape[0], -1, group_size)
    lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (highest - lowest) / 15
    return (((groups - lowest) / step).round() * step + lowest).view(weight.shape)


def error(weight: torch.Tensor, rounded: torch.Tensor) -> float:
    return (weight.double() - rounded.double()).square().mean().item()


# ---------------------------------------------------------------- rounding


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("kind", ["normal", "outliers", "shifted"])
def test_the_search_beats_plain_rounding_clearly(kind, group_size):
    weight = weights(kind)
    matrix = quantize_int4(weight, group_size)
    plain = plainly_rounded(weight, group_size)
    assert error(weight, matrix.dequantize()) < 0.9 * error(weight, plain)
    by_group = [
        (weight - rounded).square().view(-1, group_size).sum(1) for rounded in (matrix.dequantize(), plain)
    ]  # fmt: skip
    assert (by_group[0] <= 1.02 * by_group[1]).float().mean() > 0.99
    assert matrix.nbytes * 8 / weight.numel() == 4 + 32 / group_size


def test_smaller_groups_come_closer():
    weight = weights("outliers")
    errors = [error(weight, quantize_int4(weight, group_size).dequantize()) for group_size in (32, 64, 128)]
    assert errors == sorted(errors) and errors[0] < 0.7 * errors[2]


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(3, 64),
        torch.full((3, 64), 0.7),
        torch.full((3, 64), -1e-6),
        torch.tensor([[0.0] * 63 + [1.0]]),
        torch.tensor([[-1.0, 1.0] * 32]),
        1e4 + torch.arange(64.0).view(1, 64),
        torch.arange(64.0).view(1, 64) * 1e-9,
        torch.arange(64.0).view(1, 64) * 1e3,
        torch.arange(70.0).view(1, 70),
        torch.arange(12.0).view(1, 12),
    ],
    ids=["zeros", "constant", "small", "one", "two_values", "far_off", "tiny", "huge", "short_group", "one_group"],
)
def test_no_group_is_too_odd_to_be_rounded(weight):
    before = weight.clone()
    for matrix in (quantize_int4(weight, 32), quantize_int8(weight)):
        assert torch.equal(weight, before)
        spread = max((weight.max() - weight.min()).item(), 0.0)
        allowed = 0.6 * spread / 15 + 3e-4 * weight.abs().max().item()
        if matrix.bits == 8:
            allowed = 0.5001 * weight.abs().max().item() / 127
        assert (matrix.dequantize() - weight).abs().max().item() <= allowed * 1.001


def test_8_bits_are_symmetric_and_scaled_to_the_largest_of_each_row():
    weight = weights("outliers")
    matrix = quantize_int8(weight)
    assert (matrix.zeros == 128).all() and matrix.scales.shape == (64, 1)
    steps = weight.abs().amax(1) / 127
    assert ((matrix.dequantize() - weight).abs().amax(1) <= 0.51 * steps).all()
    assert torch.equal(quantize_int8(-weight).dequantize(), -matrix.dequantize())


def test_parts_of_a_matrix_are_rounded_like_the_whole():
    weight = weights("normal", rows=700)  # more rows than are rounded at once
    for whole, parts in (
        (quantize_int4(weight, 64), [quantize_int4(part, 64) for part in weight.split(99)]),
        (quantize_int8(weight), [quantize_int8(part) for part in weight.split(99)]),
    ):
        assert torch.equal(AffineMatrix.cat(parts).dequantize(), whole.dequantize())
        assert torch.equal(whole.row_slice(5, 9).dequantize(), whole.dequantize()[5:9])


@native_library
@pytest.mark.parametrize("group_size", [32, 128])
def test_native_tiles_hold_what_the_search_found(group_size):
    weight = weights("outliers")
    for matrix in (quantize_int4(weight, group_size), quantize_int8(weight)):
        tiles = native_affine(matrix)
        assert tiles is not None
        step = matrix.scales.float().max().item()
        assert (tiles.dequantize() - matrix.dequantize()).abs().max().item() < 0.01 * step
    assert native_affine(quantize_int4(weight, 48)) is None  # no whole groups of 32 columns


# ---------------------------------------------------------------- loading


def dequantised(model: Any, loaded: LoadedModel) -> LlamaForCausalLM:
    """The model with the numbers that its rounded matrices stand for."""
    model, decoder = copy.deepcopy(model), decoder_of(loaded)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(decoder.embedding.dequantize())
        model.lm_head.weight.copy_(decoder.head.weight.dequantize())
        for layer, own in zip(model.model.layers, decoder.layers):
            attention, mlp = layer.self_attn, layer.mlp
            for modules, weight in (
                ((attention.q_proj, attention.k_proj, attention.v_proj), own.attention.qkv.weight),
                ((attention.o_proj,), own.attention.output.weight),
                ((mlp.gate_proj, mlp.up_proj), own.mlp.gate_up.weight),
                ((mlp.down_proj,), own.mlp.down.weight),
            ):
                sizes = [module.weight.shape[0] for module in modules]
                for module, values in zip(modules, weight.dequantize().split(sizes)):
                    module.weight.copy_(values)
    return model


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return random_llama(tiny_config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2))


@pytest.fixture(scope="module")
def folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(("method", "group_size"), [("int8", 64), ("int4", 32), ("int4", 64)])
def test_a_folder_is_rounded_while_it_is_loaded(model, folder, method, group_size):
    loaded = load(folder, quantization=method, quantization_group_size=group_size)
    rounding = Rounding(method, group_size)
    decoder = decoder_of(loaded)
    down = decoder.layers[1].mlp.down.weight
    assert isinstance(down, AffineWeight) and down.matrix.bits == (8 if method == "int8" else 4)
    stored = model.get_parameter("model.layers.1.mlp.down_proj.weight").detach()
    assert torch.equal(down.dequantize(), rounding("down", stored).dequantize())
    assert isinstance(decoder.embedding, AffineWeight) and decoder.embedding.matrix.bits == 8
    assert decoder.final_norm.weight.dtype == torch.float32
    token_ids = random_tokens(40)
    expected = oracle_logits(dequantised(model, loaded), token_ids)
    assert (Harness(loaded).logits(token_ids, chunk=17) - expected).abs().max() < 1e-3
    assert (expected - oracle_logits(model, token_ids)).abs().max() > 0.02  # else nothing was rounded
    assert loaded.weight_bytes < 0.4 * sum(parameter.nbytes for parameter in model.parameters())


@native_library
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_the_native_kernels_compute_the_same_rounded_model(model, folder, method):
    reference, native = (load(folder, kernels, quantization=method) for kernels in ("reference", "cpu"))
    token_ids = random_tokens(40)
    expected, found = Harness(reference).logits(token_ids), Harness(native).logits(token_ids)
    divergence = (expected.softmax(-1) * (expected.log_softmax(-1) - found.log_softmax(-1))).sum(-1).mean()
    assert divergence < 2e-2
    assert native.weight_bytes < 1.3 * reference.weight_bytes


@pytest.mark.parametrize("tensor_type", ["F16", "F32", "Q8_0"])
def test_a_gguf_file_is_rounded_too_whatever_it_holds(model, tmp_path, tensor_type):
    """Of quantised files the numbers that they stand for are rounded."""
    path = write_gguf(tmp_path / "tiny.gguf", model.config, gguf_tensors(model), tensor_type)
    exact, rounded = load(path), load(path, quantization="int4", quantization_group_size=32)
    for layer, own in zip(decoder_of(exact).layers, decoder_of(rounded).layers):
        expected = quantize_int4(layer.attention.qkv.weight.dequantize(), 32)
        assert torch.equal(own.attention.qkv.weight.dequantize(), expected.dequantize())


def test_routers_stay_as_they_are_and_experts_do_not(tmp_path):
    save_family("mixtral", tmp_path)
    mlp = decoder_of(load(tmp_path, quantization="int4")).layers[0].mlp
    assert isinstance(mlp.router.weight, DenseWeight)
    assert isinstance(mlp.experts[0].down.weight, AffineWeight)


def test_the_engine_says_what_it_did_to_the_weights(tmp_path, monkeypatch):
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "reference")
    save_family("llama", tmp_path)
    with LLM(tmp_path, quantization="int4", quantization_group_size=32, num_kv_blocks=16) as llm:
        assert llm.info.quantization == "int4"
        packed = llm.info.weight_bytes
    with LLM(tmp_path, num_kv_blocks=16) as llm:
        assert llm.info.quantization is None and packed < 0.4 * llm.info.weight_bytes


# ---------------------------------------------------------------- memory


class PeakMemory:
    """The most memory of this process' own, mapped files left out, while the block ran: bytes above the start."""

    def __enter__(self) -> PeakMemory:
        self._start = self.bytes = self._own()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.bytes -= self._start

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self.bytes = max(self.bytes, self._own())

    @staticmethod
    def _own() -> int:
        _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
        return (int(resident) - int(shared)) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_loading_never_holds_more_than_the_packed_model_and_one_layer(tmp_path, monkeypatch, method):
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "reference")
    # Four layers: were all held unpacked, it would show.
    shape = {"hidden_size": 768, "intermediate_size": 2560, "num_attention_heads": 12, "num_key_value_heads": 12}
    config = tiny_config(num_hidden_layers=4, head_dim=64, **shape)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu").bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.1, 0.1)
    layer_bytes = sum(parameter.numel() * 4 for parameter in model.model.layers[0].parameters())
    model.save_pretrained(tmp_path)
    del model
    release_memory()
    config = EngineConfig(model=str(tmp_path), quantization=method)
    with PeakMemory() as peak:
        loaded = load_model(tmp_path, config, CPU)
    assert loaded.weight_bytes < peak.bytes < loaded.weight_bytes + layer_bytes
