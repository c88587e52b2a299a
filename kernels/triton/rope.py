"""Rotation of queries and keys, their norms before it, and the write into the KV cache, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.kv import KVLayer
from kernels.triton.launch import launch
from kernels.triton.tuning import padded


@triton.jit
def rope_and_write_kv_kernel(
    q_out,
    kv,
    kv_scales,
    qkv,
    cos,
    sin,
    slot_mapping,
    q_norm,
    k_norm,
    eps,
    stride_qkv,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """Grid (tokens, query, key and value heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    is_dim = dims < HEAD_DIM
    at = qkv + token * stride_qkv + head * HEAD_DIM
    x = tl.load(at + dims, mask=is_dim, other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        half: tl.constexpr = ROTARY_DIM // 2
        is_rotated = dims < ROTARY_DIM
        other_dims = tl.where(dims < half, dims + half, dims - half)
        other = tl.load(at + other_dims, mask=is_rotated, other=0.0).to(tl.float32)
        if HAS_NORM:
            weight = q_norm if head < NUM_HEADS else k_norm
            inverse = tl.rsqrt(tl.sum(x * x, 0) / HEAD_DIM + eps)
            x = x * inverse * tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)
            other = other * inverse * tl.load(weight + other_dims, mask=is_rotated, other=0.0).to(tl.float32)
        if ROTARY_DIM > 0:
            c = tl.load(cos + token * ROTARY_DIM + dims, mask=is_rotated, other=1.0).to(tl.float32)
            s = tl.load(sin + token * ROTARY_DIM + dims, mask=is_rotated, other=0.0).to(tl.float32)
            x = x * c + other * s
    if head < NUM_HEADS:
        tl.store(q_out + (token * NUM_HEADS + head) * HEAD_DIM + dims, x.to(q_out.dtype.element_ty), mask=is_dim)
    else:
        row = tl.load(slot_mapping + token) * (2 * NUM_KV_HEADS) + head - NUM_HEADS
        if IS_INT8:
            largest = tl.max(tl.abs(x), 0)
            steps = x * tl.where(largest > 0.0, 127.0 / largest, 0.0)
            # Rounds half to even, as the reference does: adding 1.5 * 2^23 leaves no bits for the fraction.
            x = (steps + 12582912.0) - 12582912.0
            tl.store(kv_scales + row, largest / 127.0)
        tl.store(kv + row * HEAD_DIM + dims, x.to(kv.dtype.element_ty), mask=is_dim)


def rope_and_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: KVLayer,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    num_tokens, num_fused_heads, head_dim = qkv.shape
    num_kv_heads = kv_cache.num_kv_heads
    num_heads = num_fused_heads - 2 * num_kv_heads
    assert qkv.stride(1) == head_dim and qkv.stride(2) == 1
    assert cos.is_contiguous() and sin.is_contiguous() and kv_cache.data.is_contiguous()
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    launch(
        rope_and_write_kv_kernel,
        (num_tokens, num_fused_heads),
        q,
        kv_cache.data,
        q if kv_cache.scales is None else kv_cache.scales,
        qkv,
        cos,
        sin,
        slot_mapping,
        q if q_norm is None else q_norm,
        q if k_norm is None else k_norm,
        eps,
        qkv.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=padded(head_dim),
        ROTARY_DIM=cos.shape[-1],
        HAS_NORM=q_norm is not None,
        IS_INT8=kv_cache.scales is not None,
        num_warps=1,
    )
    return q
