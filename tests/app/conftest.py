"""Fixtures of the window's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtGui import QFont
from PySide6.QtWidgets import QApplication

from tests.app.app_parts import AppParts


@pytest.fixture(autouse=True)
def clean_application() -> Iterator[None]:
    """Style, font and palette belong to the one application of all tests: none may see another's."""
    yield
    application = QApplication.instance()
    if isinstance(application, QApplication):
        application.setStyleSheet("")
        application.setFont(QFont())
        application.setPalette(application.style().standardPalette())


@pytest.fixture
def make_parts(qapp: object, tmp_path: Path) -> Iterator[Callable[..., AppParts]]:
    """Makes and starts `AppParts` on one database in the test's folder, and closes them afterwards."""
    made: list[AppParts] = []

    def make(**script: Any) -> AppParts:
        parts = AppParts(tmp_path / "kvasir.db", **script)
        made.append(parts)
        return parts.start()

    yield make
    for parts in made:
        parts.close()
