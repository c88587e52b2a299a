"""Checkpoints in 8-bit floating point: `quant_method: fp8` (DeepSeek, Qwen, AutoFP8) and `fbgemm_fp8`.

Per module: weight float8_e4m3 [out, in], and a scale that multiplies it: weight_scale_inv for each block of
`weight_block_size`, or weight_scale for the whole matrix or each output. Micikevicius et al. 2022,
https://arxiv.org/abs/2209.05433
"""

from __future__ import annotations

import torch

from engine.loading.packed import PackedMatrix, Parts, Settings, group_count, modules_with
from engine.loading.tensor_files import FLOAT_TYPES, TensorFiles
from engine.quantization.affine import rows_at_a_time

FP8_TYPES = ("F8_E4M3", "F8_E5M2")
SCALE_TYPES = (*FLOAT_TYPES, "F8_E8M0")
_ACTIVATION_SCALES = ("input_scale", "input_scale_ub", "activation_scale", "output_scale")


def fp8_matrices(files: TensorFiles, settings: Settings) -> list[PackedMatrix]:
    """Every module whose `weight` is stored in 8-bit floating point.

    Raises ModelError where a scale is missing or does not fit.
    """
    block = block_of(settings, "weight_block_size")
    matrices = []
    for module in modules_with(files, "weight"):
        if files.tensors[f"{module}.weight"].type not in FP8_TYPES:
            continue
        parts = Parts(files, module)
        suffix = "weight_scale_inv" if parts.has("weight_scale_inv") else "weight_scale"
        matrices.append(fp8_matrix(parts, suffix, block))
    return matrices


def fp8_matrix(parts: Parts, scale_suffix: str, block: tuple[int, int] | None) -> PackedMatrix:
    """`module.weight` times its scale, which covers blocks of [rows, columns], or by its shape rows or everything."""
    out, columns = parts.shape("weight", FP8_TYPES)
    scale_shape = parts.shape(scale_suffix, SCALE_TYPES, rank=None)
    if block is None or scale_shape in ((), (1,), (1, 1)):
        block = (1 if scale_shape in ((out,), (out, 1)) else out, columns)
    expected = (group_count(out, block[0]), group_count(columns, block[1]))
    if torch.Size(scale_shape).numel() != expected[0] * expected[1] or (
        len(scale_shape) == 2 and scale_shape != expected
    ):
        raise parts.error(
            f"tensor '{parts.module}.{scale_suffix}' has shape {list(scale_shape)}, but {[out, columns]} weights "
            f"in blocks of {list(block)} ask for {list(expected)}"
        )
    parts.ignore(*_ACTIVATION_SCALES)

    def fill(target: torch.Tensor) -> None:
        weight = parts.read("weight")
        scales = parts.read(scale_suffix).float().view(expected)
        step = rows_at_a_time(columns)
        for first in range(0, out, step):
            rows = weight[first : first + step].float()
            of_rows = scales[torch.arange(first, first + rows.shape[0]) // block[0]]
            rows.mul_(of_rows.repeat_interleave(block[1], dim=1)[:, :columns])
            target[first : first + step] = rows

    return parts.matrix((out, columns), "FP8", fill=fill)


def block_of(settings: Settings, name: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None where the setting is missing."""
    value = settings.get(name)
    match value:
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise settings.error(f"{name} is {value!r}, not two positive numbers")
