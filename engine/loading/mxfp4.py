"""Experts of gpt-oss folders in 4-bit floating point: `quant_method: mxfp4`.

`NAME_blocks` uint8 [experts, out, in / 32, 16], the even input in the low nibble; `NAME_scales` uint8
[experts, out, in / 32], powers of two. They are read as the rows of GGUF's MXFP4, whose numbers are the same.
OCP Microscaling Formats 1.0, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

import torch

from engine.loading.packed import PackedMatrix, Settings
from engine.loading.tensor_files import TensorFiles
from engine.loading.weights import StoredTensor
from engine.models.config import ModelError
from engine.quantization.affine import unpack_nibbles

_GROUP = 32


def mxfp4_matrices(files: TensorFiles, _settings: Settings) -> list[PackedMatrix]:
    """Every tensor stored as blocks and scales: `NAME` of shape [experts, out, in].

    Raises ModelError where one half is missing or does not fit the other.
    """
    names = [name.removesuffix("_blocks") for name in files.tensors if name.endswith("_blocks")]
    return [_experts(files, name) for name in names]


def _experts(files: TensorFiles, name: str) -> PackedMatrix:
    blocks, scales = files.tensors[f"{name}_blocks"], files.tensors.get(f"{name}_scales")
    if scales is None:
        raise ModelError(f"{files.label}: tensor '{name}_scales' is missing; the file is incomplete")
    fits = blocks.shape[-1:] == (_GROUP // 2,) and blocks.shape[:-1] == scales.shape and len(scales.shape) >= 2
    if not fits or (blocks.type, scales.type) != ("U8", "U8"):
        raise ModelError(
            f"{files.label}: tensors '{name}_blocks' {list(blocks.shape)} and '{name}_scales' {list(scales.shape)} "
            "do not fit each other; download it again"
        )

    def rows() -> torch.Tensor:
        return ggml_rows(files.read(blocks.stored_name), files.read(scales.stored_name))

    of_scales = torch.Size(scales.shape)
    shape = (*of_scales[:-1], of_scales[-1] * _GROUP)
    stored = StoredTensor(name, shape, "MXFP4", blocks.nbytes + scales.nbytes)
    return PackedMatrix(stored, frozenset((blocks.stored_name, scales.stored_name)), ggml_rows=rows)


def ggml_rows(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Blocks uint8 [..., groups, 16] and scales [..., groups] -> uint8 [..., groups * 17].

    A GGUF block is its exponent, then 16 bytes of which byte j holds elements j and j + 16.
    """
    elements = unpack_nibbles(blocks.reshape(-1, _GROUP // 2))
    packed = torch.empty(elements.shape[0], 1 + _GROUP // 2, dtype=torch.uint8)
    packed[:, 0] = scales.reshape(-1)
    packed[:, 1:] = elements[:, : _GROUP // 2] | elements[:, _GROUP // 2 :] << 4
    return packed.view(*scales.shape[:-1], -1)
