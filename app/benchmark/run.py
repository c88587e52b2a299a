"""Carries out a serving benchmark against an engine, whoever hands it the engine's events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from app.benchmark.plan import BenchmarkPlan, LevelResult, RequestResult, random_prompt, summarise
from engine.protocol import (
    AnyCommand,
    AnyEvent,
    Cancel,
    Delta,
    Finished,
    Generate,
    ModelInfo,
    SamplingParams,
    Telemetry,
)

OWNER = "benchmark"
_run_numbers = itertools.count(1)


class BenchmarkRun:
    """Sends the plan's requests and takes in what comes back, level after level; the first request only warms up.

    `send` gets the commands. Give every event to `take` soon after it arrives: latencies count until then.
    """

    def __init__(
        self,
        plan: BenchmarkPlan,
        info: ModelInfo,
        send: Callable[[AnyCommand], None],
        price_per_hour: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_fits(plan, info)
        self.plan = plan
        self.levels: list[LevelResult] = []
        self.num_answered = 0
        self.is_done = False
        self._vocab_size = info.vocab_size
        self._send = send
        self._price_per_hour = price_per_hour
        self._clock = clock
        self._params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=plan.output_tokens)
        # Requests of an earlier run on the same engine may still be on their way out.
        self._name = f"{OWNER}-{next(_run_numbers)}"
        self._num_sent = 0
        self._under_way: dict[str, _Watch] = {}
        self._level: _Level | None = None

    def start(self) -> None:
        """Sends the first requests."""
        self._begin(_Level(1, 1, self._clock(), is_warm_up=True))

    @property
    def concurrency(self) -> int:
        """Of the level that runs now; 0 before the first and after the last."""
        return self._level.concurrency if self._level else 0

    def take(self, event: AnyEvent) -> None:
        """Takes in one event; those of others are passed over."""
        if isinstance(event, Telemetry):
            if self._level is not None:
                self._level.watch(event)
        elif isinstance(event, Delta) and (watch := self._under_way.get(event.request_id)):
            watch.take(event, self._clock())
        elif isinstance(event, Finished) and event.request_id in self._under_way:
            self._finish(self._under_way.pop(event.request_id), event)

    def cancel(self) -> None:
        """Stops early; finished levels stay."""
        self.is_done = True
        self._level = None
        for request_id in self._under_way:
            self._send(Cancel(request_id=request_id))
        self._under_way.clear()

    def _finish(self, watch: _Watch, event: Finished) -> None:
        level = self._level
        assert level is not None
        self.num_answered += 1
        level.results.append(watch.result(event))
        if level.num_unsent:
            self._ask(level)
        elif not self._under_way:
            self._end(level)

    def _begin(self, level: _Level) -> None:
        self._level = level
        for _ in range(min(level.concurrency, level.num_unsent)):
            self._ask(level)

    def _ask(self, level: _Level) -> None:
        request_id = f"{self._name}-{self._num_sent}"
        prompt = random_prompt(self.plan, self._num_sent, self._vocab_size)
        self._num_sent += 1
        level.num_unsent -= 1
        self._under_way[request_id] = _Watch(self._clock())
        self._send(Generate(request_id=request_id, owner=OWNER, params=self._params, token_ids=prompt))

    def _end(self, level: _Level) -> None:
        now = self._clock()
        if not level.is_warm_up:
            self.levels.append(
                summarise(
                    self.plan,
                    level.concurrency,
                    level.results,
                    now - level.start,
                    level.kv_peak,
                    level.memory_peak,
                    self._price_per_hour,
                )
            )
        self._level = None
        if len(self.levels) < len(self.plan.concurrency):
            concurrency = self.plan.concurrency[len(self.levels)]
            self._begin(_Level(concurrency, self.plan.num_requests(concurrency), now))
        else:
            self.is_done = True


class _Level:
    """One concurrency under way."""

    def __init__(self, concurrency: int, num_requests: int, start: float, is_warm_up: bool = False) -> None:
        self.concurrency = concurrency
        self.num_unsent = num_requests
        self.start = start
        self.is_warm_up = is_warm_up
        self.results: list[RequestResult] = []
        self.kv_peak: float | None = None
        self.memory_peak: int | None = None

    def watch(self, telemetry: Telemetry) -> None:
        if telemetry.kv_blocks_total:
            self.kv_peak = max(self.kv_peak or 0.0, telemetry.kv_blocks_used / telemetry.kv_blocks_total)
        memory = telemetry.memory
        held = memory.weights + memory.kv_cache + memory.workspace + memory.runtime
        self.memory_peak = max(self.memory_peak or 0, held)


class _Watch:
    """When one request was sent and when its tokens came."""

    def __init__(self, sent: float) -> None:
        self._sent = sent
        self._first: float | None = None
        self._last = sent
        self._num_first = 0
        self._num_tokens = 0

    def take(self, delta: Delta, now: float) -> None:
        if not delta.token_ids:
            return
        self._num_tokens += len(delta.token_ids)
        self._last = now
        if self._first is None:
            self._first, self._num_first = now, len(delta.token_ids)

    def result(self, finished: Finished) -> RequestResult:
        if finished.finish_reason == "error":
            return RequestResult(error=finished.error or "the request failed without a reason")
        if self._first is None:
            return RequestResult(error=f"the answer ended without a token ({finished.finish_reason})")
        # Tokens that came in the first delta together took no time of their own that could be seen.
        later = self._num_tokens - self._num_first
        return RequestResult(
            ttft_ms=(self._first - self._sent) * 1e3,
            tpot_ms=(self._last - self._first) / later * 1e3 if later > 0 else None,
            queue_ms=finished.metrics.queue_ms if finished.metrics else None,
            output_tokens=self._num_tokens,
        )


def check_fits(plan: BenchmarkPlan, info: ModelInfo) -> None:
    """Raises `ValueError` for prompts and answers that the loaded model has no room for."""
    if plan.context > info.max_context:
        raise ValueError(
            f"{plan.input_tokens} input and {plan.output_tokens} output tokens are more than the context of "
            f"{info.name} ({info.max_context}): ask for fewer"
        )
    capacity = info.num_kv_blocks * info.block_size
    if plan.context > capacity:
        raise ValueError(
            f"{plan.input_tokens} input and {plan.output_tokens} output tokens do not fit the KV cache, which has "
            f"room for {capacity}: ask for fewer"
        )
