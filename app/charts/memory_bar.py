"""Where the device's memory is."""

from __future__ import annotations

from PySide6.QtWidgets import QWidget

from app.charts.figures import Figure
from app.charts.page import ChartPage
from app.charts.parts_bar import Part, PartsBar
from app.state.telemetry import TelemetryState
from app.theme import Theme
from engine.memory import format_bytes
from engine.protocol import MemoryBreakdown


def parts_of(memory: MemoryBreakdown) -> tuple[Part, ...]:
    """The parts in the order of the bar."""
    return (
        Part("Weights", "memory_weights", memory.weights, "the model's parameters"),
        Part("KV cache", "memory_kv", memory.kv_cache, "keys and values of every token the chats hold"),
        Part("Workspace", "memory_workspace", memory.workspace, "activations, scratch space and captured graphs"),
        Part("Runtime", "memory_runtime", memory.runtime, "interpreter, libraries and driver of the engine"),
        Part("Other", "memory_other", memory.other, "other programs and this window"),
        Part("Free", "memory_free", memory.free, "not used by anything"),
    )


class MemoryPage(ChartPage):
    title = "Memory"

    def __init__(self, state: TelemetryState, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(state, theme, parent)
        self.bar = PartsBar(theme, self)
        self.add_picture(self.bar)

    def set_theme(self, theme: Theme) -> None:
        super().set_theme(theme)
        self.bar.set_theme(theme)

    def refresh(self, now: float) -> None:
        pass  # sizes are read as numbers: they change at the pace of the figures

    def refresh_figures(self) -> None:
        telemetry = self.state.latest
        if telemetry is None:
            return
        memory = telemetry.memory
        self.bar.set_parts(parts_of(memory), memory.kind)
        used = format_bytes(memory.total - memory.free)
        total = format_bytes(memory.total)
        self.figure_row.set_figures(Figure(used, f"of {total} {memory.kind}"))
        worker = self.state.engine.worker
        self.set_note(worker.device_name if worker is not None else "")
        listed = ", ".join(f"{part.name.lower()} {format_bytes(part.size)}" for part in parts_of(memory))
        self.describe(f"{memory.kind}: {used} used of {total}. {listed}.")
