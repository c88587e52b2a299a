"""What a serving benchmark asks of the engine, and what came of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

MIN_REQUESTS = 4


class BenchmarkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """At each concurrency, that many requests are kept under way until `num_requests(concurrency)` are answered.

    Raises `ValueError` for a plan that measures nothing.
    """

    concurrency: tuple[int, ...] = (1, 4, 8)
    input_tokens: int = 512
    output_tokens: int = 64
    requests_per_stream: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.concurrency:
            raise ValueError("no concurrency is given: name at least one, such as 1")
        for name, value in (
            ("concurrency", min(self.concurrency)),
            ("input_tokens", self.input_tokens),
            ("output_tokens", self.output_tokens),
            ("requests_per_stream", self.requests_per_stream),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    def num_requests(self, concurrency: int) -> int:
        return max(MIN_REQUESTS, concurrency * self.requests_per_stream)

    @property
    def total_requests(self) -> int:
        """All requests, the one that warms up included."""
        return 1 + sum(self.num_requests(concurrency) for concurrency in self.concurrency)

    @property
    def context(self) -> int:
        """Tokens of one chat."""
        return self.input_tokens + self.output_tokens


def random_prompt(plan: BenchmarkPlan, number: int, vocab_size: int) -> list[int]:
    """Token ids that no other prompt begins with, so that no prefix is found in the cache."""
    # The ends of a vocabulary hold control tokens and padding.
    low, high = vocab_size // 8, max(vocab_size // 8 + 1, vocab_size - vocab_size // 8)
    generator = random.Random(f"{plan.seed} {number}")
    return [generator.randrange(low, high) for _ in range(plan.input_tokens)]


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its sender saw it; milliseconds. `tpot_ms` is None for fewer than two tokens."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    queue_ms: float | None = None
    output_tokens: int = 0
    error: str | None = None


class LevelResult(msgspec.Struct, frozen=True, kw_only=True):
    """One concurrency. Latencies are milliseconds at the sender, `queue` as the engine counts it; None without data.

    `kv_peak` is the largest share of the KV cache in use, `memory_peak` the most bytes the engine held.
    """

    concurrency: int
    requests: int
    errors: int
    seconds: float
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    queue_p50: float | None
    queue_p99: float | None
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    kv_peak: float | None
    memory_peak: int | None
    first_error: str | None = None
    cost_per_million_tokens: float | None = None


def summarise(
    plan: BenchmarkPlan,
    concurrency: int,
    results: Sequence[RequestResult],
    seconds: float,
    kv_peak: float | None,
    memory_peak: int | None,
    price_per_hour: float | None = None,
) -> LevelResult:
    """Adds up the requests of one level, which took `seconds` from the first sent to the last answered."""
    answered = [result for result in results if result.error is None]
    output_tokens = sum(result.output_tokens for result in answered)
    ttft = [result.ttft_ms for result in answered if result.ttft_ms is not None]
    tpot = [result.tpot_ms for result in answered if result.tpot_ms is not None]
    queue = [result.queue_ms for result in answered if result.queue_ms is not None]
    rate = output_tokens / seconds
    cost = price_per_hour / (rate * 3600) * 1e6 if price_per_hour is not None and rate > 0 else None
    return LevelResult(
        concurrency=concurrency,
        requests=len(results),
        errors=len(results) - len(answered),
        seconds=seconds,
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        tpot_p50=percentile(tpot, 50),
        tpot_p99=percentile(tpot, 99),
        queue_p50=percentile(queue, 50),
        queue_p99=percentile(queue, 99),
        output_tokens_per_s=rate,
        total_tokens_per_s=(output_tokens + plan.input_tokens * len(answered)) / seconds,
        requests_per_s=len(answered) / seconds,
        kv_peak=kv_peak,
        memory_peak=memory_peak,
        first_error=next((result.error for result in results if result.error is not None), None),
        cost_per_million_tokens=cost,
    )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which `percent` of the values lie, between neighbours by proportion; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
