from __future__ import annotations

import numpy as np
import pytest
from PySide6.QtCore import QPoint
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QToolTip
from pytestqt.qtbot import QtBot

from app.charts.axes import SHRINK_AFTER_SECONDS
from app.charts.step_timeline import BAR_PITCH, BAR_WIDTH, StepImage, StepsPage, StepTimeline
from app.theme import load_theme
from engine.protocol import StepEntry, StepRecord
from tests.app.telemetry_scene import BusyEngine, telemetry

DECODE_2, PREFILL_5, PREFILL_5_STRIPE, DRAFT_2 = 1 << 6 | 2, 1 << 6 | 5, 2 << 6 | 5, 2 << 6 | 2


def step(index: int, milliseconds: float, *entries: StepEntry) -> StepRecord:
    return StepRecord(index, 10.0, 10.0 + milliseconds / 1000, list(entries))


def test_a_bar_is_as_high_as_its_step_was_long_and_split_by_tokens() -> None:
    image = StepImage(columns=2, height=100, top_ms=100.0)
    image.show([step(0, 80.0, StepEntry("a", 2, 0, 20), StepEntry("b", 5, 60, 0))])
    assert (image.pixels[:, :BAR_PITCH] <= 1).all(), "the newest step is at the right"
    bar = image.pixels[::-1, BAR_PITCH : BAR_PITCH + BAR_WIDTH]
    assert (bar[0:20] == DECODE_2).all()
    assert (bar[20:80:2] == PREFILL_5).all() and (bar[21:80:2] == PREFILL_5_STRIPE).all()
    assert (bar[80:] <= 1).all()


def test_draft_tokens_are_dim_and_steps_without_tokens_leave_no_bar() -> None:
    image = StepImage(2, 10, 10.0)
    image.show([step(0, 10.0, StepEntry("a", 2, 0, 1, 1, 0)), step(1, 10.0)])
    assert (image.pixels[::-1][:5, :BAR_WIDTH] == (1 << 6 | 2)).all()
    assert (image.pixels[::-1][5:, :BAR_WIDTH] == DRAFT_2).all()
    assert (image.pixels[:, BAR_PITCH:] <= 1).all()


@pytest.mark.parametrize("chunks", [[1] * 30, [3, 0, 7, 20], [30], [11, 19]])
def test_moving_the_bars_gives_the_same_picture_as_painting_them_all(chunks: list[int]) -> None:
    steps = [step(i, 5.0 + i, StepEntry("a", i % 7, i % 3, 2)) for i in range(30)]
    moved = StepImage(10, 40, 40.0)
    seen = 0
    for chunk in chunks:
        seen += chunk
        moved.show(steps[:seen][-10:])
    whole = StepImage(10, 40, 40.0)
    whole.show(steps[-10:])
    assert np.array_equal(moved.pixels, whole.pixels)


def test_steps_of_another_model_replace_the_bars_whatever_their_numbers() -> None:
    image = StepImage(10, 40, 40.0)
    image.show([step(i, 20.0, StepEntry("a", 1, 0, 1)) for i in range(10)])
    later = [step(i, 30.0, StepEntry("b", 2, 0, 1)) for i in range(12)]
    image.show(later[-5:])
    fresh = StepImage(10, 40, 40.0)
    fresh.show(later[-5:])
    assert np.array_equal(image.pixels, fresh.pixels)


@pytest.fixture
def engine() -> BusyEngine:
    return BusyEngine()


@pytest.fixture
def timeline(qtbot: QtBot, engine: BusyEngine) -> StepTimeline:
    names = {"tab0": "Paged attention", "tab1": "Rust lifetimes"}
    timeline = StepTimeline(engine.state, load_theme("dark"), lambda owner: names.get(owner, ""))
    qtbot.addWidget(timeline)
    timeline.resize(300, 120)
    timeline.show()
    return timeline


def emit_step(engine: BusyEngine, record: StepRecord) -> None:
    engine.source.emit(telemetry(steps=[record], owners={0: "tab0", 1: "tab1"}))


def test_a_step_is_described_by_time_and_shares(timeline: StepTimeline, engine: BusyEngine) -> None:
    record = step(1234, 38.4, StepEntry("a", 0, 256, 0), StepEntry("b", 1, 0, 1, 4, 3), StepEntry("c", 9, 0, 2))
    emit_step(engine, record)
    assert timeline.describe_step(record).splitlines() == [
        "Step 1,234: 38 ms",
        "Paged attention: 256 prompt tokens",
        "Rust lifetimes: 1 new token, 3 of 4 drafts accepted",
        "a closed chat: 2 new tokens in a row",
    ]


@pytest.mark.parametrize(("tokens", "words"), [(1, "1 token per step"), (3, "3 tokens per step")])
def test_the_page_says_how_long_a_step_takes_and_what_it_computes(
    qtbot: QtBot, engine: BusyEngine, tokens: int, words: str
) -> None:
    page = StepsPage(engine.state, load_theme("dark"), str)
    qtbot.addWidget(page)
    emit_step(engine, step(0, 40.0, StepEntry("a", 0, 0, tokens)))
    page.refresh_figures()
    assert [f"{figure.value} {figure.meaning}" for figure in page.figure_row.figures] == ["40 ms per step", words]


def test_the_axis_shrinks_after_long_steps_are_out_of_sight_though_no_more_come(
    timeline: StepTimeline, engine: BusyEngine
) -> None:
    for index in range(400):
        emit_step(engine, step(index, 190.0 if index < 5 else 9.0, StepEntry("a", 0, 0, 1)))
        if index in (4, 399):
            timeline.refresh(float(index))
    assert timeline.range.top == 200.0
    timeline.refresh(399.0 + SHRINK_AFTER_SECONDS)
    assert timeline.range.top == 10.0


def test_the_picture_stands_still_under_the_mouse(timeline: StepTimeline, engine: BusyEngine) -> None:
    for index in range(5):
        emit_step(engine, step(index, 20.0, StepEntry("a", 0, 0, 1)))
    timeline.refresh(0.0)
    QTest.mouseMove(timeline, QPoint(timeline.width() - 4, 50))
    assert QToolTip.text().startswith("Step 4: 20 ms")
    emit_step(engine, step(5, 20.0, StepEntry("a", 0, 0, 1)))
    timeline.refresh(0.1)
    held = timeline.step_at(timeline.width() - 4)
    assert held is not None and held.index == 4
    QTest.mouseMove(timeline, QPoint(2, 2))
    timeline.refresh(0.2)
    newest = timeline.step_at(timeline.width() - 4)
    assert newest is not None and newest.index == 5


def test_the_scale_follows_the_longest_step_shown(timeline: StepTimeline, engine: BusyEngine) -> None:
    emit_step(engine, step(0, 35.0, StepEntry("a", 0, 0, 1)))
    timeline.refresh(0.0)
    assert timeline.range.top == 40.0
    emit_step(engine, step(1, 350.0, StepEntry("a", 0, 512, 0)))
    timeline.refresh(0.1)
    assert timeline.range.top == 400.0
    timeline.grab()


def test_steps_of_a_new_model_start_a_new_picture(timeline: StepTimeline, engine: BusyEngine) -> None:
    engine.run(1.0)
    timeline.refresh(0.0)
    assert timeline.step_at(timeline.width() - 4) is not None
    engine.state.steps.clear()
    engine.state.steps_version += 1
    timeline.refresh(0.1)
    assert timeline.step_at(timeline.width() - 4) is None
    emit_step(engine, step(0, 10.0, StepEntry("a", 0, 0, 1)))
    timeline.refresh(0.2)
    first = timeline.step_at(timeline.width() - 4)
    assert first is not None and first.index == 0
    timeline.grab()
