"""Weights of a GGUF file, unpacked tensor by tensor from the memory map."""

from __future__ import annotations

import math
from collections import Counter

import torch

from engine.loading.gguf import GGUFFile, GGUFTensor
from engine.loading.gguf_names import View, canonical_views, deinterleave_rows, interleaved_heads
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
        self._first_bytes: dict[str, int] = {}
        for tensor in file.tensors.values():
            if tensor.type not in ops.QUANTIZED_FORMATS:
                raise UnsupportedModelError(
                    f"{self.label}: tensor {tensor.name!r} is stored as {tensor.type}, which is not supported; "
                    f"choose a file in {', '.join(ops.QUANTIZED_FORMATS)}"
                )
            # A name without a canonical spelling keeps its own and is refused with the unused ones.
            views = canonical_views(tensor.name, tensor.shape, config) or [View(tensor.name, 0, tensor.shape)]
            for view in views:
                whole = view.shape == tensor.shape
                self._first_bytes[view.name] = 0 if whole else self._bytes(tensor, view.start)
                nbytes = tensor.nbytes if whole else self._bytes(tensor, math.prod(view.shape))
                self.tensors[view.name] = StoredTensor(tensor.name, view.shape, tensor.type, nbytes)
        types = Counter(stored.type for stored in self.tensors.values() if len(stored.shape) > 1)
        self.format = f"GGUF {types.most_common(1)[0][0]}" if types else "GGUF"

    def stored_rows(self, name: str) -> torch.Tensor:
        stored, first = self.tensors[name], self._first_bytes[name]
        packed = self._file.read(stored.stored_name)[first : first + stored.nbytes]
        num_heads = interleaved_heads(name, self._config)
        if num_heads is None:
            return torch.from_numpy(packed.reshape(math.prod(stored.shape[:-1]), -1))
        return torch.from_numpy(deinterleave_rows(packed.reshape(stored.shape[0], -1), num_heads))

    def read_into(self, name: str, out: torch.Tensor) -> None:
        stored = self.tensors[name]
        packed = self.stored_rows(name)
        rows = out.view(packed.shape[0], -1)
        try:
            ops.dequantize(packed.to(out.device), stored.type, rows)
        except ValueError as error:
            raise ModelError(f"{self.label}: tensor {stored.stored_name!r}: {error}") from error

    def quantized(self, name: str) -> None:
        """GGUF has formats of its own, which `stored_rows` gives."""

    def _bytes(self, tensor: GGUFTensor, count: int) -> int:
        """Bytes of `count` numbers, which are whole blocks of the tensor's format."""
        size, rest = divmod(count * tensor.nbytes, tensor.num_elements)
        if rest:
            raise UnsupportedModelError(f"{self.label}: tensor {tensor.name!r} cannot be divided as {tensor.type}")
        return size

    def close(self) -> None:
        self._file.close()
