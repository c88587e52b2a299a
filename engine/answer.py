"""One request's answer on its way from tokens to text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.protocol import FinishReason, RequestMetrics, TokenLogprob
from engine.request import Request
from engine.sampling.counts import CountTables
from engine.sampling.logprobs import RawLogprobs
from engine.sampling.rows import RequestSampling
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


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What a step added to an answer. `token_ids` are those that count, up to an end or a complete stop string."""

    token_ids: list[int]
    text: str = ""
    stop: str | None = None
    """The stop string that is now complete."""
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Answer:
    """Turns a request's new tokens into text and watches for stop strings.

    No stop string is looked for in the tokens that `min_tokens` demands.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, counts: CountTables) -> None:
        self.request = request
        self.sampling = RequestSampling(request, counts)
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopChecker(request.params.stop)

    def add(self, token_ids: Sequence[int], raw: Sequence[RawLogprobs | None]) -> AnswerPart:
        """Reads new tokens, token by token, before they become part of the request.

        What follows an end token or a complete stop string is left out; an end token gives no text.
        """
        num_before, shown, stop = self.request.num_output_tokens, "", None
        count = 0
        for count, token_id in enumerate(token_ids, start=1):
            if self.request.is_end(token_id):
                break
            text = self._detokenizer.add([token_id])
            if num_before + count < self.request.params.min_tokens:
                shown += text
                continue
            passed, stop = self._stops.feed(text)
            shown += passed
            if stop is not None:
                break
        kept = list(token_ids[:count])
        logprobs = [self._describe(token_id, each) for token_id, each in zip(kept, raw) if each is not None]
        return AnswerPart(kept, shown, stop, logprobs)

    def flush(self) -> tuple[str, str | None]:
        """The held-back rest of an answer that no stop string ended, and a stop string it completes."""
        passed, stop = self._stops.feed(self._detokenizer.flush())
        return passed + self._stops.flush(), stop

    def _describe(self, token_id: int, raw: RawLogprobs) -> TokenLogprob:
        return TokenLogprob(
            token_id=token_id,
            text=self._tokenizer.token_text(token_id),
            logprob=raw.chosen,
            top=[(other, self._tokenizer.token_text(other), value) for other, value in raw.top],
        )
