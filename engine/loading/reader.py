"""Makes a decoder's weights from a model file, one layer's tensors at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.layers.linear import Linear
from engine.loading.weights import WeightSource
from engine.quantization import AffineWeight, DenseWeight, GGMLWeight, QuantWeight, StackedWeight
from engine.quantization.affine import AffineMatrix, rows_at_a_time
from engine.quantization.native import native_weight
from engine.quantization.native_affine import native_affine
from engine.quantization.rounding import Rounding
from engine.quantization.triton_tiles import triton_affine, triton_ggml
from kernels import ops
from kernels.cpu.packing import Packer, can_pack
from kernels.ggml_codes import CODED_FORMATS

_PLAIN_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# A checkpoint's experts: of many, few compute a token, so that unpacking those costs less than keeping all unpacked.
_STAYS_PACKED = "MXFP4"


class WeightReader:
    """Each tensor is unpacked straight into its place, fused neighbours on top of each other.

    Integer codes stay packed, those of a checkpoint and those that `rounding` makes of other matrices (quantised ones
    are unpacked for it, a few rows at a time). With `native`, all matrices stay in the file's own numbers, packed for
    the native CPU kernels as far as those have them; the Triton kernels get integer codes in tiles. Neighbours of
    different formats, groups or orders are kept apart.
    """

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        native: bool,
        norm_offset: float,
        on_tensor: Callable[[str], None],
        rounding: Rounding | None = None,
    ) -> None:
        self._source = source
        self._device = device
        self._dtype = dtype
        self._native = native
        self._triton = ops.kernel_backend() == "triton"
        self._norm_offset = norm_offset
        self._on_tensor = on_tensor
        self._rounding = rounding
        self._packer = Packer()

    def finish(self) -> None:
        """To be called after all was read: some matrices get their numbers only now."""
        if self._native:
            self._packer.finish()

    def matrix(self, names: list[str]) -> QuantWeight:
        codes = []
        for name in names:
            self._on_tensor(name)
            codes.append(self._codes(name))
        integer = [matrix for matrix in codes if matrix is not None]
        if len(integer) < len(names):
            if integer:
                return StackedWeight([self._plain([n]) if c is None else self._affine(c) for n, c in zip(names, codes)])
            return self._plain(names)
        if all(integer[0].fits(matrix) for matrix in integer):
            return self._affine(AffineMatrix.cat(integer))
        return StackedWeight([self._affine(matrix) for matrix in integer])

    def vector(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        self._on_tensor(name)
        return self._fused([name], dtype)

    def norm_weight(self, name: str) -> torch.Tensor:
        weight = self.vector(name, self._dtype)
        return weight.add_(self._norm_offset) if self._norm_offset else weight

    def linear(self, names: list[str], has_bias: bool) -> Linear:
        weight = self.matrix([f"{name}.weight" for name in names])
        if not has_bias:
            return Linear(weight)
        biases = [f"{name}.bias" for name in names]
        for name in biases:
            self._on_tensor(name)
        return Linear(weight, self._fused(biases, self._dtype))

    def _codes(self, name: str) -> AffineMatrix | None:
        if self._rounding is None:
            return self._source.quantized(name)
        num_rows, columns = self._source.tensors[name].shape
        plain_rows = self._plain_rows(name)
        step = rows_at_a_time(columns)
        return AffineMatrix.cat(
            [
                self._rounding(name, plain_rows(first, min(first + step, num_rows)).to(self._device))
                for first in range(0, num_rows, step)
            ]
        )

    def _plain_rows(self, name: str) -> Callable[[int, int], torch.Tensor]:
        """Reads rows first..end of a matrix as plain numbers, whatever they are stored as."""
        integer = self._source.quantized(name)
        if integer is not None:
            return lambda first, end: integer.row_slice(first, end).dequantize()
        stored, columns = self._source.stored_rows(name), self._source.tensors[name].shape[1]
        if stored.dtype != torch.uint8:
            return lambda first, end: stored[first:end]
        kind = self._source.tensors[name].type
        return lambda first, end: ops.dequantize(stored[first:end], kind, torch.empty(end - first, columns))

    def _affine(self, matrix: AffineMatrix) -> QuantWeight:
        if self._native and (packed := native_affine(matrix, self._packer.pack)) is not None:
            return packed
        matrix = matrix.to(self._device)
        if self._triton and (tiled := triton_affine(matrix, self._dtype)) is not None:
            return tiled
        return AffineWeight(matrix, self._dtype)

    def _plain(self, names: list[str]) -> QuantWeight:
        if self._native:
            weight = self._native_plain(names)
            if weight is not None:
                return weight
        stored = [self._source.tensors[name] for name in names]
        if self._triton and (tiled := self._triton_plain(names)) is not None:
            return tiled
        if all(tensor.type == _STAYS_PACKED for tensor in stored):
            packed = torch.cat([self._source.stored_rows(name) for name in names]).to(self._device)
            return GGMLWeight(packed, _STAYS_PACKED, stored[0].shape[1])
        return DenseWeight(self._fused(names, self._dtype))

    def _triton_plain(self, names: list[str]) -> QuantWeight | None:
        """None where the stored type has no whole codes, as plain numbers have none."""
        types = [self._source.tensors[name].type for name in names]
        if any(kind not in CODED_FORMATS for kind in types):
            return None
        if len(set(types)) > 1:
            apart = [self._triton_plain([name]) for name in names]
            return StackedWeight([part for part in apart if part is not None])
        return triton_ggml([self._source.stored_rows(name) for name in names], types[0], self._device, self._dtype)

    def _native_plain(self, names: list[str]) -> QuantWeight | None:
        """None where the native kernels lack the shape."""
        in_features = self._source.tensors[names[0]].shape[1]
        if not can_pack(in_features):
            return None
        types = {self._source.tensors[name].type for name in names}
        if len(types) > 1:
            apart = [self._native_plain([name]) for name in names]
            return StackedWeight([part for part in apart if part is not None])
        (stored_type,) = types
        parts = [_in_half_if_eight_bit(self._source.stored_rows(name), stored_type) for name in names]
        pack, tensor_type = self._packer.pack, _PLAIN_TYPES.get(parts[0].dtype, stored_type)
        packed = native_weight(parts, tensor_type, in_features, pack)
        return packed or native_weight([self._fused(names, torch.float32)], "F32", in_features, pack)

    def _fused(self, names: list[str], dtype: torch.dtype) -> torch.Tensor:
        shapes = [self._source.tensors[name].shape for name in names]
        num_rows = [shape[0] for shape in shapes]
        fused = torch.empty((sum(num_rows), *shapes[0][1:]), dtype=dtype, device=self._device)
        for name, rows in zip(names, fused.split(num_rows)):
            self._source.read_into(name, rows)
        return fused


def _in_half_if_eight_bit(rows: torch.Tensor, stored_type: str) -> torch.Tensor:
    """8-bit floating point times its scale: half precision holds it with bits to spare, unless it is out of range."""
    if stored_type != "FP8" or bool(rows.abs().max() > torch.finfo(torch.float16).max):
        return rows
    return rows.half()
