"""KV blocks as an 8-bit image whose pixels are block states: pure arithmetic, no widget."""

from __future__ import annotations

import dataclasses

import numpy as np

from app.theme import Theme, mix
from engine.protocol import (
    BLOCK_ACTIVE,
    BLOCK_CACHED,
    BLOCK_FREE,
    BLOCK_SHARED,
    NUM_OWNER_SLOTS,
    pack_block_state,
    unpack_block_state,
)

# A free block has no owner, so the free states of owner slots 1 and up are palette entries to spare.
GAP = pack_block_state(BLOCK_FREE, 1)
SHARED_MARK = pack_block_state(BLOCK_FREE, 2)

LARGEST_CELL = 22
SMALLEST_CELL = 2
SMALLEST_CELL_WITH_GAP = 4
SMALLEST_CELL_WITH_RING = 6

# What a cell of several blocks shows: the rarer and more important state wins, so that nothing
# in use disappears behind its neighbours.
_RANK_OF_KIND = {BLOCK_FREE: 0, BLOCK_CACHED: 1, BLOCK_ACTIVE: 2, BLOCK_SHARED: 3}
_RANK = np.array(
    [_RANK_OF_KIND[kind] << 6 | slot for kind, slot in map(unpack_block_state, range(256))], dtype=np.uint8
)
_STATE_OF_RANK = np.zeros(256, dtype=np.uint8)
_STATE_OF_RANK[_RANK] = np.arange(256, dtype=np.uint8)


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """`columns` x `rows` cells of `cell_width` x `cell_height` pixels; `blocks_per_cell` neighbours share one."""

    num_blocks: int
    columns: int
    rows: int
    cell_width: int
    cell_height: int
    blocks_per_cell: int = 1

    @property
    def num_cells(self) -> int:
        return -(-self.num_blocks // self.blocks_per_cell)

    @property
    def gap(self) -> int:
        return 1 if self.cell_width >= SMALLEST_CELL_WITH_GAP else 0

    def blocks_of(self, cell: int) -> range:
        """The block numbers shown by a cell."""
        first = cell * self.blocks_per_cell
        return range(first, min(first + self.blocks_per_cell, self.num_blocks))

    def cell_at(self, x: int, y: int) -> int | None:
        """The cell at a pixel; None beside the map and behind its last cell."""
        column, row = x // self.cell_width, y // self.cell_height
        if x < 0 or y < 0 or column >= self.columns:
            return None
        cell = row * self.columns + column
        return cell if cell < self.num_cells else None


def lay_out(num_blocks: int, width: int, height: int) -> BlockLayout:
    """The largest cells that show `num_blocks` in `width` x `height` pixels: as wide as squares
    could be, then as high as the rows leave room for, within half as much again.

    From the point where a block would be smaller than two pixels, cells stand for several blocks.
    """
    if num_blocks <= 0 or width < SMALLEST_CELL or height < SMALLEST_CELL:
        return BlockLayout(0, 1, 0, SMALLEST_CELL, SMALLEST_CELL)
    cell, blocks_per_cell = LARGEST_CELL, 1
    while (width // cell) * (height // cell) < num_blocks and cell > SMALLEST_CELL:
        cell -= 1
    columns, rows = width // cell, height // cell
    if columns * rows < num_blocks:
        blocks_per_cell = -(-num_blocks // (columns * rows))
    num_cells = -(-num_blocks // blocks_per_cell)
    rows = -(-num_cells // columns)
    cell_height = min(height // rows, cell * 3 // 2, LARGEST_CELL)
    return BlockLayout(num_blocks, columns, rows, cell, cell_height, blocks_per_cell)


def paint_blocks(states: np.ndarray, layout: BlockLayout) -> np.ndarray:
    """uint8 [rows * cell_height, columns * cell_width]: the palette index of every pixel.

    `states` is uint8 [layout.num_blocks], as in the protocol.
    """
    width, height, gap = layout.cell_width, layout.cell_height, layout.gap
    pixels = np.full((layout.rows * height, layout.columns * width), GAP, dtype=np.uint8)
    if layout.num_cells == 0:
        return pixels
    grid = np.full(layout.rows * layout.columns, GAP, dtype=np.uint8)
    grid[: layout.num_cells] = _merge(states, layout)
    grid = grid.reshape(layout.rows, 1, layout.columns, 1)
    marked = np.where(grid >> 6 == BLOCK_SHARED, np.uint8(SHARED_MARK), grid)
    cells = pixels.reshape(layout.rows, height, layout.columns, width)
    cells[:, : height - gap, :, : width - gap] = marked
    if width >= SMALLEST_CELL_WITH_RING:
        ring = 1 if width < 12 else 2
        cells[:, ring : height - gap - ring, :, ring : width - gap - ring] = grid
    return pixels


def _merge(states: np.ndarray, layout: BlockLayout) -> np.ndarray:
    states = np.where(states >> 6 == BLOCK_FREE, np.uint8(0), states)
    group = layout.blocks_per_cell
    if group == 1:
        return states
    ranks = np.zeros(layout.num_cells * group, dtype=np.uint8)
    ranks[: len(states)] = _RANK[states]
    return _STATE_OF_RANK[ranks.reshape(-1, group).max(axis=1)]


def free_colour(theme: Theme) -> str:
    return mix(theme.surface, theme.text, 0.10 if theme.is_dark else 0.09)


def cached_colour(theme: Theme, slot: int) -> str:
    return mix(theme.surface, theme.owner_color(slot), 0.38)


def palette(theme: Theme) -> list[str]:
    """The 256 colours of the image, "#rrggbb", by block state."""
    colours = []
    for state in range(256):
        kind, slot = unpack_block_state(state)
        if kind == BLOCK_FREE:
            colours.append(free_colour(theme))
        elif kind == BLOCK_CACHED:
            colours.append(cached_colour(theme, slot))
        else:
            colours.append(theme.owner_color(slot))
    colours[GAP] = theme.surface
    colours[SHARED_MARK] = theme.text
    assert len(colours) == 4 * NUM_OWNER_SLOTS
    return colours
