"""Describes a model from its headers and configuration alone: no weights are read. Torch-free."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.loading.folder import FolderError, read_model_config, shard_paths
from engine.loading.gguf import GGUFError, GGUFFile
from engine.loading.limits import MAX_LAYERS
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
_SAFETENSORS_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
_MAX_SAFETENSORS_HEADER = 100 << 20


class DescriptionError(ValueError):
    """A model that cannot be described. The message says what is wrong and what to do, without the path."""


@dataclass(frozen=True)
class ModelDescription:
    format: str
    architecture: str
    quantisation: str
    size_bytes: int
    shape: ModelShape


def describe(path: Path) -> ModelDescription:
    """Describes a `.gguf` file or a Hugging Face folder. Raises `DescriptionError`."""
    try:
        return _describe_folder(path) if path.is_dir() else _describe_gguf(path)
    except (GGUFError, FolderError) as error:
        raise DescriptionError(str(error).removeprefix(f"{path}: ")) from error
    except OSError as error:
        raise DescriptionError(f"cannot be read ({error.strerror or error}); check its permissions") from error


def _describe_gguf(path: Path) -> ModelDescription:
    with GGUFFile(path) as file:
        metadata = file.metadata
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise DescriptionError("its header names no architecture; choose a file that holds a language model")
        parts = metadata.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise DescriptionError(
                f"is one of {parts} parts of a split model; join them with llama-gguf-split --merge first"
            )

        def number(name: str, default: int | None = None) -> int:
            value = metadata.get(f"{architecture}.{name}", default)
            if isinstance(value, list):  # one value a layer: the largest bounds them all
                value = max(value, default=None)
            return _positive(value, f"{architecture}.{name}")

        layers = _num_layers(number("block_count"))
        hidden, heads = number("embedding_length"), number("attention.head_count")
        head_dim = max(1, hidden // heads)
        shape = ModelShape(
            num_parameters=sum(
                tensor.num_elements for name, tensor in file.tensors.items() if not name.startswith("rope_")
            ),
            stored_bytes=sum(tensor.nbytes for tensor in file.tensors.values()),
            kv_heads=_kv_heads(metadata.get(f"{architecture}.attention.head_count_kv", heads), layers),
            key_dim=number("attention.key_length", head_dim),
            value_dim=number("attention.value_length", head_dim),
            hidden_size=hidden,
            intermediate_size=number("feed_forward_length"),
            vocab_size=metadata.array_length("tokenizer.ggml.tokens") or number("vocab_size", 1),
            max_context=number("context_length"),
        )
        types: Counter[str] = Counter()
        for tensor in file.tensors.values():
            types[tensor.type] += tensor.nbytes
        commonest = types.most_common(1)[0][0] if types else "none"
        file_type = metadata.get("general.file_type")
        named = _FILE_TYPES.get(file_type) if isinstance(file_type, int) else None
        quantisation = named if named and named.startswith(commonest) else commonest
        return ModelDescription("gguf", architecture, quantisation, file.size, shape)


def _kv_heads(value: Any, layers: int) -> tuple[int, ...]:
    heads = value if isinstance(value, list) else [value] * layers
    if len(heads) != layers or any(not isinstance(count, int) or count < 0 for count in heads):
        raise DescriptionError(f"head_count_kv does not fit its {layers} layers; convert the model again")
    return tuple(heads)


def _num_layers(value: int) -> int:
    if value > MAX_LAYERS:
        raise DescriptionError(f"it claims to have {value} layers; its header is damaged, download it again")
    return value


def _positive(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 40:
        raise DescriptionError(f"its value of {name} is {value!r}, not a positive number; download it again")
    return value


def _describe_folder(folder: Path) -> ModelDescription:
    config = read_model_config(folder)
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(text, dict)
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    tensors, size_bytes = _read_safetensors(folder)

    def number(*names: str, default: int | None = None) -> int:
        value = next((text[name] for name in names if text.get(name) is not None), default)
        return _positive(value, names[0])

    hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
    head_dim = number("head_dim", default=max(1, hidden // heads))
    quantization = config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    bits = quantization.get("bits", quantization.get("w_bit"))
    shape = ModelShape(
        num_parameters=_count_parameters(tensors, bits),
        stored_bytes=size_bytes,
        kv_heads=(number("num_key_value_heads", default=heads),) * _num_layers(number("num_hidden_layers", "n_layer")),
        key_dim=head_dim,
        value_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=number("intermediate_size", "n_inner", default=4 * hidden),
        vocab_size=number("vocab_size"),
        max_context=number("max_position_embeddings", "n_positions"),
    )
    if quantization:
        quantisation = str(quantization.get("quant_method", "quantised")) + (f" {bits}-bit" if bits else "")
    else:
        sizes: Counter[str] = Counter()
        for dtype, elements in tensors.values():
            sizes[dtype] += elements
        quantisation = sizes.most_common(1)[0][0] if sizes else "none"
    return ModelDescription("safetensors", str(architecture or "unknown"), quantisation, size_bytes, shape)


def _count_parameters(tensors: Mapping[str, tuple[str, int]], bits: Any) -> int:
    """Weights in the model's own count: packed GPTQ and AWQ words hold several, their scales and zeros none."""
    total = 0
    for name, (dtype, elements) in tensors.items():
        if name.endswith(".qweight") and dtype == "I32" and isinstance(bits, int) and bits > 0:
            total += elements * 32 // bits
        elif not name.endswith((".qzeros", ".scales", ".g_idx", "_scale", "_scale_inv", ".absmax")):
            total += elements
    return total


def _read_safetensors(folder: Path) -> tuple[dict[str, tuple[str, int]], int]:
    """(tensor name -> (dtype, number of elements), bytes of weights), from the headers of all shards."""
    shards = shard_paths(folder)
    tensors: dict[str, tuple[str, int]] = {}
    for shard in shards:
        tensors.update(_safetensors_header(shard))
    return tensors, sum(shard.stat().st_size for shard in shards)


def _safetensors_header(path: Path) -> dict[str, tuple[str, int]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_SAFETENSORS_HEADER):
            raise DescriptionError(f"{path.name} is no safetensors file or is truncated; download it again")
        data = file.read(length)
    try:
        header = json.loads(data)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        tensors = {name: (str(entry["dtype"]), math.prod(entry["shape"])) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DescriptionError(f"{path.name} has a damaged header; download it again") from error
    if end > size - 8 - length:
        raise DescriptionError(f"{path.name} is truncated ({size} of {end + 8 + length} bytes); download it again")
    return tensors
