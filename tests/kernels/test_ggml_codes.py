"""GGUF blocks as codes and scales: the same numbers as unpacked."""

from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.ggml import MXFP4_VALUES
from kernels.ggml_codes import CODED_FORMATS, ggml_codes
from tests.kernels.ggml_blocks import quantize


@pytest.mark.parametrize("tensor_type", CODED_FORMATS)
def test_codes_scales_and_minimums_are_the_numbers_of_the_file(tensor_type):
    values = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    packed = torch.as_tensor(quantize(values.numpy(), tensor_type))
    expected = ops.dequantize(packed, tensor_type, torch.empty(3, 512))
    parts = ggml_codes(packed, tensor_type)
    assert int(parts.codes.max()) < 2**parts.bits
    group = 512 // parts.scales.shape[1]
    codes = torch.tensor(MXFP4_VALUES)[parts.codes.int()] if tensor_type == "MXFP4" else parts.codes
    numbers = (codes.float() - parts.zero) * parts.scales.repeat_interleave(group, 1)
    if parts.minimums is not None:
        numbers += parts.minimums.repeat_interleave(group, 1)
    torch.testing.assert_close(numbers, expected, rtol=1e-6, atol=1e-7)


def test_a_format_of_no_codes_is_refused():
    with pytest.raises(KeyError):
        ggml_codes(torch.zeros(1, 18, dtype=torch.uint8), "IQ4_NL")
