"""The loop over tiles of integer weights that plain products and those of experts share."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def _low_and_high_halves(above: str, one: str) -> Any:
    """PTX that puts the halves of 4 bytes below a byte each: registers of 2 numbers, 2 for each of 3 results."""
    return tl.constexpr(
        f"""{{ .reg .b32 low, high;
        and.b32 low, $6, 0x0f0f0f0f;
        shr.b32 high, $6, 4;
        and.b32 high, high, 0x0f0f0f0f;
        prmt.b32 $0, low, {above}, 0x4140;
        prmt.b32 $1, low, {above}, 0x4342;
        prmt.b32 $2, high, {above}, 0x4140;
        prmt.b32 $3, high, {above}, 0x4342;
        mov.b32 $4, {one};
        mov.b32 $5, {one}; }}"""
    )


# 0x64 begins 1024 in fp16, 0x43 begins 128 in bf16; what is below counts ones in either.
NIBBLES_TO_FP16: Any = _low_and_high_halves("0x64646464", "0x3c003c00")
NIBBLES_TO_BF16: Any = _low_and_high_halves("0x43434343", "0x3f803f80")
BYTES_TO_FP16: Any = tl.constexpr(
    """prmt.b32 $0, $4, 0x64646464, 0x4140;
    prmt.b32 $1, $4, 0x64646464, 0x4342;
    mov.b32 $2, 0x3c003c00;
    mov.b32 $3, 0x3c003c00;"""
)
# Seven bits below 128; the eighth, its sign turned, makes what is taken off 128 or 256.
BYTES_TO_BF16: Any = tl.constexpr(
    """{ .reg .b32 low, high;
    and.b32 low, $6, 0x7f7f7f7f;
    not.b32 high, $6;
    and.b32 high, high, 0x80808080;
    prmt.b32 $0, low, 0x43434343, 0x4140;
    prmt.b32 $1, low, 0x43434343, 0x4342;
    prmt.b32 $2, high, 0x43434343, 0x4140;
    prmt.b32 $3, high, 0x43434343, 0x4342;
    mov.b32 $4, 0x3f803f80;
    mov.b32 $5, 0x3f803f80; }"""
)


@triton.jit
def _nibbles(packed, like, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr, USE_PTX: tl.constexpr):
    """The numbers in the low and the high halves of bytes, exact, and ones that lie in registers as they do.

    A code becomes a number by setting it below the bits of a power of two, 1024 in fp16 and 128 in bf16. The
    compiler does so one by one; in PTX a byte permutation does two at once.
    """
    if IS_FLOAT:
        low = _float4(packed & 15, like)
        high = _float4(packed >> 4, like)
        ones = tl.full(packed.shape, 1.0, like.dtype)
    elif USE_PTX and like.dtype == tl.float16:
        low, high, ones = tl.inline_asm_elementwise(
            NIBBLES_TO_FP16,
            "=&r,=&r,=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
        low -= 1024.0 + ZERO
        high -= 1024.0 + ZERO
    elif USE_PTX:
        low, high, ones = tl.inline_asm_elementwise(
            NIBBLES_TO_BF16,
            "=&r,=&r,=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
        low -= 128.0 + ZERO
        high -= 128.0 + ZERO
    else:
        low = (packed & 15).to(tl.int16).to(like.dtype) - ZERO
        high = (packed >> 4).to(tl.int16).to(like.dtype) - ZERO
        ones = tl.full(packed.shape, 1.0, like.dtype)
    return low, high, ones


@triton.jit
def _bytes(codes, like, ZERO: tl.constexpr, USE_PTX: tl.constexpr):
    """The same for codes of a byte each."""
    if USE_PTX and like.dtype == tl.float16:
        numbers, ones = tl.inline_asm_elementwise(
            BYTES_TO_FP16,
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
        numbers -= 1024.0 + ZERO
    elif USE_PTX:
        numbers, offsets, ones = tl.inline_asm_elementwise(
            BYTES_TO_BF16,
            "=&r,=&r,=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
        numbers -= offsets
        if ZERO != 128:
            numbers -= ZERO - 128.0
    else:
        numbers = (codes.to(tl.int16) - ZERO).to(like.dtype)
        ones = tl.full(codes.shape, 1.0, like.dtype)
    return numbers, ones


@triton.jit
def _float4(codes, like):
    """Twice the numbers of E2M1: sign, exponent and mantissa in the places of a wider number, then scaled up."""
    wide = codes.to(tl.uint16)
    if like.dtype == tl.bfloat16:
        numbers = (((wide & 7) << 6) | ((wide & 8) << 12)).to(tl.bfloat16, bitcast=True) * (2.0**127)
    else:
        halves = (((wide & 7) << 9) | ((wide & 8) << 12)).to(tl.float16, bitcast=True) * 32768.0
        numbers = halves.to(like.dtype)
    return numbers


@triton.jit
def _of_groups(at, is_column, out_features, COUNT: tl.constexpr):
    """What belongs to the groups of one tile, a tuple of [columns] each."""
    values = ()
    for group in tl.static_range(COUNT):  # pyright: ignore[reportGeneralTypeIssues]
        values = values + (tl.load(at + group * out_features, mask=is_column, other=0.0),)
    return values


@triton.jit
def _of_part(values, FIRST: tl.constexpr, inner, HALF: tl.constexpr):
    """What belongs to the groups that a part begins in: [1, columns], or where it has two halves [part, columns]."""
    if HALF > 0:
        of_part = tl.where(inner[:, None] < HALF, values[FIRST][None, :], values[FIRST + 1][None, :])
    else:
        of_part = values[FIRST][None, :]
    return of_part


@triton.jit
def _multiply(
    accumulator,
    x,
    numbers,
    ones,
    scale,
    minimum,
    SCALE_WEIGHTS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
):
    """accumulator [rows, out] += x [rows, k] @ (numbers [k, out] * scale [1, out] + minimum [1, out]).

    With SCALE_WEIGHTS scale and minimum may have k rows.
    """
    if SCALE_WEIGHTS:
        weight = numbers * scale
        if HAS_MINIMUM:
            weight += minimum
        accumulator = tl.dot(x, weight, accumulator, input_precision="ieee")
    else:
        accumulator += tl.dot(x, numbers, input_precision="ieee") * scale.to(tl.float32)
        if HAS_MINIMUM:
            # The sum of x along the row; the tensor cores have nothing better to do.
            accumulator += tl.dot(x, ones, input_precision="ieee") * minimum.to(tl.float32)
    return accumulator


@triton.jit
def multiply_tiles(
    accumulator,
    x_rows,
    is_row,
    codes,
    scales,
    minimums,
    columns,
    is_column,
    out_features,
    first_tile,
    end_tile,
    BITS: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """accumulator [rows, columns] plus the product of rows of x and the tiles first_tile..end_tile of a matrix.

    x_rows [rows] points to the rows of x; the layout of codes, scales and minimums is that of
    `kernels.triton.matmul`. Scales are read one tile ahead, since nothing else hides the time that takes.
    """
    BYTES: tl.constexpr = TILE_K * BITS // 8
    # Blackwell's tensor cores take no fewer than 32 weights of a column: two groups of 16, where weights are scaled.
    HALF: tl.constexpr = GROUP if SCALE_WEIGHTS and GROUP == 16 and BYTES >= 32 else 0  # pyright: ignore[reportAssignmentType]
    # Bytes of one column whose weights in either half have the same scale, or that in each of two halves.
    PART: tl.constexpr = 32 if HALF else min(GROUP, BYTES)  # pyright: ignore[reportAssignmentType]
    GROUPS: tl.constexpr = (TILE_K + GROUP - 1) // GROUP
    inner = tl.arange(0, PART)
    # A size of 1 comes as a plain number.
    tile_bytes = tl.cast(out_features, tl.int64) * BYTES
    x_at = x_rows[:, None] + first_tile * TILE_K + inner[None, :]
    codes_at = codes + first_tile * tile_bytes + columns.to(tl.int64)[None, :] * BYTES + inner[:, None]
    scales_at = scales + columns
    minimums_at = minimums + columns
    group = first_tile * TILE_K // GROUP * out_features
    scale = _of_groups(scales_at + group, is_column, out_features, GROUPS)
    minimum = scale
    if HAS_MINIMUM:
        minimum = _of_groups(minimums_at + group, is_column, out_features, GROUPS)
    for tile in range(first_tile, end_tile):
        group = (tl.minimum(tile + 1, end_tile - 1) if not SCALE_WEIGHTS else tile) * TILE_K // GROUP * out_features
        next_scale = _of_groups(scales_at + group, is_column, out_features, GROUPS)
        next_minimum = next_scale
        if HAS_MINIMUM:
            next_minimum = _of_groups(minimums_at + group, is_column, out_features, GROUPS)
        if SCALE_WEIGHTS:
            # Values carried round the loop would force the weights through another layout.
            scale = next_scale
            minimum = next_minimum
        for part in tl.static_range(BYTES // PART):
            packed = tl.load(codes_at + part * PART, mask=is_column[None, :], other=0)
            x_low = tl.load(x_at + part * PART, mask=is_row[:, None], other=0.0)
            if BITS == 4:
                low, high, ones = _nibbles(packed, x_low, ZERO, IS_FLOAT, USE_PTX)
            else:
                low, ones = _bytes(packed, x_low, ZERO, USE_PTX)
            factor = _of_part(scale, part * PART // GROUP, inner, HALF)
            offset = _of_part(minimum, part * PART // GROUP, inner, HALF)
            accumulator = _multiply(accumulator, x_low, low, ones, factor, offset, SCALE_WEIGHTS, HAS_MINIMUM)
            if BITS == 4:
                x_high = tl.load(x_at + (BYTES + part * PART), mask=is_row[:, None], other=0.0)
                factor = _of_part(scale, (BYTES + part * PART) // GROUP, inner, HALF)
                offset = _of_part(minimum, (BYTES + part * PART) // GROUP, inner, HALF)
                accumulator = _multiply(accumulator, x_high, high, ones, factor, offset, SCALE_WEIGHTS, HAS_MINIMUM)
        scale = next_scale
        minimum = next_minimum
        x_at += TILE_K
        codes_at += tile_bytes
    return accumulator
