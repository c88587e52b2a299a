"""Turns the logits of a step into tokens, one pass over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.parameters import SamplingParams
from engine.sampling.filters import draw, filter_logits, has_filters, is_greedy, temper, to_probabilities
from engine.sampling.noise import uniform
from engine.sampling.penalties import TokenCounts, apply_logit_bias, apply_penalties, forbid


@dataclass(slots=True)
class SamplingRow:
    """What one row of logits is sampled with.

    `position` is the index, in prompt and output, of the token to be drawn. `forbidden_token_ids`
    are the ends that may not come yet (`min_tokens`). `counts`, needed for penalties only, covers
    all tokens before `position`.
    """

    params: SamplingParams
    seed: int
    position: int
    counts: TokenCounts | None = None
    forbidden_token_ids: Sequence[int] = ()


@dataclass(slots=True)
class RawLogprobs:
    """Natural log-probabilities of the model itself, before penalties, temperature and filters."""

    chosen: float
    top: list[tuple[int, float]] = field(default_factory=list)
    """The likeliest tokens, best first."""


@dataclass(slots=True)
class Sampled:
    """A token for each row, None where the row's logits were no numbers to sample from."""

    token_ids: list[int | None]
    logprobs: list[RawLogprobs | None]


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], vocab_size: int | None = None) -> Sampled:
    """Draws a token for each row of float32 logits [num_rows, padded_vocab_size].

    Changes `logits`. Ids from `vocab_size` on are padding and are never drawn. A row that holds
    NaN or infinity, or nothing but minus infinity, yields None and leaves the others alone.
    """
    logits = logits[:, :vocab_size]
    if len(rows) == 0:
        return Sampled([], [])
    healthy = mend(logits)
    raw = keep_raw(logits, rows)
    adjust(logits, rows)
    token_ids = choose(logits, rows)
    return Sampled(
        [token_id if ok else None for token_id, ok in zip(token_ids.tolist(), healthy)], report(raw, token_ids, rows)
    )


@torch.inference_mode()
def logits_to_probs(logits: torch.Tensor, rows: Sequence[SamplingRow], vocab_size: int | None = None) -> torch.Tensor:
    """The distribution [num_rows, vocab_size] that `sample` draws from; greedy rows are one-hot. Changes `logits`."""
    logits = logits[:, :vocab_size]
    adjust(logits, rows)
    return probabilities(logits, rows)


def mend(logits: torch.Tensor) -> list[bool]:
    """Tells which rows can be sampled from, and makes the others harmless, in place."""
    healthy = torch.isfinite(logits.amax(dim=-1))  # amax passes NaN on
    if not bool(healthy.all()):
        logits[~healthy] = 0.0
    return healthy.tolist()


def adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Applies logit bias, penalties and forbidden ends, in place, to the rows that have any."""
    apply_logit_bias(logits, ((i, row.params.logit_bias) for i, row in enumerate(rows) if row.params.logit_bias))
    apply_penalties(logits, ((i, row.params, row.counts) for i, row in enumerate(rows) if row.counts is not None))
    # An end token in the padding of the weights is never drawn anyway.
    forbid(logits, ((i, row.forbidden_token_ids) for i, row in enumerate(rows) if row.forbidden_token_ids))


def _split(rows: Sequence[SamplingRow]) -> tuple[list[int], list[int], list[int]]:
    greedy: list[int] = []
    plain: list[int] = []
    filtered: list[int] = []
    for index, row in enumerate(rows):
        part = greedy if is_greedy(row.params) else filtered if has_filters(row.params) else plain
        part.append(index)
    return greedy, plain, filtered


def probabilities(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The distribution [num_rows, vocab_size] of adjusted logits, the same that `choose` draws from."""
    probs = torch.zeros_like(logits)
    greedy, plain, filtered = _split(rows)
    if greedy:
        probs[greedy, logits[greedy].argmax(dim=-1)] = 1.0
    for part, shape in ((plain, temper), (filtered, filter_logits)):
        if part:
            candidates = shape(logits[part], [rows[row].params for row in part])
            probs[part] = to_probabilities(candidates, logits.shape[-1])
    return probs


def choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Draws a token for each row of adjusted logits: ids [num_rows]."""
    greedy, plain, filtered = _split(rows)
    if len(greedy) == len(rows):
        return logits.argmax(dim=-1)
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    if greedy:
        token_ids[greedy] = logits[greedy].argmax(dim=-1)
    for part, shape in ((plain, temper), (filtered, filter_logits)):
        if part:
            own = logits if len(part) == len(rows) else logits[part]
            candidates = shape(own, [rows[row].params for row in part])
            token_ids[part] = draw(candidates, [uniform(rows[row].seed, rows[row].position) for row in part])
    return token_ids


def keep_raw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], torch.Tensor] | None:
    """What `report` will need of the logits before they are adjusted."""
    wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return None
    return wanted, torch.log_softmax(logits[wanted], dim=-1)


def report(
    raw: tuple[list[int], torch.Tensor] | None, token_ids: torch.Tensor, rows: Sequence[SamplingRow]
) -> list[RawLogprobs | None]:
    """The log-probabilities of the chosen tokens [num_rows] and the likeliest others, where rows ask for them."""
    reports: list[RawLogprobs | None] = [None] * len(rows)
    if raw is None:
        return reports
    wanted, logprobs = raw
    chosen = logprobs.gather(-1, token_ids[wanted].unsqueeze(-1)).squeeze(-1).tolist()
    num_top = min(max(rows[index].params.logprobs or 0 for index in wanted), logprobs.shape[-1])
    values, ids = torch.topk(logprobs, num_top, dim=-1)
    for place, index in enumerate(wanted):
        count = rows[index].params.logprobs or 0
        top = list(zip(ids[place, :count].tolist(), values[place, :count].tolist()))
        reports[index] = RawLogprobs(chosen[place], top)
    return reports
