"""GGUF blocks taken apart into whole codes and their scales, for kernels that multiply codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.ggml import FORMATS, half_powers, six_bit_pairs, spread_planes

CODED_FORMATS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A matrix whose element is (code - zero) * scale + minimum, for MXFP4 with MXFP4_VALUES[code] in code's place.

    codes uint8 [out, in], one to a byte though they have `bits` bits; scales and minimums float32 [out, groups].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    zero: int
    bits: int


def ggml_codes(packed: torch.Tensor, tensor_type: str) -> Codes:
    """Takes rows uint8 [out, row_bytes] of one of CODED_FORMATS apart; only products of scales are rounded.

    Raises KeyError for another format.
    """
    block_bytes = FORMATS[tensor_type].block_bytes
    blocks = packed.reshape(-1, block_bytes)
    codes, scales, minimums, zero, bits = _TAKERS[tensor_type](blocks)
    num_rows = packed.shape[0]
    return Codes(
        codes.reshape(num_rows, -1),
        scales.reshape(num_rows, -1),
        None if minimums is None else minimums.reshape(num_rows, -1),
        zero,
        bits,
    )


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int, int]


def _half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _q4_0(blocks: torch.Tensor) -> _Parts:
    return spread_planes(blocks[:, 2:], 4, 16), _half(blocks, 0), None, 8, 4


def _q4_1(blocks: torch.Tensor) -> _Parts:
    return spread_planes(blocks[:, 4:], 4, 16), _half(blocks, 0), _half(blocks, 2), 0, 4


def _q8_0(blocks: torch.Tensor) -> _Parts:
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None, 128, 8


def _q4_k(blocks: torch.Tensor) -> _Parts:
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    codes = spread_planes(blocks[:, 16:], 4, 32)
    return codes, _half(blocks, 0) * scales, -_half(blocks, 2) * minima, 0, 4


def _q5_k(blocks: torch.Tensor) -> _Parts:
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    codes = spread_planes(blocks[:, 48:], 4, 32) | spread_planes(blocks[:, 16:48], 1, 32) << 4
    return codes, _half(blocks, 0) * scales, -_half(blocks, 2) * minima, 0, 8


def _q6_k(blocks: torch.Tensor) -> _Parts:
    codes = spread_planes(blocks[:, :128], 4, 64) | spread_planes(blocks[:, 128:192], 2, 32) << 4
    return codes, _half(blocks, 208) * blocks[:, 192:208].view(torch.int8), None, 32, 8


def _mxfp4(blocks: torch.Tensor) -> _Parts:
    return spread_planes(blocks[:, 1:], 4, 16), half_powers(blocks[:, :1]), None, 0, 4


_TAKERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "MXFP4": _mxfp4}
