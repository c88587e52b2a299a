"""Sampling in plain torch: the portable path, and what the fast ones are tested against.

Signatures and docstrings are those of `kernels.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.sampling import Penalties, SamplingBatch

_SMALLEST = torch.finfo(torch.float32).tiny
# Positive floats order like their bits: the upper half of the bits of a probability is a bucket of
# tokens within 1/128 of each other. 1.0 falls into bucket 0x3F80.
_NUM_BUCKETS = 1 << 14
_MAX_SORTED = 1024


def adjust_logits(logits: torch.Tensor, batch: SamplingBatch) -> None:
    if batch.cells is not None:
        logits[batch.cells.rows, batch.cells.token_ids] += batch.cells.values
    if batch.penalties is not None:
        _penalise(logits, batch.penalties)


def sample(
    logits: torch.Tensor, batch: SamplingBatch, probs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if batch.all_greedy and probs is None:
        highest, token_ids = logits.max(dim=-1)  # passes NaN on
        healthy = torch.isfinite(highest)
        return token_ids.masked_fill_(~healthy, 0), healthy
    healthy = torch.isfinite(logits.amax(dim=-1))
    if not bool(healthy.all()):
        logits = logits.masked_fill(~healthy.unsqueeze(-1), 0.0)
    token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for rows, shape in _kinds(batch):
        own = _take(batch, rows)
        candidates = shape(logits[rows], own)
        token_ids[rows] = draw(candidates, own.uniforms)
        if probs is not None:
            probs[rows] = to_probabilities(candidates, logits.shape[-1])
    return token_ids.masked_fill_(~healthy, 0), healthy


def verify_drafts(
    logits: torch.Tensor,
    batch: SamplingBatch,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    token_ids, healthy = sample(logits, batch, probs)
    accepted = torch.zeros_like(healthy)
    rows = (healthy & (draft_ids >= 0)).nonzero().squeeze(-1)
    p, q, drafted = probs[rows], draft_probs[rows], draft_ids[rows].unsqueeze(-1)
    p_drafted, q_drafted = (each.gather(-1, drafted).squeeze(-1).double() for each in (p, q))
    accepted[rows] = accept_uniforms[rows] * q_drafted < p_drafted
    token_ids[rows] = draw(Candidates(None, residual(p, q)), batch.uniforms[rows])
    return accepted, token_ids, healthy


# ---------------------------------------------------------------- penalties


def _penalise(logits: torch.Tensor, penalties: Penalties) -> None:
    rows = (penalties.slots >= 0).nonzero().squeeze(-1)
    repetition, presence, frequency = (
        each[rows].unsqueeze(-1) for each in (penalties.repetition, penalties.presence, penalties.frequency)
    )
    own = logits[rows]
    penalised = torch.where(own > 0, own / repetition, own * repetition)
    own = torch.where(_counts(penalties, penalties.sequence, penalties.delta_sequence, rows) > 0, penalised, own)
    times = _counts(penalties, penalties.output, penalties.delta_output, rows)
    logits[rows] = torch.where(times > 0, own - (presence + frequency * times), own)


def _counts(penalties: Penalties, table: torch.Tensor, deltas: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """How often each token occurs in the text of those rows: int32 [num_rows, vocab_size]."""
    ids = penalties.delta_ids[rows]
    changes = torch.where(ids >= 0, deltas[rows], 0)
    return table[penalties.slots[rows].long()].scatter_add_(-1, ids.clamp(min=0).long(), changes)


# ---------------------------------------------------------------- candidates and the draw


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may be drawn, in the order of the vocabulary.

    `weights` [num_rows, width] float64 are proportional to the probabilities, zero for what may
    not be drawn. `token_ids` [num_rows, width] int64, or None where column i is token i.
    """

    token_ids: torch.Tensor | None
    weights: torch.Tensor


def draw(candidates: Candidates, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverts the cumulative distribution at one number in [0, 1) a row; returns token ids [num_rows].

    The sum runs in float64 and in the order of the vocabulary, so the same row with the same
    number gives the same token whatever else is in the batch.
    """
    cumulative = candidates.weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(uniforms.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    columns = torch.searchsorted(cumulative, target, right=True)
    if candidates.token_ids is None:
        return columns.squeeze(-1)
    return candidates.token_ids.gather(-1, columns).squeeze(-1)


def to_probabilities(candidates: Candidates, vocab_size: int) -> torch.Tensor:
    """Normalised float32 probabilities [num_rows, vocab_size]."""
    probs = (candidates.weights / candidates.weights.cumsum(-1)[:, -1:]).float()
    if candidates.token_ids is None:
        return probs
    dense = torch.zeros(probs.shape[0], vocab_size, device=probs.device)
    return dense.scatter_add_(-1, candidates.token_ids, probs)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Weights float64 [num_rows, vocab_size], proportional to max(p - q, 0): what replaces a refused draft.

    Where rounding leaves nothing of it, p and q are one distribution, and it is p.
    """
    rest = (p.double() - q.double()).clamp_(min=0.0)
    return torch.where(rest.sum(dim=-1, keepdim=True) > 0.0, rest, p.double())


_Shape = Callable[[torch.Tensor, SamplingBatch], Candidates]


def _kinds(batch: SamplingBatch) -> Iterator[tuple[torch.Tensor, _Shape]]:
    """The rows of each kind, and what makes their candidates."""
    greedy = batch.temperature == 0.0
    filtered = ~greedy & ((batch.min_p > 0.0) | (batch.top_k > 0) | (batch.top_p < 1.0))
    for chosen, shape in ((greedy, _likeliest), (~greedy & ~filtered, _temper), (filtered, _filter)):
        rows = chosen.nonzero().squeeze(-1)
        if len(rows):
            yield rows, shape


def _take(batch: SamplingBatch, rows: torch.Tensor) -> SamplingBatch:
    return SamplingBatch(
        batch.temperature[rows],
        batch.min_p[rows],
        batch.top_k[rows],
        batch.top_p[rows],
        batch.temperature_last[rows],
        batch.uniforms[rows],
        batch.all_greedy,
        batch.any_filter,
    )


def _likeliest(logits: torch.Tensor, batch: SamplingBatch) -> Candidates:
    token_ids = logits.argmax(dim=-1, keepdim=True)
    return Candidates(token_ids, torch.ones_like(token_ids, dtype=torch.float64))


def _temper(logits: torch.Tensor, batch: SamplingBatch) -> Candidates:
    return Candidates(None, torch.softmax(logits / batch.temperature.unsqueeze(-1), -1).double())


# ---------------------------------------------------------------- filters


def _filter(logits: torch.Tensor, batch: SamplingBatch) -> Candidates:
    shaping = torch.where(batch.temperature_last, 1.0, batch.temperature)
    probs = torch.softmax(logits / shaping.unsqueeze(-1), dim=-1)
    highest = probs.amax(dim=-1, keepdim=True)
    threshold = (highest * batch.min_p.unsqueeze(-1)).clamp_(min=_SMALLEST)
    _raise_to_top_k(threshold, probs, batch)
    _raise_to_top_p(threshold, probs, batch)
    candidates = _compact(probs, threshold)
    if bool(batch.temperature_last.any()):
        candidates = _temper_last(candidates, batch)
    return candidates


def _raise_to_top_k(threshold: torch.Tensor, probs: torch.Tensor, batch: SamplingBatch) -> None:
    rows = ((batch.top_k > 0) & (batch.top_k < probs.shape[-1])).nonzero().squeeze(-1)
    if not len(rows):
        return
    top_k = batch.top_k[rows].long()
    likeliest = torch.topk(probs[rows], int(top_k.max()), dim=-1).values
    threshold[rows] = torch.maximum(threshold[rows], likeliest.gather(-1, top_k.unsqueeze(-1) - 1))


def _raise_to_top_p(threshold: torch.Tensor, probs: torch.Tensor, batch: SamplingBatch) -> None:
    """Raises thresholds to the smallest probability in the smallest set of likeliest tokens that reaches top_p."""
    nucleus = batch.top_p < 1.0
    # Where other filters came first few tokens are left, and they count as one.
    closed = (batch.min_p > 0.0) | (batch.top_k > 0)
    for few, chosen in ((True, nucleus & closed), (False, nucleus & ~closed)):
        rows = chosen.nonzero().squeeze(-1)
        if not len(rows):
            continue
        passed = _compact(probs[rows], threshold[rows]).weights.float() if few else probs[rows]
        threshold[rows] = torch.maximum(threshold[rows], _nucleus_edge(passed, batch.top_p[rows].unsqueeze(-1)))


def _nucleus_edge(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest weight [num_rows, 1] of the smallest set of largest weights that reaches top_p of their sum.

    Sorting a whole vocabulary would take longer than everything else here together. A histogram over the
    bits of float32 weights [num_rows, width] finds the bucket in which the sum crosses top_p, and only
    the few weights of that bucket are sorted; the result is exact. Few weights are sorted at once.
    """
    if weights.shape[-1] <= _MAX_SORTED:
        descending = weights.double().sort(dim=-1, descending=True).values
        return _last_kept(descending, 0.0, top_p * descending.cumsum(-1)[:, -1:])
    buckets = weights.view(torch.int32) >> 16
    mass = weights.new_zeros(len(top_p), _NUM_BUCKETS, dtype=torch.float64)
    from_top = mass.scatter_add_(-1, buckets.long(), weights.double()).flip(-1).cumsum(-1)
    target = top_p * from_top[:, -1:]
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


def _temper_last(candidates: Candidates, batch: SamplingBatch) -> Candidates:
    exponent = torch.where(batch.temperature_last, 1.0 / batch.temperature.double(), 1.0).unsqueeze(-1)
    relative = candidates.weights / candidates.weights.amax(dim=-1, keepdim=True)
    return Candidates(candidates.token_ids, relative**exponent)
