"""The model page of the right panel: what is loaded and what it takes, and the models there are to load."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtWidgets import (
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
)

from app.panels.header import STATUS_COLOURS, STATUS_WORDS, StatusDot, model_title, progress_words
from app.panels.library import ModelLibrary
from app.panels.memory_compared import MemoryCompared
from app.panels.widgets import ElidedLabel, ErrorBox, IconButton, ScrolledColumn, button, label, separator
from app.state.engine_state import EngineState
from app.state.telemetry import TelemetryState
from app.theme import SPACE_M, SPACE_S, SPACE_XS, ThemeManager
from app.units import short_count
from engine.catalog import CatalogEntry
from engine.memory import format_bytes
from engine.protocol import EngineConfig, ModelInfo

BACKEND_TITLES = {"native": "Kvasir's decoder", "transformers": "transformers"}
MAX_ROWS = 50


class ModelRow(QPushButton):
    """One model of this machine: its name over its facts, or over why it cannot be used."""

    def __init__(self, entry: CatalogEntry) -> None:
        super().__init__()
        self.entry = entry
        self.setObjectName("modelRow")
        self.setProperty("variant", "flat")
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        column = QVBoxLayout(self)
        column.setContentsMargins(SPACE_S, SPACE_XS + 2, SPACE_S, SPACE_XS + 2)
        column.setSpacing(1)
        name = ElidedLabel(entry.name, "strong", Qt.TextElideMode.ElideMiddle)
        facts = ElidedLabel(model_facts(entry), "small")
        for part in (name, facts):
            part.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
            column.addWidget(part)
        self.setEnabled(entry.error is None)
        self.setToolTip(entry.error or str(entry.path))
        self.setAccessibleName(f"Load {entry.name}, {model_facts(entry)}")
        self._column = column

    def sizeHint(self) -> QSize:
        return self._column.sizeHint()

    def minimumSizeHint(self) -> QSize:
        return self._column.minimumSize()


class ModelPanel(ScrolledColumn):
    """Shows the loaded model and lists those of this machine. What is asked for goes to the window."""

    dialog_requested = Signal(object)
    """Carries the `CatalogEntry` that was chosen, or None for whichever."""
    open_file_requested = Signal()
    unload_requested = Signal()

    def __init__(
        self, engine: EngineState, library: ModelLibrary, telemetry: TelemetryState, themes: ThemeManager
    ) -> None:
        super().__init__(SPACE_M, SPACE_S, SPACE_M, SPACE_M)
        self.memory = MemoryCompared(engine, library, telemetry)
        self._engine, self._library, self._themes = engine, library, themes
        self._shown: ModelInfo | None = None
        self._build_loaded()
        self.column.addWidget(separator())
        self._build_library()
        self.column.addStretch(1)
        engine.changed.connect(self.refresh)
        library.changed.connect(self._fill_rows)
        self._fill_rows()
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
        self._facts.setHorizontalSpacing(SPACE_S + 4)
        self._facts.setVerticalSpacing(SPACE_XS)
        self._facts.setColumnStretch(1, 1)
        self._warnings = label(role="danger", wrap=True)
        self._warnings.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._warnings.hide()
        self._progress = QProgressBar()
        self._progress.setTextVisible(False)
        self._progress.setRange(0, 1000)
        self._progress.setAccessibleName("Loading the model")
        self._stage = label(role="small", wrap=True)
        self._error = ErrorBox()
        self.load_button = button("Load a model…", "primary")
        self.load_button.clicked.connect(lambda: self.dialog_requested.emit(None))
        inside.addLayout(top)
        inside.addWidget(self._name)
        inside.addLayout(self._facts)
        inside.addWidget(self._warnings)
        inside.addWidget(self.memory)
        inside.addWidget(self._progress)
        inside.addWidget(self._stage)
        self.column.addWidget(card)
        self.column.addWidget(self._error)
        self.column.addWidget(self.load_button)

    def _build_library(self) -> None:
        head = QHBoxLayout()
        head.addWidget(label("ON THIS MACHINE", "section"), 1)
        again = IconButton("refresh", "Look for models again", self._themes, size=26)
        again.clicked.connect(self._library.refresh)
        head.addWidget(again)
        self._nothing = label(role="small", wrap=True)
        self._list = QVBoxLayout()
        self._list.setSpacing(2)
        self.rows: list[ModelRow] = []
        self.open_button = button("Open a model file…")
        self.open_button.clicked.connect(self.open_file_requested)
        part = QVBoxLayout()
        part.setSpacing(SPACE_XS)
        part.addLayout(head)
        part.addWidget(self._nothing)
        part.addLayout(self._list)
        self.column.addLayout(part)
        self.column.addWidget(self.open_button)

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
        if progress is not None:
            self._progress.setValue(round(1000 * progress.done_bytes / max(1, progress.total_bytes)))
            self._stage.setText(progress_words(progress))
        else:
            self._progress.setValue(0)
        self._error.say(engine.failure if engine.status in ("no_model", "dead") else "")

    def _show_facts(self, model: ModelInfo | None) -> None:
        if model is self._shown:
            return
        self._shown = model
        while (item := self._facts.takeAt(0)) is not None:
            if (old := item.widget()) is not None:
                old.hide()
                old.deleteLater()
        warnings = [] if model is None else model.warnings
        self._warnings.setText("\n".join(warnings))
        self._warnings.setVisible(bool(warnings))
        if model is None:
            return
        for row, (name, value) in enumerate(loaded_facts(model, self._engine.config)):
            self._facts.addWidget(label(name, "small"), row, 0)
            self._facts.addWidget(ElidedLabel(value, "figure"), row, 1)

    def _fill_rows(self) -> None:
        for row in self.rows:
            self._list.removeWidget(row)
            row.hide()
            row.deleteLater()
        self.rows = [ModelRow(entry) for entry in self._library.entries[:MAX_ROWS]]
        for row in self.rows:
            row.clicked.connect(lambda _=False, entry=row.entry: self.dialog_requested.emit(entry))
            self._list.addWidget(row)
        if self._library.entries:
            words = ""
        elif self._library.is_searching:
            words = "Looking for models…"
        else:
            words = self._library.failure or "No models found. Add a folder in the settings, or open a file."
        self._nothing.setText(words)
        self._nothing.setVisible(bool(words))


def model_facts(entry: CatalogEntry) -> str:
    """A model that is not loaded, in one line; what is wrong with it where it cannot be used."""
    if entry.error is not None:
        return f"Cannot be used: {entry.error}"
    size = format_bytes(entry.size_bytes)
    return " · ".join((entry.quantisation, short_count(entry.num_parameters), size))


def loaded_facts(model: ModelInfo, config: EngineConfig | None) -> list[tuple[str, str]]:
    """What is loaded and how, line by line."""
    cache = model.num_kv_blocks * model.block_size * model.kv_bytes_per_token
    return [
        ("Parameters", f"{short_count(model.num_parameters)} · {model.num_layers} layers"),
        ("Family", model.architecture),
        ("File", model.format),
        ("Weights", format_bytes(model.weight_bytes)),
        ("Precision", _precision_words(model)),
        ("Computes", f"{model.dtype} on {model.device}"),
        ("Backend", BACKEND_TITLES[model.backend]),
        ("Kernels", model.kernels),
        ("KV cache", f"{format_bytes(cache)} · {model.kv_dtype}"),
        ("KV blocks", f"{model.num_kv_blocks:,} × {model.block_size}"),
        ("Per token", format_bytes(model.kv_bytes_per_token)),
        ("Context", f"{model.max_context:,} tokens"),
        ("Chats", f"{model.max_num_seqs} at once"),
        ("Speculation", _speculation_words(model, config)),
        ("Loaded in", f"{model.load_seconds:.1f} s"),
    ]


def _precision_words(model: ModelInfo) -> str:
    return f"{model.quantization.upper()}, since loading" if model.quantization else "as stored"


def _speculation_words(model: ModelInfo, config: EngineConfig | None) -> str:
    if model.speculation is None:
        return "off"
    drafts = f", up to {config.num_draft_tokens}" if config is not None else ""
    if model.speculation == "draft":
        return f"{model_title(model.draft_model or 'draft model')}{drafts}"
    return f"n-gram{drafts}"
