"""What the engine measures about itself: latencies, rates and a record of every step."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from engine.owners import OwnerSlots
from engine.protocol import Distribution, MemoryBreakdown, RequestMetrics, StepEntry, StepRecord, Telemetry
from engine.request import Request
from engine.scheduler import Scheduler
from engine.telemetry import MAX_STEP_RECORDS, pack_block_update

BUCKET_BOUNDS_MS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000]
WINDOW_S = 300.0
MAX_SAMPLES = 4096
RATE_WINDOW_S = 1.0


class LatencyWindow:
    """The latencies of the last five minutes, at most `MAX_SAMPLES` of them, in milliseconds.

    They are kept in order of size, because the engine looks at their distribution many times a second.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()
        self._ascending: list[float] = []

    def add(self, now: float, milliseconds: float) -> None:
        if len(self._samples) == MAX_SAMPLES:
            self._drop_oldest()
        self._samples.append((now, milliseconds))
        insort(self._ascending, milliseconds)

    def _drop_oldest(self) -> None:
        _, milliseconds = self._samples.popleft()
        del self._ascending[bisect_left(self._ascending, milliseconds)]

    def distribution(self, now: float) -> Distribution:
        """Percentiles by the nearest rank; bucket i counts values up to its bound, the last those beyond all."""
        while self._samples and self._samples[0][0] < now - WINDOW_S:
            self._drop_oldest()
        if not self._samples:
            return Distribution(count=0)
        values = self._ascending
        counts = [0] * (len(BUCKET_BOUNDS_MS) + 1)
        below = 0
        for index, bound in enumerate(BUCKET_BOUNDS_MS):
            up_to = bisect_right(values, bound)
            counts[index] = up_to - below
            below = up_to
        counts[-1] = len(values) - below
        return Distribution(
            count=len(values),
            p50=percentile(values, 0.50),
            p95=percentile(values, 0.95),
            p99=percentile(values, 0.99),
            last=self._samples[-1][1],
            bucket_bounds_ms=[float(bound) for bound in BUCKET_BOUNDS_MS],
            bucket_counts=counts,
        )


def percentile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]


class Metrics:
    """Latency windows, step records and totals since the model was loaded. Times are monotonic seconds.

    `tpot` takes every gap between two tokens of a request, so it moves while answers stream;
    a request's own mean is in its `RequestMetrics`.
    """

    def __init__(self) -> None:
        self.ttft = LatencyWindow()
        self.tpot = LatencyWindow()
        self.queue = LatencyWindow()
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_finished = 0
        self.drafted_by_position: list[int] = []
        self.accepted_by_position: list[int] = []
        self._records: deque[StepRecord] = deque(maxlen=MAX_STEP_RECORDS)
        self._num_reported = 0

    def scheduled(self, request: Request, now: float) -> None:
        """Notes that a request is about to be computed for the first time."""
        request.scheduled_time = now
        self.queue.add(now, (now - request.arrival_time) * 1e3)

    def tokens_made(self, request: Request, count: int, now: float) -> None:
        """Notes that a request has got `count` new tokens."""
        if request.first_token_time is None:
            request.first_token_time = now
            self.ttft.add(now, (now - request.arrival_time) * 1e3)
        elif request.last_token_time is not None:
            gap = (now - request.last_token_time) * 1e3 / count
            for _ in range(count):
                self.tpot.add(now, gap)
        request.last_token_time = now

    def step_done(self, start: float, end: float, entries: list[StepEntry], num_preempted: int) -> None:
        self._records.append(StepRecord(self.num_steps, start, end, entries, num_preempted))
        self.num_steps += 1
        self.num_prefill_tokens += sum(entry.prefill_tokens for entry in entries)
        self.num_decode_tokens += sum(_decoded(entry) for entry in entries)
        for entry in entries:
            _count_positions(self.drafted_by_position, entry.draft_tokens)
            _count_positions(self.accepted_by_position, entry.accepted_tokens)

    def take_step_records(self) -> list[StepRecord]:
        """The step records since the last call, the oldest dropped if there were too many."""
        count = min(self.num_steps - self._num_reported, len(self._records))
        self._num_reported = self.num_steps
        return list(islice(reversed(self._records), count))[::-1]

    def rates(self, now: float) -> tuple[float, float]:
        """Prefill and decode tokens per second over the last second."""
        prefill = decode = 0.0
        for share, record in self._last_second(now):
            prefill += share * sum(entry.prefill_tokens for entry in record.entries)
            decode += share * sum(_decoded(entry) for entry in record.entries)
        return prefill / RATE_WINDOW_S, decode / RATE_WINDOW_S

    def request_rates(self, running: Iterable[Request], now: float) -> dict[str, float]:
        """Decode tokens per second of each running request over the last second."""
        rates = {request.request_id: 0.0 for request in running}
        for share, record in self._last_second(now):
            for entry in record.entries:
                if entry.request_id in rates:
                    rates[entry.request_id] += share * _decoded(entry) / RATE_WINDOW_S
        return rates

    def _last_second(self, now: float) -> Iterable[tuple[float, StepRecord]]:
        """Steps that reach into the last second, each with the share of it that lies there.

        Without shares a step longer than the window would count in full or not at all.
        """
        since = now - RATE_WINDOW_S
        for record in reversed(self._records):
            if record.end <= since:
                return
            duration = record.end - record.start
            yield (min(1.0, (record.end - since) / duration) if duration > 0 else 1.0), record


def _decoded(entry: StepEntry) -> int:
    """Tokens of the answer that decoding yielded."""
    return entry.decode_tokens + entry.accepted_tokens


def _count_positions(counts: list[int], num_drafts: int) -> None:
    counts.extend([0] * (num_drafts - len(counts)))
    for position in range(num_drafts):
        counts[position] += 1


def request_metrics(request: Request) -> RequestMetrics:
    """A request's own figures, at its end."""
    first, last = request.first_token_time, request.last_token_time
    gaps = request.num_output_tokens - 1
    started = request.scheduled_time if request.scheduled_time is not None else last
    return RequestMetrics(
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        output_tokens=request.num_output_tokens,
        queue_ms=max(0.0, ((started or request.arrival_time) - request.arrival_time) * 1e3),
        ttft_ms=None if first is None else (first - request.arrival_time) * 1e3,
        tpot_ms=(last - first) * 1e3 / gaps if first is not None and last is not None and gaps > 0 else None,
        preemptions=request.num_preemptions,
        drafted_tokens=request.num_drafted_tokens,
        accepted_tokens=request.num_accepted_tokens,
    )


def collect_telemetry(
    scheduler: Scheduler,
    metrics: Metrics,
    owners: OwnerSlots,
    memory: MemoryBreakdown,
    full_map: bool,
    speculation_note: str = "",
) -> Telemetry:
    """Takes changes and step records since the last call; with `full_map` the block map starts anew."""
    now = time.monotonic()
    pool = scheduler.pool
    block_ids, states = pool.take_changes()
    changes = dict(zip(block_ids, states))
    if full_map:
        changes = {block_id: state for block_id, state in enumerate(pool.all_states()) if state}
    prefill_rate, decode_rate = metrics.rates(now)
    return Telemetry(
        timestamp=time.time(),
        memory=memory,
        blocks=pack_block_update(pool.num_blocks, full_map, changes),
        owners=owners.owners,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        prefill_tokens_per_s=prefill_rate,
        decode_tokens_per_s=decode_rate,
        ttft=metrics.ttft.distribution(now),
        tpot=metrics.tpot.distribution(now),
        queue=metrics.queue.distribution(now),
        kv_blocks_used=pool.num_used,
        kv_blocks_cached=pool.num_cached,
        kv_blocks_total=pool.num_blocks,
        prefix_hit_tokens=scheduler.prefix_hit_tokens,
        prefix_query_tokens=scheduler.prefix_query_tokens,
        preemptions=scheduler.num_preemptions,
        steps=metrics.take_step_records(),
        request_rates=metrics.request_rates(scheduler.running, now),
        drafted_tokens=sum(metrics.drafted_by_position),
        accepted_tokens=sum(metrics.accepted_by_position),
        drafted_by_position=list(metrics.drafted_by_position),
        accepted_by_position=list(metrics.accepted_by_position),
        speculation_note=speculation_note,
    )
