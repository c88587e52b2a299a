"""Quantised checkpoints compute the product of the numbers that their bits stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, LlamaForCausalLM

from engine.llm import LLM
from engine.loading.safetensors_weights import SafetensorsWeights
from engine.models import LoadCancelled, LoadedModel, load_model
from engine.models.config import ModelError
from engine.protocol import EngineConfig
from engine.quantization import AffineWeight, StackedWeight
from engine.quantization.affine import AffineMatrix
from engine.quantization.native_affine import NativeAffineWeight
from kernels import ops
from tests.engine import quantized_folders as folders
from tests.engine.families import save_tokenizer
from tests.engine.quantized_folders import Known, Quantised, Tensors
from tests.engine.tiny_llama import (
    CPU,
    Harness,
    decoder_of,
    load,
    oracle_logits,
    random_llama,
    random_tokens,
    randomised,
    tiny_config,
)

Pack = Callable[[np.random.Generator, int, int], tuple[Tensors, torch.Tensor]]


def of_integers(write: Callable[[Known], Tensors], **shape: Any) -> Pack:
    def pack(rng: np.random.Generator, out: int, columns: int) -> tuple[Tensors, torch.Tensor]:
        matrix = folders.known(rng, out, columns, **shape)
        tensors = write(matrix)
        return tensors, matrix.values

    return pack


def ordered(bits: int, group_size: int) -> Pack:
    """GPTQ with desc_act: inputs belong to groups in a random order."""

    def pack(rng: np.random.Generator, out: int, columns: int) -> tuple[Tensors, torch.Tensor]:
        matrix = folders.known(rng, out, columns, bits, group_size)
        matrix.group = rng.permutation(matrix.group)
        return folders.gptq(matrix, bits), matrix.values

    return pack


def same_order(bits: int, group_size: int) -> Pack:
    """desc_act where all matrices of as many inputs agree on the order, as neighbours that share theirs do."""

    def pack(rng: np.random.Generator, out: int, columns: int) -> tuple[Tensors, torch.Tensor]:
        matrix = folders.known(rng, out, columns, bits, group_size)
        matrix.group = np.random.default_rng(columns).permutation(matrix.group)
        return folders.gptq(matrix, bits), matrix.values

    return pack


def of_floats(
    block: tuple[int, int] | None, suffix: str, kind: torch.dtype = torch.float32, flat: bool = False
) -> Pack:
    def pack(rng: np.random.Generator, out: int, columns: int) -> tuple[Tensors, torch.Tensor]:
        size = (block[0] or out, block[1] or columns) if block else (out, columns)
        weight, scales = folders.fp8(rng, out, columns, size)
        scales = scales.to(kind)
        values = folders.fp8_values(weight, scales, size)
        return {"weight": weight, suffix: scales.view(-1) if flat else scales}, values

    return pack


def gptq_config(bits: int, group_size: int, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": False, "desc_act": False} | changes


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


def pack_quantized(bits: int, group_size: int | None, symmetric: bool, plain_zeros: bool = False) -> Quantised:
    strategy = {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    config = compressed("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **strategy)

    def write(matrix: Known) -> Tensors:
        return folders.packed_compressed_tensors(matrix, bits, symmetric, plain_zeros)

    return Quantised(config, of_integers(write, bits=bits, group_size=group_size or 1 << 20, symmetric=symmetric))


def int_quantized(symmetric: bool, group_size: int = 1 << 20) -> Quantised:
    strategy = {"strategy": "channel"} if group_size > 999 else {"strategy": "group", "group_size": group_size}
    config = compressed("int-quantized", num_bits=8, type="int", symmetric=symmetric, **strategy)

    def write(matrix: Known) -> Tensors:
        return folders.integer_compressed_tensors(matrix, symmetric)

    return Quantised(config, of_integers(write, bits=8, group_size=group_size, symmetric=symmetric))


def gptq(bits: int, group_size: int, version: int = 1, **changes: Any) -> Quantised:
    def write(matrix: Known) -> Tensors:
        return folders.gptq(matrix, bits, zero_offset=2 - version)

    size = group_size if group_size > 0 else 1 << 20
    return Quantised(gptq_config(bits, group_size, **changes), of_integers(write, bits=bits, group_size=size))


LAYOUTS: dict[str, Callable[[], Quantised]] = {
    "gptq_4": lambda: gptq(4, 32),
    "gptq_4_v2": lambda: gptq(4, 32, version=2, checkpoint_format="gptq_v2"),
    "gptq_8": lambda: gptq(8, 32),
    "gptq_whole_rows": lambda: gptq(4, -1),
    "gptq_short_last_group": lambda: gptq(4, 40),
    "gptq_desc_act": lambda: Quantised(gptq_config(4, 32, desc_act=True), ordered(4, 32)),
    "gptq_desc_act_8": lambda: Quantised(gptq_config(8, 32, desc_act=True), ordered(8, 32)),
    "gptq_desc_act_short": lambda: Quantised(gptq_config(4, 40, desc_act=True), ordered(4, 40)),
    "gptq_desc_act_shared": lambda: Quantised(gptq_config(4, 32, desc_act=True), same_order(4, 32)),
    "awq": lambda: Quantised(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        of_integers(folders.awq, bits=4, group_size=32),
    ),
    "packed_4_group": lambda: pack_quantized(4, 32, symmetric=True),
    "packed_4_group_zeros": lambda: pack_quantized(4, 32, symmetric=False),
    "packed_4_plain_zeros": lambda: pack_quantized(4, 32, symmetric=False, plain_zeros=True),
    "packed_4_channel": lambda: pack_quantized(4, None, symmetric=True),
    "packed_8_group_zeros": lambda: pack_quantized(8, 32, symmetric=False),
    "packed_8_channel": lambda: pack_quantized(8, None, symmetric=True),
    "int_8_channel": lambda: int_quantized(symmetric=True),
    "int_8_zeros": lambda: int_quantized(symmetric=False),
    "int_8_group": lambda: int_quantized(symmetric=True, group_size=32),
    "fp8_blocks": lambda: Quantised(
        {"quant_method": "fp8", "weight_block_size": [32, 40], "activation_scheme": "dynamic"},
        of_floats((32, 40), "weight_scale_inv"),
    ),
    "fp8_whole": lambda: Quantised(
        {"quant_method": "fp8", "activation_scheme": "static"}, of_floats(None, "weight_scale", flat=True)
    ),
    "float_8_channel": lambda: Quantised(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        of_floats((1, 0), "weight_scale", torch.bfloat16),
    ),
    "float_8_tensor": lambda: Quantised(
        compressed("naive-quantized", num_bits=8, type="float", strategy="tensor"),
        of_floats(None, "weight_scale", flat=True),
    ),
    "float_8_blocks": lambda: Quantised(
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 64]),
        of_floats((16, 64), "weight_scale"),
    ),
}


def tiny_model(**changes: Any) -> LlamaForCausalLM:
    """All matrices have whole groups of 32 columns, and an MLP wide enough for a short last group of 40."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return random_llama(tiny_config(**shape | {"num_hidden_layers": 2} | changes))


def load_for_tiles(folder: Path) -> LoadedModel:
    """Matrices in native tiles as far as there are some for them; what they cannot do runs layer by layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ops.BACKEND_VARIABLE, "cpu")
        return load_model(folder, EngineConfig(model=str(folder)), CPU)


def read(source: SafetensorsWeights, name: str) -> torch.Tensor:
    out = torch.empty(source.tensors[name].shape)
    source.read_into(name, out)
    return out


# ---------------------------------------------------------------- bits become numbers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_matrix_has_the_values_that_its_bits_stand_for(tmp_path, layout):
    quantised = LAYOUTS[layout]()
    quantised.save(tiny_model(), tmp_path)
    source = SafetensorsWeights(tmp_path, quantization=quantised.config)
    assert len(quantised.exact) == 14
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    for name, exact in quantised.exact.items():
        torch.testing.assert_close(read(source, name), exact, rtol=1e-6, atol=1e-7)
        matrix = source.quantized(name)
        assert (matrix is None) == ("fp8" in layout or "float" in layout)
        if matrix is not None:
            product = AffineWeight(matrix).matmul(x[:, : exact.shape[1]])
            torch.testing.assert_close(product, x[:, : exact.shape[1]] @ exact.T, rtol=1e-4, atol=1e-4)
            assert matrix.nbytes < exact.nbytes * 0.6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_dequantised_model(tmp_path, layout):
    dequantised = LAYOUTS[layout]().save(tiny_model(), tmp_path)
    token_ids = random_tokens(40)
    expected = oracle_logits(dequantised, token_ids)
    loaded = load(tmp_path)
    assert (Harness(loaded).logits(token_ids, chunk=17) - expected).abs().max() < 1e-3


def test_the_whole_engine_answers_with_a_quantised_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "reference")
    dequantised = LAYOUTS["gptq_4"]().save(tiny_model(vocab_size=128), tmp_path)
    save_tokenizer(tmp_path)
    token_ids = random_tokens(30)
    with LLM(tmp_path, num_kv_blocks=16) as llm:
        assert (llm.logits(token_ids) - oracle_logits(dequantised, token_ids)).abs().max() < 1e-3
        assert llm.info.format == "safetensors GPTQ 4 bit"
        assert llm.info.quantization is None  # nothing was done to it while loading
        dense = sum(parameter.nbytes for parameter in dequantised.parameters())
        assert llm.info.weight_bytes < dense / 2


# ---------------------------------------------------------------- native tiles


@pytest.mark.skipif(ops.why_no_cpu_kernels() is not None, reason="the native library is not built")
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "short" not in name])
def test_native_tiles_compute_the_same_product(tmp_path, layout):
    quantised = LAYOUTS[layout]()
    quantised.save(tiny_model(), tmp_path)
    loaded = load_for_tiles(tmp_path)
    prefix = "model.layers.1.mlp.down_proj"
    exact = quantised.exact[f"{prefix}.weight"]
    weight = decoder_of(loaded).layers[1].mlp.down.weight
    bits = 16 if "fp8" in layout or "float" in layout else 8 if "8" in layout else 4
    assert weight.nbytes * 8 / exact.numel() <= {16: 16, 8: 10.5, 4: 6}[bits]
    # Tiles of 4 bits hold scale and minimum in half precision: an error of a hundredth of a step.
    torch.testing.assert_close(weight.dequantize(), exact, rtol=1e-3, atol=1e-3 * exact.abs().max().item())
    x = torch.randn(7, exact.shape[1], generator=torch.Generator().manual_seed(1))
    expected = x @ exact.T
    assert (weight.matmul(x) - expected).abs().max() < 2e-3 * expected.abs().max()


@pytest.mark.skipif(ops.why_no_cpu_kernels() is not None, reason="the native library is not built")
def test_rows_of_native_tiles_come_in_the_order_of_the_matrix(tmp_path):
    for layout in ("gptq_desc_act", "gptq_8"):
        folder = tmp_path / layout
        folder.mkdir()
        quantised = LAYOUTS[layout]()
        quantised.save(tiny_model(), folder)
        weight = decoder_of(load_for_tiles(folder)).layers[0].mlp.down.weight
        assert isinstance(weight, NativeAffineWeight)
        exact = quantised.exact["model.layers.0.mlp.down_proj.weight"]
        torch.testing.assert_close(weight.rows(torch.tensor([3, 60, 3])), exact[[3, 60, 3]], rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------- fusing


def test_neighbours_fuse_only_where_their_orders_agree(tmp_path):
    for layout, kind in (("gptq_desc_act_shared", AffineWeight), ("gptq_desc_act", StackedWeight)):
        folder = tmp_path / layout
        folder.mkdir()
        LAYOUTS[layout]().save(tiny_model(), folder)
        layer = decoder_of(load(folder)).layers[0]
        assert type(layer.attention.qkv.weight) is kind
        assert type(layer.mlp.gate_up.weight) is kind
        assert type(layer.mlp.down.weight) is AffineWeight


def test_a_module_that_is_not_quantised_stands_beside_those_that_are(tmp_path):
    """As with `modules_in_block_to_quantize`, and where lm_head is quantised or some layers are left out."""
    quantised = gptq(4, 32, modules_in_block_to_quantize=[["self_attn.q_proj", "self_attn.k_proj"]], lm_head=True)
    quantised.skip = ("embed_tokens", "v_proj", "layers.1.mlp.down_proj")
    model = tiny_model(vocab_size=96)
    dequantised = quantised.save(model, tmp_path)
    assert "lm_head.weight" in quantised.exact and "model.layers.0.self_attn.v_proj.weight" not in quantised.exact
    token_ids = random_tokens(30, vocab_size=96)
    assert (Harness(load(tmp_path)).logits(token_ids) - oracle_logits(dequantised, token_ids)).abs().max() < 1e-3


def test_biases_stay_beside_packed_matrices(tmp_path):
    dequantised = LAYOUTS["gptq_4"]().save(tiny_model(attention_bias=True, mlp_bias=True), tmp_path)
    token_ids = random_tokens(30)
    assert (Harness(load(tmp_path)).logits(token_ids) - oracle_logits(dequantised, token_ids)).abs().max() < 1e-3


def test_rows_of_stacked_parts_are_found_again():
    dense = [torch.randn(rows, 8) for rows in (3, 5, 2)]
    parts = [
        AffineWeight(AffineMatrix(w.mul(50).add(128).byte(), torch.ones(len(w), 1), torch.zeros(len(w), 1), 8, 8))
        for w in dense
    ]
    stacked = StackedWeight(parts)
    assert stacked.shape == (10, 8)
    indices = torch.tensor([9, 0, 4, 4, 8, 2])
    assert torch.equal(stacked.rows(indices), stacked.dequantize()[indices])


# ---------------------------------------------------------------- zero points of GPTQ


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("label", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("zero_offset", [0, 1])
def test_a_symmetric_matrix_is_read_right_whatever_version_it_claims(tmp_path, bits, label, zero_offset):
    config = gptq_config(bits, 32, sym=True) | ({"checkpoint_format": label} if label else {})

    def write(matrix: Known) -> Tensors:
        return folders.gptq(matrix, bits, zero_offset)

    quantised = Quantised(config, of_integers(write, bits=bits, group_size=32, symmetric=True))
    quantised.save(tiny_model(num_hidden_layers=1), tmp_path)
    source = SafetensorsWeights(tmp_path, quantization=config)
    for name, exact in quantised.exact.items():
        torch.testing.assert_close(read(source, name), exact, rtol=1e-6, atol=1e-7)


def test_gptqmodels_rules_change_the_bits_of_single_modules(tmp_path):
    rules = {r"-:.*\.v_proj": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 64}}
    quantised = gptq(4, 32, dynamic=rules)
    model = tiny_model()
    quantised.skip = (*quantised.skip, "down_proj")
    quantised.save(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    matrix = folders.known(np.random.default_rng(1), 64, 96, bits=8, group_size=64)
    del stored["model.layers.0.mlp.down_proj.weight"]
    stored |= {f"model.layers.0.mlp.down_proj.{name}": values for name, values in folders.gptq(matrix, 8).items()}
    save_file(stored, tmp_path / "model.safetensors")
    source = SafetensorsWeights(tmp_path, quantization=quantised.config)
    torch.testing.assert_close(read(source, "model.layers.0.mlp.down_proj.weight"), matrix.values)


# ---------------------------------------------------------------- gpt-oss


def test_4_bit_floats_of_gpt_oss_stay_packed_and_compute_what_they_stand_for(tmp_path):
    config = GptOssConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"], max_position_embeddings=128, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    config._attn_implementation = "eager"  # the only one that knows attention sinks
    model = randomised(GptOssForCausalLM(config))
    rng = np.random.default_rng(3)
    stored: Tensors = {}
    halves = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]) / 2
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                stored[name] = parameter.detach().clone()
                continue
            experts, columns, out = parameter.shape  # transformers multiplies from the left
            codes = rng.integers(0, 16, (experts, out, columns // 32, 32))
            exponents = rng.integers(122, 126, (experts, out, columns // 32))
            stored[f"{name}_blocks"] = torch.from_numpy((codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8))
            stored[f"{name}_scales"] = torch.from_numpy(exponents.astype(np.uint8))
            values = halves[codes] * 2.0 ** (exponents[..., None] - 127)
            parameter.copy_(torch.from_numpy(values.reshape(experts, out, columns)).transpose(1, 2))
    folders.write_folder(tmp_path, model, stored, {"quant_method": "mxfp4"})
    token_ids = random_tokens(40)
    loaded = load(tmp_path)
    assert (Harness(loaded).logits(token_ids, chunk=11) - oracle_logits(model, token_ids)).abs().max() < 1e-3
    assert decoder_of(loaded).layers[0].mlp.experts[0].down.weight.nbytes == 64 * 96 // 32 * 17
    if "triton" in ops.available_backends():
        grouped = decoder_of(load(tmp_path, "triton")).layers[0].mlp.grouped
        assert grouped.down.is_float and grouped.down.num_matrices == 4


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("gptq_4", {"quant_method": "quip"}, "weights quantised as 'quip' are not supported; supported are gptq, awq"),
        ("gptq_4", {"quant_method": None}, "quantised as None"),
        ("gptq_4", {"bits": 3}, r"GPTQ with 3 bits \(model.layers.0.*\) is not supported"),
        ("gptq_4", {"bits": "four"}, "bits is 'four', not a whole number"),
        ("gptq_4", {"bits": 8}, r"scales' has shape \[3, 64\], but 48 inputs of 8 bits"),
        ("gptq_4", {"group_size": 0}, "group_size is 0; it must be positive or -1"),
        ("gptq_4", {"group_size": 64}, "scales' has shape .* ask for"),
        ("gptq_4", {"checkpoint_format": "marlin"}, "layout 'marlin' is not supported"),
        ("gptq_4", {"is_marlin_format": True}, "layout 'marlin' is not supported"),
        ("gptq_4", {"dynamic": {"+:(": {"bits": 8}}}, r"'\(' is no pattern"),
        ("gptq_4", {"dynamic": ["x"]}, "dynamic is .*, no object"),
        ("awq", {"version": "gemv"}, "AWQ in the layout 'gemv' is not supported"),
        ("awq", {"bits": 3}, "AWQ with 3 bits"),
        ("awq", {"zero_point": False}, "AWQ without zero points"),
        ("packed_4_group", {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' is not supported"),
        ("packed_4_group", {"format": "marlin-24"}, "'marlin-24' is not supported"),
        ("packed_4_group", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse compressed-tensors"),
        ("packed_4_group", {"config_groups": {}}, "says nothing of the quantised"),
        ("packed_4_group", {"config_groups": {"a": 3}}, "config_groups is 3, no object"),
        ("fp8_blocks", {"weight_block_size": [0, 4]}, r"weight_block_size is \[0, 4\], not two positive numbers"),
        ("fp8_blocks", {"weight_block_size": [16, 16]}, r"in blocks of \[16, 16\] ask for"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name_before_a_tensor_is(tmp_path, monkeypatch, layout, changes, message):
    LAYOUTS[layout]().save(tiny_model(num_hidden_layers=1), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    read: list[str] = []
    monkeypatch.setattr("engine.quantization.affine.AffineMatrix.dequantize", lambda self: read.append("a matrix"))
    with pytest.raises(ModelError, match=message) as refusal:
        load(tmp_path, backend="native")
    assert str(tmp_path) in str(refusal.value) and not read


@pytest.mark.parametrize(
    ("layout", "tensor", "change", "message"),
    [
        ("gptq_4", "qzeros", None, "q_proj.qzeros' is missing"),
        ("gptq_4", "scales", lambda scales: scales[:1], "q_proj.scales' has shape"),
        ("gptq_4", "qweight", lambda words: words.float(), "stored as F32"),
        ("gptq_desc_act", "g_idx", lambda groups: torch.zeros_like(groups), "does not put 32 inputs into each group"),
        ("gptq_desc_act", "g_idx", lambda groups: groups[:-1], "does not have the 64 entries"),
        ("gptq_desc_act", "g_idx", None, "g_idx' is missing, though desc_act"),
        ("packed_4_group", "weight_shape", lambda shape: shape * 2, "does not hold 128 x 128 codes of 4 bits"),
        ("packed_4_group", "weight_scale", None, "weight_scale' is missing"),
        ("fp8_blocks", "weight_scale_inv", None, "weight_scale' is missing"),
    ],
)
def test_damaged_tensors_are_named(tmp_path, layout, tensor, change, message):
    LAYOUTS[layout]().save(tiny_model(num_hidden_layers=1), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.0.self_attn.q_proj.{tensor}"
    values = stored.pop(name)
    if change is not None:
        stored[name] = change(values).contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(tmp_path, backend="native")


def test_packed_words_without_a_configuration_are_named(tmp_path):
    LAYOUTS["awq"]().save(tiny_model(num_hidden_layers=1), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="is stored as I32, which is not supported without a quantization_config"):
        load(tmp_path, backend="native")


# ---------------------------------------------------------------- progress


def test_progress_counts_the_bytes_on_disk_and_loading_can_be_cancelled(tmp_path):
    LAYOUTS["gptq_4"]().save(tiny_model(), tmp_path)
    seen: list[tuple[int, int]] = []
    config = EngineConfig(model=str(tmp_path))
    load_model(tmp_path, config, CPU, lambda _stage, done, total: seen.append((done, total)))
    stored = sum(values.nbytes for values in load_file(tmp_path / "model.safetensors").values())
    assert {total for _, total in seen} == {stored}
    assert seen[-1] == (stored, stored) and [done for done, _ in seen] == sorted(done for done, _ in seen)
    with pytest.raises(LoadCancelled):
        load_model(tmp_path, config, CPU, lambda *_: None, lambda: True)
