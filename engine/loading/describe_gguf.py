"""Describes a GGUF file, or the several that make up one model, from the header. Torch-free."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
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
from engine.loading.gguf import GGUFMetadata, GGUFTensor
from engine.loading.gguf_split import open_gguf
from engine.memory import ModelShape

# llama.cpp's names of general.file_type, where they say more than the commonest tensor type does.
_FILE_TYPES = {
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
}
# Routers and biases: small, and held as plain numbers.
_PLAIN = re.compile(r"\.ffn_gate_inp\.|\.bias$")
_ROLES = {"token_embd.weight": "embedding", "output.weight": "head"}
# Architectures whose layers with a sliding window rotate by a table of angles of their own.
_TWO_ROPES = ("gemma3",)


def describe_gguf(path: Path) -> ModelDescription:
    """Raises `DescriptionError`, `GGUFError` and `OSError`."""
    with open_gguf(path) as file:
        metadata = file.metadata
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise DescriptionError("its header names no architecture; choose a file that holds a language model")
        tensors = list(file.tensors.values())
        shape = _shape(architecture, metadata, tensors)
        sizes: Counter[str] = Counter()
        for tensor in tensors:
            sizes[tensor.type] += tensor.nbytes
        file_type = metadata.get("general.file_type")
        named = _FILE_TYPES.get(file_type) if isinstance(file_type, int) else None
        quantisation = named if named and named.startswith(commonest(sizes)) else commonest(sizes)
        return ModelDescription("gguf", architecture, quantisation, file.size, shape)


def _shape(architecture: str, metadata: GGUFMetadata, tensors: Sequence[GGUFTensor]) -> ModelShape:
    def number(name: str, default: int | None = None) -> int:
        value = metadata.get(f"{architecture}.{name}", default)
        return positive(largest(value), f"{architecture}.{name}")

    layers = checked_layers(number("block_count"))
    hidden, heads = number("embedding_length"), number("attention.head_count")
    head_dim = max(1, hidden // heads)
    key_dim = number("attention.key_length", head_dim)
    kv_heads: Any = metadata.get(f"{architecture}.attention.head_count_kv", heads)
    experts = number("expert_used_count", 1) * number("expert_feed_forward_length", number("feed_forward_length", 1))
    return ModelShape(
        weights=_weights(tensors),
        stored_bytes=sum(tensor.nbytes for tensor in tensors),
        kv_heads=heads_of_layers(kv_heads, layers, "head_count_kv"),
        num_heads=heads,
        key_dim=key_dim,
        value_dim=number("attention.value_length", head_dim),
        hidden_size=hidden,
        intermediate_size=max(number("feed_forward_length", experts), experts),
        vocab_size=metadata.array_length("tokenizer.ggml.tokens") or number("vocab_size", 1),
        max_context=number("context_length"),
        rope_dims=number("rope.dimension_count", key_dim) * _num_ropes(architecture, tensors),
        experts_per_token=number("expert_used_count", 1) if any(".ffn_gate_inp." in t.name for t in tensors) else 0,
        has_norms_after=any("post_ffw_norm" in tensor.name for tensor in tensors),
    )


def _num_ropes(architecture: str, tensors: Sequence[GGUFTensor]) -> int:
    """How many tables of angles there are: for layers with a window, or for long sequences, one more."""
    has_long_factors = any(tensor.name == "rope_factors_long.weight" for tensor in tensors)
    return 2 if architecture in _TWO_ROPES or has_long_factors else 1


def _weights(tensors: Iterable[GGUFTensor]) -> tuple[Any, ...]:
    rows: Counter[GroupKey] = Counter()
    for tensor in tensors:
        if tensor.name.startswith("rope_") or not tensor.shape:
            continue
        columns = tensor.shape[-1]
        if len(tensor.shape) == 1 or _PLAIN.search(tensor.name):
            key = GroupKey("small", tensor.type, columns)
        else:
            role = _ROLES.get(tensor.name) or ("experts" if len(tensor.shape) > 2 else "layers")
            key = GroupKey(role, tensor.type, columns)
        rows[key] += tensor.num_elements // columns if columns else 0
    return weight_groups(rows)
