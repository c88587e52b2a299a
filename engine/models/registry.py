"""Which decoders are supported: one row for each family, and how its configuration reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import ModelConfig, UnsupportedModelError
from engine.models.gguf_config import llama_from_gguf
from engine.models.hf_config import llama_from_hf


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family of decoders.

    `gguf_name` is its `general.architecture`, `hf_name` its `model_type`; either is None where the
    other container calls it something else.
    """

    gguf_name: str | None
    hf_name: str | None
    from_gguf: Callable[[Mapping[str, Any], Mapping[str, Any]], ModelConfig] | None
    from_hf: Callable[[Mapping[str, Any]], ModelConfig] | None


ARCHITECTURES = (
    Architecture("llama", "llama", llama_from_gguf, llama_from_hf),
    Architecture(None, "mistral", None, llama_from_hf),
)


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a GGUF file: `GGUFFile.metadata` and `GGUFFile.tensors`.

    Raises UnsupportedModelError naming an unknown architecture or variant, ModelError for bad values.
    """
    name = metadata.get("general.architecture")
    for architecture in ARCHITECTURES:
        if architecture.from_gguf is not None and architecture.gguf_name == name:
            return architecture.from_gguf(metadata, tensors)
    supported = ", ".join(row.gguf_name for row in ARCHITECTURES if row.gguf_name)
    raise UnsupportedModelError(f"the architecture {name!r} is not supported; supported in GGUF files: {supported}")


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a Hugging Face `config.json`.

    Raises UnsupportedModelError naming an unknown architecture or variant, ModelError for bad values.
    """
    name = values.get("model_type")
    for architecture in ARCHITECTURES:
        if architecture.from_hf is not None and architecture.hf_name == name:
            return architecture.from_hf(values)
    supported = ", ".join(row.hf_name for row in ARCHITECTURES if row.hf_name)
    raise UnsupportedModelError(f"the architecture {name!r} is not supported; supported in folders: {supported}")
