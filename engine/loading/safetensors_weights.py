"""Weights of a Hugging Face folder: one safetensors file, or shards named by an index, perhaps quantised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.loading.compressed_tensors import is_cache_scale
from engine.loading.packed import PackedMatrix
from engine.loading.quantized import packed_matrices
from engine.loading.tensor_files import FLOAT_TYPES, TensorFiles
from engine.loading.weights import StoredTensor
from engine.models.config import UnsupportedModelError
from engine.quantization.affine import AffineMatrix
from kernels import ops


class SafetensorsWeights:
    """A `WeightSource` over all shards of a folder, under the names that the family gives its tensors.

    `quantization` is the `quantization_config` of config.json. The tensors that hold a quantised matrix together
    appear as one, of the name and shape it would have had.
    Raises ModelError for a folder without weights, a damaged file or an index that does not match its shards,
    UnsupportedModelError for a way of quantising that is not read.
    """

    def __init__(self, folder: Path, quantization: Mapping[str, Any] | None = None) -> None:
        self._files = TensorFiles(folder)
        self.label = self._files.label
        self._packed: dict[str, PackedMatrix] = {}
        self.tensors: dict[str, StoredTensor] = {}
        parts: set[str] = set()
        for matrix in packed_matrices(self._files, quantization):
            self._packed[matrix.stored.stored_name] = matrix
            self.tensors[matrix.stored.stored_name] = matrix.stored
            parts |= matrix.parts
        for name, stored in self._files.tensors.items():
            if name in parts or (quantization and is_cache_scale(name)):
                continue
            if stored.type not in FLOAT_TYPES:
                raise UnsupportedModelError(
                    f"{self._files.path(name)}: tensor {name!r} is stored as {stored.type}, "
                    f"which is not supported{'' if quantization else ' without a quantization_config in config.json'}"
                )
            self.tensors[name] = stored
        matrices = Counter(stored.type for stored in self.tensors.values() if len(stored.shape) > 1)
        self.format = f"safetensors {matrices.most_common(1)[0][0]}" if matrices else "safetensors"

    def read_into(self, name: str, out: torch.Tensor) -> None:
        packed = self._packed.get(name)
        if packed is None:
            out.copy_(self._files.read(name))
        elif packed.fill is not None:
            packed.fill(out)
        elif packed.affine is not None:
            out.copy_(packed.affine().dequantize())
        else:
            rows = self.stored_rows(name)
            ops.dequantize(rows.view(-1, rows.shape[-1]), packed.stored.type, out.view(-1, out.shape[-1]))

    def stored_rows(self, name: str) -> torch.Tensor:
        packed = self._packed.get(name)
        if packed is None:
            return self._files.read(name)
        if packed.ggml_rows is not None:
            return packed.ggml_rows()
        plain = torch.empty(packed.stored.shape, dtype=torch.float32)
        self.read_into(name, plain)
        return plain

    def quantized(self, name: str) -> AffineMatrix | None:
        packed = self._packed.get(name)
        return None if packed is None or packed.affine is None else packed.affine()

    def close(self) -> None:
        self._files.close()
