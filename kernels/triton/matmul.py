"""Products with integer weights: x @ ((codes - zero) * scale + minimum).T, for any number of rows.

Weights lie tile by tile, so that a program reads whole runs of bytes: codes uint8
[in / TILE_K, out, TILE_K / 2] hold element j of a tile in the low and element j + TILE_K / 2 in the
high half of byte j, or with 8 bits [in / TILE_K, out, TILE_K]. Scales and minimums are
[in / group, out]. In the manner of GPTQ's and AWQ's kernels, few rows multiply the codes as they are and
scale the sums (fewer operations a weight), many rows scale the weights once. Few rows are bound by reading the
weights: where one program for each block of columns would leave the GPU idle, programs share out the inputs too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.ggml import MXFP4_VALUES
from kernels.triton.launch import compute_capability, launch, runs_ptx
from kernels.triton.tile_loop import multiply_tiles
from kernels.triton.tuning import matmul_tiles

LEAST_SPLIT = 1024
"""Inputs that a program must have left, so that sharing them out is worth the sum afterwards."""
SUM_BLOCK = 512
_MIDDLE = 128


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeight:
    """An integer matrix [out_features, in_features] in the layout above.

    `zero` is the code of 0 in all groups, whole and so exact; `minimums` None means 0 for all. With `is_float` the
    4-bit codes stand for the numbers of MXFP4, `kernels.ggml.MXFP4_VALUES`.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    bits: int
    out_features: int
    in_features: int
    zero: int = 0
    num_matrices: int = 1
    """Experts whose matrices lie on top of each other."""
    is_float: bool = False

    @property
    def tile_k(self) -> int:
        return self.codes.shape[2] * (2 if self.bits == 4 else 1)

    @property
    def group_size(self) -> int:
        return self.in_features * self.num_matrices // self.scales.shape[0]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.minimums is None else self.minimums.nbytes)


def tile_columns(in_features: int, group: int, bits: int) -> int | None:
    """Inputs of a tile: some whole groups, or a part of one; None where there is no such tile.

    Tensor cores take 16 inputs at once, and the halves of a tile of 4 bits are multiplied one after the other.
    """
    if group % 16 or in_features % group:
        return None
    sizes = (128, 64, 32, 16) if bits == 8 else (128, 64, 32)
    fitting = (size for size in sizes if in_features % size == 0 and (group % size == 0 or size % group == 0))
    return next(fitting, None)


def tile_weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None,
    bits: int,
    dtype: torch.dtype,
    zero: int = 0,
    is_float: bool = False,
) -> TiledWeight:
    """Lays out codes uint8 [out, in] (one a byte) with scales and minimums [out, groups]; once, at load.

    Raises ValueError where `tile_columns` finds no tile.
    """
    out_features, in_features = codes.shape
    group = in_features // scales.shape[1]
    tile_k = None if in_features % scales.shape[1] else tile_columns(in_features, group, bits)
    if tile_k is None:
        raise ValueError(f"groups of {group} {bits}-bit weights in {in_features} columns cannot be tiled")
    if bits == 8 and zero == 0 and not codes.is_meta and int(codes.max()) > _MIDDLE and minimums is not None:
        # Minimums of centred codes are small: in half precision little of them is lost.
        zero, minimums = _MIDDLE, minimums + _MIDDLE * scales
    tiles = codes.view(out_features, in_features // tile_k, tile_k).transpose(0, 1)
    if bits == 4:
        tiles = tiles[..., : tile_k // 2] | (tiles[..., tile_k // 2 :] << 4)
    return TiledWeight(
        tiles.contiguous(),
        scales.t().to(dtype).contiguous(),
        None if minimums is None else minimums.t().to(dtype).contiguous(),
        bits,
        out_features,
        in_features,
        zero,
        is_float=is_float,
    )


def untile(weight: TiledWeight, rows: torch.Tensor | None = None) -> torch.Tensor:
    """The numbers of a matrix, or of some of its rows (int64 indices): float32 [num_rows, in_features]."""
    codes, scales, minimums = (
        part if part is None or rows is None else part[:, rows]
        for part in (weight.codes, weight.scales, weight.minimums)
    )
    assert codes is not None and scales is not None and weight.num_matrices == 1
    if weight.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    codes = codes.transpose(0, 1).reshape(codes.shape[1], scales.shape[0], -1)
    if weight.is_float:
        numbers = torch.tensor(MXFP4_VALUES, dtype=torch.float32, device=codes.device)[codes.int()]
    else:
        numbers = codes.float() - weight.zero
    numbers *= scales.t().float().unsqueeze(-1)
    if minimums is not None:
        numbers += minimums.t().float().unsqueeze(-1)
    return numbers.flatten(1)


@triton.jit(do_not_specialize=["num_rows"])
def tiled_matmul_kernel(
    out,
    x,
    codes,
    scales,
    minimums,
    bias,
    num_rows,
    out_features,
    num_tiles,
    tiles_each,
    stride_x,
    stride_out,
    stride_split,
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
    USE_PTX: tl.constexpr,
):
    """Grid (blocks of out_features, blocks of rows, splits of `tiles_each` tiles); a split has an `out` of its own."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < out_features
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    first_tile = tl.program_id(2) * tiles_each
    end_tile = tl.minimum(first_tile + tiles_each, num_tiles)
    accumulator = multiply_tiles(
        tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32),
        x + rows.to(tl.int64) * stride_x,
        is_row,
        codes,
        scales,
        minimums,
        columns,
        is_column,
        out_features,
        first_tile,
        end_tile,
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
        accumulator += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_at = out + tl.program_id(2).to(tl.int64) * stride_split + rows.to(tl.int64)[:, None] * stride_out
    tl.store(
        out_at + columns[None, :],
        accumulator.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


@triton.jit
def sum_splits_kernel(
    out,
    partial,
    bias,
    out_features,
    num_splits,
    stride_split,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, blocks of out_features): the splits in their order, so that the sum is the same every time."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < out_features
    at = row * out_features + columns
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in range(num_splits):
        total += tl.load(partial + split * stride_split + at, mask=is_column, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_column)


def tiled_linear(x: torch.Tensor, weight: TiledWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [num_rows, in_features] @ weight.T + bias -> [num_rows, out_features] in the dtype of x."""
    num_rows = x.shape[0]
    assert x.stride(1) == 1 and x.shape[1] == weight.in_features
    out = torch.empty(num_rows, weight.out_features, dtype=x.dtype, device=x.device)
    num_tiles = weight.codes.shape[0]
    tiles = matmul_tiles(compute_capability(x.device), num_rows, weight.bits, weight.out_features)
    num_splits = max(1, min(tiles.most_splits, weight.in_features // LEAST_SPLIT))
    tiles_each = -(-num_tiles // num_splits)
    num_splits = -(-num_tiles // tiles_each)
    target = out
    if num_splits > 1:
        target = torch.empty(num_splits, num_rows, weight.out_features, dtype=torch.float32, device=x.device)
    grid = (-(-weight.out_features // tiles.block_n), -(-num_rows // tiles.block_m), num_splits)
    launch(
        tiled_matmul_kernel,
        grid,
        target,
        x,
        weight.codes,
        weight.scales,
        out if weight.minimums is None else weight.minimums,
        out if bias is None else bias,
        num_rows,
        weight.out_features,
        num_tiles,
        tiles_each,
        x.stride(0),
        weight.out_features,
        num_rows * weight.out_features if num_splits > 1 else 0,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        SCALE_WEIGHTS=tiles.scale_weights,
        HAS_BIAS=bias is not None and num_splits == 1,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **weight_constants(weight, x),
    )
    if num_splits > 1:
        launch(
            sum_splits_kernel,
            (num_rows, -(-weight.out_features // SUM_BLOCK)),
            out,
            target,
            out if bias is None else bias,
            weight.out_features,
            num_splits,
            num_rows * weight.out_features,
            HAS_BIAS=bias is not None,
            BLOCK=SUM_BLOCK,
            num_warps=4,
        )
    return out


def weight_constants(weight: TiledWeight, x: torch.Tensor) -> dict[str, Any]:
    """What the kernels that read tiles are compiled for."""
    return {
        "BITS": weight.bits,
        "TILE_K": weight.tile_k,
        "GROUP": weight.group_size,
        "ZERO": weight.zero,
        "IS_FLOAT": weight.is_float,
        "HAS_MINIMUM": weight.minimums is not None,
        "USE_PTX": runs_ptx(x.device) and x.dtype != torch.float32,
    }
