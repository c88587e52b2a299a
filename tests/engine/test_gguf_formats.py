"""A GGUF file in each block format computes what its own unpacked numbers do."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.layers.linear import Linear
from engine.loading.gguf import GGUFError, GGUFFile
from engine.loading.gguf_names import View, canonical_views
from engine.models import load_model
from engine.models.config import ModelError, UnsupportedModelError
from engine.models.decoder import Decoder
from engine.models.gguf_config import config_from_gguf
from engine.protocol import EngineConfig
from engine.quantization import StackedWeight
from engine.quantization.native import NativeWeight
from kernels.cpu.library import WeightFormat
from kernels.ggml import FORMATS
from tests.engine.families import FAMILIES, randomised
from tests.engine.gguf_writer import write_gguf_model
from tests.engine.tiny_gguf import header, set_metadata, tensor
from tests.engine.tiny_llama import CPU, Harness, load, oracle_logits, random_tokens
from tests.kernels.ggml_blocks import dequantize, quantize

PROMPT = random_tokens(21)
# As llama.cpp mixes them: some matrices are worth more bits.
Q4_K_M = {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q6_K", "token_embd.weight": "Q6_K"}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Rows of 256 and 512: whole blocks of every format."""
    config = LlamaConfig(
        vocab_size=104,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    randomised(model)
    return model


def rounded(model: LlamaForCausalLM, tensor_type: str, others: dict[str, str]) -> LlamaForCausalLM:
    """The model with the very numbers that its file will hold."""
    names = {"v_proj": "attn_v.weight", "down_proj": "ffn_down.weight", "embed_tokens": "token_embd.weight"}
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                kind = others.get(names.get(name.split(".")[-2], ""), tensor_type)
                if kind != "F32":
                    parameter.copy_(torch.from_numpy(dequantize(quantize(parameter.numpy(), kind), kind)))
    return model


@pytest.mark.parametrize("tensor_type", [*FORMATS, "Q4_K_M"])
def test_a_file_computes_what_its_numbers_do(tensor_type: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    others = Q4_K_M if tensor_type == "Q4_K_M" else {}
    tensor_type = tensor_type.removesuffix("_M")
    path = write_gguf_model(tmp_path / "model.gguf", model, tensor_type, type_of=others)
    expected = oracle_logits(rounded(model, tensor_type, others), PROMPT)
    reference = load(path)
    torch.testing.assert_close(Harness(reference).logits(PROMPT, chunk=8), expected, atol=1e-3, rtol=0)

    native = load(path, kernels="cpu")
    logits = Harness(native).logits(PROMPT, chunk=8)
    # Activations are rounded on the way, some of them to 8 bits.
    assert (logits - expected).norm() < 0.04 * expected.norm()
    assert (logits.argmax(1) == expected.argmax(1)).float().mean() > 0.9
    with GGUFFile(path) as file:
        in_file = sum(tensor.nbytes for tensor in file.tensors.values() if len(tensor.shape) > 1)
    others_bytes = 5 * 256 * 4 + 2 * 128 * 64 * 4  # norms, and the angles of 128 positions
    assert native.weight_bytes <= 1.06 * in_file + others_bytes


def test_projections_of_different_formats_stay_packed_and_run_in_one_step(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    types = {"attn_q.weight": "Q4_K", "attn_k.weight": "Q8_0", "attn_v.weight": "F16"}
    path = write_gguf_model(tmp_path / "model.gguf", model, "Q6_K", type_of=types)
    native = load(path, kernels="cpu")  # which asserts that whole steps are native
    assert isinstance(native.model, Decoder)
    weight = native.model.layers[0].attention.qkv.weight
    assert isinstance(weight, StackedWeight)
    formats = [part.packed.format for part in weight.parts if isinstance(part, NativeWeight)]
    assert formats == [WeightFormat.Q4_K, WeightFormat.Q8_0, WeightFormat.F16]
    x = torch.randn(3, 256)
    torch.testing.assert_close(Linear(weight)(x), x @ weight.dequantize().T, atol=1e-2, rtol=1e-3)
    logits, expected = (Harness(loaded).logits(PROMPT) for loaded in (native, load(path)))
    assert (logits - expected).norm() < 0.04 * expected.norm()


def test_experts_stay_packed_each_on_its_own(tmp_path: Path) -> None:
    mixtral = FAMILIES["mixtral"]()
    path = write_gguf_model(tmp_path / "model.gguf", mixtral, "Q5_0")
    native, plain = load(path, kernels="cpu"), load(path)
    assert native.weight_bytes < 0.3 * plain.weight_bytes
    logits, expected = (Harness(loaded).logits(PROMPT) for loaded in (native, plain))
    assert (logits - expected).norm() < 0.05 * expected.norm()


def test_stacked_experts_that_are_not_as_many_as_the_model_says_are_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf_model(tmp_path / "model.gguf", FAMILIES["mixtral"](), "Q8_0")
    set_metadata(path, "llama.expert_count", "<I", 3)
    with pytest.raises(ModelError, match=r"mlp\.experts\.0"):
        load(path)


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        ([32, 4, 1 << 59], "ends at byte"),  # 2^64 numbers: more than a 64-bit count holds
        ([(1 << 63) + 32, 1, 1], "ends at byte"),
        ([32, 0, 4], "dimension of 0"),
        ([31, 32, 4], "no multiple of Q8_0's 32"),
    ],
)
def test_shapes_that_no_file_can_hold_are_refused_before_memory_is_spent(
    dimensions: list[int], message: str, tmp_path: Path
) -> None:
    name = "blk.0.ffn_gate_exps.weight"
    path = tmp_path / "model.gguf"
    path.write_bytes(header(tensors=tensor(name, dimensions, 8), num_tensors=1).ljust(512, b"\0"))
    with pytest.raises(GGUFError, match=f"{name}.*{message}"):
        GGUFFile(path)


def test_expert_tensors_of_the_wrong_rank_belong_to_no_decoder(tmp_path: Path) -> None:
    with GGUFFile(write_gguf_model(tmp_path / "model.gguf", FAMILIES["mixtral"]())) as file:
        with_experts = config_from_gguf(file)
    assert with_experts.num_experts == 4
    for shape in ((4, 8), (4,), (4, 2, 2, 8), (3, 8, 8), ()):
        assert canonical_views("blk.0.ffn_gate_exps.weight", shape, with_experts) == []
    assert canonical_views("blk.0.ffn_gate_exps.bias", (4, 8, 8), with_experts) == []
    views = canonical_views("blk.0.ffn_down_exps.weight", (4, 8, 16), with_experts)
    assert views[3] == View("model.layers.0.mlp.experts.3.down_proj.weight", 3 * 8 * 16, (8, 16))


def test_a_format_without_support_is_refused_by_name(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = write_gguf_model(tmp_path / "model.gguf", model, "TQ2_0")
    with pytest.raises(UnsupportedModelError, match=r"'token_embd.weight' is stored as TQ2_0.*IQ4_NL"):
        load_model(path, EngineConfig(model=str(path)), CPU)
