"""Decides which drafts are what the model itself would have said, and what it says next.

The output follows the model's own distribution exactly, whatever was drafted (Leviathan et al. 2023;
Chen et al. 2023): a draft d, drawn from q, is accepted with probability min(1, p(d) / q(d)), and the
first one refused is replaced by a draw from max(p - q, 0), normalised. p and q come from the same
function, in float32, with the penalties, bias, forbidden ends and filters of that position.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from engine.sampling.batch import feed_forward, make_batch, noise
from engine.sampling.logprobs import LogprobReport, RawLogprobs
from engine.sampling.noise import Stream
from engine.sampling.rows import SamplingRow
from engine.sampling.transfer import Download, upload
from kernels import ops


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


class Verification:
    """What becomes of the rows of a step; on a GPU it is still on its way until `result` was called.

    `token_ids` int64 [num_rows] on the device has the token of each row, 0 where the row was no numbers.
    """

    def __init__(
        self,
        drafts: Sequence[Drafts],
        token_ids: torch.Tensor,
        healthy: torch.Tensor,
        accepted: torch.Tensor | None,
        report: LogprobReport,
    ) -> None:
        self.token_ids = token_ids
        self._drafts = drafts
        self._report = report
        report.choose(token_ids)
        self._copies = Download(token_ids, healthy, *(() if accepted is None else (accepted,)))

    def result(self) -> list[Verified]:
        """The new tokens of each request, in order. Waits for the device."""
        token_ids, healthy, *accepted = (tensor.tolist() for tensor in self._copies.wait())
        logprobs = self._report.result()
        results: list[Verified] = []
        first = 0
        for each in self._drafts:
            last = first
            for row, draft in enumerate(each.token_ids, start=first):
                # What was not drawn is accepted if it is the token drawn now.
                if not healthy[row] or not (token_ids[row] == draft if each.probs is None else accepted[0][row]):
                    break
                last += 1
            if healthy[last]:
                results.append(Verified(token_ids[first : last + 1], logprobs[first : last + 1]))
            else:
                results.append(Verified(None))
            first += len(each.token_ids) + 1
        return results


def verify(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    drafts: Sequence[Drafts],
    vocab_size: int | None = None,
    pending: torch.Tensor | None = None,
    sources: Sequence[int] = (),
) -> Verification:
    """Verifies the drafts of all requests of a step, and samples for those without, without waiting for the device.

    Each request has, one after another, a row of float32 logits [num_rows, padded_vocab_size] for each of
    its drafts and one more; `rows` are to match. May change `logits`. Ids from `vocab_size` on are never drawn.
    A row with a pending token finds it in `pending`, the `token_ids` of the step before, where `sources` says,
    a number for each row, -1 where nothing is pending.

    Drafts that were not drawn need no noise of their own: the token is drawn from p as without
    speculation, and the draft is accepted if it is this token. That happens with p(d), and any other token
    comes as from max(p - q, 0). So the very tokens are those of the same seed without speculation.
    """
    # To enter the mode takes longer than a greedy draw, and the native kernels' logits do not ask for it.
    with torch.inference_mode() if logits.is_inference() else nullcontext():
        return _verify(logits, rows, drafts, vocab_size, pending, sources)


def _verify(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    drafts: Sequence[Drafts],
    vocab_size: int | None,
    pending: torch.Tensor | None,
    sources: Sequence[int],
) -> Verification:
    logits = _in_rows(logits if vocab_size is None or vocab_size >= logits.shape[1] else logits[:, :vocab_size])
    report = LogprobReport(logits, rows)
    if not rows:
        none = torch.empty(0, dtype=torch.int64, device=logits.device)
        return Verification((), none, none.bool(), None, report)
    drawn = _drawn(drafts)
    batch = make_batch(logits, rows, [Stream.RESIDUAL if row in drawn else Stream.DRAW for row in range(len(rows))])
    if pending is not None and batch.penalties is not None:
        feed_forward(batch, pending, upload({"sources": np.array(sources, dtype=np.int64)}, logits.device)["sources"])
    ops.adjust_logits(logits, batch)
    if not drawn:
        return Verification(drafts, *ops.sample(logits, batch), None, report)

    draft_ids = np.full(len(rows), -1, dtype=np.int64)
    draft_ids[list(drawn)] = list(drawn.values())
    sent = upload({"ids": draft_ids, "uniforms": noise(rows, [Stream.ACCEPT] * len(rows))}, logits.device)
    accepted, token_ids, healthy = ops.verify_drafts(
        logits, batch, sent["ids"], _draft_probs(logits, drafts), sent["uniforms"]
    )
    return Verification(drafts, torch.where(accepted, sent["ids"], token_ids), healthy, accepted, report)


def _in_rows(logits: torch.Tensor) -> torch.Tensor:
    """Logits of which each row lies in one piece, as the operations demand; a matmul may have made their transpose."""
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _drawn(drafts: Sequence[Drafts]) -> dict[int, int]:
    """The draft of each row for which one was drawn."""
    if all(each.probs is None for each in drafts):
        return {}
    first_rows = accumulate((len(each.token_ids) + 1 for each in drafts), initial=0)
    return {
        row: draft
        for first, each in zip(first_rows, drafts)
        if each.probs is not None
        for row, draft in enumerate(each.token_ids, start=first)
    }


def _draft_probs(logits: torch.Tensor, drafts: Sequence[Drafts]) -> torch.Tensor:
    """What the drafts of each row were drawn from, [num_rows, vocab_size]; nothing is written in other rows."""
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    first = 0
    for each in drafts:
        if each.probs is not None:
            probs[first : first + len(each.token_ids)] = each.probs
        first += len(each.token_ids) + 1
    return probs


@torch.inference_mode()
def draw_drafts(
    logits: torch.Tensor, rows: Sequence[SamplingRow], certain: Sequence[bool]
) -> tuple[list[int | None], torch.Tensor | None]:
    """A draft for each row of a draft model's float32 logits [num_rows, vocab_size], and the distributions
    [num_rows, vocab_size] they were drawn from. None where a row is no numbers to draw from. May change `logits`.

    A `certain` row takes the token that the model itself would get with these logits: its own noise decides.
    The noise of the others has nothing to do with it, as `verify` demands of drafts with probabilities. Where all
    are certain, nobody asks for distributions, and there are none.
    """
    logits = _in_rows(logits)
    batch = make_batch(logits, rows, [Stream.DRAW if sure else Stream.DRAFT for sure in certain])
    ops.adjust_logits(logits, batch)
    probs = None if all(certain) else torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    token_ids, healthy = (each.tolist() for each in Download(*ops.sample(logits, batch, probs)).wait())
    return [token_id if ok else None for token_id, ok in zip(token_ids, healthy)], probs
