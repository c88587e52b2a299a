from __future__ import annotations

import pytest
from PySide6.QtCore import QRect

from app.window_geometry import MINIMUM_SIZE, first_rect, fit_on_screens

LEFT = QRect(0, 0, 1920, 1040)
RIGHT = QRect(1920, 0, 1280, 984)


def test_a_window_that_fits_stays_where_it_was() -> None:
    wanted = QRect(2000, 40, 1100, 700)
    assert fit_on_screens(wanted, [LEFT, RIGHT]) == wanted


@pytest.mark.parametrize(
    "wanted",
    [
        QRect(2000, 40, 1100, 700),  # on a screen that was unplugged
        QRect(-3000, -3000, 1000, 700),
        QRect(1800, 900, 1000, 700),  # mostly outside
        QRect(0, 0, 5000, 5000),
        QRect(0, -300, 1000, 700),  # its title bar above the screen
        QRect(5, 5, 10, 10),
    ],
)
def test_a_window_is_pulled_back_onto_the_screen(wanted: QRect) -> None:
    placed = fit_on_screens(wanted, [LEFT])
    assert LEFT.contains(placed)
    assert placed.width() >= MINIMUM_SIZE.width()
    assert placed.height() >= MINIMUM_SIZE.height()


def test_a_window_goes_to_the_screen_it_overlaps_most() -> None:
    assert RIGHT.contains(fit_on_screens(QRect(1800, 100, 1200, 700), [LEFT, RIGHT]))
    assert LEFT.contains(fit_on_screens(QRect(800, 100, 1200, 700), [LEFT, RIGHT]))


def test_a_screen_smaller_than_the_smallest_window_is_filled() -> None:
    small = QRect(0, 0, 800, 480)
    assert fit_on_screens(QRect(0, 0, 1440, 900), [small]) == small


def test_the_first_window_is_centred_and_leaves_room() -> None:
    assert first_rect(QRect(0, 0, 2560, 1400)).size().toTuple() == (1440, 900)
    assert QRect(0, 0, 1024, 640).contains(first_rect(QRect(0, 0, 1024, 640)))
