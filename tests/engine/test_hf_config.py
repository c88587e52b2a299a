"""Configurations of Hugging Face folders: both writings of them, what they leave out, and what is refused."""

from __future__ import annotations

import copy
import functools
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedConfig

from engine.models.config import ModelConfig, ModelError, UnsupportedModelError
from engine.models.hf_config import HF_ARCHITECTURES, config_from_hf
from tests.engine.families import FAMILIES


@functools.cache
def config_of(family: str) -> PreTrainedConfig:
    return FAMILIES[family]().config


def tiny_values(family: str) -> dict[str, Any]:
    """As they would be read from a file."""
    return json.loads(json.dumps(config_of(family).to_dict()))


def as_transformers_4(values: dict[str, Any]) -> dict[str, Any]:
    """The same settings as version 4 wrote them."""
    values = copy.deepcopy(values)
    rope = values.pop("rope_parameters")
    if "full_attention" in rope:
        values["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    values["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        values["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if rope.get("rope_type") != "default":
        values["rope_scaling"] = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    if values["model_type"] == "qwen3_moe":
        values["num_experts"] = values.pop("num_local_experts")
    return values


@pytest.mark.parametrize("family", FAMILIES)
def test_configurations_of_transformers_4_mean_the_same(family):
    values = tiny_values(family)
    assert config_from_hf(as_transformers_4(values)) == config_from_hf(values)


def test_phi3s_first_name_of_longrope_is_understood():
    values = tiny_values("phi3")
    old = as_transformers_4(values)
    old["rope_scaling"]["type"] = "su"
    assert config_from_hf(old) == config_from_hf(values)


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [
        ("mistral", ["sliding_window", "rope_parameters", "rms_norm_eps"]),
        ("smollm3", ["no_rope_layers", "layer_types", "rope_parameters", "tie_word_embeddings"]),
        ("qwen2", ["layer_types", "sliding_window", "rope_parameters"]),
        ("qwen3", ["head_dim", "layer_types", "rope_parameters"]),
        ("phi3", ["rms_norm_eps", "sliding_window"]),
        ("gemma2", ["head_dim", "layer_types", "query_pre_attn_scalar", "final_logit_softcapping"]),
        ("gemma2", ["attn_logit_softcapping", "sliding_window", "hidden_activation", "tie_word_embeddings"]),
        ("gemma3", ["head_dim", "layer_types", "query_pre_attn_scalar", "rope_parameters", "sliding_window"]),
        ("gemma3", ["vocab_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"]),
        ("granite", ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"]),
        ("olmo2", ["rms_norm_eps", "rope_parameters"]),
        ("mixtral", ["rms_norm_eps", "rope_parameters", "num_experts_per_tok", "sliding_window"]),
        ("qwen3_moe", ["norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "moe_intermediate_size"]),
        ("gpt_oss", ["layer_types", "rope_parameters", "swiglu_limit", "sliding_window", "rms_norm_eps"]),
        ("gpt_oss", ["head_dim", "attention_bias", "num_local_experts", "num_experts_per_tok"]),
    ],
)
def test_settings_left_out_are_those_of_transformers(model_type, missing):
    """What transformers makes of the same file, written out in full, reads the same."""
    config = config_of(model_type)
    short = {name: value for name, value in tiny_values(model_type).items() if name not in missing}
    full = type(config).from_dict(dict(short)).to_dict()
    assert config_from_hf(full) == config_from_hf(short)


# ---------------------------------------------------------------- what is refused


def test_every_architecture_the_message_lists_has_a_family_here():
    assert set(HF_ARCHITECTURES) == {config_of(family).model_type for family in FAMILIES} | {"gemma3"}
    with pytest.raises(UnsupportedModelError, match=r"'mamba' is not supported; .*llama, .*gpt_oss"):
        config_from_hf({"model_type": "mamba"})
    with pytest.raises(UnsupportedModelError, match=r"\['llama'\] is not supported"):
        config_from_hf({"model_type": ["llama"]})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"hidden_act": "relu"}, "activation 'relu'"),
        ("llama", {"hidden_act": 3}, "hidden_act is 3, no text"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"hidden_size": 96.0}, "hidden_size is 96.0, not a whole number"),
        ("llama", {"hidden_size": 10**400}, "hidden_size is .*, a number no model has"),
        ("llama", {"vocab_size": True}, "vocab_size is True, not a number"),
        ("llama", {"head_dim": -16}, "head_dim is -16, not a positive whole number"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps is .*, a number no model has"),
        ("llama", {"attention_bias": "yes"}, "attention_bias is 'yes', neither true nor false"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters is \[1\], no group of settings"),
        ("mistral", {"sliding_window": -4}, "a window of -4 tokens sees nothing"),
        ("qwen2", {"layer_types": ["full_attention"]}, "do not name the types of 3 layers"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "type 'linear_attention'"),
        ("gemma2", {"layer_types": {"a": 1}}, "do not name the types"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0, not positive"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attention_soft_cap is 0.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "sees later tokens"),
        ("gemma3", {"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern is 0"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is .*not 0 or 1 for each of 4 layers"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0.0, not positive"),
        ("granite", {"residual_multiplier": 0}, "residual_scale is 0.0"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0, not positive"),
        ("mixtral", {"num_experts_per_tok": 9}, "9 experts a token are asked for of 4"),
        ("mixtral", {"num_local_experts": 1 << 30}, "1073741824 experts a layer are claimed"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all', no list"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit is 0.0"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(family, changes, message):
    with pytest.raises(ModelError, match=message):
        config_from_hf(tiny_values(family) | changes)


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.sampled_from([0, -1, 1, 2, 3, 4096, 1 << 40, 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-2, 2), st.floats(), st.text(max_size=3)), max_size=5),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "full_attention", "sliding_attention"]), st.integers()),
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_setting_makes_anything_but_a_configuration_or_a_message(data):
    values = tiny_values(data.draw(st.sampled_from(list(FAMILIES))))
    rope = values["rope_parameters"]
    for _ in range(data.draw(st.integers(1, 3))):
        section = data.draw(st.sampled_from([values, rope]))
        section[data.draw(st.sampled_from(sorted(section)))] = data.draw(HOSTILE)
    if data.draw(st.booleans()):
        values["rope_scaling"] = values.pop("rope_parameters", None)
    try:
        config = config_from_hf(values)
    except ModelError as error:
        assert str(error) and len(str(error)) < 500
    else:
        assert isinstance(config, ModelConfig) and math.isfinite(config.scale)
