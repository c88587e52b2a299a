"""The safetensors files of a folder, as they are: names, shapes, and tensors read on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.loading.folder import FolderError, shard_paths
from engine.loading.weights import StoredTensor
from engine.models.config import ModelError, UnsupportedModelError

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
}
# Buffers that old checkpoints carry along; the decoder computes them itself.
_COMPUTED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class TensorFiles:
    """All shards of a folder, open. `tensors` maps stored names to what the headers say.

    Raises ModelError for a folder without weights, a damaged file, or shards that repeat a tensor,
    UnsupportedModelError naming a tensor of a type that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.label = str(folder)
        self.tensors: dict[str, StoredTensor] = {}
        self._shards: dict[Path, Any] = {}
        self._shard_of: dict[str, Path] = {}
        try:
            paths = shard_paths(folder)
        except FolderError as error:
            raise ModelError(f"{folder}: {error}") from error
        for path in paths:
            self._open(path)

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
            if dtype not in _ITEM_BYTES:
                raise UnsupportedModelError(f"{path}: tensor {name!r} is stored as {dtype}, which is not supported")
            self.tensors[name] = StoredTensor(name, shape, dtype, _ITEM_BYTES[dtype] * torch.Size(shape).numel())
            self._shard_of[name] = path

    def path(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._shard_of[name]

    def read(self, name: str) -> torch.Tensor:
        """A tensor, mapped from the file. Raises ModelError naming it where the bytes cannot be read."""
        path = self._shard_of[name]
        try:
            return self._shards[path].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{path}: tensor {name!r} cannot be read ({error}); download it again") from error

    def close(self) -> None:
        self._shards.clear()
