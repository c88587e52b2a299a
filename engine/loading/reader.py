"""Makes a decoder's weights from a model file, one layer's tensors at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.layers.linear import Linear
from engine.loading.weights import WeightSource
from engine.quantization import DenseWeight, QuantWeight
from engine.quantization.native import NativeWeight, native_weight


class WeightReader:
    """Each tensor is unpacked straight into its place, fused neighbours on top of each other.

    With `native`, matrices stay in the file's own numbers, packed for the native CPU kernels; neighbours
    of different types are unpacked to float32 first.
    """

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        native: bool,
        norm_offset: float,
        on_tensor: Callable[[str], None],
    ) -> None:
        self._source = source
        self._device = device
        self._dtype = dtype
        self._native = native
        self._norm_offset = norm_offset
        self._on_tensor = on_tensor

    def matrix(self, names: list[str]) -> QuantWeight:
        return self._native_matrix(names) if self._native else DenseWeight(self._fused(names, self._dtype))

    def vector(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._fused([name], dtype)

    def norm_weight(self, name: str) -> torch.Tensor:
        weight = self.vector(name, self._dtype)
        return weight.add_(self._norm_offset) if self._norm_offset else weight

    def linear(self, names: list[str], has_bias: bool) -> Linear:
        weight = self.matrix([f"{name}.weight" for name in names])
        bias = self._fused([f"{name}.bias" for name in names], self._dtype) if has_bias else None
        return Linear(weight, bias)

    def _native_matrix(self, names: list[str]) -> NativeWeight:
        stored = [self._source.tensors[name] for name in names]
        in_features = stored[0].shape[1]
        types = {tensor.type for tensor in stored}
        if len(types) == 1:
            parts = []
            for name in names:
                self._on_tensor(name)
                parts.append(self._source.stored_rows(name))
            packed = native_weight(parts, types.pop(), in_features)
            if packed is not None:
                return packed
        packed = native_weight([self._fused(names, torch.float32)], "F32", in_features)
        assert packed is not None, "native_decoder.why_not_native lets only such shapes through"
        return packed

    def _fused(self, names: list[str], dtype: torch.dtype) -> torch.Tensor:
        shapes = [self._source.tensors[name].shape for name in names]
        num_rows = [shape[0] for shape in shapes]
        fused = torch.empty((sum(num_rows), *shapes[0][1:]), dtype=dtype, device=self._device)
        for name, rows in zip(names, fused.split(num_rows)):
            self._on_tensor(name)
            self._source.read_into(name, rows)
        return fused
