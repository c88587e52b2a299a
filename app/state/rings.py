"""A ring buffer of rows whose columns are always contiguous in memory, oldest first."""

from __future__ import annotations

import numpy as np


class SeriesRing:
    """Keeps the last `capacity` rows of `columns` float64 values, without ever allocating again.

    Each row is written twice, `capacity` apart, so that the last `capacity` rows are one
    contiguous slice wherever the ring stands: reading a column costs no copy.
    """

    def __init__(self, capacity: int, columns: int) -> None:
        if capacity < 1 or columns < 1:
            raise ValueError(f"a ring needs at least one row and one column, got {capacity} x {columns}")
        self.capacity = capacity
        self.total = 0
        self._values = np.empty((columns, 2 * capacity), dtype=np.float64)

    def __len__(self) -> int:
        return min(self.total, self.capacity)

    def append(self, *row: float) -> None:
        """Adds one row; raises `ValueError` if it has not one value for each column."""
        if len(row) != len(self._values):
            raise ValueError(f"a row of this ring has {len(self._values)} values, got {len(row)}")
        position = self.total % self.capacity
        self._values[:, position] = row
        self._values[:, position + self.capacity] = row
        self.total += 1

    def column(self, index: int) -> np.ndarray:
        """float64 [len(self)], oldest first: a view, valid until the next `append`."""
        end = self._end()
        return self._values[index, end - len(self) : end]

    def columns(self) -> np.ndarray:
        """float64 [columns, len(self)], oldest first: a view, valid until the next `append`."""
        end = self._end()
        return self._values[:, end - len(self) : end]

    def clear(self) -> None:
        self.total = 0

    def _end(self) -> int:
        return self.total if self.total <= self.capacity else self.total % self.capacity + self.capacity
