"""Sampling on the native library: what `kernels.ops` sends it. Signatures and docstrings are those of `kernels.ops`."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable

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
    sampling, token_ids, healthy = describe(logits, batch)
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
    sampling, token_ids, healthy = describe(logits, batch)
    accepted = torch.empty_like(healthy)
    sampling.draft_ids = _address(draft_ids, torch.int64)
    sampling.draft_probs, sampling.draft_probs_stride = _address(draft_probs, torch.float32), draft_probs.stride(0)
    sampling.accept_uniforms = _address(accept_uniforms, torch.float64)
    sampling.accepted = accepted.data_ptr()
    if library.load().kv_sample(sampling) != 0:
        raise IndexError("a draft lies outside the vocabulary")
    return accepted, token_ids, healthy


def describe(
    logits: torch.Tensor, batch: SamplingBatch, num_steps: int = 1
) -> tuple[library.Sampling, torch.Tensor, torch.Tensor]:
    """What the library needs to sample, and where its results will be: token ids and flags, [num_steps * num_rows].

    For several steps the logits [num_rows, vocab_size] are written again by each, and the batch's uniforms are those
    of all, one step after another.
    """
    num_rows, vocab_size = logits.shape
    token_ids, healthy, at_token_ids, at_healthy = _take_results(num_steps * num_rows)
    at_logits, *at_settings = _addresses(logits, batch)
    sampling = library.Sampling(num_rows, vocab_size, at_logits, logits.stride(0), *at_settings)
    sampling.token_ids, sampling.healthy = at_token_ids, at_healthy
    return sampling, token_ids, healthy


_DTYPES = (torch.float32, torch.float32, torch.float32, torch.int32, torch.float32, torch.bool, torch.float64)
_latest: tuple[Callable[[], torch.Tensor | None], tuple[torch.Tensor, ...], tuple[int, ...]] = (lambda: None, (), ())
"""What the latest batch was sampled with, the logits as long as somebody needs them, and where it lies."""


def _addresses(logits: torch.Tensor, batch: SamplingBatch) -> tuple[int, ...]:
    """Where logits, settings and noise lie. Most stay what they were, and asking takes longer than a greedy draw."""
    global _latest
    tensors = (
        batch.temperature,
        batch.min_p,
        batch.top_k,
        batch.top_p,
        batch.temperature_last,
        batch.uniforms,
    )
    known_logits, known, addresses = _latest
    if known_logits() is not logits or not all(map(operator.is_, known, tensors)):
        before = zip((known_logits(), *known), addresses) if known else itertools.repeat((None, 0))
        addresses = tuple(
            address if same is tensor else _address(tensor, dtype)
            for tensor, dtype, (same, address) in zip((logits, *tensors), _DTYPES, before)
        )
        _latest = weakref.ref(logits), tensors, addresses
    return addresses


_ROWS_AT_ONCE = 64
_results: dict[int, list[tuple[torch.Tensor, torch.Tensor, int, int]]] = {}


def _take_results(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Room for token ids and flags of so many rows, and where it lies; made for many steps at once, for each its own.

    To make a small tensor takes longer than a greedy draw, when a step has just gone through all of the cache.
    """
    try:
        return _results[num_rows].pop()
    except (KeyError, IndexError):  # the latter in one of several threads
        steps = max(1, _ROWS_AT_ONCE // max(1, num_rows))
        token_ids = torch.empty(steps, num_rows, dtype=torch.int64)
        healthy = torch.empty(steps, num_rows, dtype=torch.bool)
        at_token_ids, at_healthy = token_ids.data_ptr(), healthy.data_ptr()
        made = [
            (ids, flags, at_token_ids + 8 * num_rows * step, at_healthy + num_rows * step)
            for step, (ids, flags) in enumerate(zip(token_ids.unbind(), healthy.unbind()))
        ]
        taken = made.pop()
        _results[num_rows] = made
        return taken


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
