"""Heights of all messages, measured or estimated, and where each one begins."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_FIXED_HEIGHT = 100  # author, footer, paddings and the gap below
_LINE_HEIGHT = 23
_CHAR_WIDTH = 7.4


class HeightIndex:
    """A column of items. Heights are whole pixels; an item counts as measured for one width only."""

    def __init__(self) -> None:
        self._heights = np.zeros(0, dtype=np.int64)
        self._measured = np.zeros(0, dtype=bool)
        self._chars = np.zeros(0, dtype=np.int64)
        self._lines = np.zeros(0, dtype=np.int64)
        self._starts: np.ndarray | None = None
        self._width = 0

    def __len__(self) -> int:
        return len(self._heights)

    @property
    def width(self) -> int:
        """The width that heights are for now."""
        return self._width

    def reset(self, texts: Iterable[str], width: int) -> None:
        """Forgets everything and estimates a height for each text."""
        sizes = [(len(text), text.count("\n")) for text in texts]
        array = np.array(sizes, dtype=np.int64).reshape(-1, 2)
        self._chars, self._lines = array[:, 0].copy(), array[:, 1].copy()
        self._heights = np.zeros(len(array), dtype=np.int64)
        self._measured = np.zeros(len(array), dtype=bool)
        self._width = 0
        self.set_width(width)

    def append(self, text: str) -> None:
        self._chars = np.append(self._chars, len(text))
        self._lines = np.append(self._lines, text.count("\n"))
        self._measured = np.append(self._measured, False)
        self._heights = np.append(self._heights, self._estimate(self._chars[-1:], self._lines[-1:]))
        self._starts = None

    def set_width(self, width: int) -> None:
        """Estimates all heights anew if `width` differs."""
        if width != self._width:
            self._width = width
            self._measured[:] = False
            self._heights = self._estimate(self._chars, self._lines)
            self._starts = None

    def forget(self, index: int, text: str) -> None:
        """The item at `index` holds another text now and has not been measured."""
        self._chars[index], self._lines[index] = len(text), text.count("\n")
        self._measured[index] = False
        self._heights[index] = self._estimate(self._chars[index : index + 1], self._lines[index : index + 1])[0]
        self._starts = None

    def set(self, index: int, height: int) -> bool:
        """Records a measured height; returns whether it differs from what was assumed."""
        self._measured[index] = True
        if self._heights[index] == height:
            return False
        self._heights[index] = height
        self._starts = None
        return True

    def is_measured(self, index: int) -> bool:
        return bool(self._measured[index])

    def height(self, index: int) -> int:
        return int(self._heights[index])

    def start(self, index: int) -> int:
        """Where an item begins; `start(len(self))` is the end of the last."""
        return int(self._get_starts()[index])

    @property
    def total(self) -> int:
        return int(self._get_starts()[-1])

    def at(self, y: int) -> int:
        """The item that covers `y`; the nearest one outside the column."""
        index = int(np.searchsorted(self._get_starts(), y, side="right")) - 1
        return max(0, min(len(self) - 1, index))

    def _get_starts(self) -> np.ndarray:
        if self._starts is None:
            self._starts = np.concatenate(([0], np.cumsum(self._heights)))
        return self._starts

    def _estimate(self, chars: np.ndarray, lines: np.ndarray) -> np.ndarray:
        per_line = max(1.0, self._width / _CHAR_WIDTH)
        return (_FIXED_HEIGHT + _LINE_HEIGHT * np.ceil(chars / per_line + 0.6 * lines + 0.5)).astype(np.int64)
