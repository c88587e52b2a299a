"""Weights of a GGUF file, unpacked tensor by tensor from the memory map."""

from __future__ import annotations

import math
from collections import Counter

import torch

from engine.loading.gguf import GGUFFile
from engine.loading.names import canonical_name, permuted_heads, unpermute_rows
from engine.loading.weights import StoredTensor
from engine.models.config import ModelConfig, ModelError, UnsupportedModelError
from kernels import ops


class GGUFWeights:
    """A `WeightSource` over an open file, which it closes.

    Raises UnsupportedModelError naming the first tensor of an unsupported format or an unknown name.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self.label = str(file.path)
        self.tensors: dict[str, StoredTensor] = {}
        for tensor in file.tensors.values():
            if tensor.type not in ops.QUANTIZED_FORMATS:
                raise UnsupportedModelError(
                    f"{self.label}: tensor {tensor.name!r} is stored as {tensor.type}, which is not supported; "
                    f"choose a file in {', '.join(ops.QUANTIZED_FORMATS)}"
                )
            # A name without a canonical spelling keeps its own and is refused with the unused ones.
            name = canonical_name(tensor.name) or tensor.name
            self.tensors[name] = StoredTensor(tensor.name, tensor.shape, tensor.type, tensor.nbytes)
        types = Counter(stored.type for stored in self.tensors.values() if len(stored.shape) > 1)
        self.format = f"GGUF {types.most_common(1)[0][0]}" if types else "GGUF"

    def stored_rows(self, name: str) -> torch.Tensor:
        stored = self.tensors[name]
        packed = torch.from_numpy(self._file.read(stored.stored_name))
        num_rows = math.prod(stored.shape[:-1])
        packed = packed.view(num_rows, -1)
        num_heads = permuted_heads(name, self._config)
        if len(stored.shape) == 1 and num_heads is not None:
            packed = packed.view(stored.shape[0], -1)
        return packed if num_heads is None else unpermute_rows(packed, num_heads)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        stored = self.tensors[name]
        packed = self.stored_rows(name)
        rows = out.view(packed.shape[0], -1)
        try:
            ops.dequantize(packed.to(out.device), stored.type, rows)
        except ValueError as error:
            raise ModelError(f"{self.label}: tensor {stored.stored_name!r}: {error}") from error

    def close(self) -> None:
        self._file.close()
