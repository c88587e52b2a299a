"""Checkpoints of GPTQ (AutoGPTQ, GPTQModel): `quant_method: gptq`.

Per module: qweight int32 [in * bits / 32, out], packed along the inputs, low bits first; scales [groups, out];
qzeros int32 [groups, out * bits / 32]; g_idx int32 [in], the group of each input, where activations were ordered.
Frantar et al. 2022, https://arxiv.org/abs/2210.17323
"""

from __future__ import annotations

import torch

from engine.loading.packed import (
    PackedMatrix,
    Parts,
    Settings,
    group_count,
    input_order,
    modules_with,
    reordered,
)
from engine.loading.tensor_files import FLOAT_TYPES, TensorFiles
from engine.quantization.affine import AffineMatrix, unpack_nibbles


def gptq_matrices(files: TensorFiles, settings: Settings) -> list[PackedMatrix]:
    """Every module with a `qweight`; the others are stored plainly and are not quantised.

    Raises UnsupportedModelError naming a variant that is not read, ModelError for damaged headers.
    """
    layout = "marlin" if settings.get("is_marlin_format") else _layout(settings)
    if layout not in ("gptq", "gptq_v2"):
        raise settings.unsupported(f"GPTQ in the layout {layout!r} is not supported; choose 'gptq'")
    return [_matrix(Parts(files, module), _of_module(settings, module)) for module in modules_with(files, "qweight")]


def _layout(settings: Settings) -> str:
    return settings.get("checkpoint_format", "format", default="gptq")


def _of_module(settings: Settings, module: str) -> Settings:
    """The settings with what GPTQModel's `dynamic` rules say of one module: the first that matches counts."""
    for pattern, changes in settings.part("dynamic").values.items():
        if not pattern.startswith("-:") and settings.matches(pattern.removeprefix("+:"), module):
            return settings.of({**settings.values, **settings.of(changes, "dynamic").values}, "dynamic")
    return settings


def _matrix(parts: Parts, settings: Settings) -> PackedMatrix:
    bits = settings.whole_number("bits")
    if bits not in (4, 8):
        raise parts.unsupported(f"GPTQ with {bits} bits ({parts.module}) is not supported; 4 and 8 bits are")
    packed_rows, out = parts.shape("qweight", ("I32",))
    columns = packed_rows * 32 // bits
    group_size = settings.group_size(columns, "group_size", default=-1)
    groups = group_count(columns, group_size)
    why = f"{columns} inputs of {bits} bits in groups of {group_size}"
    parts.check_shape("scales", FLOAT_TYPES, (groups, out), why)
    parts.check_shape("qzeros", ("I32",), (groups, group_count(out * bits, 32)), why)
    if parts.has("g_idx"):
        if parts.shape("g_idx", ("I32", "I64"), rank=1) != (columns,):
            raise parts.error(f"tensor '{parts.module}.g_idx' does not have the {columns} entries of its inputs")
    elif settings.get("desc_act"):
        raise parts.error(f"tensor '{parts.module}.g_idx' is missing, though desc_act orders the inputs")
    symmetric = bool(settings.get("sym", default=True))

    def affine() -> AffineMatrix:
        codes = parts.read("qweight").t().contiguous().view(torch.uint8)
        order = input_order(parts, "g_idx", group_size) if parts.has("g_idx") else None
        if order is not None:
            codes = reordered(codes, bits, order)
        zeros = _zeros(parts.read("qzeros"), bits, out, symmetric, plain=_layout(settings) == "gptq_v2")
        scales = parts.read("scales").t().contiguous()
        return AffineMatrix(codes, scales, zeros.t().half().contiguous(), bits, group_size, order)

    return parts.matrix((out, columns), f"GPTQ {bits} bit", affine=affine)


def _zeros(packed: torch.Tensor, bits: int, out: int, symmetric: bool, plain: bool) -> torch.Tensor:
    """uint8 [groups, out]. Version 1 stores them minus one, version 2 as they are.

    Some symmetric checkpoints carry the wrong version; theirs is the middle code whichever way it is written.
    """
    stored = packed.contiguous().view(torch.uint8)
    stored = (unpack_nibbles(stored) if bits == 4 else stored)[:, :out]
    middle = 1 << (bits - 1)
    if symmetric and bool(((stored == middle) | (stored == middle - 1)).all()) and stored.unique().numel() == 1:
        return torch.full_like(stored, middle)
    return stored if plain else (stored + 1).bitwise_and_((1 << bits) - 1)
