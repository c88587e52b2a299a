from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QColor
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QToolTip
from pytestqt.qtbot import QtBot

from app.charts.block_image import GAP, SHARED_MARK, BlockLayout, lay_out, paint_blocks, palette
from app.charts.kv_block_map import KVBlockMap
from app.state.telemetry import TelemetryState
from app.theme import contrast, load_theme
from engine.protocol import (
    BLOCK_ACTIVE,
    BLOCK_CACHED,
    BLOCK_FREE,
    BLOCK_SHARED,
    NUM_OWNER_SLOTS,
    pack_block_state,
)
from tests.app.telemetry_scene import Source, block_update, engine_on, load_model, telemetry


@given(num_blocks=st.integers(1, 100_000), width=st.integers(40, 900), height=st.integers(20, 400))
def test_every_block_has_a_place_and_every_place_its_blocks(num_blocks: int, width: int, height: int) -> None:
    layout = lay_out(num_blocks, width, height)
    assert layout.columns * layout.cell_width <= width
    assert layout.rows * layout.cell_height <= height
    assert layout.num_cells <= layout.columns * layout.rows
    assert layout.blocks_of(0).start == 0
    assert layout.blocks_of(layout.num_cells - 1).stop == num_blocks
    last = layout.num_cells - 1
    row, column = divmod(last, layout.columns)
    assert layout.cell_at(column * layout.cell_width, row * layout.cell_height) == last


@pytest.mark.parametrize(
    ("num_blocks", "smallest_cell", "most_blocks_per_cell"), [(64, 18, 1), (1024, 5, 1), (4096, 2, 1), (100_000, 2, 14)]
)
def test_cells_are_as_large_as_the_pool_allows(num_blocks: int, smallest_cell: int, most_blocks_per_cell: int) -> None:
    layout = lay_out(num_blocks, 300, 100)
    assert layout.cell_width >= smallest_cell
    assert layout.blocks_per_cell <= most_blocks_per_cell


@pytest.mark.parametrize(("num_blocks", "width", "height"), [(0, 300, 100), (100, 0, 100), (100, 300, 1)])
def test_a_map_without_blocks_or_room_is_empty(num_blocks: int, width: int, height: int) -> None:
    layout = lay_out(num_blocks, width, height)
    assert layout.num_cells == 0
    assert layout.cell_at(0, 0) is None
    assert paint_blocks(np.zeros(0, np.uint8), layout).size == 0


def test_each_pixel_of_a_cell_is_its_blocks_state_and_gaps_lie_between() -> None:
    active, cached = pack_block_state(BLOCK_ACTIVE, 3), pack_block_state(BLOCK_CACHED, 7)
    layout = BlockLayout(3, 2, 2, 4, 5)
    pixels = paint_blocks(np.array([active, 0, cached], dtype=np.uint8), layout)
    assert pixels.shape == (10, 8)
    assert (pixels[0:4, 0:3] == active).all()
    assert (pixels[0:4, 4:7] == 0).all()
    assert (pixels[5:9, 0:3] == cached).all()
    assert (pixels[4] == GAP).all() and (pixels[:, 3] == GAP).all()
    assert (pixels[5:, 4:] == GAP).all(), "there is no fourth block"


def test_a_shared_block_is_ringed_and_keeps_its_owners_colour_inside() -> None:
    shared = pack_block_state(BLOCK_SHARED, 2)
    pixels = paint_blocks(np.array([shared], dtype=np.uint8), BlockLayout(1, 1, 1, 8, 8))
    assert (pixels[0, :7] == SHARED_MARK).all() and (pixels[:7, 0] == SHARED_MARK).all()
    assert (pixels[1:6, 1:6] == shared).all()


def test_a_small_shared_block_is_marked_as_a_whole() -> None:
    pixels = paint_blocks(np.array([pack_block_state(BLOCK_SHARED, 2)], dtype=np.uint8), BlockLayout(1, 1, 1, 3, 3))
    assert (pixels == SHARED_MARK).all()


def test_a_free_block_is_free_whoever_had_it() -> None:
    states = np.array([pack_block_state(BLOCK_FREE, 1), pack_block_state(BLOCK_FREE, 2)], dtype=np.uint8)
    assert (paint_blocks(states, BlockLayout(2, 2, 1, 2, 2)) == 0).all()


def test_where_blocks_share_a_cell_those_in_use_are_not_hidden_by_the_others() -> None:
    free, cached = 0, pack_block_state(BLOCK_CACHED, 63)
    active, shared = pack_block_state(BLOCK_ACTIVE, 1), pack_block_state(BLOCK_SHARED, 0)
    states = np.array([free, cached, active, cached, active, shared, free], dtype=np.uint8)
    pixels = paint_blocks(states, BlockLayout(7, 4, 1, 2, 2, blocks_per_cell=2))
    assert pixels[0, ::2].tolist() == [cached, active, SHARED_MARK, 0]


@pytest.mark.parametrize("name", ["light", "dark"])
def test_the_palette_tells_kinds_and_neighbouring_owners_apart(name: str) -> None:
    theme = load_theme(name)
    colours = palette(theme)
    assert len(colours) == 256
    free = colours[0]
    for slot in range(len(theme.owner_colors)):
        active = colours[pack_block_state(BLOCK_ACTIVE, slot)]
        cached = colours[pack_block_state(BLOCK_CACHED, slot)]
        assert active == theme.owner_color(slot)
        assert len({free, active, cached, colours[SHARED_MARK]}) == 4
        assert contrast(active, theme.surface) > contrast(cached, theme.surface)
        assert contrast(active, colours[SHARED_MARK]) > 1.3
    assert colours[pack_block_state(BLOCK_ACTIVE, NUM_OWNER_SLOTS - 1)] in theme.owner_colors


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def block_map(qtbot: QtBot, source: Source) -> KVBlockMap:
    engine = engine_on(source)
    state = TelemetryState(source, engine)
    load_model(source, engine)
    titles = {"a": "Paged attention", "b": "Rust lifetimes"}
    widget = KVBlockMap(state, load_theme("dark"), lambda owner: titles.get(owner, ""))
    qtbot.addWidget(widget)
    widget.resize(300, 120)
    widget.show()
    states = {
        0: pack_block_state(BLOCK_SHARED, 0),
        1: pack_block_state(BLOCK_ACTIVE, 1),
        2: pack_block_state(BLOCK_CACHED, 1),
        3: pack_block_state(BLOCK_CACHED, 9),
    }
    source.emit(telemetry(blocks=block_update(64, states, full=True), owners={0: "a", 1: "b"}))
    widget.refresh()
    return widget


def test_a_cell_is_described_by_number_state_and_chat(block_map: KVBlockMap) -> None:
    assert block_map.describe_cell(0) == "Block 0: shared, a prefix of several chats\nfirst read by Paged attention"
    assert block_map.describe_cell(1) == "Block 1: active\nRust lifetimes"
    assert block_map.describe_cell(2) == "Block 2: cached, used by nobody now\nleft by Rust lifetimes"
    assert block_map.describe_cell(3) == "Block 3: cached, used by nobody now\nleft by a closed chat"
    assert block_map.describe_cell(4) == "Block 4: free"


def test_a_cell_of_several_blocks_counts_them(block_map: KVBlockMap, source: Source) -> None:
    states = {block: pack_block_state(BLOCK_ACTIVE, block % 2) for block in range(10)}
    source.emit(
        telemetry(blocks=block_update(100_000, states, full=True), owners={0: "a", 1: "b"}, kv_blocks_total=100_000)
    )
    block_map.refresh()
    per_cell = block_map.layout_.blocks_per_cell
    assert per_cell > 10
    words = block_map.describe_cell(0)
    assert words.startswith(f"Blocks 0 to {per_cell - 1}: {per_cell - 10} free, 10 active")
    assert "Paged attention" in words and "Rust lifetimes" in words


def test_the_mouse_picks_the_block_under_it(block_map: KVBlockMap) -> None:
    layout = block_map.layout_
    QTest.mouseMove(block_map, QPoint(layout.cell_width + 3, 5))
    assert block_map.picked == 1
    assert QToolTip.text() == "Block 1: active\nRust lifetimes"


def test_arrow_keys_walk_over_the_blocks_and_stop_at_the_ends(block_map: KVBlockMap) -> None:
    columns = block_map.layout_.columns
    for key, expected in (
        (Qt.Key.Key_Right, 0),
        (Qt.Key.Key_Right, 1),
        (Qt.Key.Key_Down, 1 + columns),
        (Qt.Key.Key_Up, 1),
        (Qt.Key.Key_Up, 0),
        (Qt.Key.Key_End, 63),
        (Qt.Key.Key_Down, 63),
        (Qt.Key.Key_Home, 0),
    ):
        QTest.keyClick(block_map, key)
        assert block_map.picked == expected
    assert "Block 0: shared" in block_map.accessibleDescription()


def test_blocks_are_painted_crisp_in_their_owners_colours(block_map: KVBlockMap) -> None:
    image = block_map.grab().toImage()
    theme = load_theme("dark")
    layout = block_map.layout_
    middle = QPoint(layout.cell_width + layout.cell_width // 2, 2 + layout.cell_height // 2)
    assert image.pixelColor(middle) == QColor(theme.owner_color(1))
    assert image.pixelColor(2 * layout.cell_width - 2, middle.y()) == QColor(theme.owner_color(1))
    assert image.pixelColor(2 * layout.cell_width - 1, middle.y()) == QColor(theme.surface)


def test_a_change_of_theme_repaints_the_same_blocks(block_map: KVBlockMap) -> None:
    block_map.set_theme(load_theme("light"))
    middle = QPoint(block_map.layout_.cell_width * 3 // 2, 2 + block_map.layout_.cell_height // 2)
    assert block_map.grab().toImage().pixelColor(middle) == QColor(load_theme("light").owner_color(1))
