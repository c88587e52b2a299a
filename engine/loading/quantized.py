"""Which quantised checkpoints are read: one row for each method that a `config.json` may name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.loading.awq import awq_matrices
from engine.loading.compressed_tensors import compressed_tensors_matrices
from engine.loading.fp8 import fp8_matrices
from engine.loading.gptq import gptq_matrices
from engine.loading.mxfp4 import mxfp4_matrices
from engine.loading.packed import PackedMatrix, Settings
from engine.loading.tensor_files import TensorFiles
from engine.models.config import ModelError, UnsupportedModelError

METHODS: dict[str, Callable[[TensorFiles, Settings], list[PackedMatrix]]] = {
    "gptq": gptq_matrices,
    "awq": awq_matrices,
    "compressed-tensors": compressed_tensors_matrices,
    "fp8": fp8_matrices,
    "fbgemm_fp8": fp8_matrices,
    "mxfp4": mxfp4_matrices,
}


def packed_matrices(files: TensorFiles, config: Mapping[str, Any] | None) -> list[PackedMatrix]:
    """The quantised matrices of a folder whose `config.json` holds `quantization_config`; none where it is missing.

    Only headers are read. Raises UnsupportedModelError naming a method or variant that is not supported,
    ModelError for headers that contradict the configuration.
    """
    if not config:
        return []
    if not isinstance(config, Mapping):
        raise ModelError(f"{files.label}: quantization_config is {config!r}, no object; download it again")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise UnsupportedModelError(
            f"{files.label}: weights quantised as {method!r} are not supported; supported are {', '.join(METHODS)}"
        )
    return METHODS[method](files, Settings(files.label, config))
