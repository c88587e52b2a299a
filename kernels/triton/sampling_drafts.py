"""Accepting a draft, or drawing what takes its place."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling_draws import split_of, target_of
from kernels.triton.sampling_filters import fixed_point


@triton.jit
def _residual(probs, draft_probs, row, ids, is_token, stride_probs, stride_draft_probs):
    p = tl.load(probs + row * stride_probs + ids, mask=is_token, other=0.0)
    q = tl.load(draft_probs + row * stride_draft_probs + ids, mask=is_token, other=0.0)
    return fixed_point(tl.maximum(p - q, 0.0))


@triton.jit
def residual_kernel(
    masses,
    probs,
    draft_ids,
    draft_probs,
    vocab_size,
    stride_probs,
    stride_draft_probs,
    num_splits,
    SPLIT: tl.constexpr,
):
    """Grid (rows, splits): what each split holds of max(p - q, 0), in rows with a draft."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    if tl.load(draft_ids + row) < 0:
        return
    ids = split * SPLIT + tl.arange(0, SPLIT)
    rest = _residual(probs, draft_probs, row, ids, ids < vocab_size, stride_probs, stride_draft_probs)
    tl.store(masses + row * num_splits + split, tl.sum(rest, 0))


@triton.jit
def verify_kernel(
    accepted,
    token_ids,
    healthy,
    masses,
    probs,
    draft_ids,
    draft_probs,
    uniforms,
    accept_uniforms,
    vocab_size,
    stride_probs,
    stride_draft_probs,
    num_splits,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (rows). Where the residual is empty, the token that was drawn from p stays."""
    row = tl.program_id(0).to(tl.int64)
    draft = tl.load(draft_ids + row)
    is_accepted = False
    if (draft >= 0) & (tl.load(healthy + row) != 0):
        p = tl.load(probs + row * stride_probs + draft).to(tl.float64)
        q = tl.load(draft_probs + row * stride_draft_probs + draft).to(tl.float64)
        is_accepted = tl.load(accept_uniforms + row) * q < p
        splits = tl.arange(0, SPLITS)
        each = tl.load(masses + row * num_splits + splits, mask=splits < num_splits, other=0)
        mass = tl.sum(each, 0)
        if mass > 0:
            target = target_of(tl.load(uniforms + row), mass)
            split, before = split_of(each, target)
            ids = split * SPLIT + tl.arange(0, SPLIT)
            rest = _residual(probs, draft_probs, row, ids, ids < vocab_size, stride_probs, stride_draft_probs)
            place = tl.sum((before + tl.cumsum(rest, 0) <= target).to(tl.int32), 0)
            tl.store(token_ids + row, (split * SPLIT + place).to(tl.int64))
    tl.store(accepted + row, is_accepted)
