"""The settings window. Every change holds at once; nothing waits for an OK."""

from __future__ import annotations

from pathlib import Path

import msgspec
from PySide6.QtCore import QSize, Qt, QUrl, Signal
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import (
    QDialog,
    QFileDialog,
    QHBoxLayout,
    QLineEdit,
    QListWidget,
    QVBoxLayout,
    QWidget,
)

from app.panels.dialogs import resize_within
from app.panels.sampling import OVERFLOW_TITLES
from app.panels.widgets import ErrorBox, NumberBox, ScrolledColumn, Segments, Select, Switch, button, label, separator
from app.paths import data_folder, log_folder
from app.settings import SettingsFile
from app.state.workspace import Workspace
from app.theme import FONT_SIZE_RANGE, SPACE_L, SPACE_S, SPACE_XS, ThemeManager

PREFERRED_SIZE = QSize(560, 640)


class SettingsDialog(QDialog):
    """Edits `Settings` in place and saves them; signals tell what other parts must follow."""

    folders_changed = Signal()
    engine_changed = Signal()

    def __init__(
        self, file: SettingsFile, workspace: Workspace, themes: ThemeManager, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._file, self._workspace, self._themes = file, workspace, themes
        self.setWindowTitle("Settings")
        resize_within(self, parent, PREFERRED_SIZE, least=QSize(420, 320))
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.setSpacing(0)
        scroll = ScrolledColumn(SPACE_L, SPACE_L, SPACE_L, SPACE_L)
        self._column = scroll.column
        outer.addWidget(scroll, 1)
        outer.addWidget(separator())
        foot = QHBoxLayout()
        foot.setContentsMargins(SPACE_L, SPACE_S + 4, SPACE_L, SPACE_S + 4)
        self._error = ErrorBox()
        close = button("Close", "primary")
        close.setDefault(True)
        close.clicked.connect(self.accept)
        foot.addWidget(self._error, 1)
        foot.addStretch(1)
        foot.addWidget(close)
        outer.addLayout(foot)
        self._build_appearance()
        self._build_chats()
        self._build_models()
        self._build_engine()
        self._build_data()
        self._column.addStretch(1)
        themes.changed.connect(self._show_theme)

    # ------------------------------------------------------------ parts

    def _heading(self, title: str) -> None:
        if self._column.count():
            self._column.addWidget(separator())
        self._column.addWidget(label(title, "heading"))

    def _row(self, title: str, control: QWidget, help_text: str = "", *, beneath: bool = False) -> None:
        part = QVBoxLayout()
        part.setSpacing(SPACE_XS)
        name = label(title, "strong")
        name.setBuddy(control)
        if beneath:
            part.addWidget(name)
            part.addWidget(control)
        else:
            row = QHBoxLayout()
            row.addWidget(name, 1)
            row.addWidget(control)
            part.addLayout(row)
        if help_text:
            part.addWidget(label(help_text, "small", wrap=True))
        self._column.addLayout(part)

    def _build_appearance(self) -> None:
        self._heading("Appearance")
        self.theme = Segments({"system": "System", "light": "Light", "dark": "Dark"}, "Theme")
        self.theme.setFixedWidth(252)
        self.theme.chosen.connect(self._themes.set_mode)
        self._row("Theme", self.theme)
        self.font_size = NumberBox("Font size", *FONT_SIZE_RANGE, decimals=0, step=1)
        self.font_size.setFixedWidth(84)
        self.font_size.setKeyboardTracking(False)
        self.font_size.setValue(self._file.settings.font_size)
        self.font_size.valueChanged.connect(lambda size: self._themes.set_font_size(int(size)))
        self._row("Font size", self.font_size, f"From {FONT_SIZE_RANGE[0]} to {FONT_SIZE_RANGE[1]} pixels.")
        self._show_theme()

    def _build_chats(self) -> None:
        self._heading("Chats")
        self.overflow = Select(self._themes, "Longer than the context")
        for key, title in OVERFLOW_TITLES.items():
            self.overflow.addItem(title, key)
        self.overflow.setCurrentIndex(self.overflow.findData(self._workspace.default_params.overflow))
        self.overflow.activated.connect(self._overflow_chosen)
        self._row(
            "Longer than the context",
            self.overflow,
            "What new chats do when a conversation does not fit the model's context. Nothing is cut silently.",
            beneath=True,
        )

    def _build_models(self) -> None:
        self._heading("Models")
        self.at_start = Switch("Load the last model at start", self._themes)
        self.at_start.setChecked(self._file.settings.load_model_at_start)
        self.at_start.settle()
        self.at_start.toggled.connect(self._at_start_switched)
        self._column.addWidget(self.at_start)
        self.folders = QListWidget()
        self.folders.setObjectName("boxed")
        self.folders.setAccessibleName("Model folders")
        self.folders.addItems(self._file.settings.model_folders)
        add = button("Add a folder…")
        add.clicked.connect(self._add_folder)
        self._remove = button("Remove")
        self._remove.clicked.connect(self._remove_folder)
        row = QHBoxLayout()
        row.setSpacing(SPACE_S)
        row.addWidget(add)
        row.addWidget(self._remove)
        row.addStretch(1)
        self._row(
            "Model folders",
            self.folders,
            "Searched for models besides Kvasir's own folder and the Hugging Face cache.",
            beneath=True,
        )
        self._column.addLayout(row)
        self._fit_folders()

    def _fit_folders(self) -> None:
        rows = self.folders.count()
        self.folders.setVisible(rows > 0)
        self.folders.setFixedHeight(min(rows, 5) * 28 + 12)
        self._remove.setVisible(rows > 0)

    def _build_engine(self) -> None:
        self._heading("Engine")
        self.python = QLineEdit(self._file.settings.engine_python)
        self.python.setPlaceholderText("the Python that runs this window")
        self.python.setAccessibleName("Python of the engine")
        self.python.editingFinished.connect(self._python_changed)
        browse = button("Browse…")
        browse.clicked.connect(self._browse_python)
        holder = QWidget()
        row = QHBoxLayout(holder)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(SPACE_S)
        row.addWidget(self.python, 1)
        row.addWidget(browse)
        self._row(
            "Engine Python",
            holder,
            "An interpreter with torch installed; it runs the engine in a process of its own, from the next start.",
            beneath=True,
        )

    def _build_data(self) -> None:
        self._heading("Data")
        for title, folder in (("Chats and models", data_folder()), ("Logs", log_folder())):
            place = label(str(folder), "small", wrap=True)
            place.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
            show = button("Open folder", name=f"Open the folder of {title}")
            show.clicked.connect(lambda _=False, f=folder: QDesktopServices.openUrl(QUrl.fromLocalFile(str(f))))
            row = QHBoxLayout()
            words = QVBoxLayout()
            words.setSpacing(2)
            words.addWidget(label(title, "strong"))
            words.addWidget(place)
            row.addLayout(words, 1)
            row.addWidget(show)
            self._column.addLayout(row)

    # ------------------------------------------------------------ changes

    def _show_theme(self, *_: object) -> None:
        self.theme.choose(self._themes.mode)
        self._file.settings.theme = self._themes.mode
        self._file.settings.font_size = self._themes.theme.font_size
        self._save()

    def _overflow_chosen(self, _: int) -> None:
        params = msgspec.structs.replace(self._workspace.default_params, overflow=self.overflow.currentData())
        self._workspace.set_default_params(params)

    def _at_start_switched(self, on: bool) -> None:
        self._file.settings.load_model_at_start = on
        self._save()

    def _add_folder(self) -> None:
        folder = QFileDialog.getExistingDirectory(self, "Add a folder of models", str(Path.home()))
        if folder:
            self.add_folder(folder)

    def add_folder(self, folder: str) -> None:
        """Has a folder searched for models from now on."""
        if folder not in self._file.settings.model_folders:
            self._file.settings.model_folders.append(folder)
            self.folders.addItem(folder)
            self._save()
            self._fit_folders()
            self.folders_changed.emit()

    def _remove_folder(self) -> None:
        row = self.folders.currentRow()
        if row >= 0:
            self._file.settings.model_folders.remove(self.folders.takeItem(row).text())
            self._save()
            self._fit_folders()
            self.folders_changed.emit()

    def _browse_python(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Choose the engine's Python")
        if path:
            self.python.setText(path)
            self._python_changed()

    def _python_changed(self) -> None:
        path = self.python.text().strip()
        if path == self._file.settings.engine_python:
            return
        if path and not Path(path).expanduser().is_file():
            self._error.say(f"There is no program at {path}; the old setting is kept.")
            return
        self._error.say("")
        self._file.settings.engine_python = str(Path(path).expanduser()) if path else ""
        self._save()
        self.engine_changed.emit()

    def _save(self) -> None:
        try:
            self._file.save()
        except OSError as error:
            self._error.say(f"The settings cannot be saved in {self._file.path}: {error.strerror}")
