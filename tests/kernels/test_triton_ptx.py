"""The PTX in the Triton kernels, run here bit by bit: the interpreter knows none of it, and bfloat16 not well."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is made for Linux only")
from kernels.triton import tile_loop

ALL_BYTES = np.stack([np.roll(np.arange(256, dtype=np.uint8), 64 * place) for place in range(4)], 1)
"""Every byte in every place of a register."""


def permuted(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    """prmt.b32 without sign replication: each nibble of the selector names one byte of b and a."""
    sources = [(source >> np.uint32(8 * place)) & np.uint32(255) for source in (a, b) for place in range(4)]
    chosen = [sources[(selector >> 4 * place) & 7] << np.uint32(8 * place) for place in range(4)]
    return chosen[0] | chosen[1] | chosen[2] | chosen[3]


def run(ptx: str, word: np.ndarray, num_results: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Results [256, 4] of a text whose first registers are the results, two each, and whose next one is the input."""
    registers: dict[str, np.ndarray] = {f"${2 * num_results}": word}

    def value(operand: str) -> np.ndarray:
        return np.full_like(word, int(operand, 0)) if operand[0].isdigit() else registers[operand]

    for statement in ptx.strip("{} \n").split(";"):
        match = re.fullmatch(r"\s*(\S+) (.*)", statement, re.DOTALL)
        if match is None or match[1] == ".reg":
            continue
        target, *operands = [each.strip() for each in match[2].split(",")]
        operation = {
            "and.b32": lambda a, b: value(a) & value(b),
            "shr.b32": lambda a, b: value(a) >> value(b),
            "not.b32": lambda a: ~value(a),
            "mov.b32": lambda a: value(a),
            "prmt.b32": lambda a, b, selector: permuted(value(a), value(b), int(selector, 0)),
        }[match[1]]
        registers[target] = operation(*operands)
    words = [np.stack([registers[f"${2 * index}"], registers[f"${2 * index + 1}"]], 1) for index in range(num_results)]
    return [torch.from_numpy(pair.astype("<u4").view("<i2")).view(dtype) for pair in words]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nibbles_become_exact_numbers(dtype):
    ptx, base = (tile_loop.NIBBLES_TO_FP16, 1024.0) if dtype == torch.float16 else (tile_loop.NIBBLES_TO_BF16, 128.0)
    low, high, ones = run(ptx.value, ALL_BYTES.view("<u4")[:, 0], 3, dtype)
    codes = torch.from_numpy(ALL_BYTES).int()
    for zero in range(16):
        assert torch.equal((low - (base + zero)).float(), (codes & 15).float() - zero)
        assert torch.equal((high - (base + zero)).float(), (codes >> 4).float() - zero)
    assert torch.equal(ones, torch.ones_like(ones))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bytes_become_exact_numbers_whatever_stands_for_zero(dtype):
    word, codes = ALL_BYTES.view("<u4")[:, 0], torch.from_numpy(ALL_BYTES).float()
    if dtype == torch.float16:
        numbers, ones = run(tile_loop.BYTES_TO_FP16.value, word, 2, dtype)
        base = 1024.0
    else:
        numbers, offsets, ones = run(tile_loop.BYTES_TO_BF16.value, word, 3, dtype)
        numbers, base = numbers - offsets, -128.0
    for zero in range(256):
        assert torch.equal((numbers - (base + zero)).float(), codes - zero)
    assert torch.equal(ones, torch.ones_like(ones))
