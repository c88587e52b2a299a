"""Verification of drafts: which of them the model itself would have said, and what it says next.

The output follows the model's own distribution exactly, whatever was drafted (Leviathan et al. 2023;
Chen et al. 2023): a draft d, drawn from q, is accepted with probability min(1, p(d) / q(d)), and the
first one refused is replaced by a draw from max(p - q, 0), normalised. p and q come from the same
function, in float32, with the penalties, bias, forbidden ends and filters of that position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from engine.sampling.filters import Candidates, draw
from engine.sampling.noise import Stream, uniform
from engine.sampling.sampler import RawLogprobs, SamplingRow, adjust, choose, keep_raw, mend, probabilities, report


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of one request in a step.

    `probs` float32 [num_drafts, vocab_size] is what each was drawn from, given those before it. None means
    that they were not drawn at all (q is one at the draft).
    """

    token_ids: Sequence[int] = ()
    probs: torch.Tensor | None = None


@dataclass(slots=True)
class Verified:
    """The new tokens of one request: its accepted drafts and the token that follows them.

    `token_ids` is None where a row of logits that was needed held no numbers to sample from. `logprobs` has
    an entry for each token, None where none was asked for.
    """

    token_ids: list[int] | None
    logprobs: list[RawLogprobs | None] = field(default_factory=list)


@torch.inference_mode()
def verify(
    logits: torch.Tensor, rows: Sequence[SamplingRow], drafts: Sequence[Drafts], vocab_size: int | None = None
) -> list[Verified]:
    """Verifies the drafts of all requests of a step, and samples for those without.

    Each request has, one after another, a row of float32 logits [num_rows, padded_vocab_size] for each of
    its drafts and one more; `rows` are to match. Changes `logits`. Ids from `vocab_size` on are never drawn.

    Drafts that were not drawn need no noise of their own: the token is drawn from p as without
    speculation, and the draft is accepted if it is this token. That happens with p(d), and any other token
    comes as from max(p - q, 0). So the very tokens are those of the same seed without speculation.
    """
    if not rows:
        return []
    logits = logits[:, :vocab_size]
    healthy = mend(logits)
    raw = keep_raw(logits, rows)
    adjust(logits, rows)
    chosen = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    first_rows = list(accumulate((len(each.token_ids) + 1 for each in drafts), initial=0))
    certain = [
        row
        for first, each in zip(first_rows, drafts)
        if each.probs is None
        for row in range(first, first + len(each.token_ids) + 1)
    ]
    if certain:
        every = len(certain) == len(rows)
        chosen[certain] = choose(logits if every else logits[certain], [rows[row] for row in certain])
    num_accepted = _accept_drawn(logits, rows, drafts, first_rows, chosen)
    token_ids = chosen.tolist()
    logprobs = report(raw, chosen, rows)

    results: list[Verified] = []
    for index, (first, each) in enumerate(zip(first_rows, drafts)):
        last = first + num_accepted.get(index, 0)
        if each.probs is None:
            for row, draft in enumerate(each.token_ids, start=first):
                if not healthy[row] or token_ids[row] != draft:
                    break
                last += 1
        if all(healthy[first : last + 1]):
            results.append(Verified(token_ids[first : last + 1], logprobs[first : last + 1]))
        else:
            results.append(Verified(None))
    return results


def _accept_drawn(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    drafts: Sequence[Drafts],
    first_rows: Sequence[int],
    chosen: torch.Tensor,
) -> dict[int, int]:
    """Decides about drafts that were drawn; returns how many were accepted, by index in `drafts`.

    Writes each accepted draft, and the token after the last of them, into `chosen` [num_rows].
    """
    own: list[int] = []
    drafted: list[int] = []
    q_parts: list[torch.Tensor] = []
    for first, each in zip(first_rows, drafts):
        if each.probs is not None:
            own += range(first, first + len(each.token_ids) + 1)
            # After the last draft comes a row of its own, for which nothing was drafted.
            drafted += [*each.token_ids, 0]
            q_parts.append(torch.nn.functional.pad(each.probs, (0, 0, 0, 1)))
    if not own:
        return {}
    p, q = probabilities(logits[own], [rows[row] for row in own]), torch.cat(q_parts)
    columns = torch.tensor(drafted, device=p.device).unsqueeze(-1)
    p_drafted, q_drafted = p.gather(-1, columns).squeeze(-1).tolist(), q.gather(-1, columns).squeeze(-1).tolist()

    num_accepted: dict[int, int] = {}
    finals: list[int] = []
    uniforms: list[float] = []
    start = 0
    for index, each in enumerate(drafts):
        if each.probs is None:
            continue
        final, end = start, start + len(each.token_ids)
        while final < end and _is_accepted(rows[own[final]], p_drafted[final], q_drafted[final]):
            chosen[own[final]] = drafted[final]
            final += 1
        num_accepted[index] = final - start
        finals.append(final)
        row = rows[own[final]]
        uniforms.append(uniform(row.seed, row.position, Stream.RESIDUAL if final < end else Stream.DRAW))
        start = end + 1
    chosen[[own[final] for final in finals]] = draw(Candidates(None, residual(p[finals], q[finals])), uniforms)
    return num_accepted


def _is_accepted(row: SamplingRow, p_drafted: float, q_drafted: float) -> bool:
    return uniform(row.seed, row.position, Stream.ACCEPT) * q_drafted < p_drafted


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Weights float64 [num_rows, vocab_size], proportional to max(p - q, 0): what replaces a refused draft.

    Where rounding leaves nothing of it, p and q are one distribution, and it is p.
    """
    rest = (p.double() - q.double()).clamp_(min=0.0)
    return torch.where(rest.sum(dim=-1, keepdim=True) > 0.0, rest, p.double())


@torch.inference_mode()
def draw_drafts(
    logits: torch.Tensor, rows: Sequence[SamplingRow], certain: Sequence[bool]
) -> tuple[list[int | None], torch.Tensor]:
    """A draft for each row of a draft model's float32 logits [num_rows, vocab_size], and the distributions
    [num_rows, vocab_size] they were drawn from. None where a row is no numbers to draw from. Changes `logits`.

    A `certain` row takes the token that the model itself would get with these logits: its own noise decides.
    The noise of the others has nothing to do with it, as `verify` demands of drafts with probabilities.
    """
    healthy = mend(logits)
    adjust(logits, rows)
    probs = probabilities(logits, rows)
    noise = [uniform(row.seed, row.position, Stream.DRAW if sure else Stream.DRAFT) for row, sure in zip(rows, certain)]
    token_ids = draw(Candidates(None, probs.double()), noise).tolist()
    return [token_id if ok else None for token_id, ok in zip(token_ids, healthy)], probs
