"""Block formats against gguf's own packing and unpacking."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kernels import ops
from kernels.ggml import FORMATS
from tests.kernels.ggml_blocks import dequantize, quantize

BLOCKS_OF_256 = [name for name, block in FORMATS.items() if block.block_elements == 256]


def packed_rows(tensor_type: str, num_rows: int, row_elements: int) -> tuple[np.ndarray, np.ndarray]:
    """Random rows packed, and as gguf unpacks those again."""
    rng = np.random.default_rng(5)
    values = (rng.standard_normal((num_rows, row_elements)) * rng.uniform(0.01, 10, (num_rows, 1))).astype(np.float32)
    packed = quantize(values, tensor_type)
    return packed, dequantize(packed, tensor_type)


@pytest.mark.parametrize("tensor_type", list(FORMATS))
@pytest.mark.parametrize(("num_rows", "num_blocks"), [(1, 1), (3, 18), (140, 1)])
def test_unpacking_gives_the_very_numbers_of_gguf(tensor_type, num_rows, num_blocks):
    packed, expected = packed_rows(tensor_type, num_rows, num_blocks * FORMATS[tensor_type].block_elements)
    out = torch.empty(expected.shape)
    ops.dequantize(torch.from_numpy(packed), tensor_type, out)
    assert torch.equal(out, torch.from_numpy(expected))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
@pytest.mark.parametrize("tensor_type", [name for name in FORMATS if name not in ("F32", "F16", "BF16")])
def test_any_bytes_unpack_as_gguf_does(tensor_type):
    """Scales of every size among them: infinite, subnormal, negative, none at all."""
    blocks = np.random.default_rng(0).integers(0, 256, (512, FORMATS[tensor_type].block_bytes), dtype=np.uint8)
    expected = gguf.quants.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType[tensor_type])
    assert np.isnan(expected).any() or tensor_type == "MXFP4"
    out = torch.empty(1, expected.shape[-1])
    ops.dequantize(torch.from_numpy(blocks.reshape(1, -1)), tensor_type, out)
    np.testing.assert_array_equal(out.numpy(), expected.reshape(1, -1))


def test_rows_can_be_unpacked_into_half_precision_and_into_a_strided_place():
    packed, expected = packed_rows("Q4_1", 4, 64)
    half = ops.dequantize(torch.from_numpy(packed.copy()), "Q4_1", torch.empty(4, 64, dtype=torch.float16))
    assert torch.equal(half, torch.from_numpy(expected).half())
    wide = torch.zeros(4, 100)
    ops.dequantize(torch.from_numpy(packed.copy()), "Q4_1", wide[:, 10:74])
    assert torch.equal(wide[:, 10:74], torch.from_numpy(expected))
    assert not wide[:, 74:].any() and not wide[:, :10].any()


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q4_1", "Q8_0", "F16", "Q4_K", "Q6_K"])
def test_a_packed_matmul_equals_the_matmul_of_the_unpacked_weight(tensor_type):
    packed, expected = packed_rows(tensor_type, 33, 768)
    x = torch.randn(3, 768, generator=torch.Generator().manual_seed(0))
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
    for tensor_type in BLOCKS_OF_256:
        row = torch.zeros(1, FORMATS[tensor_type].block_bytes, dtype=torch.uint8)
        with pytest.raises(ValueError, match=f"{tensor_type} rows"):
            ops.dequantize(row, tensor_type, torch.empty(1, 224))
