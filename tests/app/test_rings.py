from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.state.rings import SeriesRing


@given(capacity=st.integers(1, 9), count=st.integers(0, 40))
def test_a_ring_holds_the_newest_rows_oldest_first(capacity: int, count: int) -> None:
    ring = SeriesRing(capacity, 2)
    for number in range(count):
        ring.append(number, -number)
    expected = list(range(count))[-capacity:]
    assert len(ring) == len(expected)
    assert ring.column(0).tolist() == expected
    assert ring.columns().tolist() == [expected, [-number for number in expected]]


def test_appending_and_reading_never_allocates_the_history_again() -> None:
    ring = SeriesRing(4, 1)
    ring.append(0.0)
    memory = ring.column(0).base
    for number in range(20):
        ring.append(number)
        assert ring.column(0).base is memory
        assert ring.column(0).flags.c_contiguous
        assert np.shares_memory(ring.columns(), memory)


def test_a_cleared_ring_is_empty_and_can_be_filled_again() -> None:
    ring = SeriesRing(3, 1)
    for number in range(5):
        ring.append(number)
    ring.clear()
    assert len(ring) == 0
    assert ring.columns().shape == (1, 0)
    ring.append(7.0)
    assert ring.column(0).tolist() == [7.0]


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="has 2 values, got 3"):
        SeriesRing(3, 2).append(1.0, 2.0, 3.0)


def test_a_ring_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        SeriesRing(0, 2)
