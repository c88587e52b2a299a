"""Weights of a Hugging Face folder: one safetensors file, or shards named by an index."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.loading.folder import FolderError, shard_paths
from engine.loading.weights import StoredTensor
from engine.models.config import ModelError, UnsupportedModelError

_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Buffers that old checkpoints carry along; the decoder computes them itself.
_COMPUTED_SUFFIXES = (".rotary_emb.inv_freq",)


class SafetensorsWeights:
    """A `WeightSource` over all shards of a folder.

    With `tied_head` a stored copy of the embedding named lm_head is left out.
    Raises ModelError for a folder without weights, a damaged file or an index that does not match its shards.
    """

    def __init__(self, folder: Path, tied_head: bool) -> None:
        self.label = str(folder)
        self._shards: dict[Path, Any] = {}
        self._shard_of: dict[str, Path] = {}
        self.tensors: dict[str, StoredTensor] = {}
        try:
            paths = shard_paths(folder)
        except FolderError as error:
            raise ModelError(f"{folder}: {error}") from error
        for path in paths:
            self._open(path)
        if tied_head:
            self.tensors.pop("lm_head.weight", None)
        types = Counter(stored.type for stored in self.tensors.values())
        self.format = f"safetensors {types.most_common(1)[0][0]}" if types else "safetensors"

    def _open(self, path: Path) -> None:
        try:
            shard = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: cannot be read ({error}); download it again") from error
        self._shards[path] = shard
        for name in shard.keys():  # noqa: SIM118 (a safe_open handle is no mapping)
            if name.endswith(_COMPUTED_SUFFIXES):
                continue
            if name in self.tensors:
                raise ModelError(f"{path}: tensor {name!r} is also in {self._shard_of[name].name}")
            entry = shard.get_slice(name)
            shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
            if dtype not in _FLOAT_BYTES:
                raise UnsupportedModelError(f"{path}: tensor {name!r} is stored as {dtype}, which is not supported")
            self.tensors[name] = StoredTensor(name, shape, dtype, _FLOAT_BYTES[dtype] * torch.Size(shape).numel())
            self._shard_of[name] = path

    def read_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self.stored_rows(name))

    def stored_rows(self, name: str) -> torch.Tensor:
        path = self._shard_of[name]
        try:
            return self._shards[path].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{path}: tensor {name!r} cannot be read ({error}); download it again") from error

    def close(self) -> None:
        self._shards.clear()
