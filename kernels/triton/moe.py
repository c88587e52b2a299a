"""Mixture of experts: one product over all experts' rows, sorted by expert, whatever number each has.

In the manner of MegaBlocks, Gale et al. 2022, https://arxiv.org/abs/2211.15841
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernels.triton.launch import compute_capability, launch
from kernels.triton.matmul import TiledWeight, weight_constants
from kernels.triton.routing import ExpertRows
from kernels.triton.tile_loop import multiply_tiles
from kernels.triton.tuning import matmul_tiles

_PLAIN = {
    "BITS": 16,
    "TILE_K": 64,
    "GROUP": 64,
    "ZERO": 0,
    "IS_FLOAT": False,
    "HAS_MINIMUM": False,
    "USE_PTX": False,
}


@triton.jit
def grouped_matmul_kernel(
    out,
    x,
    weight,
    scales,
    minimums,
    bias,
    order,
    first_rows,
    first_blocks,
    num_experts,
    out_features,
    in_features,
    num_chosen,
    stride_x,
    BITS: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATHER: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """Grid (blocks of out_features, blocks of sorted rows). With 16 bits `weight` is plain [experts, out, in]."""
    block = tl.program_id(1)
    if block >= tl.load(first_blocks + num_experts):
        return
    low = 0
    high = num_experts
    while low < high:
        middle = (low + high) // 2
        if tl.load(first_blocks + middle + 1) <= block:
            low = middle + 1
        else:
            high = middle
    expert = tl.cast(low, tl.int64)
    end_row = tl.load(first_rows + expert + 1)
    first_row = tl.load(first_rows + expert) + (block - tl.load(first_blocks + expert)) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    is_row = rows < end_row
    inputs = rows.to(tl.int64)
    if GATHER:
        inputs = tl.load(order + rows, mask=is_row, other=0) // num_chosen
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < out_features
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    num_tiles = tl.cdiv(in_features, TILE_K)
    if BITS == 16:
        inner = tl.arange(0, TILE_K)
        x_at = x + inputs[:, None] * stride_x + inner[None, :]
        weight_at = weight + (expert * out_features + columns)[None, :] * in_features + inner[:, None]
        for tile in range(num_tiles):
            is_inner = inner < in_features - tile * TILE_K
            part = tl.load(x_at, mask=is_row[:, None] & is_inner[None, :], other=0.0)
            plain = tl.load(weight_at, mask=is_column[None, :] & is_inner[:, None], other=0.0)
            accumulator = tl.dot(part, plain, accumulator, input_precision="ieee")
            x_at += TILE_K
            weight_at += TILE_K
    else:
        per_group = expert * out_features * (in_features // GROUP)
        accumulator = multiply_tiles(
            accumulator,
            x + inputs * stride_x,
            is_row,
            weight + expert * out_features * (in_features * BITS // 8),
            scales + per_group,
            minimums + per_group,
            columns,
            is_column,
            out_features,
            0,
            num_tiles,
            BITS,
            TILE_K,
            GROUP,
            ZERO,
            IS_FLOAT,
            SCALE_WEIGHTS,
            HAS_MINIMUM,
            USE_PTX,
        )
    if HAS_BIAS:
        accumulator += tl.load(bias + expert * out_features + columns, mask=is_column, other=0.0).to(tl.float32)[
            None, :
        ]
    out_at = out + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    tl.store(out_at, accumulator.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor | TiledWeight,
    rows: ExpertRows,
    bias: torch.Tensor | None = None,
    gather: bool = False,
) -> torch.Tensor:
    """Each sorted row times its expert's matrix: [num_rows, out_features].

    x [num_rows, in_features] is sorted already, or with `gather` one row for each token. `weight` is
    plain [num_experts, out_features, in_features], or tiles with the experts on top of each other
    (`stack_tiled`); bias [num_experts, out_features].
    """
    num_experts = rows.first_rows.shape[0] - 1
    assert x.stride(1) == 1
    if isinstance(weight, TiledWeight):
        out_features, in_features, bits = weight.out_features, weight.in_features, weight.bits
        data, scales, minimums = weight.codes, weight.scales, weight.minimums
        constants = weight_constants(weight, x)
    else:
        _, out_features, in_features = weight.shape
        data, scales, minimums, bits = weight, weight, None, 16
        constants = _PLAIN
    num_rows = rows.order.shape[0]
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    tiles = matmul_tiles(compute_capability(x.device), rows.block_m, bits, out_features)
    launch(
        grouped_matmul_kernel,
        (-(-out_features // tiles.block_n), rows.most_blocks),
        out,
        x,
        data,
        scales,
        scales if minimums is None else minimums,
        out if bias is None else bias,
        rows.order,
        rows.first_rows,
        rows.first_blocks,
        num_experts,
        out_features,
        in_features,
        rows.num_chosen,
        x.stride(0),
        BLOCK_M=rows.block_m,
        BLOCK_N=tiles.block_n,
        SCALE_WEIGHTS=tiles.scale_weights,
        HAS_BIAS=bias is not None,
        GATHER=gather,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **constants,
    )
    return out


def stack_tiled(parts: list[TiledWeight]) -> TiledWeight | None:
    """Experts' matrices on top of each other, as `grouped_linear` takes them; None where their formats differ."""
    first = parts[0]
    if first.bits == 4 and len({(part.zero, part.minimums is None) for part in parts}) > 1:
        # One has the same zero point everywhere by chance: as minimums, all are alike.
        parts = [_with_minimums(part) for part in parts]
        first = parts[0]
    if any(_format(part) != _format(first) for part in parts):
        return None
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        minimums=torch.cat(minimums) if minimums else None,
        num_matrices=len(parts),
    )


def unstack_tiled(stack: TiledWeight) -> list[TiledWeight]:
    """The experts' matrices in a stack; they share its memory."""
    count = stack.num_matrices
    minimums = [None] * count if stack.minimums is None else stack.minimums.chunk(count)
    return [
        replace(stack, codes=codes, scales=scales, minimums=minimum, num_matrices=1)
        for codes, scales, minimum in zip(stack.codes.chunk(count), stack.scales.chunk(count), minimums, strict=True)
    ]


def _format(weight: TiledWeight) -> tuple[object, ...]:
    kinds = (weight.bits, weight.is_float, weight.zero, weight.minimums is None, weight.scales.dtype)
    return (*kinds, weight.codes.shape, weight.scales.shape)


def _with_minimums(weight: TiledWeight) -> TiledWeight:
    if weight.is_float:
        return weight
    offset = -weight.zero * weight.scales
    return replace(weight, zero=0, minimums=offset if weight.minimums is None else weight.minimums + offset)
