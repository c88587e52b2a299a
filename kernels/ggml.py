"""Block formats of GGUF files: how packed bytes become numbers.

Each format packs a row in blocks of a fixed number of elements. Layouts:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Bounds the scratch memory of unpacking a large matrix, stays within the processor's caches, and is
# just below the size from which torch splits an operation over threads, whose many short waits for
# each other cost more than they bring, above all on a busy machine.
_ELEMENTS_AT_A_TIME = 32000


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`block_bytes` bytes hold `block_elements` numbers; `decode(blocks, out)` unpacks them.

    blocks is uint8 [num_blocks, block_bytes], out float32 [num_blocks, block_elements].
    """

    block_elements: int
    block_bytes: int
    decode: Callable[[torch.Tensor, torch.Tensor], None]

    def row_bytes(self, row_elements: int) -> int:
        return row_elements // self.block_elements * self.block_bytes


def dequantize(packed: torch.Tensor, tensor_type: str, out: torch.Tensor) -> torch.Tensor:
    """Unpacks uint8 rows [num_rows, row_bytes] into `out` [num_rows, row_elements] and returns it.

    Computes in float32 whatever the dtype of `out`. Raises ValueError for an unknown format or
    where rows and bytes do not match.
    """
    block_format = FORMATS.get(tensor_type)
    if block_format is None:
        raise ValueError(f"the format {tensor_type} is not supported; supported are {', '.join(FORMATS)}")
    num_rows, row_elements = out.shape
    if row_elements % block_format.block_elements or tuple(packed.shape) != (
        num_rows,
        block_format.row_bytes(row_elements),
    ):
        raise ValueError(f"{tensor_type} rows {tuple(packed.shape)} do not unpack to {tuple(out.shape)}")
    blocks = packed.reshape(-1, block_format.block_bytes)
    direct = out.dtype == torch.float32 and out.is_contiguous()
    unpacked = out if direct else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    out_blocks = unpacked.view(-1, block_format.block_elements)
    step = max(1, _ELEMENTS_AT_A_TIME // block_format.block_elements)
    for first in range(0, blocks.shape[0], step):
        block_format.decode(blocks[first : first + step], out_blocks[first : first + step])
    return out if direct else out.copy_(unpacked)


def _half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """The float16 at byte `offset` of every block, as float32 [num_blocks, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Low nibbles become the first half of a block, high nibbles the second."""
    half = packed.shape[1]
    out[:, :half] = packed & 15
    out[:, half:] = packed >> 4


def spread_planes(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Codes of `bits` bits, each run of `width` bytes holding its low bits first: uint8 [num_blocks, codes]."""
    runs = packed.reshape(packed.shape[0], -1, 1, width)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    return (runs >> shifts).bitwise_and_((1 << bits) - 1).view(packed.shape[0], -1)


def _scaled(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, minima: torch.Tensor | None = None) -> None:
    """out = codes * scales - minima, each scale and minimum serving its share of a block's codes."""
    groups = out.view(out.shape[0], scales.shape[1], -1)
    groups.copy_(codes.view(groups.shape)).mul_(scales.unsqueeze(2))
    if minima is not None:
        groups.sub_(minima.unsqueeze(2))


def _decode_q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _decode_q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _fifth_bits(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """16 times bit i of the little-endian word at `offset`, for element i: uint8 [num_blocks, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    bits = (blocks[:, offset : offset + 4].unsqueeze(2) >> shifts).bitwise_and_(1)
    return bits.view(-1, 32).bitwise_left_shift_(4)


def _decode_q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks, 2)).sub_(16).mul_(_half(blocks, 0))


def _decode_q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks, 4)).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _decode_q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(blocks[:, 2:].view(torch.int8), _half(blocks, 0), out=out)


def _decode_q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales = _half(blocks, 80) * (blocks[:, :16] & 15)
    minima = _half(blocks, 82) * (blocks[:, :16] >> 4)
    _scaled(spread_planes(blocks[:, 16:80], 2, 32), scales, out, minima)


def _decode_q3_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales = spread_planes(blocks[:, 96:104], 4, 8) | spread_planes(blocks[:, 104:108], 2, 4) << 4
    high = spread_planes(blocks[:, :32], 1, 32)
    codes = (spread_planes(blocks[:, 32:96], 2, 32) | high << 2).view(torch.int8) - 4
    _scaled(codes, _half(blocks, 108) * (scales.view(torch.int8) - 32), out)


def six_bit_pairs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8 scales and 8 minima of 6 bits in the 12 bytes of a Q4_K or Q5_K block."""
    scales, minima, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    return (
        torch.cat((scales & 63, rest & 15 | scales >> 2 & 48), dim=1),
        torch.cat((minima & 63, rest >> 4 | minima >> 2 & 48), dim=1),
    )


def _decode_q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    _scaled(spread_planes(blocks[:, 16:], 4, 32), _half(blocks, 0) * scales, out, _half(blocks, 2) * minima)


def _decode_q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    codes = spread_planes(blocks[:, 48:], 4, 32) | spread_planes(blocks[:, 16:48], 1, 32) << 4
    _scaled(codes, _half(blocks, 0) * scales, out, _half(blocks, 2) * minima)


def _decode_q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    codes = spread_planes(blocks[:, :128], 4, 64) | spread_planes(blocks[:, 128:192], 2, 32) << 4
    _scaled(codes.view(torch.int8) - 32, _half(blocks, 208) * blocks[:, 192:208].view(torch.int8), out)


_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# The 4-bit floats of the OCP microscaling formats, doubled.
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _looked_up(codes: torch.Tensor, values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int8, device=codes.device)[codes.int()]


def _decode_iq4_nl(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _scaled(_looked_up(spread_planes(blocks[:, 2:], 4, 16), _IQ4_VALUES), _half(blocks, 0), out)


def _decode_iq4_xs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    high = spread_planes(blocks[:, 2:4], 2, 1)
    low = spread_planes(blocks[:, 4:8], 4, 1)
    scales = (low | high << 4).view(torch.int8) - 32
    _scaled(_looked_up(spread_planes(blocks[:, 8:], 4, 16), _IQ4_VALUES), _half(blocks, 0) * scales, out)


def half_powers(exponents: torch.Tensor) -> torch.Tensor:
    """Half of 2^(e - 127), float32 for uint8 exponents; the two smallest are subnormal."""
    exponents = exponents.int()
    return torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23).view(torch.float32)


def _decode_mxfp4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _scaled(_looked_up(spread_planes(blocks[:, 1:], 4, 16), MXFP4_VALUES), half_powers(blocks[:, :1]), out)


def _decode_scalar(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def decode(blocks: torch.Tensor, out: torch.Tensor) -> None:
        # A byte view of another width needs an aligned start; a tensor in a file may lie anywhere.
        if blocks.storage_offset() % dtype.itemsize or not blocks.is_contiguous():
            blocks = blocks.clone(memory_format=torch.contiguous_format)
        out.copy_(blocks.view(dtype))

    return decode


FORMATS: dict[str, BlockFormat] = {
    "F32": BlockFormat(1, 4, _decode_scalar(torch.float32)),
    "F16": BlockFormat(1, 2, _decode_scalar(torch.float16)),
    "BF16": BlockFormat(1, 2, _decode_scalar(torch.bfloat16)),
    "Q4_0": BlockFormat(32, 18, _decode_q4_0),
    "Q4_1": BlockFormat(32, 20, _decode_q4_1),
    "Q5_0": BlockFormat(32, 22, _decode_q5_0),
    "Q5_1": BlockFormat(32, 24, _decode_q5_1),
    "Q8_0": BlockFormat(32, 34, _decode_q8_0),
    "Q2_K": BlockFormat(256, 84, _decode_q2_k),
    "Q3_K": BlockFormat(256, 110, _decode_q3_k),
    "Q4_K": BlockFormat(256, 144, _decode_q4_k),
    "Q5_K": BlockFormat(256, 176, _decode_q5_k),
    "Q6_K": BlockFormat(256, 210, _decode_q6_k),
    "IQ4_NL": BlockFormat(32, 18, _decode_iq4_nl),
    "IQ4_XS": BlockFormat(256, 136, _decode_iq4_xs),
    "MXFP4": BlockFormat(32, 17, _decode_mxfp4),
}
