from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest
from PySide6.QtCore import QEventLoop, Qt, QTimer
from PySide6.QtGui import QColor
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.charts.card_deck import CardDeck
from app.charts.dashboard import DashboardPanel
from app.charts.figures import FigureRow
from app.theme import ThemeManager
from engine.protocol import (
    Distribution,
    EngineConfig,
    LoadFailed,
    LoadProgress,
    ModelLoaded,
    ModelUnloaded,
    WorkerDied,
)
from tests.app.telemetry_scene import STARTED, BusyEngine, telemetry

CPU_BUDGET = 0.05


@pytest.fixture
def engine() -> BusyEngine:
    return BusyEngine()


@pytest.fixture
def themes() -> ThemeManager:
    return ThemeManager("dark")


@pytest.fixture
def panel(qtbot: QtBot, engine: BusyEngine, themes: ThemeManager) -> DashboardPanel:
    panel = DashboardPanel(engine.state, themes, lambda owner: f"Chat {owner}")
    qtbot.addWidget(panel)
    panel.resize(1440, 190)
    return panel


def values(row: FigureRow) -> list[tuple[str, str]]:
    return [(figure.value, figure.meaning) for figure in row.figures]


def titles(panel: DashboardPanel) -> list[list[str]]:
    return [[page.title for page in deck.pages] for deck in panel.decks]


def test_every_figure_is_shown_with_its_unit_and_said_in_words(panel: DashboardPanel, engine: BusyEngine) -> None:
    panel.show()
    engine.source.emit(
        telemetry(
            running=3,
            waiting=2,
            decode_tokens_per_s=48.23,
            prefill_tokens_per_s=1234.0,
            ttft=Distribution(5, 84.2, 1402.0, 1500.0, 90.0),
            tpot=Distribution(5, 8.41, 12.0, 13.0, 9.0),
            kv_blocks_used=16,
            kv_blocks_total=64,
            prefix_hit_tokens=50,
            prefix_query_tokens=200,
            preemptions=1,
        )
    )
    panel.refresh()
    assert values(panel.memory.figure_row) == [("46.0 GiB", "of 80.0 GiB VRAM")]
    assert values(panel.kv.figure_row) == [("25 %", "of 64 blocks"), ("25 %", "prefix hits")]
    assert values(panel.ttft.figure_row) == [("84 ms", "p50"), ("1.4 s", "p95")]
    assert panel.ttft.note == "last 90 ms"
    assert values(panel.tpot.figure_row) == [("8.41 ms", "p50"), ("12 ms", "p95")]
    assert values(panel.throughput.figure_row) == [("48.2", "tok/s decode"), ("1,234", "tok/s prefill")]
    assert panel.throughput.note == "3 running · 2 waiting"
    assert panel.kv.note == "1 preemption"
    assert panel.ttft.accessibleDescription() == (
        "time to first token: median 84 ms, 95th percentile 1.4 s, last 90 ms."
    )
    assert "25 % of prompt tokens were found in the prefix cache" in panel.kv.accessibleDescription()
    assert "3 requests running, 2 waiting" in panel.throughput.accessibleDescription()


def test_a_long_step_is_told_from_figures_that_stand_still(panel: DashboardPanel, engine: BusyEngine) -> None:
    panel.show()
    engine.source.emit(telemetry(running=3))
    engine.clock.now += 7.0
    panel.refresh()
    assert panel.throughput.note == "3 running · in a step for 7 s"
    engine.source.emit(telemetry(running=0))
    engine.clock.now += 7.0
    panel.refresh()
    assert panel.throughput.note == "0 running · 0 waiting"


def test_a_model_that_has_not_answered_yet_says_so(panel: DashboardPanel, engine: BusyEngine) -> None:
    panel.show()
    engine.source.emit(telemetry())
    panel.refresh()
    assert panel.ttft.accessibleDescription() == "time to first token: no answers yet."
    assert values(panel.tpot.figure_row) == [("–", "p50"), ("–", "p95")]
    assert values(panel.kv.figure_row)[1] == ("–", "prefix hits")


def test_a_model_that_answered_long_ago_does_not_say_that_it_never_did(
    panel: DashboardPanel, engine: BusyEngine
) -> None:
    panel.show()
    engine.source.emit(telemetry(ttft=Distribution(1, 20.0, 20.0, 20.0, 20.0)))
    engine.clock.now += 400.0
    engine.source.emit(telemetry())
    panel.refresh()
    assert panel.ttft.accessibleDescription() == "time to first token: none in the last 5 minutes."
    assert panel.tpot.accessibleDescription() == "time per output token: none in the last 5 minutes."


def shown_words(panel: DashboardPanel) -> str:
    return " ".join(
        child.accessibleName() for child in panel.children() if isinstance(child, QWidget) and child.isVisible()
    )


def test_what_there_is_to_wait_for_is_said_in_words(panel: DashboardPanel, engine: BusyEngine) -> None:
    panel.show()
    assert "The model is loaded" in shown_words(panel)
    engine.source.emit(ModelUnloaded())
    assert "No model loaded" in shown_words(panel)
    engine.engine.load(EngineConfig(model="/models/other.gguf"))
    assert "Loading the model" in shown_words(panel)
    for event, words in (
        (LoadProgress("Reading weights", 50, 200), "Reading weights: 25 %"),
        (WorkerDied("killed", "", -9), "The engine is not running"),
        (STARTED, "No model loaded"),
    ):
        engine.source.emit(event)
        assert words in shown_words(panel)


def test_after_a_failed_load_the_model_before_is_not_shown_any_more(panel: DashboardPanel, engine: BusyEngine) -> None:
    panel.show()
    engine.source.emit(telemetry(running=3))
    assert shown_words(panel) == ""
    engine.engine.load(EngineConfig(model="/models/other.gguf"))
    engine.source.emit(LoadFailed("/models/other.gguf", "damaged"))
    assert "No model loaded" in shown_words(panel)


def test_charts_appear_with_the_first_telemetry_and_go_with_the_model(
    panel: DashboardPanel, engine: BusyEngine
) -> None:
    panel.show()
    assert not panel.memory.isVisible()
    engine.run(0.1)
    assert panel.memory.isVisible() and panel.throughput.isVisible()
    assert panel.memory.figure_row.figures, "the first figures do not wait for the timer"
    engine.source.emit(ModelUnloaded())
    assert not panel.memory.isVisible()


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (1440, [["Memory"], ["KV cache"], ["TTFT"], ["TPOT"], ["Throughput", "Steps"]]),
        (1024, [["Memory"], ["KV cache"], ["TTFT", "TPOT"], ["Throughput", "Steps"]]),
        (760, [["Memory", "KV cache"], ["TTFT", "TPOT"], ["Throughput", "Steps"]]),
        (600, [["Memory", "KV cache"], ["TTFT", "TPOT", "Throughput", "Steps"]]),
        (320, [["Memory", "KV cache", "TTFT", "TPOT", "Throughput", "Steps"]]),
    ],
)
def test_with_less_width_charts_share_a_column(
    panel: DashboardPanel, engine: BusyEngine, width: int, expected: list[list[str]]
) -> None:
    panel.show()
    engine.run(0.1)
    panel.resize(width, 190)
    assert titles(panel) == expected
    assert all(deck.current is not None and deck.current.isVisible() for deck in panel.decks)


def test_no_chart_is_lost_on_the_way_to_narrow_and_back(panel: DashboardPanel, engine: BusyEngine) -> None:
    panel.show()
    engine.run(0.1)
    wanted = sorted(page.title for page in panel.pages if page is not panel.drafts)
    for width in (320, 1440, 600, 1024, 760, 1440):
        panel.resize(width, 190)
        assert sorted(page.title for deck in panel.decks for page in deck.pages) == wanted
    assert [deck.current for deck in panel.decks] == [panel.memory, panel.kv, panel.ttft, panel.tpot, panel.throughput]


def test_drafts_have_a_chart_while_a_model_speculates(panel: DashboardPanel, engine: BusyEngine) -> None:
    panel.show()
    engine.run(0.1)
    assert titles(panel)[-1] == ["Throughput", "Steps"]
    plain = engine.state.engine.model
    assert plain is not None
    engine.source.emit(ModelUnloaded())
    engine.state.engine.load(EngineConfig(model="/models/fake.gguf", speculation="ngram"))
    engine.source.emit(ModelLoaded(msgspec.structs.replace(plain, speculation="ngram")))
    assert titles(panel)[-1] == ["Throughput", "Steps", "Drafts"]
    engine.source.emit(
        telemetry(
            drafted_tokens=300, accepted_tokens=150, drafted_by_position=[100, 100, 100],
            accepted_by_position=[80, 50, 20], speculation_note="paused: it lost time",
        )
    )  # fmt: skip
    panel.decks[-1].show_index(2)
    panel.refresh()
    assert values(panel.drafts.figure_row) == [("50 %", "accepted"), ("+1.5", "tokens a step")]
    assert panel.drafts.bars.shares == (0.8, 0.5, 0.2)
    assert panel.drafts.note == "paused: it lost time"
    assert "80 % at 1, 50 % at 2, 20 % at 3" in panel.drafts.accessibleDescription()
    for width in (320, 760, 1440):
        panel.resize(width, 190)
        assert any("Drafts" in deck for deck in titles(panel))
    assert panel.drafts.bars.grab().toImage().pixelColor(5, 60) == QColor(panel.drafts.theme.memory_draft)
    engine.source.emit(ModelUnloaded())
    engine.state.engine.load(EngineConfig(model="/models/fake.gguf"))
    engine.source.emit(ModelLoaded(plain))
    assert titles(panel)[-1] == ["Throughput", "Steps"]
    panel.set_theme(panel.memory.theme)  # the page that is not shown lives on


def test_the_chart_that_was_chosen_stays_in_sight_when_columns_change(
    panel: DashboardPanel, engine: BusyEngine
) -> None:
    panel.show()
    engine.run(0.1)
    panel.decks[-1].show_index(1)
    panel.resize(1024, 190)
    assert panel.decks[-1].current is panel.steps


def test_a_switch_is_worked_by_the_keyboard(panel: DashboardPanel, engine: BusyEngine) -> None:
    panel.show()
    engine.run(0.1)
    deck: CardDeck = panel.decks[-1]
    tab = next(child for child in deck.findChildren(QWidget) if child.accessibleName() == "Show Steps")
    assert tab.focusPolicy() & Qt.FocusPolicy.TabFocus
    QTest.keyClick(tab, Qt.Key.Key_Space)
    assert deck.current is panel.steps and panel.steps.isVisible()


def test_a_chart_just_chosen_shows_figures_at_once(panel: DashboardPanel, engine: BusyEngine) -> None:
    panel.show()
    engine.run(0.5)
    panel.decks[-1].show_index(1)
    assert panel.steps.figure_row.figures


def test_nothing_is_drawn_while_hidden(panel: DashboardPanel, engine: BusyEngine, qtbot: QtBot) -> None:
    assert not panel.is_drawing
    panel.show()
    qtbot.waitExposed(panel)
    engine.run(0.1)
    assert panel.is_drawing
    panel.hide()
    assert not panel.is_drawing
    before = panel.throughput.decode_plot.value_at(0.0)
    engine.run(1.0)
    QTest.qWait(150)
    assert panel.throughput.decode_plot.value_at(0.0) == before


def test_the_timer_brings_new_figures_by_itself(panel: DashboardPanel, engine: BusyEngine, qtbot: QtBot) -> None:
    panel.show()
    qtbot.waitExposed(panel)
    engine.run(0.1)
    engine.source.emit(telemetry(running=7, waiting=0))
    qtbot.waitUntil(lambda: panel.throughput.note == "7 running · 0 waiting", timeout=3000)


def test_the_theme_switches_live(panel: DashboardPanel, engine: BusyEngine, themes: ThemeManager) -> None:
    panel.show()
    engine.run(2.0)
    panel.refresh()
    for mode in ("light", "dark"):
        themes.set_mode(mode)
        image = panel.grab().toImage()
        surface = QColor(themes.theme.surface)
        for page in (panel.ttft, panel.tpot, panel.throughput, panel.kv, panel.memory):
            corner = page.mapTo(panel, page.rect().topRight())
            assert image.pixelColor(corner) == surface, page.title
        middle = panel.ttft.plot.mapTo(panel, panel.ttft.plot.plot_area.center())
        assert image.pixelColor(middle.x(), middle.y() + 7) == surface


def test_larger_text_makes_the_panel_higher(panel: DashboardPanel, themes: ThemeManager) -> None:
    before = panel.sizeHint().height()
    themes.set_font_size(18)
    assert panel.sizeHint().height() > 1.2 * before


def test_a_panel_of_no_size_at_all_breaks_nothing(panel: DashboardPanel, engine: BusyEngine) -> None:
    panel.show()
    engine.run(0.2)
    for index in (0, 1):
        panel.decks[-1].show_index(index)
        panel.setFixedSize(1440, 1)
        panel.refresh()
        panel.grab()
        panel.setFixedSize(1440, 190)


def test_the_dashboard_costs_little(
    panel: DashboardPanel, engine: BusyEngine, qtbot: QtBot, record_property: Callable[[str, object], None]
) -> None:
    """20 telemetries a second for 2 s, against the same with the panel hidden; the clock of the processor counts."""
    engine.run(60.0)
    prepared = iter([engine.next_telemetry() for _ in range(120)])

    def emit() -> None:
        engine.clock.now += 0.05
        engine.source.emit(next(prepared))

    timer = QTimer()
    timer.setInterval(50)
    timer.timeout.connect(emit)
    timer.start()

    def share_of_a_core(seconds: float) -> float:
        loop = QEventLoop()
        QTimer.singleShot(round(seconds * 1000), loop.quit)
        used, started = time.process_time(), time.monotonic()
        loop.exec()
        return (time.process_time() - used) / (time.monotonic() - started)

    hidden = share_of_a_core(1.0)
    panel.show()
    qtbot.waitExposed(panel)
    share_of_a_core(0.5)
    shown = share_of_a_core(2.0)
    timer.stop()
    cost = shown - hidden
    record_property("dashboard_cpu_share", cost)
    print(f"dashboard at 20 Hz: {100 * cost:.1f} % of one core (budget {100 * CPU_BUDGET:.0f} %)")  # noqa: T201
    assert cost <= 3 * CPU_BUDGET
