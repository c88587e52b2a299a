"""Checkpoints of AWQ (AutoAWQ, LLM-AWQ's "gemm" layout): `quant_method: awq`.

Per module: qweight int32 [in, out / 8], packed along the outputs, nibble i holding output 8 j + ORDER[i];
qzeros int32 [groups, out / 8] likewise, not minus one; scales [groups, out].
Lin et al. 2023, https://arxiv.org/abs/2306.00978
"""

from __future__ import annotations

import torch

from engine.loading.packed import PackedMatrix, Parts, Settings, group_count, modules_with
from engine.loading.tensor_files import FLOAT_TYPES, TensorFiles
from engine.quantization.affine import AffineMatrix, pack_nibbles, unpack_nibbles

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs each nibble of a word holds, from the lowest."""


def awq_matrices(files: TensorFiles, settings: Settings) -> list[PackedMatrix]:
    """Every module with a `qweight`; the others are stored plainly and are not quantised.

    Raises UnsupportedModelError naming a variant that is not read, ModelError for damaged headers.
    """
    layout = str(settings.get("version", "format", default="gemm")).lower()
    if layout != "gemm":
        raise settings.unsupported(f"AWQ in the layout {layout!r} is not supported; choose 'gemm'")
    bits = settings.whole_number("bits", "w_bit", default=4)
    if bits != 4:
        raise settings.unsupported(f"AWQ with {bits} bits is not supported; 4 bits are")
    if settings.get("zero_point") is False:
        raise settings.unsupported("AWQ without zero points is not supported")
    return [_matrix(Parts(files, module), settings) for module in modules_with(files, "qweight")]


def _matrix(parts: Parts, settings: Settings) -> PackedMatrix:
    columns, packed_out = parts.shape("qweight", ("I32",))
    out = packed_out * 8
    group_size = settings.group_size(columns, "group_size", "q_group_size", default=128)
    groups = group_count(columns, group_size)
    why = f"{columns} inputs in groups of {group_size}"
    parts.check_shape("scales", FLOAT_TYPES, (groups, out), why)
    parts.check_shape("qzeros", ("I32",), (groups, packed_out), why)
    if columns % 2:
        raise parts.unsupported(f"AWQ with an odd number of inputs ({parts.module}: {columns}) is not supported")

    def affine() -> AffineMatrix:
        codes = pack_nibbles(_outputs(parts.read("qweight")))
        scales = parts.read("scales").t().contiguous()
        return AffineMatrix(codes, scales, _outputs(parts.read("qzeros")).half(), 4, group_size)

    return parts.matrix((out, columns), "AWQ 4 bit", affine=affine)


def _outputs(packed: torch.Tensor) -> torch.Tensor:
    """int32 [rows, out / 8] -> the nibbles as uint8 [out, rows], outputs in order."""
    nibbles = unpack_nibbles(packed.contiguous().view(torch.uint8)).view(packed.shape[0], -1, 8)
    in_order = torch.empty_like(nibbles)
    in_order[..., list(ORDER)] = nibbles
    return in_order.view(packed.shape[0], -1).t().contiguous()
