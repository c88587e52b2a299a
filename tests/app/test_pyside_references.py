"""Some versions of PySide6 drop a reference to None on every void Qt call, until Python aborts."""

from __future__ import annotations

import sys

from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot


def test_a_thousand_void_calls_leave_the_reference_count_of_none_alone(qtbot: QtBot) -> None:
    widget = QWidget()
    qtbot.addWidget(widget)
    before = sys.getrefcount(None)
    for _ in range(1000):
        widget.update()
    # From Python 3.12 on None is immortal and its count constant; before, a faulty binding loses a thousand.
    assert abs(sys.getrefcount(None) - before) < 100
