from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import QPoint
from PySide6.QtGui import QColor, QImage
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QToolTip
from pytestqt.qtbot import QtBot

from app.charts.axes import SHRINK_AFTER_SECONDS, CalmRange, nice_ceiling
from app.charts.live_plot import LivePlot, Series
from app.theme import load_theme
from app.units import format_ms


@given(value=st.floats(1e-6, 1e9))
def test_the_top_of_an_axis_is_a_round_number_not_far_above(value: float) -> None:
    top = nice_ceiling(value)
    assert value * (1 - 1e-6) <= top <= 2.01 * value
    first_digit = top / 10 ** np.floor(np.log10(top) + 1e-9)
    assert round(first_digit, 6) in (1, 2, 4, 6, 8)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_peak_that_is_no_height_gives_a_plain_axis(value: float) -> None:
    assert nice_ceiling(value) == 1.0


def test_the_range_grows_at_once_and_shrinks_only_after_a_while() -> None:
    calm = CalmRange(10.0)
    assert calm.update(150, now=0.0) and calm.top == 200
    assert not calm.update(30, now=1.0) and calm.top == 200
    assert not calm.update(30, now=1.0 + SHRINK_AFTER_SECONDS - 0.1)
    assert calm.update(30, now=1.0 + SHRINK_AFTER_SECONDS) and calm.top == 40


def test_a_range_does_not_follow_noise() -> None:
    calm = CalmRange(10.0)
    calm.update(150, now=0.0)
    noise = np.random.default_rng(3).uniform(101, 185, 500)
    assert not any(calm.update(float(peak), now=0.05 * i) for i, peak in enumerate(noise))


def test_a_peak_now_and_then_keeps_the_range() -> None:
    calm = CalmRange(10.0)
    assert not any(calm.update(150 if i % 40 == 0 else 5, 0.05 * i) for i in range(1, 400) if calm.top == 200)


def test_a_range_never_falls_below_its_smallest_top() -> None:
    calm = CalmRange(10.0)
    calm.update(0.1, now=0.0)
    calm.update(0.1, now=60.0)
    assert calm.top == 10.0


@pytest.fixture
def plot(qtbot: QtBot) -> LivePlot:
    plot = LivePlot(
        [Series("p50", "accent"), Series("one request", "warning", dots=True)], format_ms, load_theme("dark")
    )
    qtbot.addWidget(plot)
    plot.resize(260, 120)
    plot.show()
    return plot


def colours_in(image: QImage, colour: str, tolerance: int = 40) -> list[tuple[int, int]]:
    """Pixels near a colour, as (x, y)."""
    wanted = QColor(colour)
    found = []
    for y in range(image.height()):
        for x in range(image.width()):
            pixel = image.pixelColor(x, y)
            distances = (pixel.red() - wanted.red(), pixel.green() - wanted.green(), pixel.blue() - wanted.blue())
            if max(map(abs, distances)) <= tolerance:
                found.append((x, y))
    return found


def test_a_curve_is_drawn_at_its_height_and_time(plot: LivePlot) -> None:
    times = np.array([970.0, 1000.0])
    plot.set_data([(times, np.array([50.0, 50.0])), (np.array([]), np.array([]))], now=1000.0)
    assert plot.range.top == 60.0
    pixels = colours_in(plot.grab().toImage(), load_theme("dark").accent)
    area = plot.plot_area
    height = area.top() + area.height() * (1 - 50 / 60)
    assert len(pixels) > area.width() // 3
    assert all(abs(y - height) <= 2 for _, y in pixels)
    assert min(x for x, _ in pixels) == pytest.approx(area.center().x(), abs=2)
    assert max(x for x, _ in pixels) == pytest.approx(area.right(), abs=2)


def test_values_that_are_missing_leave_a_gap_and_break_nothing(plot: LivePlot) -> None:
    nothing = float("nan")
    times = np.linspace(940.0, 1000.0, 7)
    plot.set_data(
        [(times, np.array([nothing, nothing, 20.0, 30.0, nothing, 40.0, 50.0])), (times[:0], times[:0])], 1000.0
    )
    assert plot.value_at(0.0) == [("p50", 50.0)]
    assert plot.value_at(60.0) == []
    area = plot.plot_area
    drawn = {x for x, _ in colours_in(plot.grab().toImage(), load_theme("dark").accent, tolerance=90)}
    assert not [x for x in drawn if area.left() + 3 < x < area.left() + area.width() / 3 - 3]
    assert not [x for x in drawn if area.center().x() + 3 < x < area.left() + area.width() * 5 / 6 - 3]
    assert len([x for x in drawn if x > area.left() + area.width() * 5 / 6]) > 10
    plot.set_data([(times, np.full(7, nothing)), (times[:0], times[:0])], 1000.0)
    assert plot.value_at(0.0) == []
    plot.grab()


def test_only_what_is_within_the_minute_counts_for_the_range(plot: LivePlot) -> None:
    times = np.array([900.0, 1000.0])
    plot.set_data([(times, np.array([5000.0, 50.0])), (times[:0], times[:0])], now=1000.0)
    assert plot.range.top == 60.0


def test_dots_are_drawn_for_single_events(plot: LivePlot) -> None:
    none = np.array([])
    plot.set_data([(none, none), (np.array([970.0]), np.array([30.0]))], now=1000.0)
    pixels = colours_in(plot.grab().toImage(), load_theme("dark").warning)
    assert 4 <= len(pixels) <= 40
    assert np.mean([x for x, _ in pixels]) == pytest.approx(plot.plot_area.center().x(), abs=2)


def test_the_mouse_reads_the_curve(plot: LivePlot, qtbot: QtBot) -> None:
    times = np.linspace(940.0, 1000.0, 61)
    plot.set_data([(times, times - 900.0), (times[:0], times[:0])], now=1000.0)
    QTest.mouseMove(plot, plot.plot_area.center())
    assert QToolTip.text() == "30 s ago\np50: 70 ms"
    QTest.mouseMove(plot, QPoint(1, 1))
    qtbot.waitUntil(lambda: not QToolTip.isVisible())


def test_a_change_of_theme_changes_curve_and_background(plot: LivePlot) -> None:
    light = load_theme("light")
    times = np.array([940.0, 1000.0])
    plot.set_data([(times, np.array([50.0, 50.0])), (times[:0], times[:0])], now=1000.0)
    plot.grab()
    plot.set_theme(light)
    image = plot.grab().toImage()
    assert image.pixelColor(plot.plot_area.center() + QPoint(0, 9)) == QColor(light.surface)
    assert len(colours_in(image, light.accent)) > plot.plot_area.width() // 2


def test_an_empty_plot_says_so_in_words(plot: LivePlot) -> None:
    before = plot.grab().toImage()
    plot.set_empty_text("No answers yet")
    words = plot.grab().toImage()
    assert words != before
    plot.set_empty_text("")
    assert plot.grab().toImage() == before
