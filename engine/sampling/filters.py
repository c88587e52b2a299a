"""Temperature, min-p, top-k and top-p: which tokens may be drawn, and with what weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.parameters import SamplingParams

GREEDY_TEMPERATURE = 1e-5
"""Below this the likeliest token is taken and no filter is looked at."""

_SMALLEST = torch.finfo(torch.float32).tiny
# Positive floats order like their bits: the upper half of the bits of a probability is a bucket of
# tokens within 1/128 of each other. 1.0 falls into bucket 0x3F80.
_NUM_BUCKETS = 1 << 14
_MAX_SORTED = 1024


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may be drawn, in the order of the vocabulary.

    `weights` [num_rows, width] float64 are proportional to the probabilities, zero for what may
    not be drawn. `token_ids` [num_rows, width] int64, or None where column i is token i.
    """

    token_ids: torch.Tensor | None
    weights: torch.Tensor


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_TEMPERATURE


def has_filters(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.min_p > 0.0 or params.top_k > 0


def temper(logits: torch.Tensor, params: Sequence[SamplingParams]) -> Candidates:
    """Softmax of logits [num_rows, vocab_size] at each row's temperature, nothing left out."""
    return Candidates(None, torch.softmax(logits / _column(logits, [p.temperature for p in params]), -1).double())


def filter_logits(logits: torch.Tensor, params: Sequence[SamplingParams]) -> Candidates:
    """Applies temperature, min-p, top-k and top-p, in this order, to float32 logits [num_rows, vocab_size].

    With `temperature_last` the filters see the untempered distribution. Every filter is a threshold
    on probability: tokens that tie with the last one kept are kept, and so is the likeliest always.
    """
    shaping = [1.0 if p.temperature_last else p.temperature for p in params]
    probs = torch.softmax(logits if all(t == 1.0 for t in shaping) else logits / _column(logits, shaping), dim=-1)
    highest = probs.amax(dim=-1, keepdim=True)
    threshold = (highest * _column(probs, [p.min_p for p in params])).clamp_(min=_SMALLEST)
    _raise_to_top_k(threshold, probs, params)

    _raise_to_top_p(threshold, probs, params)
    candidates = _compact(probs, threshold)
    if any(p.temperature_last and p.temperature != 1.0 for p in params):
        candidates = _temper_last(candidates, params)
    return candidates


def _raise_to_top_k(threshold: torch.Tensor, probs: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    vocab_size = probs.shape[-1]
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if not rows:
        return
    likeliest = torch.topk(probs[rows], max(params[row].top_k for row in rows), dim=-1).values
    last = torch.tensor([[params[row].top_k - 1] for row in rows], device=probs.device)
    threshold[rows] = torch.maximum(threshold[rows], likeliest.gather(-1, last))


def _raise_to_top_p(threshold: torch.Tensor, probs: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Raises thresholds to the smallest probability in the smallest set of likeliest tokens that reaches top_p."""
    nucleus = [row for row, p in enumerate(params) if p.top_p < 1.0]
    closed = [row for row in nucleus if params[row].min_p > 0.0 or params[row].top_k > 0]
    open_ = [row for row in nucleus if not (params[row].min_p > 0.0 or params[row].top_k > 0)]
    for rows in (closed, open_):
        if not rows:
            continue
        passed = probs if len(rows) == len(params) else probs[rows]
        if rows is closed:  # few tokens are left, and they count as one
            passed = _compact(passed, threshold[rows]).weights.float()
        edge = _nucleus_edge(passed, [params[row].top_p for row in rows])
        threshold[rows] = torch.maximum(threshold[rows], edge)


def _nucleus_edge(weights: torch.Tensor, top_p: Sequence[float]) -> torch.Tensor:
    """The smallest weight [num_rows, 1] of the smallest set of largest weights that reaches top_p of their sum.

    Sorting a whole vocabulary would take longer than everything else here together. A histogram over the
    bits of float32 weights [num_rows, width] finds the bucket in which the sum crosses top_p, and only
    the few weights of that bucket are sorted; the result is exact. Few weights are sorted at once.
    """
    if weights.shape[-1] <= _MAX_SORTED:
        descending = weights.double().sort(dim=-1, descending=True).values
        from_top = descending.cumsum(-1)
        return _last_kept(descending, 0.0, _column(from_top, top_p) * from_top[:, -1:])
    buckets = weights.view(torch.int32) >> 16
    mass = weights.new_zeros(len(top_p), _NUM_BUCKETS, dtype=torch.float64)
    from_top = mass.scatter_add_(-1, buckets.long(), weights.double()).flip(-1).cumsum(-1)
    target = _column(from_top, top_p) * from_top[:, -1:]
    crossing = torch.searchsorted(from_top, target)
    # With top_p 0 the sum crosses before anything: the largest weight is kept all the same.
    crossing = torch.maximum(crossing, _NUM_BUCKETS - 1 - buckets.amax(dim=-1, keepdim=True).long())
    above = torch.where(crossing > 0, from_top.gather(-1, (crossing - 1).clamp(min=0)), 0.0)

    members = _gather_where(weights, buckets == _NUM_BUCKETS - 1 - crossing)
    return _last_kept(members.weights.sort(dim=-1, descending=True).values, above, target)


def _last_kept(descending: torch.Tensor, above: torch.Tensor | float, target: torch.Tensor) -> torch.Tensor:
    """The smallest weight [num_rows, 1] that is needed, the largest always, for a sum of `above` and more to reach
    `target`."""
    kept = above + descending.cumsum(-1) - descending < target
    kept[:, 0] = True
    kept &= descending > 0.0
    return torch.where(kept, descending, torch.inf).amin(dim=-1, keepdim=True).float()


def _compact(probs: torch.Tensor, threshold: torch.Tensor) -> Candidates:
    return _gather_where(probs, probs >= threshold)


def _gather_where(probs: torch.Tensor, chosen: torch.Tensor) -> Candidates:
    """Gathers the chosen tokens of each row into columns, padded with weight zero."""
    rows, token_ids = chosen.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=probs.shape[0])
    columns = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = (probs.shape[0], int(counts.max()))
    ids = torch.zeros(shape, dtype=torch.int64, device=probs.device)
    weights = torch.zeros(shape, dtype=torch.float64, device=probs.device)
    ids[rows, columns] = token_ids
    weights[rows, columns] = probs[rows, token_ids].double()
    return Candidates(ids, weights)


def _temper_last(candidates: Candidates, params: Sequence[SamplingParams]) -> Candidates:
    exponent = _column(candidates.weights, [1.0 / p.temperature if p.temperature_last else 1.0 for p in params])
    relative = candidates.weights / candidates.weights.amax(dim=-1, keepdim=True)
    return Candidates(candidates.token_ids, relative**exponent)


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)


def to_probabilities(candidates: Candidates, vocab_size: int) -> torch.Tensor:
    """Normalised float32 probabilities [num_rows, vocab_size]."""
    probs = (candidates.weights / candidates.weights.cumsum(-1)[:, -1:]).float()
    if candidates.token_ids is None:
        return probs
    dense = torch.zeros(probs.shape[0], vocab_size, device=probs.device)
    return dense.scatter_add_(-1, candidates.token_ids, probs)


def draw(candidates: Candidates, uniforms: Sequence[float]) -> torch.Tensor:
    """Inverts the cumulative distribution at one number in [0, 1) a row; returns token ids [num_rows].

    The sum runs in float64 and in the order of the vocabulary, so the same row with the same
    number gives the same token whatever else is in the batch.
    """
    cumulative = candidates.weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(_column(cumulative, uniforms) * total, torch.nextafter(total, torch.zeros_like(total)))
    columns = torch.searchsorted(cumulative, target, right=True)
    if candidates.token_ids is None:
        return columns.squeeze(-1)
    return candidates.token_ids.gather(-1, columns).squeeze(-1)
