"""Root-mean-square norm, with the residual added first, and the gated activations of feed-forward layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.launch import launch
from kernels.triton.tuning import padded

GATED_BLOCK = 1024


@triton.jit
def rms_norm_kernel(
    out, x, residual, weight, num_columns, eps, stride_out, stride_x, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows). With a residual, x is added to it in place and the sum is normalised."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < num_columns
    values = tl.load(x + row * stride_x + columns, mask=is_column, other=0.0)
    if HAS_RESIDUAL:
        at = residual + row * num_columns + columns
        values += tl.load(at, mask=is_column, other=0.0)
        tl.store(at, values, mask=is_column)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / num_columns + eps)
    normed = wide * inverse * tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + columns, normed.to(out.dtype.element_ty), mask=is_column)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    num_columns = x.shape[-1]
    rows = x.reshape(-1, num_columns)
    assert rows.stride(1) == 1 and (residual is None or residual.is_contiguous())
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    block = padded(num_columns)
    launch(
        rms_norm_kernel,
        (rows.shape[0],),
        out,
        rows,
        rows if residual is None else residual,
        weight,
        num_columns,
        eps,
        out.stride(0),
        rows.stride(0),
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=4 if block <= 4096 else 8,
    )
    return out.view(x.shape)


@triton.jit
def gated_kernel(
    out, gate_up, num_columns, stride_gate_up, alpha, limit, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows, blocks of columns): activation(gate) * up; "clamped" as `kernels.ops.clamped_swiglu`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    at = gate_up + row * stride_gate_up + columns
    gate = tl.load(at, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(at + num_columns, mask=is_column, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(z)) = sigmoid(2 z)
        gated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif ACTIVATION == "clamped":
        gate = tl.minimum(gate, limit)
        gated = gate * tl.sigmoid(alpha * gate)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    else:
        gated = gate * tl.sigmoid(gate)
    tl.store(out + row * num_columns + columns, (gated * up).to(out.dtype.element_ty), mask=is_column)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _gated(gate_up, "silu")


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _gated(gate_up, "gelu_tanh")


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return _gated(gate_up, "clamped", alpha, limit)


def _gated(gate_up: torch.Tensor, activation: str, alpha: float = 1.0, limit: float = 0.0) -> torch.Tensor:
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty(num_rows, num_columns, dtype=gate_up.dtype, device=gate_up.device)
    launch(
        gated_kernel,
        (num_rows, -(-num_columns // GATED_BLOCK)),
        out,
        gate_up,
        num_columns,
        gate_up.stride(0),
        float(alpha),
        float(limit),
        ACTIVATION=activation,
        BLOCK=GATED_BLOCK,
        num_warps=4,
    )
    return out
