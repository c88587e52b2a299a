"""Puts the sampling rows of a step together as tensors on the device of the logits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.sampling.counts import CountTables, CountUpdate
from engine.sampling.noise import Stream, uniforms
from engine.sampling.rows import PACKED, RowSettings, SamplingRow
from engine.sampling.transfer import upload
from kernels.sampling import LogitCells, Penalties, SamplingBatch


def make_batch(logits: torch.Tensor, rows: Sequence[SamplingRow], streams: Sequence[Stream]) -> SamplingBatch:
    """What samples logits [num_rows, vocab_size], each row with the noise of its stream.

    What is new in the step goes to the device in one copy, and nothing waits for it. The tables of counts are
    brought up to date.
    """
    settings = _settings(tuple([row.settings for row in rows]), logits.device)
    batch = settings.batch
    arrays = _cells(rows, logits.shape[-1])
    has_cells = bool(arrays)
    tables, update = None, None
    if any(row.text is not None for row in rows):
        tables, update, own = _counts(rows, logits)
        arrays |= own
    if not batch.all_greedy:
        arrays["uniforms"] = noise(rows, streams)
    if not arrays:
        return batch
    sent = upload(arrays, logits.device)
    if tables is not None and update is not None:
        tables.apply(update, sent["places"], sent["changes"])
    return SamplingBatch(
        batch.temperature,
        batch.min_p,
        batch.top_k,
        batch.top_p,
        batch.temperature_last,
        sent.get("uniforms", batch.uniforms),
        batch.all_greedy,
        batch.any_filter,
        LogitCells(sent["cell_rows"], sent["cell_ids"], sent["cell_values"]) if has_cells else None,
        None
        if tables is None
        else Penalties(
            settings.repetition,
            settings.presence,
            settings.frequency,
            sent["slots"],
            tables.sequence,
            tables.output,
            sent["delta_ids"],
            sent["delta_sequence"],
            sent["delta_output"],
        ),
    )


def make_steps(rows: Sequence[SamplingRow], num_steps: int, device: torch.device) -> SamplingBatch:
    """What samples so many tokens of each row one after another, rows that need only noise.

    Its uniforms are [num_steps * num_rows], step by step.
    """
    batch = _settings(tuple([row.settings for row in rows]), device).batch
    if batch.all_greedy:
        drawn = np.zeros(num_steps * len(rows))
    else:
        later = [replace(row, position=row.position + step) for step in range(num_steps) for row in rows]
        drawn = noise(later, [Stream.DRAW] * len(later))
    return replace(batch, uniforms=upload({"uniforms": drawn}, device)["uniforms"])


def noise(rows: Sequence[SamplingRow], streams: Sequence[Stream]) -> np.ndarray:
    """The rows' numbers of these streams: float64 [num_rows] in [0, 1)."""
    return uniforms([row.seed for row in rows], [row.position for row in rows], streams)


def feed_forward(batch: SamplingBatch, token_ids: torch.Tensor, sources: torch.Tensor) -> None:
    """Counts tokens that are still on the device, for the penalties.

    sources int64 [num_rows] says which of token_ids int64 [n] is the pending one of each row; -1: there is none.
    """
    if batch.penalties is not None and batch.penalties.delta_ids.shape[-1]:
        first = batch.penalties.delta_ids[:, 0]
        first.copy_(torch.where(sources >= 0, token_ids[sources.clamp(min=0)], first))


@dataclass(frozen=True, slots=True)
class _Settings:
    """What stays the same from step to step; `batch` has no noise, and neither cells nor penalties."""

    batch: SamplingBatch
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


@functools.lru_cache(maxsize=64)
def _settings(rows: tuple[RowSettings, ...], device: torch.device) -> _Settings:
    packed = np.frombuffer(b"".join([row.packed for row in rows]), PACKED)
    arrays = {name: packed[name].copy() for name in PACKED.names or ()}
    sent = upload({**arrays, "uniforms": np.zeros(len(rows))}, device)
    batch = SamplingBatch(
        sent["temperature"],
        sent["min_p"],
        sent["top_k"],
        sent["top_p"],
        sent["temperature_last"],
        sent["uniforms"],
        all_greedy=all(row.greedy for row in rows),
        any_filter=any(row.has_filters for row in rows),
    )
    return _Settings(batch, sent["repetition"], sent["presence"], sent["frequency"])


def forget_settings() -> None:
    """Lets go of what is kept on devices for later steps."""
    _settings.cache_clear()


def _cells(rows: Sequence[SamplingRow], vocab_size: int) -> dict[str, np.ndarray]:
    """Bias and forbidden ends; nothing if there are none."""
    cell_rows: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    for index, row in enumerate(rows):
        bias = row.settings.params.logit_bias
        if bias or row.forbidden_token_ids:
            own = bias | dict.fromkeys(row.forbidden_token_ids, -np.inf)
            # An end token in the padding of the weights is never drawn anyway.
            own = {token_id: value for token_id, value in own.items() if token_id < vocab_size}
            cell_rows += [index] * len(own)
            ids += own.keys()
            values += own.values()
    if not ids:
        return {}
    return {
        "cell_rows": np.array(cell_rows, dtype=np.int64),
        "cell_ids": np.array(ids, dtype=np.int64),
        "cell_values": np.array(values, dtype=np.float32),
    }


def _counts(
    rows: Sequence[SamplingRow], logits: torch.Tensor
) -> tuple[CountTables, CountUpdate | None, dict[str, np.ndarray]]:
    """The tables that count the rows' texts, what they miss, and the arrays of both this and the penalties."""
    vocab_size = logits.shape[-1]
    texts = {row.text: row.position - len(row.following) for row in rows if row.text is not None}
    tables = next(iter(texts)).tables
    assert all(text.tables is tables for text in texts), "the texts of a batch are counted in the same tables"
    update = tables.update_to(texts, vocab_size, logits.device)
    deltas = {
        index: row.text.deltas(texts[row.text], row.following, vocab_size)
        for index, row in enumerate(rows)
        if row.text is not None and row.following
    }
    packed = np.zeros((3, len(rows), max(map(len, deltas.values()), default=0)), dtype=np.int32)
    packed[0] = -1
    for index, own in deltas.items():
        packed[:, index, : len(own)] = np.array(own, dtype=np.int32).T
    arrays = {
        "slots": np.array([-1 if row.text is None else row.text.slot for row in rows], dtype=np.int32),
        "delta_ids": packed[0],
        "delta_sequence": packed[1],
        "delta_output": packed[2],
    }
    if update is not None:
        arrays |= {"places": update.places, "changes": update.changes}
    return tables, update, arrays
