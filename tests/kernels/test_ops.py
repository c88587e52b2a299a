"""Norm, rope, activation, matmul and the choice of backend."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernels import ops
from kernels.cpu import library
from kernels.kv import KVLayer


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("hidden_size", [64, 576, 100])
@pytest.mark.parametrize("num_tokens", [1, 15, 17])
def test_rms_norm_is_that_of_transformers(hidden_size, num_tokens):
    x, weight = normal(num_tokens, hidden_size), normal(hidden_size, seed=1)
    norm = LlamaRMSNorm(hidden_size, eps=1e-5)
    norm.weight.data = weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), norm(x), atol=1e-6, rtol=1e-5)


def test_rms_norm_adds_to_the_residual_in_place_first():
    x, residual, weight = normal(3, 576), normal(3, 576, seed=1), normal(576, seed=2)
    total = x + residual
    out = ops.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(residual, total)
    assert torch.equal(out, ops.rms_norm(total, weight, 1e-5))


def rope_inputs(num_tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, and cos and sin of transformers."""
    positions = torch.arange(num_tokens) * 7 + 3
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=4096)
    )
    cos, sin = rotary(torch.zeros(1), positions[None])
    return positions, cos[0], sin[0]


def signed(sin: torch.Tensor) -> torch.Tensor:
    half = sin.shape[-1] // 2
    return torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("num_tokens", [1, 15, 17])
def test_rope_rotates_as_transformers_and_writes_keys_and_values_to_their_slots(head_dim, num_tokens):
    num_heads, num_kv_heads = 9, 3
    _, cos, sin = rope_inputs(num_tokens, head_dim)
    qkv = normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    expected_q, expected_k = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None]
    )
    kv_cache = KVLayer(torch.zeros(5, 16, 2, num_kv_heads, head_dim))
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(1))[:num_tokens]

    rotated = ops.rope_and_write_kv(qkv, cos, signed(sin), kv_cache, slots)

    torch.testing.assert_close(rotated, expected_q[0].transpose(0, 1), atol=1e-6, rtol=1e-5)
    written = kv_cache.data.view(80, 2, num_kv_heads, head_dim)
    torch.testing.assert_close(written[slots, 0], expected_k[0].transpose(0, 1), atol=1e-6, rtol=1e-5)
    assert torch.equal(written[slots, 1], v)
    untouched = torch.ones(80, dtype=torch.bool)
    untouched[slots] = False
    assert not written[untouched].any()


def test_rope_over_a_part_of_the_head_leaves_the_rest_alone():
    _, cos, sin = rope_inputs(5, 32)
    qkv = normal(5, 4, 80)
    kv_cache = KVLayer(torch.zeros(1, 16, 2, 1, 80))
    rotated = ops.rope_and_write_kv(qkv, cos, signed(sin), kv_cache, torch.arange(5))
    expected, _ = apply_rotary_pos_emb(
        qkv[:, :2, :32].transpose(0, 1)[None], qkv[:, 2:3, :32].transpose(0, 1)[None], cos[None], sin[None]
    )
    torch.testing.assert_close(rotated[..., :32], expected[0].transpose(0, 1), atol=1e-6, rtol=1e-5)
    assert torch.equal(rotated[..., 32:], qkv[:, :2, 32:])


@pytest.mark.parametrize("num_tokens", [1, 15])
def test_silu_and_mul_takes_gate_first_then_up(num_tokens):
    gate_up = normal(num_tokens, 2 * 1536)
    gate, up = gate_up[:, :1536].double(), gate_up[:, 1536:].double()
    expected = (gate / (1 + torch.exp(-gate)) * up).float()
    torch.testing.assert_close(ops.silu_and_mul(gate_up), expected, atol=1e-6, rtol=1e-5)


def test_gelu_tanh_and_mul_takes_gate_first_then_up():
    gate_up = 3 * normal(15, 2 * 96)
    gate, up = gate_up[:, :96].double(), gate_up[:, 96:].double()
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    expected = (0.5 * gate * (1 + torch.tanh(inner)) * up).float()
    torch.testing.assert_close(ops.gelu_tanh_and_mul(gate_up), expected, atol=2e-6, rtol=1e-5)


def test_clamped_swiglu_cuts_the_gate_above_and_up_on_both_sides():
    gate_up = torch.tensor([[9.0, -9.0, 1.0, 2.0, 0.5, -8.0, 8.0, 1.5]])
    gate, up = torch.tensor([7.0, -9.0, 1.0, 2.0]).double(), torch.tensor([0.5, -7.0, 7.0, 1.5]).double()
    expected = (gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)).float()
    before = gate_up.clone()
    torch.testing.assert_close(ops.clamped_swiglu(gate_up, alpha=1.702, limit=7.0)[0], expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 8, 15, 17, 32, 33, 100])
def test_linear_is_exact_to_rounding_for_any_number_of_rows(num_rows):
    x, weight = normal(num_rows, 576), normal(960, 576, seed=1)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(ops.linear(x, weight), expected, atol=1e-4, rtol=1e-5)


def test_the_backend_is_named_and_a_forced_one_is_used(monkeypatch):
    monkeypatch.delenv("KVASIR_KERNELS", raising=False)
    assert ops.kernel_backend() in ops.BACKENDS
    monkeypatch.setenv("KVASIR_KERNELS", "reference")
    assert ops.kernel_backend() == "reference"


@pytest.mark.parametrize("name", ["fast", "Reference"])
def test_an_unknown_backend_is_refused_with_the_choices(monkeypatch, name):
    monkeypatch.setenv("KVASIR_KERNELS", name)
    with pytest.raises(ops.KernelBackendError, match=f"{name}.*reference, cpu, triton"):
        ops.kernel_backend()


@pytest.mark.parametrize("name", [name for name in ops.BACKENDS if name not in ops.available_backends()])
def test_a_backend_that_is_not_there_is_never_replaced_silently(monkeypatch, name):
    monkeypatch.setenv("KVASIR_KERNELS", name)
    with pytest.raises(ops.KernelBackendError, match=name):
        ops.kernel_backend()


def test_a_core_is_left_only_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    if ops.why_no_cpu_kernels() is not None:
        pytest.skip("no native kernels here")
    monkeypatch.setenv("KVASIR_KERNELS", "cpu")
    before = library.num_threads()
    try:
        for num_threads, left in ((3, 2), (1, 1)):
            library.set_num_threads(num_threads)
            with pytest.raises(KeyError), ops.one_core_left():
                assert library.num_threads() == left
                raise KeyError
            assert library.num_threads() == num_threads
    finally:
        library.set_num_threads(before)
