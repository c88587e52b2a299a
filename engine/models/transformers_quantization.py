"""Weights of a transformers model packed while they are loaded.

A quantizer in transformers' own sense: it is asked for each parameter that comes off the disk, so that no
more than one of them is ever held unpacked. Its presence also makes transformers read tensors one after
another; reading ahead, as it does otherwise, would hold many that wait to be used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from engine.layers.linear import Linear
from engine.loading.names import HEAD
from engine.quantization import AffineWeight, DenseWeight, QuantWeight
from engine.quantization.affine import AffineMatrix
from engine.quantization.native import native_weight
from engine.quantization.native_affine import native_affine
from engine.quantization.rounding import Rounding

_METHOD = "kvasir"
_HALVES = {torch.bfloat16: "BF16", torch.float16: "F16"}
# Their choices are all or nothing, and they are small.
_ROUTERS = ("gate", "router")


class PackedLinear(nn.Module):
    """Takes the place of a linear layer. `weight` is a placeholder while the model is loaded."""

    def __init__(self, replaced: nn.Linear | Conv1D) -> None:
        super().__init__()
        self.weight = replaced.weight
        self.bias = replaced.bias
        self.is_transposed = isinstance(replaced, Conv1D)
        self.packed: QuantWeight | None = None

    def take(self, name: str, weight: torch.Tensor, packing: PackingConfig) -> None:
        matrix = weight.t().contiguous() if self.is_transposed else weight
        packed: QuantWeight | None = None
        if packing.rounding is not None:
            codes = packing.rounding(name, matrix)
            packed = native_affine(codes) if packing.native else None
            packed = AffineWeight(codes, weight.dtype) if packed is None else packed
        elif (stored := _lossless_half(matrix)) is not None:
            packed = native_weight([stored], _HALVES[stored.dtype], stored.shape[1])
        self.packed = DenseWeight(matrix) if packed is None else packed

    @property
    def nbytes(self) -> int:
        """Bytes beside those of parameters."""
        return 0 if self.packed is None else self.packed.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.packed is not None
        rows = x.reshape(-1, x.shape[-1])
        return Linear(self.packed, self.bias)(rows).reshape(*x.shape[:-1], -1)


def _lossless_half(matrix: torch.Tensor) -> torch.Tensor | None:
    """The same numbers in half as many bits, as most models store them; None where that would round."""
    return next((half for kind in _HALVES if torch.equal((half := matrix.to(kind)).float(), matrix)), None)


class PackedExperts:
    """Stands for a parameter [experts, ...]: one expert's matrix is unpacked when it is asked for by its index."""

    def __init__(self, name: str, weights: torch.Tensor, is_transposed: bool, rounding: Rounding) -> None:
        self._is_transposed = is_transposed
        self._dtype = weights.dtype
        each = weights.transpose(1, 2) if is_transposed else weights
        self._experts: list[AffineMatrix] = [rounding(name, matrix.contiguous()) for matrix in each]

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self._experts)

    def __getitem__(self, index: torch.Tensor | int) -> torch.Tensor:
        matrix = self._experts[int(index)].dequantize().to(self._dtype)
        return matrix.t() if self._is_transposed else matrix


def packed_bytes(model: nn.Module) -> int:
    """Bytes of what is packed in a model, which its parameters do not count."""
    total = 0
    for module in model.modules():
        if isinstance(module, PackedLinear):
            total += module.nbytes
        total += sum(value.nbytes for value in vars(module).values() if isinstance(value, PackedExperts))
    return total


class PackingConfig(QuantizationConfigMixin):
    """How linear layers and experts are rounded, if at all, and whether native CPU kernels compute linear layers."""

    def __init__(
        self,
        rounding: Rounding | None = None,
        native: bool = False,
        device: torch.device | None = None,
        **_: Any,
    ) -> None:
        self.quant_method: Any = _METHOD
        self.rounding = rounding
        self.native = native
        self.device = device


class PackingQuantizer(HfQuantizer):
    """See the module. Embeddings, tied heads, routers and all that is not a matrix stay as they are."""

    quantization_config: PackingConfig

    def __init__(self, quantization_config: PackingConfig, **arguments: Any) -> None:
        super().__init__(quantization_config, **arguments)
        self.experts: list[tuple[nn.Module, str, PackedExperts]] = []

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        packing = self.quantization_config
        if packing.rounding is not None or packing.native:
            for name, module in list(model.named_modules()):
                if (
                    type(module) in (nn.Linear, Conv1D)
                    and f"{name}.weight" not in model.all_tied_weights_keys
                    and name.rpartition(".")[2] not in _ROUTERS
                ):
                    model.set_submodule(name, PackedLinear(module))
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        """Puts what is packed where its placeholder was."""
        for module in model.modules():
            if isinstance(module, PackedLinear):
                del module._parameters["weight"]
        for module, name, experts in self.experts:
            del module._parameters[name]
            setattr(module, name, experts)
        self.experts = []
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        path, _dot, name = param_name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, PackedLinear):
            return name == "weight"
        return self.quantization_config.rounding is not None and _holds_experts(module) and name.endswith("_proj")

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self)


def _holds_experts(module: nn.Module) -> bool:
    """Whether it is one of transformers' classes for the experts of a layer, which index their parameters by expert."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


class _Pack(ConversionOps):
    def __init__(self, quantizer: PackingQuantizer) -> None:
        self._quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], *, model: Any, missing_keys: set[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        """Packs those that are to be packed into their modules; returns the others."""
        packing = self._quantizer.quantization_config
        kept: dict[str, torch.Tensor] = {}
        for target, value in input_dict.items():
            tensor: torch.Tensor = value[0] if isinstance(value, list) else value
            if not self._quantizer.param_needs_quantization(model, target):
                kept[target] = tensor
                continue
            path, _dot, name = target.rpartition(".")
            module = model.get_submodule(path)
            placeholder = getattr(module, name)
            if tensor.shape != placeholder.shape:
                raise ValueError(f"{target} has the shape {list(tensor.shape)}, not {list(placeholder.shape)}")
            tensor = tensor.to(packing.device)
            if isinstance(module, PackedLinear):
                module.take(HEAD if module is model.get_output_embeddings() else target, tensor, packing)
            else:
                assert packing.rounding is not None
                experts = PackedExperts(target, tensor, module.is_transposed, packing.rounding)
                self._quantizer.experts.append((module, name, experts))
            # Otherwise transformers would make up what looks like a parameter that was not stored.
            placeholder._is_hf_initialized = True
            missing_keys.discard(target)
        return kept


register_quantization_config(_METHOD)(PackingConfig)
register_quantizer(_METHOD)(PackingQuantizer)
