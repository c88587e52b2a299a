"""The benchmark's page on the fake engine: what it asks for, shows and keeps, and what disturbs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyqtgraph as pg
import pytest
from PySide6.QtCore import QPointF
from PySide6.QtGui import QGuiApplication, QImage
from PySide6.QtWidgets import QWidget

from app.benchmark.report import BenchmarkReport, as_json, as_text, rows
from app.charts.level_plot import LevelPlot
from app.charts.live_plot import Series
from app.panels.benchmark import BenchmarkDialog
from app.panels.benchmark_sheet import PICTURE_SCALE, PICTURE_WIDTH, picture
from app.state.benchmark import BenchmarkState
from app.theme import ThemeManager, load_theme
from engine.protocol import AnyCommand, Cancel, Generate
from tests.app.app_parts import AppParts, wait_until
from tests.app.window_parts import open_application

FAST: dict[str, Any] = {"tokens_per_second": 2000, "ttft_ms": 1, "repeat": 5}


class Page:
    """The dialog over the state half of the application; `sent` are the commands that reached the engine."""

    def __init__(self, parts: AppParts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts = parts
        self.sent: list[AnyCommand] = []
        send = parts.client.send

        def noting(command: AnyCommand) -> None:
            self.sent.append(command)
            send(command)

        monkeypatch.setattr(parts.client, "send", noting)
        self.state = BenchmarkState(parts.engine, parts.bridge, parts.workspace)
        self.themes = ThemeManager("light")
        self.dialog = BenchmarkDialog(self.state, self.themes)
        self.ask(levels="1, 2", output_tokens=4)
        self.dialog.show()

    def ask(self, levels: str, output_tokens: int, input_tokens: int = 16) -> None:
        self.dialog.concurrency.setText(levels)
        self.dialog.input_tokens.setValue(input_tokens)
        self.dialog.output_tokens.setValue(output_tokens)

    def start(self) -> None:
        self.dialog.refresh()
        self.dialog.start_button.click()
        assert self.state.is_running, self.dialog.error.text

    def run(self) -> BenchmarkReport:
        self.start()
        wait_until(lambda: not self.state.is_running)
        assert self.state.report is not None, self.state.failure
        return self.state.report

    @property
    def cells(self) -> list[list[str]]:
        table = self.dialog.sheet.table
        items = [[table.item(row, column) for column in range(table.columnCount())] for row in range(table.rowCount())]
        return [[item.text() if item is not None else "" for item in line] for line in items]


@pytest.fixture
def make_page(qtbot, make_parts, monkeypatch) -> Callable[..., Page]:
    def make(**script) -> Page:
        page = Page(make_parts(**(FAST | script)), monkeypatch)
        qtbot.addWidget(page.dialog)
        return page

    return make


def test_the_page_measures_the_loaded_model_and_shows_the_figures_of_the_report(make_page, tmp_path: Path) -> None:
    page = make_page()
    dialog = page.dialog
    assert "fake-135M" in dialog.question.text() and "9 requests of 16 random tokens" in dialog.intention.text()
    assert not dialog.copy_button.isEnabled() and not dialog.png_button.isEnabled()
    dialog.price.setValue(2.0)
    page.start()
    assert dialog.start_button.text() == "Stop" and not dialog.concurrency.isEnabled()
    wait_until(lambda: dialog.progress.value() >= 2)
    assert dialog.progress.isVisible() and dialog.progress.maximum() == 9
    assert "of 9 requests answered" in dialog.words.text()
    wait_until(lambda: not page.state.is_running)
    report = page.state.report
    assert report is not None and [level.requests for level in report.levels] == [4, 4]
    assert page.cells == rows(report) and len(page.cells[0]) == 12
    level = msgspec.structs.replace(report.levels[0], kv_peak=0.0043)
    assert rows(msgspec.structs.replace(report, levels=[level]))[0][8] == "0.4 %", "as the dashboard writes it"
    assert dialog.sheet.title.text() == "fake-135M"
    assert dialog.start_button.text() == "Start" and dialog.progress.isHidden() and dialog.note.isHidden()

    dialog.copy_button.click()
    assert QGuiApplication.clipboard().text() == as_text(report)
    dialog.save(tmp_path / "figures.json", as_json(report))
    assert msgspec.json.decode((tmp_path / "figures.json").read_bytes(), type=BenchmarkReport) == report
    assert str(tmp_path) in dialog.words.text()
    dialog.save(tmp_path / "missing" / "figures.json", b"")
    assert "cannot be written" in dialog.error.text


def test_a_second_run_sends_other_prompts_under_other_names(make_page) -> None:
    page = make_page()
    page.ask(levels="1", output_tokens=2)
    page.run()
    page.run()
    asked = [command for command in page.sent if isinstance(command, Generate)]
    assert len(asked) == 2 * 5
    assert len({command.request_id for command in asked}) == len(asked)
    assert len({tuple(command.token_ids or [])[:4] for command in asked}) == len(asked), "none is found in the cache"
    assert {command.owner for command in asked} == {"benchmark"}


def test_while_a_chat_is_answered_no_benchmark_starts(make_page) -> None:
    page = make_page(tokens_per_second=300)
    chat = page.parts.workspace.new_session()
    assert chat.send("A question")
    page.dialog.refresh()
    assert not page.dialog.start_button.isEnabled()
    assert "1 chat is being answered" in page.dialog.note.text()
    page.state.start(page.dialog.plan())
    assert not page.state.is_running and "would make the figures worse" in page.state.failure
    chat.stop()
    wait_until(lambda: page.dialog.start_button.isEnabled())
    page.run()
    assert not page.state.was_disturbed


def test_a_chat_meanwhile_is_answered_and_its_disturbance_is_told(make_page) -> None:
    page = make_page()
    page.ask(levels="2", output_tokens=60)
    page.start()
    chat = page.parts.workspace.new_session()
    assert page.parts.ask(chat, "A question")
    wait_until(lambda: not page.state.is_running)
    assert "A chat was answered while this was measured" in page.dialog.note.text()
    assert page.run() and "A chat was answered" not in page.dialog.note.text()


def test_stopping_keeps_complete_levels_and_cancels_the_rest(make_page) -> None:
    page = make_page()
    page.ask(levels="1, 8", output_tokens=40)
    page.start()
    wait_until(lambda: page.state.report is not None)
    page.dialog.start_button.click()
    assert not page.state.is_running and [cells[0] for cells in page.cells] == ["1"]
    assert "only complete levels" in page.dialog.note.text()
    assert sum(isinstance(command, Cancel) for command in page.sent) == 8
    chat = page.parts.workspace.new_session()
    assert page.parts.ask(chat, "And now?"), "chats go on"
    page.ask(levels="1", output_tokens=2)
    assert [level.errors for level in page.run().levels] == [0]


def test_closing_the_page_stops_the_benchmark_and_the_figures_are_there_when_it_is_opened_again(make_page) -> None:
    page = make_page()
    page.run()
    page.ask(levels="8", output_tokens=500)
    shown = page.cells
    page.dialog.close()
    page.dialog.show()
    assert page.cells == shown
    page.start()
    page.dialog.close()
    assert not page.state.is_running


def test_a_dying_engine_is_told_in_words_and_what_was_measured_stays(make_page) -> None:
    page = make_page(crash_at_delta=60, crash="segfault", tokens_per_second=100)
    page.ask(levels="1, 4", output_tokens=10)
    page.start()
    wait_until(lambda: page.parts.engine.status == "dead")
    assert not page.state.is_running
    assert page.dialog.error.isVisible() and page.dialog.error.text == page.parts.engine.failure
    assert [cells[0] for cells in page.cells] == ["1"]
    assert not page.dialog.start_button.isEnabled() and "Restart" in page.dialog.note.text()
    page.parts.engine.restart()
    wait_until(lambda: page.parts.engine.status == "ready", 20)
    page.ask(levels="1", output_tokens=2)
    page.run()
    assert not page.dialog.error.isVisible()


def test_unloading_the_model_ends_the_benchmark(make_page) -> None:
    page = make_page()
    page.ask(levels="1", output_tokens=500)
    page.start()
    page.parts.engine.unload()
    wait_until(lambda: not page.state.is_running)
    assert "unloaded" in page.dialog.error.text
    assert "No model is loaded" in page.dialog.note.text()


@pytest.mark.parametrize(("levels", "input_tokens", "words"), [("", 16, "whole numbers"), ("1", 9000, "context")])
def test_what_cannot_be_measured_is_refused_in_words(make_page, levels: str, input_tokens: int, words: str) -> None:
    page = make_page()
    page.ask(levels, 4, input_tokens)
    page.dialog.start_button.click()
    assert not page.state.is_running
    assert page.dialog.error.isVisible() and words in page.dialog.error.text
    assert "--" not in page.dialog.error.text, "there are no options of a command here"


def test_more_chats_than_the_model_was_loaded_for_is_told(make_page) -> None:
    page = make_page(max_num_seqs=1)
    page.ask(levels="2", output_tokens=2)
    page.run()
    assert "loaded for 1 answer at a time" in page.dialog.note.text()


def test_the_picture_holds_the_sheet_in_the_theme(make_page) -> None:
    page = make_page()
    page.ask(levels="1", output_tokens=2)
    report = page.run()
    page.themes.set_mode("dark")
    page.themes.apply()
    image = QImage.fromData(picture(report, page.themes.theme))
    assert image.width() > PICTURE_SCALE * PICTURE_WIDTH
    assert image.pixelColor(1, 1).name() == page.themes.theme.surface
    pixels = np.frombuffer(image.convertToFormat(QImage.Format.Format_RGB32).constBits(), np.uint32)
    accent = int(page.themes.theme.accent.removeprefix("#"), 16)
    assert ((pixels & 0xFFFFFF) == accent).any(), "the curves are drawn"


def test_curves_are_one_pixel_wide_and_keep_their_places_while_levels_come(qtbot) -> None:
    theme = load_theme("light")
    plot = LevelPlot((Series("p50", "accent"), Series("p99", "warning")), str, theme)
    qtbot.addWidget(plot)
    plot.resize(300, 200)
    plot.set_data([1, 4], [[10.0, None], [12.0, None]])
    x_range = plot._view.box.viewRange()[0]
    plot.set_data([1, 4], [[10.0, 20.0], [12.0, 30.0]])
    assert plot._view.box.viewRange()[0] == x_range
    assert plot._view.box.viewRange()[1][0] == 0 and plot._view.box.viewRange()[1][1] >= 30
    colours: list[str] = []
    for curve, heights in zip(plot._curves, ([10.0, 20.0], [12.0, 30.0]), strict=True):
        assert pg.mkPen(curve.opts["pen"]).width() == 1
        colours.append(pg.mkPen(curve.opts["pen"]).color().name())
        assert curve.yData is not None and curve.yData.tolist() == heights
    assert colours == [theme.accent, theme.warning], "as the legend has them"


def test_no_steep_line_passes_through_a_figure(qtbot) -> None:
    plot = LevelPlot((Series("p50", "accent"), Series("p99", "warning")), "{:.0f} ms".format, load_theme("light"))
    qtbot.addWidget(plot)
    plot.resize(340, 300)
    plot.set_data([1, 2, 4], [[300.0, 500.0, 800.0], [400.0, 600.0, 900.0]])
    plot.show()
    qtbot.waitExposed(plot)
    plot.grab()
    box = plot._view.box
    heights = np.interp(np.linspace(0, 2, 200), [0, 1, 2], [300.0, 500.0, 800.0])
    line = [box.mapViewToScene(QPointF(x, y)) for x, y in zip(np.linspace(0, 2, 200), heights, strict=True)]
    assert len(plot._words) == 3
    for words in plot._words:
        inside = words.sceneBoundingRect()
        assert box.sceneBoundingRect().right() + 4 >= inside.right(), "cut off"
        assert not any(inside.contains(point) for point in line), words.toPlainText()


def test_menu_and_palette_open_one_page_and_the_dashboard_names_its_requests(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path, **FAST) as application:
        window = application.window
        assert "Benchmark…" in [entry.title for entry in window.actions_.command_entries()]
        window.commands.run("engine.benchmark")
        window.commands.run("engine.benchmark")
        (dialog,) = (child for child in window.findChildren(QWidget) if isinstance(child, BenchmarkDialog))
        assert dialog.isVisible() and not dialog.isModal()
        assert window._owner_title("benchmark") == "Benchmark"
        dialog.concurrency.setText("1")
        dialog.output_tokens.setValue(2)
        dialog.start_button.click()
        wait_until(lambda: application.benchmark.report is not None)
        assert dialog.sheet.isVisible()
