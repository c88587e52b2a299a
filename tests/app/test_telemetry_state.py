from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytestqt.qtbot import QtBot

from app.bridge import Bridge
from app.state import telemetry as columns
from app.state.engine_state import EngineState
from app.state.telemetry import NUM_STEPS_KEPT, TelemetryState
from engine.protocol import (
    BLOCK_ACTIVE,
    BLOCK_CACHED,
    BLOCK_SHARED,
    BlockMapUpdate,
    ChatMessage,
    Distribution,
    EngineConfig,
    Generate,
    LoadFailed,
    LoadProgress,
    ModelLoaded,
    ModelUnloaded,
    SamplingParams,
    StepEntry,
    StepRecord,
    WorkerDied,
    pack_block_state,
)
from tests.app.telemetry_scene import Clock, Source, block_update, engine_on, load_model, model_info, telemetry
from tests.fake_engine import fake_client


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(source: Source) -> EngineState:
    return engine_on(source)


@pytest.fixture
def state(source: Source, engine: EngineState, clock: Clock) -> TelemetryState:
    state = TelemetryState(source, engine, clock)
    load_model(source, engine)
    return state


changes = st.dictionaries(st.integers(0, 63), st.integers(0, 255), max_size=20)


@given(updates=st.lists(st.tuples(st.booleans(), changes), max_size=12))
def test_the_block_map_is_what_the_updates_say_one_after_the_other(updates: list) -> None:
    source = Source()
    engine = engine_on(source)
    state = TelemetryState(source, engine)
    load_model(source, engine)
    expected = np.zeros(64, dtype=np.uint8)
    for full, changed in updates:
        source.emit(telemetry(blocks=block_update(64, changed, full)))
        if full:
            expected[:] = 0
        for block, byte in changed.items():
            expected[block] = byte
        assert state.block_states.tolist() == expected.tolist()


def test_a_pool_of_another_size_starts_with_a_free_map(source: Source, state: TelemetryState) -> None:
    source.emit(telemetry(blocks=block_update(64, {3: 64})))
    source.emit(telemetry(blocks=block_update(100, {99: 64})))
    assert len(state.block_states) == 100
    assert np.flatnonzero(state.block_states).tolist() == [99]


@pytest.mark.parametrize(
    "broken",
    [
        BlockMapUpdate(64, False, block_update(64, {64: 1}).block_ids, b"\x01"),
        BlockMapUpdate(64, False, block_update(64, {1: 1}).block_ids, b"\x01\x02"),
    ],
)
def test_an_impossible_block_update_is_logged_and_left_out(
    source: Source, state: TelemetryState, broken: BlockMapUpdate, caplog: pytest.LogCaptureFixture
) -> None:
    source.emit(telemetry(blocks=block_update(64, {0: 64})))
    with caplog.at_level(logging.ERROR):
        source.emit(telemetry(blocks=broken, running=3))
    assert "block map update left out" in caplog.text
    assert np.flatnonzero(state.block_states).tolist() == [0]
    assert state.latest is not None and state.latest.running == 3


def test_the_map_has_a_new_version_only_when_a_block_changed(source: Source, state: TelemetryState) -> None:
    source.emit(telemetry(blocks=block_update(64, {0: 64}, full=True)))
    version = state.blocks_version
    source.emit(telemetry())
    assert state.blocks_version == version
    source.emit(telemetry(blocks=block_update(64, {1: 65})))
    assert state.blocks_version > version


def test_blocks_are_counted_by_kind(source: Source, state: TelemetryState) -> None:
    kinds = {0: BLOCK_ACTIVE, 1: BLOCK_ACTIVE, 2: BLOCK_SHARED, 3: BLOCK_CACHED}
    packed = {block: pack_block_state(kind, 5) for block, kind in kinds.items()}
    source.emit(telemetry(blocks=block_update(64, packed)))
    assert state.block_counts.tolist() == [60, 2, 1, 1]


def test_history_has_a_row_for_each_telemetry_at_its_arrival(
    source: Source, state: TelemetryState, clock: Clock
) -> None:
    source.emit(telemetry(decode_tokens_per_s=10.0))
    clock.now += 0.5
    source.emit(telemetry(decode_tokens_per_s=20.0, ttft=Distribution(1, 80.0, 90.0, 90.0, 80.0), running=2))
    assert state.history.column(columns.TIME).tolist() == [1000.0, 1000.5]
    assert state.history.column(columns.DECODE_RATE).tolist() == [10.0, 20.0]
    assert state.history.column(columns.RUNNING).tolist() == [0.0, 2.0]
    p50 = state.history.column(columns.TTFT_P50)
    assert np.isnan(p50[0]) and p50[1] == 80.0


def test_after_a_long_silence_the_figures_change_in_a_step_and_not_in_a_ramp(
    source: Source, state: TelemetryState, clock: Clock
) -> None:
    source.emit(telemetry(decode_tokens_per_s=10.0))
    clock.now += 8.0
    source.emit(telemetry(decode_tokens_per_s=40.0))
    assert state.history.column(columns.TIME).tolist() == pytest.approx([1000.0, 1008.0, 1008.0], abs=0.01)
    assert state.history.column(columns.DECODE_RATE).tolist() == [10.0, 10.0, 40.0]


def test_curve_rows_are_the_same_ones_from_one_picture_to_the_next(
    source: Source, state: TelemetryState, clock: Clock
) -> None:
    seen: set[float] = set()
    for number in range(1500):
        clock.now += 0.05
        source.emit(telemetry(decode_tokens_per_s=float(number)))
        rates = state.curve_rows()[columns.DECODE_RATE]
        assert rates[-1] == number
        assert all(rate % 4 == 0 for rate in rates[:-1])
        assert seen - set(rates) <= {number - 1.0} | {rate for rate in seen if rate < number - 1195}
        seen = set(rates)
    assert 300 <= len(seen) <= 302


def test_both_sides_of_a_silence_are_on_the_curve(source: Source, state: TelemetryState, clock: Clock) -> None:
    for pause in (0.05,) * 5 + (3.0,) + (0.05,) * 5:
        clock.now += pause
        source.emit(telemetry(decode_tokens_per_s=clock.now))
    rows = state.curve_rows()
    held = int(np.diff(rows[columns.TIME]).argmax())
    assert rows[columns.TIME, held + 1] - rows[columns.TIME, held] == pytest.approx(3.0, abs=0.01)
    assert rows[columns.DECODE_RATE, held + 1] == rows[columns.DECODE_RATE, held]


def test_the_latest_token_gap_is_kept_only_while_something_runs(source: Source, state: TelemetryState) -> None:
    source.emit(telemetry(tpot=Distribution(9, last=21.0), running=1))
    source.emit(telemetry(tpot=Distribution(9, last=21.0), running=0))
    assert state.history.column(columns.TPOT_LAST)[0] == 21.0
    assert np.isnan(state.history.column(columns.TPOT_LAST)[1])


def test_each_first_token_is_noted_once(source: Source, state: TelemetryState) -> None:
    for count, last in ((0, None), (1, 80.0), (1, 80.0), (2, 80.0), (3, 95.0), (2, 95.0), (2, 70.0)):
        source.emit(telemetry(ttft=Distribution(count, last=last)))
    assert state.first_tokens.column(1).tolist() == [80.0, 80.0, 95.0, 70.0]


def test_step_records_are_kept_in_order_and_bounded(source: Source, state: TelemetryState) -> None:
    number = 0
    for _ in range(3):
        steps = [StepRecord(number + i, 0.0, 0.01, [StepEntry("r", 0, 0, 1)]) for i in range(500)]
        number += 500
        source.emit(telemetry(steps=steps))
    assert [step.index for step in state.steps] == list(range(1500 - NUM_STEPS_KEPT, 1500))


def fill(source: Source, state: TelemetryState) -> None:
    step = StepRecord(0, 0.0, 0.01, [])
    source.emit(
        telemetry(steps=[step], ttft=Distribution(1, last=5.0), blocks=block_update(64, {0: 64}), owners={0: "a"})
    )
    assert not is_empty(state)


def is_empty(state: TelemetryState) -> bool:
    sizes = (len(state.history), len(state.first_tokens), len(state.steps), len(state.block_states))
    return sizes == (0, 0, 0, 0) and state.latest is None and state.owner_name(0) is None


OTHER = EngineConfig(model="/models/other.gguf")


def test_nothing_of_one_model_is_shown_for_the_next(source: Source, engine: EngineState, state: TelemetryState) -> None:
    fill(source, state)
    source.emit(ModelUnloaded())
    assert is_empty(state)


def test_a_model_that_takes_the_place_of_another_starts_empty_at_once(
    source: Source, engine: EngineState, state: TelemetryState
) -> None:
    fill(source, state)
    engine.load(OTHER)
    assert is_empty(state)
    source.emit(telemetry(running=1))
    assert is_empty(state), "the worker may still speak of the model before"
    source.emit(ModelLoaded(model_info()))
    fill(source, state)


def test_a_failed_load_leaves_no_figures_of_the_model_it_was_to_replace(
    source: Source, engine: EngineState, state: TelemetryState
) -> None:
    fill(source, state)
    engine.load(OTHER)
    source.emit(LoadProgress("Reading weights", 1, 2))
    source.emit(LoadFailed("/models/other.gguf", "no such file"))
    source.emit(telemetry(running=1))
    assert engine.status == "no_model"
    assert is_empty(state)


@pytest.mark.parametrize("how", ["death", "restart"])
def test_figures_go_with_the_worker(source: Source, engine: EngineState, state: TelemetryState, how: str) -> None:
    fill(source, state)
    if how == "death":
        source.emit(WorkerDied("killed", "", -9))
    else:
        engine.restart()
    assert is_empty(state)


def test_progress_of_loading_forgets_nothing_twice(source: Source, engine: EngineState, state: TelemetryState) -> None:
    version = state.blocks_version
    engine.changed.emit()
    assert state.blocks_version == version


def test_telemetry_without_a_model_is_ignored(source: Source, state: TelemetryState) -> None:
    source.emit(ModelUnloaded())
    source.emit(telemetry(running=1))
    assert state.latest is None


def test_a_real_worker_process_fills_the_state_through_the_bridge(qtbot: QtBot) -> None:
    client = fake_client(tokens_per_second=400.0, ttft_ms=5.0, repeat=20)
    bridge = Bridge(client)
    engine = EngineState(client, bridge)
    state = TelemetryState(bridge, engine)
    try:
        engine.start(EngineConfig(model="fake"))
        qtbot.waitUntil(lambda: engine.is_ready, timeout=10_000)
        message = ChatMessage("user", "word " * 200)
        bridge.send(Generate("r1", "tab-1", SamplingParams(max_tokens=2000), messages=[message]))
        qtbot.waitUntil(lambda: len(state.first_tokens) == 1 and state.block_counts[BLOCK_ACTIVE] > 3, timeout=10_000)
        assert state.latest is not None and "tab-1" in state.latest.owners.values()
        assert len(state.steps) > 0
        engine.unload()
        qtbot.waitUntil(lambda: engine.status == "no_model", timeout=10_000)
        assert len(state.block_states) == 0
    finally:
        bridge.stop()
        client.close()
