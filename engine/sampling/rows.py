"""How one request samples: what its next rows of logits are turned into tokens with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.parameters import SamplingParams
from engine.request import Request
from engine.sampling.counts import PENDING, CountedText, CountTables

GREEDY_TEMPERATURE = 1e-5
"""Below this the likeliest token is taken and no filter is looked at."""

PACKED = np.dtype(
    [
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("temperature_last", np.bool_),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
    ]
)


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_TEMPERATURE


def uses_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class RowSettings:
    """What all rows of a request have in common. `packed` holds its numbers, laid out as `PACKED`."""

    __slots__ = ("greedy", "has_filters", "packed", "params")

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.greedy = is_greedy(params)
        self.has_filters = not self.greedy and (params.top_p < 1.0 or params.min_p > 0.0 or params.top_k > 0)
        self.packed = np.array(
            (
                0.0 if self.greedy else params.temperature,
                params.min_p,
                params.top_k,
                params.top_p,
                params.temperature_last,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            ),
            dtype=PACKED,
        ).tobytes()


@dataclass(slots=True)
class SamplingRow:
    """What one row of logits is sampled with.

    `position` is the index, in prompt and output, of the token to be drawn. `text`, needed for penalties only,
    has the tokens before it but for the latest ones, which `following` holds: drafts, or `PENDING`.
    `forbidden_token_ids` are the ends that may not come yet (`min_tokens`).
    """

    settings: RowSettings
    seed: int
    position: int
    text: CountedText | None = None
    following: Sequence[int] = ()
    forbidden_token_ids: Sequence[int] = ()


class RequestSampling:
    """Makes the sampling rows of one request, for its next token and for those after drafts.

    At each position the drafts before it count as output: penalties, `min_tokens` and noise are
    those that a token in this place would meet without speculation.
    """

    def __init__(self, request: Request, tables: CountTables) -> None:
        self._request = request
        self._settings = RowSettings(request.params)
        self._text = CountedText(request, tables) if uses_penalties(request.params) else None
        self._ending_token_ids = tuple(request.end_token_ids | set(request.params.stop_token_ids))

    @property
    def needs_only_noise(self) -> bool:
        """Whether the next rows differ in their noise alone, and nobody wants to know more than their tokens."""
        params = self._request.params
        may_end = self._request.num_output_tokens >= params.min_tokens
        return self._text is None and may_end and not params.logit_bias and params.logprobs is None

    def rows(self, drafts: Sequence[int] = ()) -> list[SamplingRow]:
        """One row for the next token and one for the token after each draft."""
        return [self.row(drafts[:count]) for count in range(len(drafts) + 1)]

    def row(self, drafts: Sequence[int] = (), pending: int = 0) -> SamplingRow:
        """The row of the token that follows the request's tokens and `drafts`.

        With `pending` 1 and no drafts the latest token is still on the device and not among the request's.
        """
        following = (PENDING,) * pending if pending else drafts
        num_following = len(following)
        may_end = self._request.num_output_tokens + num_following >= self._request.params.min_tokens
        return SamplingRow(
            self._settings,
            self._request.seed,
            self._request.num_tokens + num_following,
            self._text,
            following,
            () if may_end else self._ending_token_ids,
        )

    def release(self) -> None:
        """Gives back what is held for the request, which is over."""
        if self._text is not None:
            self._text.release()
