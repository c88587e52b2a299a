"""The dialog "Load model": which model, with which options, and what that takes of the memory."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QSignalBlocker, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import QDialog, QHBoxLayout, QProgressBar, QVBoxLayout, QWidget

from app.panels.dialogs import resize_within
from app.panels.header import progress_words
from app.panels.library import ModelLibrary
from app.panels.load_form import LoadForm
from app.panels.memory_estimate import MemoryEstimateCard
from app.panels.widgets import ErrorBox, ScrolledColumn, Select, button, label, separator
from app.state.engine_state import EngineState
from app.state.load_options import fit_on, remembered_config
from app.theme import SPACE_L, SPACE_M, SPACE_S, SPACE_XS, ThemeManager
from app.units import short_count
from engine.catalog import CatalogEntry
from engine.memory import format_bytes
from engine.protocol import EngineConfig, LoadProgress

PREFERRED_SIZE = QSize(860, 640)
MEMORY_WIDTH = 288
# Other programs come and go: what is free is read again while the dialog is open.
ESTIMATE_MS = 2000


class LoadDialog(QDialog):
    """Stays open while a model loads, says what went wrong if it fails, and closes once it is ready."""

    load_requested = Signal(object)
    cancel_requested = Signal()
    open_file_requested = Signal()

    def __init__(
        self,
        engine: EngineState,
        library: ModelLibrary,
        themes: ThemeManager,
        load_options: Mapping[str, EngineConfig],
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._engine, self._library, self._load_options = engine, library, load_options
        self._extra: CatalogEntry | None = None
        self._is_loading = False
        self._fits = True
        self.setWindowTitle("Load model")
        self._build(themes)
        resize_within(self, parent, PREFERRED_SIZE, least=QSize(680, 420))
        self._timer = QTimer(self)
        self._timer.setInterval(ESTIMATE_MS)
        self._timer.timeout.connect(self._show_estimate)
        engine.changed.connect(self._follow_engine)
        library.changed.connect(self._fill_models)
        self._fill_models()
        self._follow_engine()

    # ------------------------------------------------------------ building

    def _build(self, themes: ThemeManager) -> None:
        self.models = Select(themes, "Model")
        self.models.activated.connect(self._model_chosen)
        self.open_button = button("Open a file…", name="Open a model file")
        self.open_button.clicked.connect(self.open_file_requested)
        self._about = label(role="small", wrap=True)
        choice = QHBoxLayout()
        choice.setSpacing(SPACE_S)
        choice.addWidget(self.models, 1)
        choice.addWidget(self.open_button)
        head = QVBoxLayout()
        head.setContentsMargins(SPACE_L, SPACE_L - 4, SPACE_L, SPACE_M - 4)
        head.setSpacing(SPACE_XS + 2)
        head.addLayout(choice)
        head.addWidget(self._about)

        self.form = LoadForm(themes)
        self.form.edited.connect(self._show_estimate)
        scroll = ScrolledColumn(SPACE_L, SPACE_M, SPACE_M, SPACE_M)
        scroll.column.addWidget(self.form)
        self.memory = MemoryEstimateCard(themes)
        self.memory.setFixedWidth(MEMORY_WIDTH)
        self.memory.context_wanted.connect(self.form.set_context)
        side = QVBoxLayout()
        side.setContentsMargins(0, SPACE_M, SPACE_L, SPACE_M)
        side.addWidget(self.memory)
        side.addStretch(1)
        middle = QHBoxLayout()
        middle.setSpacing(SPACE_S)
        middle.addWidget(scroll, 1)
        middle.addLayout(side)

        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addLayout(head)
        column.addWidget(separator())
        column.addLayout(middle, 1)
        column.addWidget(separator())
        column.addLayout(self._build_foot())

    def _build_foot(self) -> QVBoxLayout:
        self.error = ErrorBox()
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setRange(0, 1000)
        self.progress.setAccessibleName("Loading the model")
        self.stage = label(role="small")
        self.load_button = button("Load", "primary")
        self.load_button.setDefault(True)
        self.load_button.clicked.connect(self._load)
        self.close_button = button("Close")
        self.close_button.clicked.connect(self.reject)
        row = QHBoxLayout()
        row.setSpacing(SPACE_S)
        words = QVBoxLayout()
        words.setSpacing(SPACE_XS)
        words.addWidget(self.stage)
        words.addWidget(self.progress)
        row.addLayout(words, 1)
        row.addSpacing(SPACE_M)
        row.addWidget(self.close_button)
        row.addWidget(self.load_button)
        foot = QVBoxLayout()
        foot.setContentsMargins(SPACE_L, SPACE_M - 4, SPACE_L, SPACE_M - 4)
        foot.setSpacing(SPACE_S)
        foot.addWidget(self.error)
        foot.addLayout(row)
        return foot

    # ------------------------------------------------------------ the model

    def choose(self, entry: CatalogEntry) -> None:
        """Shows a model, which need not be one of the library's."""
        if self._library.entry(str(entry.path)) is None:
            self._extra = entry
        self._fill_models(str(entry.path))

    @property
    def entry(self) -> CatalogEntry | None:
        return next((e for e in self._entries() if str(e.path) == self.models.currentData()), None)

    def _entries(self) -> list[CatalogEntry]:
        return [*self._library.entries, *([self._extra] if self._extra is not None else [])]

    def _fill_models(self, wanted: str = "") -> None:
        chosen = wanted or self.models.currentData()
        if not chosen and self._engine.model is not None:
            chosen = self._engine.model.path
        before = self.models.currentData()
        with QSignalBlocker(self.models):
            self.models.clear()
            for entry in self._entries():
                self.models.addItem(entry.name, str(entry.path))
                self.models.setItemData(
                    self.models.count() - 1, entry.error or str(entry.path), Qt.ItemDataRole.ToolTipRole
                )
            self.models.setCurrentIndex(max(0, self.models.findData(chosen)) if self.models.count() else -1)
        if self.models.currentData() != before or before is None:
            self._model_chosen()
        self._show_state()

    def _model_chosen(self, *_: object) -> None:
        self.error.say("")
        entry = self.entry
        if entry is None:
            searching = "Looking for models…" if self._library.is_searching else "No models found."
            self._about.setText(self._library.failure or f"{searching} Open a file, or add a folder in the settings.")
        elif entry.error is not None:
            self._about.setText(f"Cannot be used: {entry.error}.")
        else:
            facts = (entry.architecture, entry.quantisation, f"{short_count(entry.num_parameters)} parameters")
            self._about.setText(" · ".join((*facts, format_bytes(entry.size_bytes))))
            config = remembered_config(entry, self._load_options)
            self.form.show_model(entry, self._entries(), config, self._engine.worker)
        self._show_estimate()

    def _show_estimate(self) -> None:
        entry = self.entry
        fit = None
        if entry is not None and entry.error is None:
            fit = fit_on(entry, self._engine.worker, self.form.config, self.form.draft_entry)
            self.memory.show_fit(fit, "The memory of this device cannot be read.")
        else:
            self.memory.show_fit(None)
        self._fits = fit is None or fit.fits
        self._show_state()

    # ------------------------------------------------------------ loading

    def _load(self) -> None:
        if self._is_loading:
            self.cancel_requested.emit()
            return
        entry = self.entry
        if entry is None or not self.load_button.isEnabled():
            return
        self.error.say("")
        self._is_loading = True
        self.load_requested.emit(self.form.config)

    def _follow_engine(self) -> None:
        engine = self._engine
        self.form.set_worker(engine.worker)
        if self._is_loading and engine.status == "ready":
            self._is_loading = False
            self.accept()
            return
        if self._is_loading and engine.status in ("no_model", "dead"):
            self._is_loading = False
            self.error.say(engine.failure)
        self._show_state()

    def _show_state(self) -> None:
        engine, entry = self._engine, self.entry
        loading = engine.status in ("loading", "starting") and self._is_loading
        usable = entry is not None and entry.error is None
        for part in (self.models, self.open_button, self.form):
            part.setEnabled(not loading)
        self.form.setVisible(usable)
        self.progress.setVisible(loading)
        self.stage.setVisible(loading)
        if loading:
            self._show_progress(engine.progress)
        self.load_button.setText("Cancel" if loading else "Load" if self._fits else "Load anyway")
        self.load_button.setAccessibleName("Cancel loading" if loading else "Load the model")
        self.load_button.setEnabled(loading or (usable and engine.status in ("no_model", "ready", "dead", "loading")))
        self.close_button.setText("Hide" if loading else "Close")
        self.close_button.setToolTip("Loading goes on; the header shows how far it is." if loading else "")

    def _show_progress(self, progress: LoadProgress | None) -> None:
        if progress is None:
            self.progress.setValue(0)
            self.stage.setText("Starting…")
            return
        self.progress.setValue(round(1000 * progress.done_bytes / max(1, progress.total_bytes)))
        self.stage.setText(progress_words(progress))

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._timer.start()
        self._show_estimate()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._timer.stop()
