"""Loading and unloading models from the window: menu, file dialog, and remembering the last one."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QObject, Signal
from PySide6.QtWidgets import QFileDialog, QMenu, QWidget

from app.panels.library import ModelLibrary
from app.settings import SettingsFile, remember_load
from app.state.engine_state import EngineState
from app.state.load_options import remembered_config
from app.units import short_count
from engine.catalog import CatalogEntry, describe_path, starter_model
from engine.memory import format_bytes
from engine.protocol import EngineConfig


class ModelActions(QObject):
    """What can be done about models, for whichever part of the window asks."""

    dialog_wanted = Signal(object)
    """Asks for the load dialog, with the `CatalogEntry` it shall show, or None for whichever."""
    problem = Signal(str)

    def __init__(
        self, engine: EngineState, library: ModelLibrary, file: SettingsFile, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._engine, self._library, self._file, self._window = engine, library, file, parent
        engine.changed.connect(self._remember)

    def load(self, config: EngineConfig) -> None:
        self._engine.load(config)

    def load_entry(self, entry: CatalogEntry) -> None:
        """Loads a model as it was loaded last."""
        self.load(remembered_config(entry, self._file.settings.load_options))

    def load_starter(self) -> None:
        starter = starter_model()
        if starter is not None:
            self.load_entry(describe_path(starter))

    def unload(self) -> None:
        self._engine.unload()

    def open_file(self) -> None:
        """Asks for a model file and has the load dialog show it."""
        start = self._file.settings.model_folders[0] if self._file.settings.model_folders else str(Path.home())
        path, _ = QFileDialog.getOpenFileName(
            self._window, "Open a model file", start, "Models (*.gguf);;All files (*)"
        )
        if path:
            self.show_file(path)

    def show_file(self, path: str) -> None:
        """Has the load dialog show a model, wherever it lies. One that cannot be used is a problem told."""
        entry = describe_path(Path(path))
        if entry.error is not None:
            self.problem.emit(f"{entry.name} cannot be loaded: {entry.error}")
        else:
            self.dialog_wanted.emit(entry)

    def fill_menu(self, menu: QMenu) -> None:
        """The models on this machine, the loaded one ticked, and what else can be done."""
        menu.clear()
        menu.setToolTipsVisible(True)
        loaded = self._engine.model.path if self._engine.model is not None else ""
        for entry in self._library.entries[:30]:
            facts = [entry.quantisation, short_count(entry.num_parameters), format_bytes(entry.size_bytes)]
            action = menu.addAction(entry.name, lambda entry=entry: self.load_entry(entry))
            action.setCheckable(True)
            action.setChecked(str(entry.path) == loaded)
            action.setEnabled(entry.error is None)
            action.setToolTip(entry.error or " · ".join(facts))
        if not self._library.entries:
            menu.addAction("Looking for models…" if self._library.is_searching else "No models found").setEnabled(False)
        menu.addSeparator()
        menu.addAction("Load with options…", lambda: self.dialog_wanted.emit(None))
        menu.addAction("Open a model file…", self.open_file)
        unload = menu.addAction("Unload the model", self.unload)
        unload.setEnabled(self._engine.status in ("ready", "loading"))

    def config_at_start(self) -> EngineConfig | None:
        """What the engine loads by itself: the last model if it is still there, else the starter model."""
        settings = self._file.settings
        if not settings.load_model_at_start:
            return None
        if settings.last_model is not None and Path(settings.last_model.model).exists():
            return settings.last_model
        starter = starter_model()
        return remembered_config(describe_path(starter), settings.load_options) if starter is not None else None

    def _remember(self) -> None:
        config = self._engine.config
        if self._engine.status != "ready" or config is None or not remember_load(self._file.settings, config):
            return
        try:
            self._file.save()
        except OSError as error:
            self.problem.emit(f"The settings cannot be saved in {self._file.path}: {error.strerror}")
