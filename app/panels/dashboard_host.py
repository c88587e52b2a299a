"""The place of the dashboard: empty until the window is on screen, since the plotting library is slow to import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtCore import QSize
from PySide6.QtWidgets import QFrame, QVBoxLayout

from app.state.telemetry import TelemetryState
from app.theme import ThemeManager

if TYPE_CHECKING:
    from app.charts.dashboard import DashboardPanel

MINIMUM_HEIGHT = 148


class DashboardHost(QFrame):
    """Holds the `DashboardPanel` once `build` was called. `panel` is None before."""

    def __init__(self, telemetry: TelemetryState, themes: ThemeManager, title_of: Callable[[str], str]) -> None:
        super().__init__()
        self.setObjectName("dashboardHost")
        self._telemetry, self._themes, self._title_of = telemetry, themes, title_of
        self.panel: DashboardPanel | None = None
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)

    def build(self) -> None:
        """Makes the dashboard, once."""
        if self.panel is None:
            from app.charts.dashboard import DashboardPanel

            self.panel = DashboardPanel(self._telemetry, self._themes, self._title_of)
            self._column.addWidget(self.panel)

    def sizeHint(self) -> QSize:
        return QSize(1024, 196)

    def minimumSizeHint(self) -> QSize:
        return QSize(280, MINIMUM_HEIGHT)
