"""Sampling on the native library: what `kernels.ops` sends it. Signatures and docstrings are those of `kernels.ops`."""

from __future__ import annotations

import functools

import torch

from kernels.cpu import library
from kernels.sampling import LogitCells, Penalties, SamplingBatch


def adjust_logits(logits: torch.Tensor, batch: SamplingBatch) -> None:
    adjustment = library.Adjustment(*logits.shape, _address(logits, torch.float32), logits.stride(0))
    if batch.cells is not None:
        _add_cells(adjustment, batch.cells)
    if batch.penalties is not None:
        _add_penalties(adjustment, batch.penalties)
    if library.load().kv_adjust_logits(adjustment) != 0:
        raise IndexError("a cell or slot lies outside the logits or tables")


def sample(
    logits: torch.Tensor, batch: SamplingBatch, probs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    sampling, token_ids, healthy = _describe(logits, batch)
    if probs is not None:
        sampling.probs, sampling.probs_stride = _address(probs, torch.float32), probs.stride(0)
    library.load().kv_sample(sampling)
    return token_ids, healthy


def verify_drafts(
    logits: torch.Tensor,
    batch: SamplingBatch,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sampling, token_ids, healthy = _describe(logits, batch)
    accepted = torch.empty_like(healthy)
    sampling.draft_ids = _address(draft_ids, torch.int64)
    sampling.draft_probs, sampling.draft_probs_stride = _address(draft_probs, torch.float32), draft_probs.stride(0)
    sampling.accept_uniforms = _address(accept_uniforms, torch.float64)
    sampling.accepted = accepted.data_ptr()
    if library.load().kv_sample(sampling) != 0:
        raise IndexError("a draft lies outside the vocabulary")
    return accepted, token_ids, healthy


def _describe(logits: torch.Tensor, batch: SamplingBatch) -> tuple[library.Sampling, torch.Tensor, torch.Tensor]:
    token_ids = torch.empty(logits.shape[0], dtype=torch.int64)
    healthy = torch.empty(logits.shape[0], dtype=torch.bool)
    sampling = library.Sampling(*logits.shape, _address(logits, torch.float32), logits.stride(0))
    (
        sampling.temperature,
        sampling.min_p,
        sampling.top_k,
        sampling.top_p,
        sampling.temperature_last,
    ) = _settings(batch.temperature, batch.min_p, batch.top_k, batch.top_p, batch.temperature_last)
    sampling.uniforms = _address(batch.uniforms, torch.float64)
    sampling.token_ids, sampling.healthy = token_ids.data_ptr(), healthy.data_ptr()
    return sampling, token_ids, healthy


@functools.lru_cache(maxsize=16)
def _settings(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Addresses of what stays the same from step to step; asking for each takes longer than a greedy draw."""
    dtypes = (torch.float32, torch.float32, torch.int32, torch.float32, torch.bool)
    return tuple(_address(tensor, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True))


def _add_cells(adjustment: library.Adjustment, cells: LogitCells) -> None:
    adjustment.num_cells = len(cells.rows)
    adjustment.cell_rows = _address(cells.rows, torch.int64)
    adjustment.cell_ids = _address(cells.token_ids, torch.int64)
    adjustment.cell_values = _address(cells.values, torch.float32)


def _add_penalties(adjustment: library.Adjustment, penalties: Penalties) -> None:
    adjustment.repetition = _address(penalties.repetition, torch.float32)
    adjustment.presence = _address(penalties.presence, torch.float32)
    adjustment.frequency = _address(penalties.frequency, torch.float32)
    adjustment.slots = _address(penalties.slots, torch.int32)
    adjustment.num_slots, adjustment.num_deltas = penalties.sequence.shape[0], penalties.delta_ids.shape[1]
    for name in ("sequence", "output", "delta_ids", "delta_sequence", "delta_output"):
        table = getattr(penalties, name)
        if not table.is_contiguous():
            raise ValueError(f"the penalties' {name} must be contiguous")
        setattr(adjustment, name, _address(table, torch.int32))


def _address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """The address of a contiguous CPU tensor, or of rows that each are: a view of wider ones."""
    if tensor.dtype is not dtype or not tensor.is_cpu or not (tensor.is_contiguous() or tensor.stride(-1) == 1):
        raise ValueError(f"{tensor.dtype} of strides {tensor.stride()} on {tensor.device}, needed: {dtype} on the cpu")
    return tensor.data_ptr()
