"""Writes a small transformers model as a GGUF file, just as llama.cpp's convert_hf_to_gguf.py does.

Names come from the `gguf` package's own map, so that they are an oracle for ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import PreTrainedModel

from tests.engine.families import END_TOKEN
from tests.engine.tiny_gguf import TEMPLATE
from tests.kernels.ggml_blocks import quantize

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "gpt_oss": "gpt-oss",
}
"""transformers' model_type -> general.architecture."""
_INTERLEAVED = ("llama", "smollm3", "granite")


def write_gguf_model(
    path: Path,
    model: PreTrainedModel,
    tensor_type: str = "F32",
    extra: dict[str, Any] | None = None,
    type_of: Mapping[str, str] | None = None,
    tensors_per_file: int = 0,
) -> Path:
    """Matrices are stored as `tensor_type`, those whose names end in a key of `type_of` as that says, vectors and
    routers as F32. With `tensors_per_file` the model is split; the path returned is the first part's.

    `extra` adds metadata: integers, floats, booleans, strings or lists by key.
    """
    config: Any = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    _add_shape(writer, config, architecture)
    _add_rope(writer, config, architecture)
    _add_tokenizer(writer, config.vocab_size)
    for key, value in (extra or {}).items():
        _add_value(writer, key, value)
    for name, tensor in _tensors(model, architecture):
        is_matrix = tensor.dim() > 1 and "ffn_gate_inp" not in name and not name.endswith(".bias")
        chosen = next((kind for end, kind in (type_of or {}).items() if name.endswith(end)), tensor_type)
        kind = gguf.GGMLQuantizationType[chosen if is_matrix else "F32"]
        values = tensor.contiguous().numpy()
        packed = values if kind.name == "F32" else quantize(values, kind.name)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if tensors_per_file else path


def _add_shape(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None and architecture not in ("phi3", "granite"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    window = getattr(config, "sliding_window", None)
    if architecture in ("gemma2", "gemma3", "gpt-oss", "olmo2") and window:
        writer.add_sliding_window(window)
    if architecture == "phi3":
        writer.add_sliding_window(window or 0)
    if config.model_type == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if architecture in _INTERLEAVED:
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim or config.hidden_size // config.num_attention_heads)


def _add_rope(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    by_layer = config.rope_parameters
    rope = by_layer.get("full_attention", by_layer)
    if architecture == "gemma2":
        return
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture == "gemma3":
        writer.add_rope_freq_base_swa(by_layer["sliding_attention"]["rope_theta"])
    if architecture == "phi3":
        original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        writer.add_rope_scaling_orig_ctx_len(original)
        share = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(share * config.hidden_size) // config.num_attention_heads)
        if "long_factor" in rope:
            stretch = config.max_position_embeddings / original
            factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
            writer.add_rope_scaling_attn_factors(factor)
    elif rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Printable ASCII, padded to the model's vocabulary; id 1 ends a text."""
    tokens = ["<|startoftext|>", END_TOKEN, "Ċ", *("Ġ" if code == 32 else chr(code) for code in range(32, 127)), "ab"]
    types = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2)
    padding = [f"[PAD{index}]" for index in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + padding)
    writer.add_token_types(types + [gguf.TokenType.UNUSED] * len(padding))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    for values in writer.kv_data:
        values.pop(key, None)
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_int32 if value < 0 else writer.add_uint32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    config: Any = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    parameters = dict(model.named_parameters())  # a tied head is none of its own
    for hf_name, parameter in parameters.items():
        for part_name, values in _parts(hf_name, parameter.detach(), config, architecture):
            if architecture.startswith("gemma") and part_name.endswith("norm.weight"):
                values = values + 1
            name = names.get_name(part_name, try_suffixes=(".weight", ".bias"))
            assert name is not None, part_name
            yield name, values
    if (rope := config.rope_parameters).get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(rope, config)
    if "long_factor" in rope:
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])


def _parts(name: str, values: torch.Tensor, config: Any, architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What the converter makes of one of the model's parameters, still under Hugging Face names."""
    stem, _, kind = name.rpartition(".")
    if kind == "sinks":
        yield f"{name}.weight", values
    elif ".experts." in name:
        is_bias = kind.endswith("_bias")
        kind = kind.removesuffix("_bias")
        if architecture == "gpt-oss" and not is_bias:
            values = values.transpose(-1, -2)
        suffix = "bias" if is_bias else "weight"
        if kind == "gate_up_proj":
            rows = values if is_bias else values.transpose(1, 2)
            halves = (rows[..., ::2], rows[..., 1::2]) if architecture == "gpt-oss" else rows.chunk(2, -1)
            for half, part in zip(halves, ("gate_proj", "up_proj")):
                yield f"{stem}.{part}.{suffix}", half if is_bias else half.transpose(1, 2)
        else:
            yield f"{stem}.{kind}.{suffix}", values
    elif architecture in _INTERLEAVED and stem.endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        yield name, halves.transpose(1, 2).reshape(values.shape)
    else:
        yield name, values


def _llama3_factors(rope: dict[str, Any], config: Any) -> torch.Tensor:
    """By what each frequency is divided: as `generate_extra_tensors` of the converter's LlamaModel."""
    dim = config.head_dim
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = torch.where(wavelengths > original / low, rope["factor"], between)
    return torch.where(wavelengths < original / high, 1.0, factors)
