"""Weights in memory behave alike whatever their format."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.layers.linear import Linear
from engine.quantization import DenseWeight, GGMLWeight, QuantWeight


def packed_weight(tensor_type: str) -> GGMLWeight:
    values = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[tensor_type])
    return GGMLWeight(torch.from_numpy(packed.view(np.uint8).reshape(40, -1).copy()), tensor_type, 96)


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_a_packed_weight_multiplies_like_its_unpacked_self(tensor_type):
    packed = packed_weight(tensor_type)
    dense = DenseWeight(packed.dequantize())
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    assert packed.shape == dense.shape == (40, 96)
    torch.testing.assert_close(packed.matmul(x), dense.matmul(x), atol=1e-5, rtol=1e-5)
    assert packed.nbytes < dense.nbytes == 40 * 96 * 4


def test_packed_weights_take_the_bytes_of_their_format():
    assert packed_weight("Q4_1").nbytes == 40 * 96 // 32 * 20
    assert packed_weight("Q8_0").nbytes == 40 * 96 // 32 * 34


@pytest.mark.parametrize("make", [lambda: packed_weight("Q4_1"), lambda: DenseWeight(torch.randn(40, 96))])
def test_a_linear_layer_adds_its_bias_to_every_row(make):
    weight: QuantWeight = make()
    bias = torch.arange(40.0)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    layer = Linear(weight, bias)
    expected = x.double() @ weight.dequantize().double().T + bias.double()
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-4, rtol=1e-5)
    assert layer.nbytes == weight.nbytes + 160
