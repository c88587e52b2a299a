"""Describes a Hugging Face folder from its configuration and the headers of its safetensors files. Torch-free."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.loading.description import (
    DescriptionError,
    GroupKey,
    ModelDescription,
    checked_layers,
    commonest,
    heads_of_layers,
    largest,
    positive,
    weight_groups,
)
from engine.loading.folder import parse_json, read_model_config, shard_paths
from engine.memory import ModelShape, WeightGroup

_MAX_SAFETENSORS_HEADER = 100 << 20
_DEFAULT_CONTEXT = 2048
# Scales, zero points and the like, beside the integer codes they belong to.
_BESIDE = re.compile(
    r"\.(qzeros|scales|g_idx|weight_scale|weight_scale_inv|weight_zero_point|weight_shape|weight_g_idx|input_scale"
    r"|absmax|quant_map|nested_absmax|nested_quant_map)$|_scales$"
)
# What else than the language model lies in a folder of a model that also sees or hears.
_OTHER_TOWERS = re.compile(r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\.")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
# Routers, and biases of all experts together: small, and held as plain numbers.
_PLAIN = re.compile(r"\.(mlp|block_sparse_moe)\.(gate|router)\.weight$|bias$")
_PACKED = re.compile(r"\.(qweight|weight_packed)$")


def describe_folder(folder: Path) -> ModelDescription:
    """Raises `DescriptionError`, `FolderError` and `OSError`."""
    config = read_model_config(folder)
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(text, dict)
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    shards = shard_paths(folder)
    tensors: dict[str, _Tensor] = {}
    for shard in shards:
        tensors.update(_safetensors_header(shard))
    size = sum(shard.stat().st_size for shard in shards)
    quantization = config.get("quantization_config") or text.get("quantization_config")
    method = _Quantization.of(quantization) if isinstance(quantization, dict) else None
    has_norms_after = any("post_feedforward_layernorm" in name for name in tensors)
    is_transposed = text.get("model_type") == "gpt_oss"
    weights = _weights(tensors, method, bool(_tied(config, text)), is_transposed)
    shape = _shape(text, weights, size, has_norms_after)
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.num_elements
    quantisation = method.title if method is not None else commonest(sizes)
    return ModelDescription("safetensors", str(architecture or "unknown"), quantisation, size, shape)


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class _Quantization:
    """How the weights of a quantised checkpoint are packed. `group_size` 0: a scale for each row."""

    method: str
    bits: int
    group_size: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> _Quantization:
        method = str(values.get("quant_method", "quantised"))
        groups = values.get("config_groups")
        scheme: Any = next(iter(groups.values()), None) if isinstance(groups, dict) else None
        weights = scheme.get("weights") if isinstance(scheme, dict) else None
        if isinstance(weights, dict):
            bits, group_size = weights.get("num_bits"), weights.get("group_size")
        else:
            bits, group_size = values.get("bits", values.get("w_bit")), values.get("group_size")
        return cls(method, _whole(bits), _whole(group_size))

    @property
    def title(self) -> str:
        return f"{self.method} {self.bits}-bit" if self.bits else self.method


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    return text.get("tie_word_embeddings", config.get("tie_word_embeddings"))


def _shape(
    text: Mapping[str, Any], weights: tuple[WeightGroup, ...], stored_bytes: int, has_norms_after: bool
) -> ModelShape:
    def number(*names: str, default: int | None = None) -> int:
        value = next((text[name] for name in names if text.get(name) is not None), default)
        return positive(largest(value), names[0])

    hidden, heads = number("hidden_size", "n_embd", "d_model"), number("num_attention_heads", "n_head", "n_heads")
    layers = checked_layers(number("num_hidden_layers", "n_layer", "n_layers"))
    head_dim = number("head_dim", default=max(1, hidden // heads))
    key_dim, value_dim = head_dim, head_dim
    if text.get("qk_nope_head_dim") is not None and text.get("qk_rope_head_dim") is not None:
        # Such models run through transformers, whose cache holds keys and values at the width of the wider ones.
        key_dim = number("qk_nope_head_dim") + number("qk_rope_head_dim")
        key_dim = value_dim = max(key_dim, number("v_head_dim", default=head_dim))
    # Some layers' heads may be wider than the others'; the cache has one width for all.
    by_layer = text.get("per_layer_config")
    layers_of_their_own = by_layer.values() if isinstance(by_layer, dict) else ()
    widths = [each.get("head_dim") for each in layers_of_their_own if isinstance(each, dict)]
    for width in (text.get("global_head_dim"), *widths):
        if width is not None:
            key_dim = value_dim = max(key_dim, positive(width, "head_dim"))
    kv_heads: Any = next((text[n] for n in ("num_key_value_heads", "num_kv_heads") if text.get(n) is not None), heads)
    active = number("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", default=1)
    inner = number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    return ModelShape(
        weights=weights,
        stored_bytes=stored_bytes,
        kv_heads=heads_of_layers(kv_heads, layers, "num_key_value_heads"),
        num_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        hidden_size=hidden,
        intermediate_size=max(inner, active * number("moe_intermediate_size", default=inner)),
        vocab_size=number("vocab_size"),
        max_context=number("max_position_embeddings", "n_positions", "max_seq_len", default=_DEFAULT_CONTEXT),
        rope_dims=_rope_dims(text, key_dim),
        experts_per_token=active if any(group.role == "experts" for group in weights) else 0,
        has_norms_after=has_norms_after,
    )


def _rope_dims(text: Mapping[str, Any], head_dim: int) -> int:
    """Dimensions that are rotated, counted for each table of angles."""
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    partial: Any = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
    partial = text.get("partial_rotary_factor", 1.0) if partial is None else partial
    dims = int(head_dim * partial) if isinstance(partial, int | float) and 0 < partial <= 1 else head_dim
    two_tables = text.get("rope_local_base_freq") is not None
    if isinstance(parameters, dict):
        kind = parameters.get("rope_type", parameters.get("type"))
        two_tables = two_tables or "sliding_attention" in parameters or kind in ("longrope", "su")
    return dims * (2 if two_tables else 1)


def _weights(
    tensors: Mapping[str, _Tensor], method: _Quantization | None, tied: bool, is_transposed: bool
) -> tuple[WeightGroup, ...]:
    """`is_transposed`: the experts' matrices are stored with their inputs as rows."""
    rows: Counter[GroupKey] = Counter()
    has_embedding = any(_EMBEDDING.search(name) for name in tensors)
    for name, tensor in tensors.items():
        if _BESIDE.search(name) or _OTHER_TOWERS.search(name) or not tensor.num_elements:
            continue
        if tied and has_embedding and _HEAD.search(name):
            continue  # stored although it is the embedding: loading counts it once
        if is_transposed and ".experts." in name and tensor.dtype != "U8" and len(tensor.shape) == 3:
            tensor = _Tensor(tensor.dtype, (tensor.shape[0], tensor.shape[2], tensor.shape[1]))
        key, count = _group(name, tensor, method)
        rows[key] += count
    return weight_groups(rows)


def _group(name: str, tensor: _Tensor, method: _Quantization | None) -> tuple[GroupKey, int]:
    """What kind of weights a tensor holds, and how many rows of them; packed words hold several weights each."""
    if len(tensor.shape) < 2 or _PLAIN.search(name):
        return GroupKey("small", tensor.dtype, tensor.num_elements), 1
    role = "embedding" if _EMBEDDING.search(name) else "head" if _HEAD.search(name) else "layers"
    if ".experts." in name and role == "layers":
        role = "experts"
    rows, columns = tensor.num_elements // tensor.shape[-1], tensor.shape[-1]
    if _PACKED.search(name) and tensor.dtype == "I32" and method is not None:
        bits = method.bits if method.bits in (4, 8) else 4
        in_a_word = 32 // bits
        if name.endswith(".weight_packed"):
            columns *= in_a_word
        elif method.method == "awq":
            rows, columns = columns * in_a_word, rows
        else:
            rows, columns = columns, rows * in_a_word
        return GroupKey(role, f"INT{bits}", columns, method.group_size), rows
    if name.endswith("_blocks") and tensor.dtype == "U8" and len(tensor.shape) == 4:
        return GroupKey(role, "MXFP4", 2 * tensor.shape[2] * tensor.shape[3]), tensor.shape[0] * tensor.shape[1]
    if tensor.dtype == "I8" and method is not None:
        return GroupKey(role, "INT8", columns, method.group_size), rows
    return GroupKey(role, "F8" if tensor.dtype.startswith("F8_") else tensor.dtype, columns), rows


def _safetensors_header(path: Path) -> dict[str, _Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_SAFETENSORS_HEADER):
            raise DescriptionError(f"{path.name} is no safetensors file or is truncated; download it again")
        data = file.read(length)
    try:
        header = parse_json(data)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        tensors = {name: _Tensor(str(entry["dtype"]), _dimensions(entry["shape"])) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DescriptionError(f"{path.name} has a damaged header; download it again") from error
    if end > size - 8 - length:
        raise DescriptionError(f"{path.name} is truncated ({size} of {end + 8 + length} bytes); download it again")
    return tensors


def _dimensions(shape: Any) -> tuple[int, ...]:
    """Raises `ValueError` for what is no shape."""
    if not isinstance(shape, list) or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shape):
        raise ValueError(f"{shape!r} is no shape")
    return tuple(shape)
