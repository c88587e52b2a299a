"""Block formats against gguf's own packing and unpacking."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kernels import ops
from kernels.ggml import FORMATS


def packed_rows(tensor_type: str, num_rows: int, row_elements: int) -> tuple[np.ndarray, np.ndarray]:
    """Random rows as gguf packs them, and as gguf unpacks those again."""
    rng = np.random.default_rng(5)
    values = (rng.standard_normal((num_rows, row_elements)) * rng.uniform(0.01, 10, (num_rows, 1))).astype(np.float32)
    kind = gguf.GGMLQuantizationType[tensor_type]
    packed = gguf.quants.quantize(values, kind)
    return packed.view(np.uint8).reshape(num_rows, -1), gguf.quants.dequantize(packed, kind)


@pytest.mark.parametrize("tensor_type", list(FORMATS))
@pytest.mark.parametrize(("num_rows", "row_elements"), [(1, 32), (3, 576), (5, 1536)])
def test_unpacking_gives_the_very_numbers_of_gguf(tensor_type, num_rows, row_elements):
    packed, expected = packed_rows(tensor_type, num_rows, row_elements)
    out = torch.empty(num_rows, row_elements)
    ops.dequantize(torch.from_numpy(packed.copy()), tensor_type, out)
    assert torch.equal(out, torch.from_numpy(expected.reshape(num_rows, row_elements)))


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q4_1", "Q8_0"])
def test_extreme_bytes_unpack_as_gguf_does(tensor_type):
    blocks = np.random.default_rng(0).integers(0, 256, (64, FORMATS[tensor_type].block_bytes), dtype=np.uint8)
    expected = gguf.quants.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType[tensor_type])
    out = torch.empty(1, expected.shape[-1])
    ops.dequantize(torch.from_numpy(blocks.reshape(1, -1)), tensor_type, out)
    np.testing.assert_array_equal(out.numpy(), expected)


def test_rows_can_be_unpacked_into_half_precision_and_into_a_strided_place():
    packed, expected = packed_rows("Q4_1", 4, 64)
    half = ops.dequantize(torch.from_numpy(packed.copy()), "Q4_1", torch.empty(4, 64, dtype=torch.float16))
    assert torch.equal(half, torch.from_numpy(expected).half())
    wide = torch.zeros(4, 100)
    ops.dequantize(torch.from_numpy(packed.copy()), "Q4_1", wide[:, 10:74])
    assert torch.equal(wide[:, 10:74], torch.from_numpy(expected))
    assert not wide[:, 74:].any() and not wide[:, :10].any()


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_a_packed_matmul_equals_the_matmul_of_the_unpacked_weight(tensor_type):
    packed, expected = packed_rows(tensor_type, 33, 576)
    x = torch.randn(3, 576, generator=torch.Generator().manual_seed(0))
    out = ops.quantized_linear(x, torch.from_numpy(packed.copy()), tensor_type)
    exact = x.double() @ torch.from_numpy(expected.astype(np.float64)).T
    torch.testing.assert_close(out.double(), exact, atol=1e-3, rtol=1e-5)


def test_an_unknown_format_and_rows_of_the_wrong_length_are_refused():
    with pytest.raises(ValueError, match="IQ2_S"):
        ops.dequantize(torch.zeros(1, 82, dtype=torch.uint8), "IQ2_S", torch.empty(1, 256))
    with pytest.raises(ValueError, match="Q4_1 rows"):
        ops.dequantize(torch.zeros(1, 20, dtype=torch.uint8), "Q4_1", torch.empty(1, 64))
    with pytest.raises(ValueError, match="Q4_1 rows"):
        ops.dequantize(torch.zeros(1, 20, dtype=torch.uint8), "Q4_1", torch.empty(1, 33))
