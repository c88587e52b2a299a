"""Figures say what happened, over the time they claim to cover."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine.metrics import BUCKET_BOUNDS_MS, MAX_SAMPLES, WINDOW_S, LatencyWindow, Metrics, request_metrics
from engine.owners import OwnerSlots
from engine.protocol import NUM_OWNER_SLOTS, StepEntry
from engine.request import Request


def entry(request_id: str, prefill: int = 0, decode: int = 0) -> StepEntry:
    return StepEntry(request_id=request_id, owner_slot=1, prefill_tokens=prefill, decode_tokens=decode)


def test_percentiles_are_nearest_ranks_and_buckets_count_everything():
    window = LatencyWindow()
    values = np.random.default_rng(0).lognormal(4, 2, 1000)
    for value in values:
        window.add(0.0, float(value))
    result = window.distribution(1.0)
    for share, value in ((0.5, result.p50), (0.95, result.p95), (0.99, result.p99)):
        assert value == np.quantile(values, share, method="inverted_cdf")
    assert result.last == values[-1]
    edges = [-np.inf, *BUCKET_BOUNDS_MS, np.inf]
    assert result.bucket_counts == [
        int(((values > low) & (values <= high)).sum()) for low, high in itertools.pairwise(edges)
    ]
    assert sum(result.bucket_counts) == result.count == 1000


def test_an_empty_window_has_no_percentiles_and_old_latencies_leave_it():
    window = LatencyWindow()
    assert window.distribution(0.0).p50 is None
    window.add(0.0, 500.0)
    window.add(WINDOW_S, 5.0)
    assert window.distribution(WINDOW_S + 1).p99 == 5.0
    assert window.distribution(3 * WINDOW_S).count == 0


def test_a_full_window_forgets_its_oldest_and_keeps_its_figures_right():
    window = LatencyWindow()
    values = np.random.default_rng(1).integers(0, 50, MAX_SAMPLES + 300).astype(float)
    for index, value in enumerate(values):
        window.add(index * 0.01, value)
    kept = values[-MAX_SAMPLES:]
    result = window.distribution(40.0)
    assert result.count == MAX_SAMPLES and sum(result.bucket_counts) == MAX_SAMPLES
    assert (result.p50, result.p99) == tuple(np.quantile(kept, [0.5, 0.99], method="inverted_cdf"))
    left = kept[-100:]
    later = window.distribution((len(values) - 100) * 0.01 + WINDOW_S)
    assert later.count == 100 and later.p95 == np.quantile(left, 0.95, method="inverted_cdf")


def test_rates_cover_the_last_second():
    metrics = Metrics()
    for step in range(40):  # 20 steps a second
        metrics.step_done(step * 0.05, step * 0.05 + 0.05, [entry("a", decode=1), entry("b", prefill=10)], 0)
    prefill, decode = metrics.rates(2.0)
    assert (prefill, decode) == (pytest.approx(200), pytest.approx(20))
    assert metrics.rates(2.5)[1] == pytest.approx(10)
    assert metrics.rates(10.0) == (0, 0)
    assert metrics.request_rates([Request("a", [1])], 2.0) == {"a": pytest.approx(20)}


def test_a_step_longer_than_the_window_counts_by_its_share():
    metrics = Metrics()
    metrics.step_done(0.0, 4.0, [entry("a", prefill=400)], 0)
    assert metrics.rates(4.0)[0] == pytest.approx(100)
    assert metrics.rates(4.5)[0] == pytest.approx(50)


def test_step_records_are_handed_out_once_and_in_order():
    metrics = Metrics()
    for step in range(3):
        metrics.step_done(step, step + 1, [entry("a", decode=1)], num_preempted=step)
    assert [record.index for record in metrics.take_step_records()] == [0, 1, 2]
    assert metrics.take_step_records() == []
    metrics.step_done(3, 4, [], 0)
    assert [record.index for record in metrics.take_step_records()] == [3]


def test_a_request_knows_its_own_latencies():
    metrics = Metrics()
    request = Request("a", [1, 2, 3], arrival_time=10.0)
    metrics.scheduled(request, 10.5)
    for token, now in ((7, 11.0), (8, 11.1), (9, 11.4)):
        request.token_ids.append(token)
        metrics.tokens_made(request, 1, now)
    own = request_metrics(request)
    assert (own.prompt_tokens, own.output_tokens) == (3, 3)
    assert (own.queue_ms, own.ttft_ms, own.tpot_ms) == (
        pytest.approx(500),
        pytest.approx(1000),
        pytest.approx(200),
    )
    gaps = metrics.tpot.distribution(12.0)
    assert gaps.count == 2 and gaps.p50 == pytest.approx(100) and gaps.last == pytest.approx(300)


def test_a_request_cancelled_while_waiting_has_no_token_times():
    own = request_metrics(Request("a", [1], arrival_time=5.0))
    assert own.ttft_ms is None and own.tpot_ms is None and own.queue_ms == 0.0


def test_owners_keep_their_slots_until_the_slots_run_out():
    slots = OwnerSlots()
    assert slots.enter("") == (0, None)
    first, _ = slots.enter("first")
    assert slots.enter("first") == (first, None)
    assert slots.owners == {first: "first"}
    for index in range(NUM_OWNER_SLOTS - 2):
        slots.enter(f"tab {index}")
        slots.leave(f"tab {index}")
    assert len(set(slots.owners)) == NUM_OWNER_SLOTS - 1 and 0 not in slots.owners
    # "first" still has requests; the one idle longest gives way.
    slot, vacated = slots.enter("new")
    assert slot == vacated and slots.owners[slot] == "new"
    assert "tab 0" not in slots.owners.values() and "first" in slots.owners.values()


def test_when_every_owner_is_busy_a_new_one_shares_the_slot_of_none():
    slots = OwnerSlots()
    for index in range(NUM_OWNER_SLOTS - 1):
        slots.enter(f"tab {index}")
    assert slots.enter("one too many") == (0, None)
    slots.leave("one too many")
    slots.leave("tab 3")
    assert slots.enter("next")[0] == slots.enter("next")[0] != 0
