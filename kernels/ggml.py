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


def _decode_q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _decode_q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _decode_q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(blocks[:, 2:].view(torch.int8), _half(blocks, 0), out=out)


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
    "Q8_0": BlockFormat(32, 34, _decode_q8_0),
}
