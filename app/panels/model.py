"""The model page of the right panel: what is loaded, what it takes, and how to load another."""

from __future__ import annotations

from PySide6.QtCore import QSignalBlocker, Qt, Signal
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QFrame, QGridLayout, QHBoxLayout, QProgressBar, QScrollArea, QVBoxLayout, QWidget

from app.panels.header import STATUS_COLOURS, STATUS_WORDS, StatusDot, model_title
from app.panels.library import ModelLibrary, fit_on
from app.panels.widgets import (
    ElidedLabel,
    ErrorBox,
    IconButton,
    NumberBox,
    Select,
    button,
    label,
    separator,
)
from app.state.engine_state import EngineState
from app.theme import SPACE_M, SPACE_S, SPACE_XS, ThemeManager
from app.units import short_count
from engine.catalog import CatalogEntry
from engine.memory import format_bytes
from engine.protocol import EngineConfig, ModelInfo

MIN_CONTEXT = 256
DEFAULT_CONTEXT_LIMIT = 8192
MAX_TABS = 64


class ModelPanel(QScrollArea):
    """Shows the loaded model and loads others. The requests go to the window, which knows where models come from."""

    load_requested = Signal(object)
    open_file_requested = Signal()
    unload_requested = Signal()

    def __init__(self, engine: EngineState, library: ModelLibrary, themes: ThemeManager) -> None:
        super().__init__()
        self._engine, self._library, self._themes = engine, library, themes
        self._was_loaded: str | None = None
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFrameShape(QFrame.Shape.NoFrame)
        content = QWidget()
        content.setObjectName("scrolled")
        self._column = QVBoxLayout(content)
        self._column.setContentsMargins(SPACE_M, SPACE_S, SPACE_M, SPACE_M)
        self._column.setSpacing(SPACE_M)
        self._build_loaded()
        self._column.addWidget(separator())
        self._build_loader()
        self._column.addStretch(1)
        self.setWidget(content)
        engine.changed.connect(self.refresh)
        library.changed.connect(self._fill_models)
        self._fill_models()
        self.refresh()

    # ------------------------------------------------------------ building

    def _build_loaded(self) -> None:
        card = QFrame()
        card.setObjectName("card")
        inside = QVBoxLayout(card)
        inside.setContentsMargins(SPACE_M - 2, SPACE_M - 4, SPACE_M - 2, SPACE_M - 4)
        inside.setSpacing(SPACE_S)
        top = QHBoxLayout()
        top.setSpacing(SPACE_S)
        self._dot = StatusDot(self._themes)
        self._status = label(role="section")
        self._unload = button("Unload", "link", "Unload the model and give its memory back")
        self._unload.clicked.connect(self.unload_requested)
        top.addWidget(self._dot)
        top.addWidget(self._status, 1)
        top.addWidget(self._unload)
        self._name = label(role="strong", wrap=True)
        self._facts = QGridLayout()
        self._facts.setHorizontalSpacing(SPACE_M)
        self._facts.setVerticalSpacing(SPACE_XS)
        self._facts.setColumnStretch(1, 1)
        self._progress = QProgressBar()
        self._progress.setTextVisible(False)
        self._progress.setAccessibleName("Loading the model")
        self._stage = label(role="small", wrap=True)
        self._error = ErrorBox()
        inside.addLayout(top)
        inside.addWidget(self._name)
        inside.addLayout(self._facts)
        inside.addWidget(self._progress)
        inside.addWidget(self._stage)
        self._column.addWidget(card)
        self._column.addWidget(self._error)

    def _build_loader(self) -> None:
        head = QHBoxLayout()
        head.addWidget(label("LOAD A MODEL", "section"), 1)
        again = IconButton("refresh", "Look for models again", self._themes, size=26)
        again.clicked.connect(self._library.refresh)
        head.addWidget(again)
        self._column.addLayout(head)
        self.models = Select(self._themes, "Model to load")
        self.models.currentIndexChanged.connect(self._model_chosen)
        self._about = label(role="small", wrap=True)
        part = QVBoxLayout()
        part.setSpacing(SPACE_XS)
        part.addWidget(self.models)
        part.addWidget(self._about)
        self._column.addLayout(part)
        self.context = NumberBox("Context length in tokens", MIN_CONTEXT, DEFAULT_CONTEXT_LIMIT, 0, 1024)
        self.tabs = NumberBox("Chats answered at once", 1, MAX_TABS, 0, 1)
        self.tabs.setValue(8)
        for box, title, help_text in (
            (self.context, "Context length", "Tokens one chat can hold; memory is taken at load, for several chats."),
            (self.tabs, "Chats at once", "How many answers are written in one batch; others wait."),
        ):
            box.setFixedWidth(84)
            box.valueChanged.connect(self._show_estimate)
            row = QHBoxLayout()
            title_label = label(title, "strong")
            title_label.setBuddy(box)
            row.addWidget(title_label, 1)
            row.addWidget(box)
            part = QVBoxLayout()
            part.setSpacing(SPACE_XS)
            part.addLayout(row)
            part.addWidget(label(help_text, "faint", wrap=True))
            self._column.addLayout(part)
        self._estimate = label(role="small", wrap=True)
        self._column.addWidget(self._estimate)
        self.load_button = button("Load", "primary")
        self.load_button.clicked.connect(self._load)
        self.open_button = button("Open a model file…")
        self.open_button.clicked.connect(self.open_file_requested)
        buttons = QHBoxLayout()
        buttons.setSpacing(SPACE_S)
        buttons.addWidget(self.load_button, 1)
        buttons.addWidget(self.open_button, 1)
        self._column.addLayout(buttons)

    # ------------------------------------------------------------ showing

    def refresh(self) -> None:
        """Shows the engine's state as it is now."""
        engine, model = self._engine, self._engine.model
        self._status.setText(STATUS_WORDS[engine.status].upper())
        self._dot.set_colour(STATUS_COLOURS[engine.status])
        loading = engine.status == "loading"
        if model is not None:
            self._name.setText(model.name)
        elif loading and engine.config is not None:
            self._name.setText(model_title(engine.config.model))
        else:
            self._name.setText({"dead": "The engine is not running"}.get(engine.status, "No model is loaded"))
        self._show_facts(model)
        self._unload.setVisible(engine.status in ("ready", "loading"))
        self._unload.setText("Cancel" if loading else "Unload")
        self._progress.setVisible(loading)
        progress = engine.progress
        self._stage.setVisible(loading and progress is not None)
        if loading and progress is not None:
            self._progress.setRange(0, 1000)
            self._progress.setValue(round(1000 * progress.done_bytes / max(1, progress.total_bytes)))
            size = f" · {format_bytes(progress.total_bytes)}" if progress.total_bytes else ""
            self._stage.setText(f"{progress.stage}{size}")
        elif loading:
            self._progress.setRange(0, 1000)
            self._progress.setValue(0)
        self._error.say(engine.failure if engine.status in ("no_model", "dead") else "")
        self.load_button.setEnabled(self._may_load())
        self._show_estimate()

    def _show_facts(self, model: ModelInfo | None) -> None:
        path = model.path if model is not None else None
        if path == self._was_loaded and path is not None:
            return
        self._was_loaded = path
        while (item := self._facts.takeAt(0)) is not None:
            if (old := item.widget()) is not None:
                old.hide()
                old.deleteLater()
        if model is None:
            return
        cache = model.num_kv_blocks * model.block_size * model.kv_bytes_per_token
        facts = (
            ("Parameters", f"{short_count(model.num_parameters)} · {model.num_layers} layers"),
            ("Kind", f"{model.architecture} · {model.format}"),
            ("Computes in", f"{model.dtype} on {model.device}"),
            ("Weights", format_bytes(model.weight_bytes)),
            ("KV cache", format_bytes(cache)),
            ("KV blocks", f"{model.num_kv_blocks:,} of {model.block_size} tokens"),
            ("Per token", f"{format_bytes(model.kv_bytes_per_token)} · {model.kv_dtype}"),
            ("Context", f"{model.max_context:,} tokens"),
            ("Chats at once", f"{model.max_num_seqs}"),
            ("Loaded in", f"{model.load_seconds:.1f} s"),
        )
        for row, (name, value) in enumerate(facts):
            self._facts.addWidget(label(name, "small"), row, 0)
            self._facts.addWidget(ElidedLabel(value, "figure"), row, 1)

    def _fill_models(self) -> None:
        chosen = self.models.currentData()
        with QSignalBlocker(self.models):
            self.models.clear()
            for entry in self._library.entries:
                self.models.addItem(entry.name, str(entry.path))
                self.models.setItemData(
                    self.models.count() - 1, entry.error or str(entry.path), Qt.ItemDataRole.ToolTipRole
                )
            index = self.models.findData(chosen) if chosen else -1
            self.models.setCurrentIndex(max(0, index) if self.models.count() else -1)
            self.models.setEnabled(self.models.count() > 0)
        self._model_chosen()

    def _entry(self) -> CatalogEntry | None:
        return self._library.entry(self.models.currentData() or "")

    def _may_load(self) -> bool:
        entry = self._entry()
        return self._engine.status in ("no_model", "ready", "dead") and entry is not None and entry.error is None

    def _model_chosen(self, *_: object) -> None:
        entry = self._entry()
        if entry is None:
            self._about.setText(
                self._library.failure or "No models found. Add a folder in the settings, or open a file."
            )
        elif entry.error is not None:
            self._about.setText(f"Cannot be used: {entry.error}")
        else:
            facts = (entry.quantisation, short_count(entry.num_parameters), format_bytes(entry.size_bytes))
            self._about.setText(" · ".join((*facts, f"context up to {entry.max_context:,}")))
        if entry is not None and entry.error is None:
            self.context.setRange(min(MIN_CONTEXT, entry.max_context), entry.max_context)
            self.context.setValue(min(entry.max_context, DEFAULT_CONTEXT_LIMIT))
        self.load_button.setEnabled(self._may_load())
        self._show_estimate()

    def _show_estimate(self, *_: object) -> None:
        entry = self._entry()
        fit = None
        if entry is not None and self.isVisible():
            fit = fit_on(entry, self._engine.worker, int(self.context.value()), int(self.tabs.value()))
        if fit is None:
            self._estimate.hide()
            return
        self._estimate.setText(fit.message[0].upper() + fit.message[1:] + ".")
        self._estimate.show()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._show_estimate()

    def _load(self) -> None:
        entry = self._entry()
        if entry is not None:
            config = EngineConfig(
                model=str(entry.path),
                max_context=int(self.context.value()),
                max_num_seqs=int(self.tabs.value()),
            )
            self.load_requested.emit(config)
