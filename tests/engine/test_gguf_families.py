"""Each family in a GGUF file, as llama.cpp's converter writes it, computes what transformers does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from engine.loading.gguf import GGUFFile
from engine.loading.gguf_weights import GGUFWeights
from engine.models.config import ModelConfig, ModelError, RopeConfig, UnsupportedModelError
from engine.models.gguf_config import GGUF_ARCHITECTURES, config_from_gguf
from tests.engine.families import FAMILIES, expected_logits, randomised
from tests.engine.gguf_writer import ARCHITECTURES, write_gguf_model
from tests.engine.tiny_gguf import write_model
from tests.engine.tiny_llama import Harness, load, random_tokens

# What a family's file has no key for stands at what llama.cpp takes for granted.
WRITABLE: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama2": {},
    "mistral": {"sliding_window": None},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "qwen2": {"layer_types": ["full_attention"] * 3},
    "qwen3": {},
    "phi3": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    },
    "granite": {},
    "olmo2": {},
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"mlp_only_layers": []},
    "gpt_oss": {"swiglu_limit": 7.0},
}
PROMPT = random_tokens(60, vocab_size=128)


def writable(family: str, **changes: Any) -> PreTrainedModel:
    model = FAMILIES[family]()
    changes = WRITABLE[family] | changes
    if not changes:
        return model
    for name, value in changes.items():
        setattr(model.config, name, value)
    return randomised(type(model)(model.config))


def logits_of(path: Path) -> torch.Tensor:
    return Harness(load(path)).logits(PROMPT, chunk=23)


def test_every_family_of_the_issue_is_written_and_read() -> None:
    assert set(WRITABLE) == set(FAMILIES)
    written = {ARCHITECTURES[FAMILIES[family]().config.model_type] for family in FAMILIES}
    assert written == set(GGUF_ARCHITECTURES)


@pytest.mark.parametrize("family", WRITABLE)
def test_a_file_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    model = writable(family)
    path = write_gguf_model(tmp_path / "model.gguf", model)
    torch.testing.assert_close(logits_of(path), expected_logits(model, PROMPT), atol=1e-3, rtol=0)


@pytest.mark.parametrize("tensor_type", ["F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("family", ["phi3", "gpt_oss", "mixtral", "llama2"])
def test_fused_stacked_and_interleaved_tensors_are_cut_in_any_format(
    family: str, tensor_type: str, tmp_path: Path
) -> None:
    """The oracle is transformers with the numbers that the file's format keeps."""
    model = writable(family)
    path = write_gguf_model(tmp_path / "model.gguf", model, tensor_type)
    whole = write_gguf_model(tmp_path / "whole.gguf", model)
    with GGUFFile(path) as file, GGUFFile(whole) as whole_file:
        sources = [GGUFWeights(each, config_from_gguf(each)) for each in (file, whole_file)]
        assert sources[0].tensors.keys() == sources[1].tensors.keys()
        for name, stored in sources[0].tensors.items():
            got, full = torch.empty(stored.shape), torch.empty(stored.shape)
            sources[0].read_into(name, got)
            sources[1].read_into(name, full)
            kind = gguf.GGMLQuantizationType[stored.type]
            rounded = gguf.quants.dequantize(gguf.quants.quantize(full.numpy(), kind), kind)
            torch.testing.assert_close(got, torch.from_numpy(rounded.copy()), atol=1e-6, rtol=0)
        assert config_from_gguf(file) == config_from_gguf(whole_file)


def test_a_window_over_some_layers_follows_the_files_pattern(tmp_path: Path) -> None:
    config = transformers.Olmo3Config(
        **{**FAMILIES["olmo2"]().config.to_dict(), "model_type": "olmo3"}
        | {
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
            | {"original_max_position_embeddings": 32},
        }
    )
    model = randomised(transformers.Olmo3ForCausalLM(config))
    path = write_gguf_model(tmp_path / "model.gguf", model)
    torch.testing.assert_close(logits_of(path), expected_logits(model, PROMPT), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("family", "window"), [("mistral", 20), ("mixtral", 20)])
def test_a_window_in_a_llama_file_covers_all_layers(family: str, window: int, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    path = write_gguf_model(tmp_path / "model.gguf", model, extra={"llama.attention.sliding_window": window})
    torch.testing.assert_close(logits_of(path), expected_logits(model, PROMPT), atol=1e-3, rtol=0)


def config_of(path: Path) -> ModelConfig:
    with GGUFFile(path) as file:
        return config_from_gguf(file)


def config_with(family: str, tmp_path: Path, metadata: dict[str, Any], **changes: Any) -> ModelConfig:
    return config_of(write_gguf_model(tmp_path / "model.gguf", writable(family, **changes), extra=metadata))


def test_what_files_leave_unsaid_is_what_llama_cpp_takes_for_granted(tmp_path: Path) -> None:
    model = writable("gemma2")
    model.config.sliding_window = None
    gemma2 = config_of(write_gguf_model(tmp_path / "gemma2.gguf", model))
    assert gemma2.sliding_windows == (4096, None, 4096)
    assert gemma2.embedding_scale == 96**0.5 and gemma2.norm_weight_offset == 0 and gemma2.tie_word_embeddings
    gemma3 = config_with("gemma3", tmp_path, {})
    assert gemma3.sliding_windows == (20,) * 5 + (None, 20)
    assert gemma3.local_rope == RopeConfig(10000.0, 32)
    assert gemma3.rope == RopeConfig(1e6, 32, scaling="linear", factor=8.0)
    gpt_oss = config_with("gpt_oss", tmp_path, {})
    assert gpt_oss.sliding_windows == (20, None, 20)
    assert not gpt_oss.rope.truncate and gpt_oss.attention_sinks and gpt_oss.router_bias and gpt_oss.expert_bias
    smollm3 = config_with("smollm3", tmp_path, {})
    assert smollm3.rope_layers == (True, True, True, False)
    assert config_with("phi3", tmp_path, {}, sliding_window=None).sliding_windows == ()


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_attention_by_their_width(family: str, layers: int, tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * layers
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = config_with(family, tmp_path, {}, num_hidden_layers=layers, layer_types=kinds, **small)
    assert config.attention_scale == (32 // 2) ** -0.5
    assert config_with(family, tmp_path, {}).attention_scale is None


def test_yarn_scales_attention_as_its_metadata_say(tmp_path: Path) -> None:
    usual = 0.1 * math.log(4) + 1

    def factor(**metadata: float) -> float:
        return config_with(
            "qwen3", tmp_path, {f"qwen3.rope.scaling.{k}": v for k, v in metadata.items()}
        ).rope.attention_factor

    assert factor() == pytest.approx(usual)
    assert factor(yarn_log_multiplier=1.0) == pytest.approx(1.0)
    assert factor(attn_factor=2.0) == pytest.approx(2 * usual)
    assert factor(yarn_attn_factor=1.5) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("llama", {"llama.attention.clamp_kqv": 3.0}, "not understood: llama.attention.clamp_kqv"),
        ("qwen2", {"qwen2.attention.sliding_window": 8}, "not understood: qwen2.attention.sliding_window"),
        ("llama", {"llama.rope.scaling.type": "dynamic", "llama.rope.scaling.factor": 2.0}, "rope scaling 'dynamic'"),
        ("mixtral", {"llama.expert_gating_func": 2}, "expert_gating_func 2 is not supported"),
        ("mixtral", {"llama.expert_shared_count": 1}, "expert_shared_count = 1 is not supported"),
        ("qwen3", {"qwen3.pooling_type": 3}, "compute embeddings"),
        ("qwen3", {"qwen3.attention.causal": False}, "compute embeddings"),
        ("gemma2", {"gemma2.rope.freq_base_swa": 500.0}, "freq_base_swa is not supported"),
        ("qwen3", {"qwen3.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5 is not supported"),
    ],
)
def test_a_variant_is_refused_by_name(family: str, metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_with(family, tmp_path, metadata)


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("gemma2", {"gemma2.attention.sliding_window_pattern": [True]}, "pattern covers 1 of 3 layers"),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": "all"}, "pattern is 'all'"),
        ("llama", {"llama.rope.scaling.factor": -2.0}, "factor is -2.0"),
        ("granite", {"granite.embedding_scale": 0.0}, "embedding_scale is 0.0"),
        ("mixtral", {"llama.expert_used_count": 9}, "9 experts a token are asked for of 4"),
    ],
)
def test_a_damaged_value_is_refused_by_name(
    family: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        config_with(family, tmp_path, metadata)


def test_an_unknown_architecture_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    path = write_model(tmp_path / "x.gguf", architecture="mamba")
    with pytest.raises(
        UnsupportedModelError, match=r"architecture 'mamba' is not supported; .* llama, smollm3, .*gpt-oss"
    ):
        config_of(path)
