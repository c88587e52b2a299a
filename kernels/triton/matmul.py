"""Products with integer weights: x @ ((codes - zero) * scale + minimum).T, for any number of rows.

Weights lie tile by tile, so that a program reads whole runs of bytes: codes uint8
[in / TILE_K, out, TILE_K / 2] hold element j of a tile in the low and element j + TILE_K / 2 in the
high half of byte j, or with 8 bits [in / TILE_K, out, TILE_K]. Scales and minimums are
[in / group, out]. In the manner of GPTQ's and AWQ's kernels, few rows multiply the codes as they are and
scale the sums (fewer operations a weight), many rows scale the weights once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.launch import compute_capability, launch
from kernels.triton.tuning import matmul_tiles

MAX_TILE_K = 128


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeight:
    """An integer matrix [out_features, in_features] in the layout above.

    `zero` is the code of 0 in all groups, whole and so exact; `minimums` None means 0 for all.
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

    @property
    def tile_k(self) -> int:
        return self.codes.shape[2] * (2 if self.bits == 4 else 1)

    @property
    def group_size(self) -> int:
        return self.in_features * self.num_matrices // self.scales.shape[0]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.minimums is None else self.minimums.nbytes)


def tile_weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None,
    bits: int,
    dtype: torch.dtype,
    zero: int = 0,
) -> TiledWeight:
    """Lays out codes uint8 [out, in] (one a byte) with scales and minimums [out, groups]; once, at load.

    Raises ValueError where groups or columns are no multiple of 16.
    """
    out_features, in_features = codes.shape
    group = in_features // scales.shape[1]
    tile_k = next((size for size in (128, 64, 32, 16) if group % size == 0), 0)
    if tile_k == 0 or in_features % scales.shape[1]:
        raise ValueError(f"groups of {group} weights in {in_features} columns cannot be tiled: not a multiple of 16")
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
    numbers = codes.transpose(0, 1).reshape(codes.shape[1], scales.shape[0], -1).float() - weight.zero
    numbers *= scales.t().float().unsqueeze(-1)
    if minimums is not None:
        numbers += minimums.t().float().unsqueeze(-1)
    return numbers.reshape(codes.shape[1], -1)


@triton.jit
def _codes_to_float(codes, like, ZERO: tl.constexpr):
    """codes - ZERO, exact in any dtype; for fp16 by setting the codes below the bits of 1024."""
    if like.dtype == tl.float16:
        return (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + ZERO)
    return (codes.to(tl.int16) - ZERO).to(like.dtype)


@triton.jit
def multiply_codes(
    accumulator,
    x,
    codes,
    scale,
    minimum,
    ZERO: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
):
    """accumulator [rows, out] += x [rows, k] @ ((codes [k, out] - ZERO) * scale [out] + minimum [out])."""
    weight = _codes_to_float(codes, x, ZERO)
    if SCALE_WEIGHTS:
        weight *= scale[None, :]
        if HAS_MINIMUM:
            weight += minimum[None, :]
        accumulator = tl.dot(x, weight, accumulator, input_precision="ieee")
    else:
        accumulator += tl.dot(x, weight, input_precision="ieee") * scale[None, :].to(tl.float32)
        if HAS_MINIMUM:
            accumulator += tl.sum(x.to(tl.float32), 1)[:, None] * minimum[None, :].to(tl.float32)
    return accumulator


@triton.jit
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
    stride_x,
    stride_out,
    BITS: tl.constexpr,
    TILE_K: tl.constexpr,
    TILES_PER_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ZERO: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Grid (blocks of out_features, blocks of rows)."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < out_features
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    BYTES: tl.constexpr = TILE_K * BITS // 8
    inner = tl.arange(0, BYTES)
    x_at = x + rows.to(tl.int64)[:, None] * stride_x + inner[None, :]
    codes_at = codes + columns.to(tl.int64)[None, :] * BYTES + inner[:, None]
    tile_bytes = out_features.to(tl.int64) * BYTES
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for tile in range(num_tiles):
        packed = tl.load(codes_at, mask=is_column[None, :], other=0)
        group_at = tile // TILES_PER_GROUP * out_features + columns
        scale = tl.load(scales + group_at, mask=is_column, other=0.0)
        minimum = scale
        if HAS_MINIMUM:
            minimum = tl.load(minimums + group_at, mask=is_column, other=0.0)
        first = tl.load(x_at, mask=is_row[:, None], other=0.0)
        if BITS == 4:
            second = tl.load(x_at + BYTES, mask=is_row[:, None], other=0.0)
            accumulator = multiply_codes(
                accumulator, first, packed & 15, scale, minimum, ZERO, SCALE_WEIGHTS, HAS_MINIMUM
            )
            accumulator = multiply_codes(
                accumulator, second, packed >> 4, scale, minimum, ZERO, SCALE_WEIGHTS, HAS_MINIMUM
            )
        else:
            accumulator = multiply_codes(accumulator, first, packed, scale, minimum, ZERO, SCALE_WEIGHTS, HAS_MINIMUM)
        x_at += TILE_K
        codes_at += tile_bytes
    if HAS_BIAS:
        accumulator += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_at = out + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_at, accumulator.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def tiled_linear(x: torch.Tensor, weight: TiledWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [num_rows, in_features] @ weight.T + bias -> [num_rows, out_features] in the dtype of x."""
    num_rows = x.shape[0]
    assert x.stride(1) == 1 and x.shape[1] == weight.in_features
    out = torch.empty(num_rows, weight.out_features, dtype=x.dtype, device=x.device)
    tiles = matmul_tiles(compute_capability(x.device), num_rows, weight.bits)
    grid = (-(-weight.out_features // tiles.block_n), -(-num_rows // tiles.block_m))
    launch(
        tiled_matmul_kernel,
        grid,
        out,
        x,
        weight.codes,
        weight.scales,
        out if weight.minimums is None else weight.minimums,
        out if bias is None else bias,
        num_rows,
        weight.out_features,
        weight.codes.shape[0],
        x.stride(0),
        out.stride(0),
        BITS=weight.bits,
        TILE_K=weight.tile_k,
        TILES_PER_GROUP=weight.group_size // weight.tile_k,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        ZERO=weight.zero,
        SCALE_WEIGHTS=tiles.scale_weights,
        HAS_MINIMUM=weight.minimums is not None,
        HAS_BIAS=bias is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out
