"""One request's answer on its way from tokens to text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.protocol import FinishReason, RequestMetrics, TokenLogprob
from engine.request import Request
from engine.sampling.penalties import TokenCounts, uses_penalties
from engine.sampling.sampler import RawLogprobs, SamplingRow
from engine.text.detokenizer import Detokenizer
from engine.text.stops import StopChecker
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What is new about one request after a step. `metrics` is set when it finished, `error` when it failed.

    `text` may be empty while bytes or a possible stop string are held back.
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None


class Answer:
    """Turns a request's new tokens into text and watches for stop strings.

    No stop string is looked for in the tokens that `min_tokens` demands.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopChecker(request.params.stop)
        self._counts: TokenCounts | None = None
        if uses_penalties(request.params):
            self._counts = TokenCounts(request.num_prompt_tokens, request.params.penalty_window)
        self._ending_token_ids = tuple(request.end_token_ids | set(request.params.stop_token_ids))

    def sampling_row(self) -> SamplingRow:
        """What the request's next token is sampled with."""
        request = self.request
        if self._counts is not None:
            self._counts.advance(request.token_ids)
        may_end = request.num_output_tokens >= request.params.min_tokens
        return SamplingRow(
            request.params, request.seed, request.num_tokens, self._counts, () if may_end else self._ending_token_ids
        )

    def add(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """Takes in new tokens that are part of the request's already, token by token.

        Returns the text that may be shown and the stop string that is now complete, or None. A
        token that ended the request gives no text.
        """
        request = self.request
        num_before = request.num_output_tokens - len(token_ids)
        if request.finish_reason == "stop":
            token_ids = token_ids[:-1]
        shown = ""
        for index, token_id in enumerate(token_ids, start=num_before + 1):
            text = self._detokenizer.add([token_id])
            if index < request.params.min_tokens:
                shown += text
                continue
            passed, stop = self._stops.feed(text)
            shown += passed
            if stop is not None:
                return shown, stop
        return shown, None

    def flush(self) -> tuple[str, str | None]:
        """The held-back rest of an answer that no stop string ended, and a stop string it completes."""
        passed, stop = self._stops.feed(self._detokenizer.flush())
        return passed + self._stops.flush(), stop

    def describe(self, token_id: int, raw: RawLogprobs) -> TokenLogprob:
        return TokenLogprob(
            token_id=token_id,
            text=self._tokenizer.token_text(token_id),
            logprob=raw.chosen,
            top=[(other, self._tokenizer.token_text(other), value) for other, value in raw.top],
        )
