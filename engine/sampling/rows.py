"""How one request samples: what its next rows of logits are turned into tokens with."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import Request
from engine.sampling.penalties import TokenCounts, uses_penalties
from engine.sampling.sampler import SamplingRow


class RequestSampling:
    """Makes the sampling rows of one request, for its next token and for those after drafts.

    At each position the drafts before it count as output: penalties, `min_tokens` and noise are
    those that a token in this place would meet without speculation.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._counts: TokenCounts | None = None
        if uses_penalties(request.params):
            self._counts = TokenCounts(request.num_prompt_tokens, request.params.penalty_window)
        self._ending_token_ids = tuple(request.end_token_ids | set(request.params.stop_token_ids))

    def rows(self, drafts: Sequence[int] = ()) -> list[SamplingRow]:
        """One row for the next token and one for the token after each draft."""
        return [self.row(drafts[:count]) for count in range(len(drafts) + 1)]

    def row(self, drafts: Sequence[int] = ()) -> SamplingRow:
        """The row of the token that follows the request's tokens and `drafts`."""
        request, counts = self._request, self._counts
        if counts is not None:
            counts.advance(request.token_ids)
            if drafts:
                counts = counts.after(request.token_ids, drafts)
        may_end = request.num_output_tokens + len(drafts) >= request.params.min_tokens
        return SamplingRow(
            request.params,
            request.seed,
            request.num_tokens + len(drafts),
            counts,
            () if may_end else self._ending_token_ids,
        )
