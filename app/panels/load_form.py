"""The options a model is loaded with, as a form. What does not apply is greyed, and the reason stands below."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from PySide6.QtCore import QSignalBlocker, Signal
from PySide6.QtWidgets import QHBoxLayout, QLabel, QVBoxLayout, QWidget

from app.panels.parameter_row import SLIDER_STEPS, log_scale
from app.panels.widgets import CalmSlider, NumberBox, Segments, Select, Switch, button, label, separator
from app.state.load_options import (
    GPU_MEMORY_SHARES,
    MAX_DRAFT_TOKENS,
    MAX_TABS,
    MIN_CONTEXT,
    LoadOptions,
    Reasons,
    device_choices,
    hardware_for,
    options_for,
    possible_config,
)
from app.theme import SPACE_M, SPACE_S, SPACE_XS, ThemeManager
from engine.catalog import CatalogEntry
from engine.memory import format_bytes, precision_of
from engine.protocol import EngineConfig, WorkerStarted

_PRECISION_HELP = {
    "stored": "The weights keep the numbers of the file.",
    "int8": "Rounded to 8 bits while loading: about half of 16-bit weights, at no loss that shows.",
    "int4": "Rounded to 4 bits while loading: about a quarter, at a small loss.",
}
_KV_HELP = {
    "auto": "The keys and values of every token the chats hold; {auto} here.",
    "int8": "About twice as many tokens in the same memory as with 16 bits, at a loss that hardly shows.",
}
_SPECULATION_HELP = {
    "off": "One token a step for each answer.",
    "ngram": "Guesses the next tokens from what the chat already holds: fast where an answer repeats its question.",
    "draft": "A smaller model guesses the next tokens and this one checks them. The answers stay the same.",
}
_BACKEND_HELP = {
    "auto": "Kvasir's own decoder where it knows the family, the model's code in transformers elsewhere.",
    "native": "Kvasir's own decoder only.",
    "transformers": "The model's code in transformers, slower, for any decoder that it runs.",
}
_SHARE_HELP = (
    "The part of the GPU's memory, from {:g} to {:g}, that all programs together may use: the KV cache is cut to it."
).format(*GPU_MEMORY_SHARES)
_GRAPHS_HELP = "Steps of usual sizes are captured while loading: faster answers, for some memory and a longer load."

_ADVANCED = ("device", "gpu_memory_share", "backend", "cuda_graphs")


class LoadForm(QWidget):
    """Edits an `EngineConfig` for one model. `edited` follows each change; `config` is always one that may be tried."""

    edited = Signal()

    def __init__(self, themes: ThemeManager) -> None:
        super().__init__()
        self._entry: CatalogEntry | None = None
        self._entries: Sequence[CatalogEntry] = ()
        self._worker: WorkerStarted | None = None
        self._config = EngineConfig(model="")
        self._names: dict[QWidget, QLabel] = {}
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(SPACE_M)
        self._build_precision()
        self._build_sizes()
        self._build_speculation(themes)
        self._build_advanced(themes)
        self._column.addStretch(1)

    # ------------------------------------------------------------ building

    def _build_precision(self) -> None:
        self.precision = Segments({"stored": "As stored", "int8": "INT8", "int4": "INT4"}, "Weights")
        self.precision.chosen.connect(lambda key: self._change(quantization=None if key == "stored" else key))
        self.group_size = Segments({"32": "32", "64": "64", "128": "128"}, "Weights that share a scale")
        self.group_size.chosen.connect(lambda key: self._change(quantization_group_size=int(key)))
        self._group_row = self._inner_row(
            "Group size", self.group_size, "Weights that share a scale; smaller is closer."
        )
        self._precision_help = self._part("Weights", self.precision, self._group_row)
        self.kv_dtype = Segments(
            {"auto": "Auto", "fp32": "FP32", "fp16": "FP16", "bf16": "BF16", "int8": "INT8"}, "KV cache"
        )
        self.kv_dtype.chosen.connect(lambda key: self._change(kv_dtype=key))
        self._kv_help = self._part("KV cache", self.kv_dtype)

    def _build_sizes(self) -> None:
        self.context = NumberBox("Context length in tokens", MIN_CONTEXT, MIN_CONTEXT, 0, 1024)
        self.context.setFixedWidth(92)
        self.context.valueChanged.connect(lambda value: self._change(max_context=int(value)))
        self.context_slider = CalmSlider("Context length slider")
        self.context_slider.setRange(0, SLIDER_STEPS)
        self.context_slider.setPageStep(SLIDER_STEPS // 20)
        self.context_slider.setMinimumHeight(18)
        self.context_slider.valueChanged.connect(self._slider_moved)
        self._context_help = self._part("Context length", self.context, self.context_slider, beside=True)
        self.tabs = NumberBox("Chats answered at once", 1, MAX_TABS, 0, 1)
        self.tabs.setFixedWidth(92)
        self.tabs.valueChanged.connect(lambda value: self._change(max_num_seqs=int(value)))
        self._part("Chats at once", self.tabs, beside=True).setText(
            "How many answers are written in one batch; others wait their turn."
        )

    def _build_speculation(self, themes: ThemeManager) -> None:
        self.speculation = Segments({"off": "Off", "ngram": "N-gram", "draft": "Draft model"}, "Speculation")
        self.speculation.chosen.connect(lambda key: self._change(speculation=None if key == "off" else key))
        self.draft_model = Select(themes, "Draft model")
        self.draft_model.activated.connect(lambda _: self._change(draft_model=self.draft_model.currentData()))
        self.draft_model.setMinimumWidth(300)
        self._draft_row = self._inner_row("Draft model", self.draft_model)
        self.num_drafts = NumberBox("Tokens guessed ahead", 1, MAX_DRAFT_TOKENS, 0, 1)
        self.num_drafts.setFixedWidth(92)
        self.num_drafts.valueChanged.connect(lambda value: self._change(num_draft_tokens=int(value)))
        self._drafts_row = self._inner_row(
            "Tokens guessed ahead", self.num_drafts, "At most; fewer where few are right."
        )
        self._speculation_help = self._part("Speculation", self.speculation, self._draft_row, self._drafts_row)

    def _build_advanced(self, themes: ThemeManager) -> None:
        self._column.addWidget(separator())
        self.advanced_button = button("Advanced", "link", "Show device, backend and the options of a GPU")
        self.advanced_button.setCheckable(True)
        self.advanced_button.toggled.connect(self._advanced_toggled)
        row = QHBoxLayout()
        row.addWidget(self.advanced_button)
        row.addStretch(1)
        self._column.addLayout(row)
        self._advanced = QWidget()
        column = QVBoxLayout(self._advanced)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACE_M)
        self.device = Select(themes, "Device")
        self.device.activated.connect(lambda _: self._change(device=self.device.currentData()))
        self._device_help = self._part("Device", self.device, into=column)
        self.gpu_memory_share = NumberBox("GPU memory share", *GPU_MEMORY_SHARES, decimals=2, step=0.05)
        self.gpu_memory_share.setFixedWidth(92)
        self.gpu_memory_share.valueChanged.connect(lambda value: self._change(gpu_memory_share=value))
        self._share_help = self._part("GPU memory share", self.gpu_memory_share, beside=True, into=column)
        self.backend = Segments({"auto": "Auto", "native": "Kvasir", "transformers": "transformers"}, "Backend")
        self.backend.chosen.connect(lambda key: self._change(backend=key))
        self._backend_help = self._part("Backend", self.backend, into=column)
        self.cuda_graphs = Switch("CUDA graphs", themes)
        self.cuda_graphs.setProperty("role", "strong")
        self.cuda_graphs.toggled.connect(lambda on: self._change(cuda_graphs=on))
        self._graphs_help = self._part("", self.cuda_graphs, into=column)
        self._column.addWidget(self._advanced)
        self._advanced_toggled(False)

    def _part(
        self, title: str, control: QWidget, *more: QWidget, beside: bool = False, into: QVBoxLayout | None = None
    ):
        """Adds a control, titled unless it shows its own name, with further rows and a line of help below it, and
        returns that line."""
        part = QVBoxLayout()
        part.setSpacing(SPACE_XS)
        line = QHBoxLayout() if beside else part
        if title:
            name = label(title, "strong")
            name.setBuddy(control)
            self._names[control] = name
            line.addWidget(name, int(beside))
        line.addWidget(control)
        if line is not part:
            part.addLayout(line)
        for widget in more:
            part.addWidget(widget)
        words = label(role="faint", wrap=True)
        part.addWidget(words)
        (self._column if into is None else into).addLayout(part)
        return words

    def _inner_row(self, title: str, control: QWidget, help_text: str = "") -> QWidget:
        row = QWidget()
        line = QHBoxLayout(row)
        line.setContentsMargins(0, SPACE_XS, 0, 0)
        line.setSpacing(SPACE_S)
        name = label(title, "small")
        name.setBuddy(control)
        name.setToolTip(help_text)
        control.setToolTip(help_text)
        line.addWidget(name)
        line.addStretch(1)
        line.addWidget(control)
        return row

    # ------------------------------------------------------------ showing

    @property
    def config(self) -> EngineConfig:
        return self._config

    def show_model(
        self,
        entry: CatalogEntry,
        entries: Sequence[CatalogEntry],
        config: EngineConfig,
        worker: WorkerStarted | None,
    ) -> None:
        """Shows how a model would be loaded with `config`; `entries` may draft for it."""
        self._entry, self._entries, self._worker = entry, entries, worker
        self._config = config
        with QSignalBlocker(self.device):
            self.device.clear()
            for name, (title, reason) in device_choices(worker).items():
                self.device.addItem(f"{title} – not usable" if reason else title, name)
                self.device.setItemData(self.device.count() - 1, reason, _REASON_ROLE)
        usual = EngineConfig(model=config.model)
        if any(getattr(config, name) != getattr(usual, name) for name in _ADVANCED):
            self.advanced_button.setChecked(True)
        self._show()

    def set_worker(self, worker: WorkerStarted | None) -> None:
        if worker is not self._worker and self._entry is not None:
            self.show_model(self._entry, self._entries, self._config, worker)

    def set_context(self, tokens: int) -> None:
        """Chooses a context length as if it had been typed."""
        self.context.setValue(tokens)

    @property
    def draft_entry(self) -> CatalogEntry | None:
        """The model that drafts with the configuration shown."""
        return next((entry for entry in self._entries if str(entry.path) == self._config.draft_model), None)

    def _change(self, **changes: object) -> None:
        self._config = replace(self._config, **changes)
        self._show()
        self.edited.emit()

    def _slider_moved(self, position: int) -> None:
        if self._entry is None:
            return
        low, high = self.context.minimum(), self.context.maximum()
        value = log_scale(low, high).to_value(position / SLIDER_STEPS) if high > low else high
        step = 256 if value < 8192 else 1024
        value = high if position == SLIDER_STEPS else max(low, min(high, round(value / step) * step))
        if int(value) != self._config.max_context:
            self._change(max_context=int(value))

    def _show(self) -> None:
        entry = self._entry
        if entry is None or entry.shape is None:
            return
        options = options_for(entry, self._entries, self._config, self._worker)
        config = self._config = possible_config(self._config, options)
        self._show_segments(self.precision, options.precision, config.quantization or "stored")
        self.precision.set_title("stored", f"As stored · {entry.quantisation}")
        self._precision_help.setText(_words(options.precision, _PRECISION_HELP[config.quantization or "stored"]))
        self._group_row.setVisible(config.quantization == "int4")
        self.group_size.choose(str(config.quantization_group_size))
        self._show_segments(self.kv_dtype, options.kv_dtype, config.kv_dtype)
        auto = precision_of(replace(config, kv_dtype="auto"), hardware_for(config, self._worker)).kv.upper()
        kv_help = _KV_HELP.get(config.kv_dtype, "The keys and values of every token the chats hold.")
        self._kv_help.setText(_words(options.kv_dtype, kv_help.format(auto=auto)))
        self._show_sizes(entry, config)
        self._show_segments(self.speculation, options.speculation, config.speculation or "off")
        self._speculation_help.setText(_words(options.speculation, _SPECULATION_HELP[config.speculation or "off"]))
        self._show_drafts(options, config)
        self.device.setCurrentIndex(max(0, self.device.findData(config.device)))
        self._device_help.setText(self.device.currentData(_REASON_ROLE) or "Where weights and KV cache are held.")
        self._show_segments(self.backend, options.backend, config.backend)
        self._backend_help.setText(_words(options.backend, _BACKEND_HELP[config.backend]))
        self._show_gpu(options, config)

    @staticmethod
    def _show_segments(segments: Segments, reasons: Reasons, choice: str) -> None:
        for key, reason in reasons.items():
            segments.set_reason(key, reason)
        segments.choose(choice)

    def _show_sizes(self, entry: CatalogEntry, config: EngineConfig) -> None:
        low, high = min(MIN_CONTEXT, entry.max_context), entry.max_context
        context = config.max_context or high
        with QSignalBlocker(self.context), QSignalBlocker(self.context_slider), QSignalBlocker(self.tabs):
            self.context.setRange(low, high)
            self.context.setValue(context)
            travel = log_scale(low, high).to_travel(context) if high > low else 1.0
            self.context_slider.setValue(round(travel * SLIDER_STEPS))
            self.context_slider.setEnabled(high > low)
            self.tabs.setValue(config.max_num_seqs)
        self._context_help.setText(f"Tokens one chat can hold; this model's maximum is {high:,}.")

    def _show_gpu(self, options: LoadOptions, config: EngineConfig) -> None:
        with QSignalBlocker(self.gpu_memory_share), QSignalBlocker(self.cuda_graphs):
            self.gpu_memory_share.setValue(config.gpu_memory_share)
            if self.cuda_graphs.isChecked() != config.cuda_graphs:
                self.cuda_graphs.setChecked(config.cuda_graphs)
                self.cuda_graphs.settle()
        for control, words, help_text, reason in (
            (self.gpu_memory_share, self._share_help, _SHARE_HELP, options.gpu_memory_share),
            (self.cuda_graphs, self._graphs_help, _GRAPHS_HELP, options.cuda_graphs),
        ):
            for part in (control, self._names.get(control)):
                if part is not None:
                    part.setEnabled(not reason)
            control.setAccessibleDescription(reason or help_text)
            words.setText(_words({"": reason}, help_text))

    def _show_drafts(self, options: LoadOptions, config: EngineConfig) -> None:
        self._draft_row.setVisible(config.speculation == "draft")
        self._drafts_row.setVisible(config.speculation is not None)
        with QSignalBlocker(self.draft_model), QSignalBlocker(self.num_drafts):
            self.draft_model.clear()
            for draft in options.drafts:
                self.draft_model.addItem(f"{draft.name} · {format_bytes(draft.size_bytes)}", str(draft.path))
            self.draft_model.setCurrentIndex(self.draft_model.findData(config.draft_model))
            self.num_drafts.setValue(config.num_draft_tokens)

    def _advanced_toggled(self, shown: bool) -> None:
        self._advanced.setVisible(shown)
        self.advanced_button.setText("Advanced  ▾" if shown else "Advanced  ▸")


_REASON_ROLE = 0x0101  # beside the device's name, which is Qt.ItemDataRole.UserRole


def _words(reasons: Reasons, help_text: str) -> str:
    """What the choice means, and why others are not to be had, each reason once."""
    return " ".join([help_text, *dict.fromkeys(reason for reason in reasons.values() if reason)])
