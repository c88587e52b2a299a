"""What loading a model would take of the device's memory, in a bar and in words."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QGridLayout, QHBoxLayout, QSizePolicy, QVBoxLayout

from app.charts.parts_bar import Part, PartsBar
from app.panels.header import StatusDot
from app.panels.widgets import ElidedLabel, button, label
from app.state.load_options import MIN_CONTEXT
from app.theme import SPACE_M, SPACE_S, SPACE_XS, Theme, ThemeManager
from engine.memory import Fit, MemoryEstimate, format_bytes


def estimate_parts(estimate: MemoryEstimate) -> tuple[Part, ...]:
    """The parts in the order of the bar."""
    draft = (Part("Draft model", "memory_draft", estimate.draft, "the draft model with a KV cache of its own"),)
    return (
        Part("Weights", "memory_weights", estimate.weights, "the model's parameters"),
        Part("KV cache", "memory_kv", estimate.kv_cache, "keys and values of every token the chats hold"),
        *(draft if estimate.draft else ()),
        Part("Workspace", "memory_workspace", estimate.workspace, "activations and scratch space of a step"),
        Part("Runtime", "memory_runtime", estimate.runtime, "interpreter, libraries and driver of the engine"),
    )


class MemoryEstimateCard(QFrame):
    """Shows a `Fit`: the verdict, the bar against what is free, and what the KV cache holds.

    Where only a shorter context fits, `context_wanted` carries it when it is asked for.
    """

    context_wanted = Signal(int)

    def __init__(self, themes: ThemeManager) -> None:
        super().__init__()
        self.setObjectName("card")
        self._themes = themes
        column = QVBoxLayout(self)
        column.setContentsMargins(SPACE_M, SPACE_M - 2, SPACE_M, SPACE_M - 2)
        column.setSpacing(SPACE_S)
        self._dot = StatusDot(themes)
        self.verdict = label(role="strong")
        top = QHBoxLayout()
        top.setSpacing(SPACE_S)
        top.addWidget(self._dot)
        top.addWidget(self.verdict, 1)
        self.words = label(role="small", wrap=True)
        self._largest_context = 0
        self.shorter = button("", "link")
        self.shorter.clicked.connect(lambda: self.context_wanted.emit(self._largest_context))
        self.bar = PartsBar(themes.theme)
        self.bar.setAccessibleName("Memory that loading would take")
        self.bar.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self._facts = QGridLayout()
        self._facts.setHorizontalSpacing(SPACE_M)
        self._facts.setVerticalSpacing(SPACE_XS)
        self._facts.setColumnStretch(1, 1)
        self.facts: dict[str, ElidedLabel] = {}
        for row, name in enumerate(("KV blocks", "Tokens in all", "Per token", "Full chats")):
            value = self.facts[name] = ElidedLabel("", "figure")
            self._facts.addWidget(label(name, "small"), row, 0)
            self._facts.addWidget(value, row, 1)
        column.addWidget(label("MEMORY", "section"))
        column.addLayout(top)
        column.addWidget(self.words)
        column.addWidget(self.shorter, 0, Qt.AlignmentFlag.AlignLeft)
        column.addWidget(self.bar)
        column.addLayout(self._facts)
        column.addStretch(1)
        themes.changed.connect(self._show_theme)
        self.show_fit(None)

    def show_fit(self, fit: Fit | None, why_not: str = "") -> None:
        """Shows an estimate against what is free, or says why there is none."""
        self._largest_context = fit.largest_context if fit is not None and not fit.fits else 0
        self.shorter.setVisible(self._largest_context >= MIN_CONTEXT)
        self.shorter.setText(f"Use {self._largest_context:,} tokens")
        if fit is None:
            self._dot.set_colour("text_faint")
            self.verdict.setText("No estimate")
            self.words.setText(why_not or "Choose a model to see what it takes.")
            self.bar.set_parts((), "")
            self.bar.hide()
            for value in self.facts.values():
                value.set_text("–")
            return
        granted = fit.granted
        title, colour = _verdict(fit)
        self._dot.set_colour(colour)
        self.verdict.setText(title)
        self.words.setText(_words(fit))
        parts = estimate_parts(granted)
        room = fit.available - granted.total
        if room > 0:
            parts += (Part("Still free", "memory_free", room, "not used by anything"),)
        self.bar.set_parts(parts, "what is free" if room >= 0 else "what is needed", fit.available)
        self.bar.setAccessibleDescription(", ".join(f"{part.name} {format_bytes(part.size)}" for part in parts))
        self.bar.show()
        if not fit.fits and not fit.largest_context:
            for value in self.facts.values():
                value.set_text("–")
            return
        blocks = granted.num_blocks
        self.facts["KV blocks"].set_text(f"{blocks:,} of {granted.block_size} tokens")
        self.facts["Tokens in all"].set_text(f"{granted.kv_tokens:,} for all chats")
        self.facts["Per token"].set_text(format_bytes(granted.kv_cache / granted.kv_tokens))
        full = granted.kv_tokens // granted.context
        self.facts["Full chats"].set_text(f"{full} of {granted.context:,} tokens" if full else "none")

    def _show_theme(self, theme: Theme) -> None:
        self.bar.set_theme(theme)


def _verdict(fit: Fit) -> tuple[str, str]:
    if fit.fits:
        return "Fits", "success"
    return ("Context too long", "warning") if fit.largest_context else ("Does not fit", "danger")


def _words(fit: Fit) -> str:
    """The fit's message, without the verdict that stands above it."""
    text = fit.message
    for verdict in ("fits: ", "does not fit: "):
        text = text.removeprefix(verdict)
    return f"{text[:1].upper()}{text[1:]}."
