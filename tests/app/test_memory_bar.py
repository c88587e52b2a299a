from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import QPointF
from PySide6.QtGui import QColor
from pytestqt.qtbot import QtBot

from app.charts.memory_bar import MemoryPage, parts_of
from app.charts.parts_bar import BAR_HEIGHT, SMALLEST_SEGMENT, PartsBar, segment_widths
from app.state.telemetry import TelemetryState
from app.theme import load_theme
from app.units import format_ms, format_percent, format_rate, three_figures
from tests.app.telemetry_scene import MEMORY, Source, engine_on, load_model, telemetry


@given(sizes=st.lists(st.integers(0, 1 << 40), min_size=6, max_size=6).filter(any), width=st.integers(60, 900))
def test_segments_fill_the_bar_and_nothing_that_exists_is_invisible(sizes: list[int], width: int) -> None:
    widths = segment_widths(sizes, width)
    assert sum(widths) == width
    for size, pixels in zip(sizes, widths):
        assert (pixels == 0) if size == 0 else (pixels >= SMALLEST_SEGMENT)


def test_a_bar_of_nothing_has_no_segments() -> None:
    assert segment_widths([0] * 6, 100) == [0] * 6


def test_parts_of_a_breakdown_add_up_to_its_total() -> None:
    assert sum(part.size for part in parts_of(MEMORY)) == MEMORY.total


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def page(qtbot: QtBot, source: Source) -> MemoryPage:
    engine = engine_on(source)
    state = TelemetryState(source, engine)
    load_model(source, engine)
    page = MemoryPage(state, load_theme("dark"))
    qtbot.addWidget(page)
    page.resize(220, 150)
    page.show()
    source.emit(telemetry())
    page.refresh_figures()
    return page


def test_memory_is_named_by_kind_and_device_and_said_in_words(page: MemoryPage, source: Source) -> None:
    (figure,) = page.figure_row.figures
    assert (figure.value, figure.meaning) == ("46.0 GiB", "of 80.0 GiB VRAM")
    assert page.note == "NVIDIA H200"
    assert page.accessibleDescription().startswith(
        "VRAM: 46.0 GiB used of 80.0 GiB. weights 16.0 GiB, kv cache 24.0 GiB"
    )
    source.emit(telemetry(memory=msgspec.structs.replace(MEMORY, kind="RAM")))
    page.refresh_figures()
    assert page.figure_row.figures[0].meaning == "of 80.0 GiB RAM"


def test_the_bar_shows_each_part_in_its_colour(page: MemoryPage) -> None:
    bar = page.bar
    image = bar.grab().toImage()
    theme = load_theme("dark")
    left = 0
    for part, width in zip(parts_of(MEMORY), segment_widths([p.size for p in parts_of(MEMORY)], bar.width())):
        colour = image.pixelColor(left + (width - 1) // 2, BAR_HEIGHT // 2)
        assert colour == QColor(getattr(theme, part.colour)), part.name
        left += width


def test_bar_and_legend_know_the_part_under_the_mouse(page: MemoryPage) -> None:
    bar: PartsBar = page.bar
    first = bar.part_at(QPointF(5, 5))
    last = bar.part_at(QPointF(bar.width() - 3, 5))
    assert first is not None and first.name == "Weights"
    assert last is not None and last.name == "Free"
    rows = {part.name for y in range(BAR_HEIGHT + 6, bar.height()) if (part := bar.part_at(QPointF(20, y)))}
    assert rows == {"Weights", "KV cache", "Workspace", "Runtime", "Other", "Free"}


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0, "0 ms"),
        (8.44, "8.44 ms"),
        (84.4, "84 ms"),
        (1240, "1.24 s"),
        (75_000, "75 s"),
    ],
)
def test_latencies_change_unit_at_a_second(milliseconds: float | None, text: str) -> None:
    assert format_ms(milliseconds) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(0, "0"), (8, "8.0"), (48.23, "48.2"), (312.4, "312"), (2140, "2,140"), (12_340, "12.3k")]
)
def test_rates_are_short(rate: float, text: str) -> None:
    assert format_rate(rate) == text


def test_shares_of_nothing_are_a_dash() -> None:
    assert format_percent(0, 0) == "–"
    assert format_percent(1, 3) == "33 %"
    assert format_percent(1, 300) == "0.3 %"


@given(value=st.floats(0.01, 1e6))
def test_three_figures_are_within_half_a_percent_or_half_a_hundredth(value: float) -> None:
    assert float(three_figures(value).replace(",", "")) == pytest.approx(value, rel=0.006, abs=0.0051)
