"""Mixture of experts: one product over all experts' rows, sorted by expert, without asking the host how many each has.

In the manner of MegaBlocks, Gale et al. 2022, https://arxiv.org/abs/2211.15841
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.launch import compute_capability, launch
from kernels.triton.matmul import TiledWeight, multiply_codes
from kernels.triton.tuning import matmul_tiles


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRows:
    """Which rows belong to which expert, sorted by expert; everything stays on the device.

    order int64 [num_rows]: sorted row r is pair order[r] of the router's [num_tokens, num_chosen] choices.
    first_rows int32 [num_experts + 1]: where each expert's rows begin.
    first_blocks int32 [num_experts + 1]: the same in blocks of `block_m` rows, each expert's last one part empty.
    """

    order: torch.Tensor
    first_rows: torch.Tensor
    first_blocks: torch.Tensor
    num_chosen: int
    block_m: int

    @property
    def most_blocks(self) -> int:
        """Enough for every way the rows can be shared out."""
        num_experts = self.first_rows.shape[0] - 1
        return min(self.order.shape[0], self.order.shape[0] // self.block_m + num_experts)


def sort_by_expert(chosen: torch.Tensor, num_experts: int) -> ExpertRows:
    """chosen int64 [num_tokens, num_chosen], the experts of each token."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    rows_each = flat.shape[0] // num_experts
    block_m = 16 if rows_each <= 16 else 64 if rows_each <= 128 else 128
    blocks = (counts + (block_m - 1)) // block_m
    zero = torch.zeros(1, dtype=torch.int32, device=flat.device)
    first_rows = torch.cat((zero, counts.cumsum(0, dtype=torch.int32)))
    first_blocks = torch.cat((zero, blocks.cumsum(0, dtype=torch.int32)))
    return ExpertRows(order, first_rows, first_blocks, chosen.shape[1], block_m)


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
    TILES_PER_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ZERO: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATHER: tl.constexpr,
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
    BYTES: tl.constexpr = TILE_K if BITS == 16 else TILE_K * BITS // 8
    inner = tl.arange(0, BYTES)
    x_at = x + inputs[:, None] * stride_x + inner[None, :]
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    num_tiles = tl.cdiv(in_features, TILE_K)
    if BITS == 16:
        weight_at = weight + (expert * out_features + columns)[None, :] * in_features + inner[:, None]
        for tile in range(num_tiles):
            is_inner = inner < in_features - tile * TILE_K
            part = tl.load(x_at, mask=is_row[:, None] & is_inner[None, :], other=0.0)
            plain = tl.load(weight_at, mask=is_column[None, :] & is_inner[:, None], other=0.0)
            accumulator = tl.dot(part, plain, accumulator, input_precision="ieee")
            x_at += TILE_K
            weight_at += TILE_K
    else:
        tile_bytes = out_features.to(tl.int64) * BYTES
        codes_at = weight + expert * num_tiles * tile_bytes + columns.to(tl.int64)[None, :] * BYTES + inner[:, None]
        groups_at = expert * (num_tiles // TILES_PER_GROUP) * out_features + columns
        for tile in range(num_tiles):
            packed = tl.load(codes_at, mask=is_column[None, :], other=0)
            group_at = groups_at + tile // TILES_PER_GROUP * out_features
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
                accumulator = multiply_codes(
                    accumulator, first, packed, scale, minimum, ZERO, SCALE_WEIGHTS, HAS_MINIMUM
                )
            x_at += TILE_K
            codes_at += tile_bytes
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
    if isinstance(weight, TiledWeight):
        out_features, in_features, bits = weight.out_features, weight.in_features, weight.bits
        tile_k, group_size = weight.tile_k, weight.group_size
        data, scales, minimums = weight.codes, weight.scales, weight.minimums
    else:
        _, out_features, in_features = weight.shape
        bits, tile_k, group_size = 16, 64, 64
        data, scales, minimums = weight, weight, None
    num_rows = rows.order.shape[0]
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    tiles = matmul_tiles(compute_capability(x.device), rows.block_m, bits)
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
        BITS=bits,
        TILE_K=tile_k,
        TILES_PER_GROUP=group_size // tile_k,
        BLOCK_M=rows.block_m,
        BLOCK_N=tiles.block_n,
        ZERO=weight.zero if isinstance(weight, TiledWeight) else 0,
        SCALE_WEIGHTS=tiles.scale_weights,
        HAS_MINIMUM=minimums is not None,
        HAS_BIAS=bias is not None,
        GATHER=gather,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def stack_tiled(parts: list[TiledWeight]) -> TiledWeight:
    """Experts' matrices of one shape and format, on top of each other, as `grouped_linear` takes them."""
    first = parts[0]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return TiledWeight(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minimums) if minimums else None,
        first.bits,
        first.out_features,
        first.in_features,
        first.zero,
        len(parts),
    )


def combine(outputs: torch.Tensor, rows: ExpertRows, weights: torch.Tensor) -> torch.Tensor:
    """Sorted rows [num_rows, n] -> each token's weighted sum [num_tokens, n]; weights [num_tokens, num_chosen]."""
    by_pair = torch.empty_like(outputs).index_copy_(0, rows.order, outputs)
    return torch.einsum("tkn,tk->tn", by_pair.view(*weights.shape, -1), weights.to(outputs.dtype))
