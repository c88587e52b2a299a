"""Which colour an open chat has in the block map, on its tab and in the sidebar alike."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal

from app.state.telemetry import TelemetryState
from app.theme import ThemeManager


class OwnerColours(QObject):
    """Follows the owner slots the worker hands out. `changed` tells when a chat's colour may be another."""

    changed = Signal()

    def __init__(self, telemetry: TelemetryState, themes: ThemeManager, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._telemetry, self._themes = telemetry, themes
        self._slots: dict[str, int] = {}
        telemetry.updated.connect(self._follow)

    def colour(self, conversation_id: str) -> str:
        """The chat's colour; a quiet one until it first asked the engine something."""
        theme = self._themes.theme
        slot = self._slots.get(conversation_id)
        return theme.text_faint if slot is None else theme.owner_color(slot)

    def _follow(self) -> None:
        latest = self._telemetry.latest
        slots = {owner: slot for slot, owner in latest.owners.items()} if latest is not None else {}
        if slots != self._slots:
            self._slots = slots
            self.changed.emit()
