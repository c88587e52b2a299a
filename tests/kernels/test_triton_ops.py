"""Norm, rope, activations and products as Triton kernels, in the interpreter, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import reference
from kernels.ggml import MXFP4_VALUES
from kernels.kv import KVLayer

pytest.importorskip("triton", reason="triton is made for Linux only")
from kernels.triton import matmul, moe, norm, rope, routing
from kernels.triton.launch import recording

DTYPES = [torch.float32, torch.float16]
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"atol": 2e-6, "rtol": 2e-5},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [64, 100, 576])
def test_rms_norm_adds_the_residual_in_place_first(hidden_size, dtype):
    x, residual = normal(5, hidden_size, dtype=dtype), normal(5, hidden_size, seed=1, dtype=dtype)
    weight = normal(hidden_size, seed=2, dtype=dtype)
    own = residual.clone()
    expected = reference.rms_norm(x, weight, 1e-5, residual)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5, own), expected, **TOLERANCE[dtype])
    assert torch.equal(own, residual)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **TOLERANCE[dtype])


def test_rms_norm_takes_rows_that_lie_apart():
    spans = normal(3, 10, 64)[:, 2:7]
    weight = normal(64, seed=1)
    torch.testing.assert_close(norm.rms_norm(spans, weight, 1e-6), reference.rms_norm(spans, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 1024, 1536])
def test_gated_activations(width, dtype):
    gate_up = normal(3, 2 * width, dtype=dtype) * 4
    for own, expected in (
        (norm.silu_and_mul(gate_up), reference.silu_and_mul(gate_up.float())),
        (norm.gelu_tanh_and_mul(gate_up), reference.gelu_tanh_and_mul(gate_up.float())),
        (norm.clamped_swiglu(gate_up, 1.702, 7.0), reference.clamped_swiglu(gate_up.float(), 1.702, 7.0)),
    ):
        torch.testing.assert_close(own.float(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 32, 80])
def test_rope_rotates_and_writes_keys_and_values_to_their_slots(rotary_dim, int8):
    qkv = normal(5, 10, 80)
    angles = normal(5, rotary_dim // 2, seed=1)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    slots = torch.tensor([5, 6, 40, 17, 0])

    def empty() -> KVLayer:
        data = torch.zeros(3, 16, 2, 2, 80, dtype=torch.int8 if int8 else torch.float32)
        return KVLayer(data, torch.zeros(3, 16, 2, 2) if int8 else None)

    own, expected = empty(), empty()
    q = rope.rope_and_write_kv(qkv, cos, sin, own, slots)
    torch.testing.assert_close(q, reference.rope_and_write_kv(qkv, cos, sin, expected, slots))
    difference = (own.data.float() - expected.data.float()).abs()
    if own.scales is not None and expected.scales is not None:
        torch.testing.assert_close(own.scales, expected.scales)
        assert difference.max() <= 1 and (difference > 0).float().mean() < 0.001  # a tie may round either way
    else:
        assert difference.max() < 1e-5


def test_rope_normalises_queries_and_keys_first():
    qkv = normal(3, 6, 64)
    angles = normal(3, 32, seed=1)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    q_norm, k_norm = normal(64, seed=2), normal(64, seed=3)
    normed = qkv.clone()
    normed[:, :2] = reference.rms_norm(qkv[:, :2], q_norm, 1e-6)
    normed[:, 2:4] = reference.rms_norm(qkv[:, 2:4], k_norm, 1e-6)
    expected = KVLayer(torch.zeros(1, 16, 2, 2, 64))
    slots = torch.arange(3)
    expected_q = reference.rope_and_write_kv(normed, cos, sin, expected, slots)
    for operation in (rope.rope_and_write_kv, reference.rope_and_write_kv):
        own = KVLayer(torch.zeros(1, 16, 2, 2, 64))
        torch.testing.assert_close(operation(qkv, cos, sin, own, slots, q_norm, k_norm, 1e-6), expected_q)
        torch.testing.assert_close(own.data, expected.data)


@pytest.mark.parametrize("num_rows", [3, 20])
@pytest.mark.parametrize(
    ("rows", "columns", "group", "dtype"),
    [
        (48, 256, 32, torch.float16),
        (33, 192, 64, torch.float32),
        (20, 256, 256, torch.float16),
        (17, 96, 16, torch.float32),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_integer_weights(bits, rows, columns, group, num_rows, dtype):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(rows, columns // group, generator=generator) * 0.1).to(dtype)
    minimums = normal(rows, columns // group, seed=1, dtype=dtype)
    x, bias = normal(num_rows, columns, seed=2, dtype=dtype), normal(rows, seed=3, dtype=dtype)
    weight = codes.double() * scales.double().repeat_interleave(group, 1)
    for stored_minimums in (minimums, None):
        tiled = matmul.tile_weight(codes, scales, stored_minimums, bits, dtype)
        offset = 0 if stored_minimums is None else stored_minimums.double().repeat_interleave(group, 1)
        expected = x.double() @ (weight + offset).T + bias.double()
        error = (matmul.tiled_linear(x, tiled, bias).double() - expected).abs().max() / expected.abs().max()
        assert error < (1e-6 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize(("bits", "zero"), [(4, 8), (8, 128), (8, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_zero_point_is_exact(bits, zero, dtype):
    codes = torch.randint(0, 2**bits, (20, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    scales = normal(20, 2, seed=1, dtype=dtype)
    tiled = matmul.tile_weight(codes, scales, None, bits, dtype, zero)
    numbers = (codes.float() - zero) * scales.float().repeat_interleave(32, 1)
    assert torch.equal(matmul.untile(tiled), numbers)
    assert torch.equal(matmul.untile(tiled, torch.tensor([7, 2])), numbers[[7, 2]])
    for num_rows in (2, 20):
        x = normal(num_rows, 64, seed=2, dtype=dtype)
        expected = x.double() @ numbers.double().T
        error = (matmul.tiled_linear(x, tiled).double() - expected).abs().max() / expected.abs().max()
        assert error < (1e-6 if dtype == torch.float32 else 2e-3)


def test_few_rows_share_out_the_inputs_of_a_small_matrix_in_parts_of_whole_tiles():
    """17 tiles: the parts are not alike."""
    codes = torch.randint(0, 16, (24, 17 * 128), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    tiled = matmul.tile_weight(codes, torch.full((24, 17), 0.1), None, 4, torch.float32, 8)
    x, bias = normal(2, 17 * 128), normal(24, seed=1)
    with recording((9, 0)) as launches:
        matmul.tiled_linear(x, tiled, bias)
    assert [launch.kernel.__name__ for launch in launches] == ["tiled_matmul_kernel", "sum_splits_kernel"]
    expected = x.double() @ ((codes.double() - 8) * 0.1).T + bias.double()
    torch.testing.assert_close(matmul.tiled_linear(x, tiled, bias).double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_four_bit_floats_are_exact(dtype):
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 6)
    scales = torch.tensor([0.25, 2.0, 0.5]).repeat(3, 1)
    tiled = matmul.tile_weight(codes, scales, None, 4, dtype, is_float=True)
    numbers = torch.tensor(MXFP4_VALUES)[codes.int()] * scales.repeat_interleave(32, 1)
    assert torch.equal(matmul.untile(tiled), numbers)
    for num_rows in (1, 17):
        x = torch.eye(96, dtype=dtype)[40 : 40 + num_rows]
        assert torch.equal(matmul.tiled_linear(x, tiled), numbers.T[40 : 40 + num_rows].to(dtype))


@pytest.mark.parametrize(("columns", "groups", "bits"), [(40, 2, 4), (40, 2, 8), (48, 3, 4), (96, 2, 4), (32, 3, 8)])
def test_groups_that_cannot_be_tiled_are_refused(columns, groups, bits):
    """Tensor cores take 16 inputs at once: a tile of 16 has too few where it is halved."""
    codes = torch.zeros(4, columns, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"groups of {columns // groups} {bits}-bit weights in {columns} columns"):
        matmul.tile_weight(codes, torch.ones(4, groups), None, bits, torch.float16)
    if columns % groups == 0:
        assert matmul.tile_columns(columns, columns // groups, bits) is None


def test_every_product_of_a_tile_has_the_inputs_that_tensor_cores_take():
    for columns in range(16, 1025, 16):
        for group in range(16, columns + 1, 16):
            for bits in (4, 8):
                tile = matmul.tile_columns(columns, group, bits)
                if tile is not None:
                    assert min(group, tile * bits // 8) % 16 == 0 and columns % tile == 0
                    assert group % tile == 0 or tile % group == 0


@pytest.mark.parametrize("num_tokens", [1, 43])
@pytest.mark.parametrize(
    ("bits", "dtype"), [(16, torch.float32), (16, torch.float16), (8, torch.float16), (4, torch.float32)]
)
def test_each_row_meets_the_expert_it_chose(bits, num_tokens, dtype):
    num_experts, num_chosen, rows, columns = 5, 2, 24, 96
    generator = torch.Generator().manual_seed(num_tokens)
    # Expert 3 is never chosen.
    chosen = torch.stack([torch.randperm(4, generator=generator)[:num_chosen] for _ in range(num_tokens)])
    chosen[chosen == 3] = 4
    codes = torch.randint(0, 16, (num_experts, rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.rand(num_experts, rows, 3, generator=generator).to(dtype)
    minimums = normal(num_experts, rows, 3, dtype=dtype)
    plain = codes * scales.double().repeat_interleave(32, 2) + minimums.double().repeat_interleave(32, 2)
    if bits == 16:
        plain = plain.to(dtype).double()
        weight: torch.Tensor | matmul.TiledWeight = plain.to(dtype)
    else:
        parts = [matmul.tile_weight(codes[e], scales[e], minimums[e], bits, dtype) for e in range(num_experts)]
        stack = moe.stack_tiled(parts)
        assert stack is not None
        weight = stack
    x, bias = normal(num_tokens, columns, dtype=dtype), normal(num_experts, rows, seed=4, dtype=dtype)
    shares = torch.rand(num_tokens, num_chosen, generator=generator)

    by_expert = routing.sort_by_expert(chosen, num_experts)
    own = routing.combine(moe.grouped_linear(x, weight, by_expert, bias, gather=True), by_expert, shares)

    each = torch.einsum("tc,tkrc->tkr", x.double(), plain[chosen]) + bias.double()[chosen]
    expected = (each * shares.double().unsqueeze(-1)).sum(1)
    error = (own.double() - expected).abs().max() / expected.abs().max()
    assert error < (2e-6 if dtype == torch.float32 else 4e-3)


def test_a_stack_takes_experts_that_differ_in_how_they_store_their_zero_point_only():
    codes = torch.arange(16, dtype=torch.uint8).repeat(4, 2)
    scales = torch.full((4, 1), 0.5)
    symmetric = matmul.tile_weight(codes, scales, None, 4, torch.float32, 8)
    shifted = matmul.tile_weight(codes, scales, scales, 4, torch.float32)
    stack = moe.stack_tiled([symmetric, shifted])
    assert stack is not None
    for own, part in zip(moe.unstack_tiled(stack), (symmetric, shifted)):
        assert torch.equal(matmul.untile(own), matmul.untile(part))
    assert moe.stack_tiled([symmetric, matmul.tile_weight(codes, scales, None, 8, torch.float32, 8)]) is None


@pytest.mark.parametrize("normalize", [True, False])
def test_experts_are_chosen_by_their_logits(normalize):
    logits = normal(4, 11)
    chosen, shares = routing.choose_experts(logits, 3, normalize)
    best, expected = logits.topk(3)
    assert torch.equal(chosen, expected)
    weights = best.softmax(-1) if normalize else logits.softmax(-1).gather(-1, expected)
    torch.testing.assert_close(shares, weights)
    bad, _ = routing.choose_experts(torch.full((1, 11), float("nan")), 3, normalize)
    assert set(bad.flatten().tolist()) <= set(range(11))


@pytest.mark.parametrize("num_tokens", [1, 70])
def test_few_pairs_and_many_are_sorted_alike(num_tokens, monkeypatch):
    chosen = torch.randint(0, 5, (num_tokens, 2), generator=torch.Generator().manual_seed(0))
    few = routing.sort_by_expert(chosen, 6)
    monkeypatch.setattr(routing, "_SORTED_AT_ONCE", 0)
    many = routing.sort_by_expert(chosen, 6)
    for name in ("order", "places", "first_rows", "first_blocks"):
        assert torch.equal(getattr(few, name), getattr(many, name))
    assert torch.equal(chosen.flatten()[few.order], chosen.flatten().sort().values)
