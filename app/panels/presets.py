"""The preset row of the sampling panel: choose, save, delete."""

from __future__ import annotations

from PySide6.QtWidgets import QHBoxLayout, QMessageBox, QWidget

from app.panels.dialogs import ask_text
from app.panels.widgets import IconButton, Select
from app.state.session import ChatSession
from app.state.workspace import Workspace
from app.theme import SPACE_XS, ThemeManager

CUSTOM = "Custom settings"


class PresetBar(QWidget):
    """Shows which preset the session uses, "Custom settings" once a parameter was changed by hand."""

    def __init__(self, workspace: Workspace, themes: ThemeManager) -> None:
        super().__init__()
        self._workspace = workspace
        self._session: ChatSession | None = None
        self.select = Select(themes, "Preset")
        self.select.activated.connect(self._chosen)
        self.save_button = IconButton("save", "Save these settings as a preset", themes, size=30)
        self.save_button.clicked.connect(self._ask_and_save)
        self.delete_button = IconButton("trash", "Delete this preset", themes, size=30)
        self.delete_button.clicked.connect(self._delete)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(SPACE_XS)
        row.addWidget(self.select, 1)
        row.addWidget(self.save_button)
        row.addWidget(self.delete_button)
        workspace.presets_changed.connect(self._fill)
        self._fill()

    def set_session(self, session: ChatSession | None) -> None:
        self._session = session
        self.show_choice()

    def show_choice(self) -> None:
        """Shows the session's preset as it is now: the one chosen, or one that has just these parameters."""
        presets, session = self._workspace.presets, self._session
        chosen = None
        if session is not None:
            named = (preset for preset in presets if preset.name == session.preset_name)
            alike = (preset for preset in presets if preset.params == session.params and not preset.system_prompt)
            chosen = next(named, None) or next(alike, None)
        self.select.setCurrentIndex(self.select.findData(chosen.name) if chosen is not None else 0)
        self.delete_button.setEnabled(chosen is not None and not chosen.is_builtin)

    def save(self, name: str) -> None:
        """Keeps the session's settings under a name. Raises `ValueError` for a name that cannot be used."""
        if self._session is not None:
            self._workspace.save_preset(name, self._session)

    def _fill(self) -> None:
        self.select.clear()
        self.select.addItem(CUSTOM, "")
        for preset in self._workspace.presets:
            self.select.addItem(preset.name, preset.name)
        self.show_choice()

    def _chosen(self, index: int) -> None:
        name = self.select.itemData(index)
        preset = next((preset for preset in self._workspace.presets if preset.name == name), None)
        if self._session is not None and preset is not None:
            self._session.apply_preset(preset)
        self.show_choice()

    def _ask_and_save(self) -> None:
        if self._session is None:
            return
        name = ask_text(self, "Save preset", "Name of the preset", self._session.preset_name)
        if not name:
            return
        try:
            self.save(name)
        except ValueError as error:
            QMessageBox.warning(self, "Save preset", str(error))

    def _delete(self) -> None:
        name = self.select.currentData()
        if name:
            self._workspace.delete_preset(name)
