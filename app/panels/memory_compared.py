"""The loaded model's memory: what was estimated beside what is measured."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from app.panels.library import ModelLibrary
from app.panels.widgets import label
from app.state.engine_state import EngineState
from app.state.load_options import fit_on
from app.state.telemetry import TelemetryState
from app.theme import SPACE_S, SPACE_XS
from engine.catalog import CatalogEntry
from engine.memory import MemoryEstimate, format_bytes
from engine.protocol import MemoryBreakdown, ModelInfo


class MemoryCompared(QWidget):
    """A table of parts, estimated and measured; hidden while there is nothing to compare.

    With a draft model the parts are not told apart, since the engine counts its weights and cache with the others.
    """

    def __init__(self, engine: EngineState, library: ModelLibrary, telemetry: TelemetryState) -> None:
        super().__init__()
        self._engine, self._library, self._telemetry = engine, library, telemetry
        self._model: ModelInfo | None = None
        self._estimate: MemoryEstimate | None = None
        grid = QGridLayout(self)
        grid.setContentsMargins(0, SPACE_XS, 0, 0)
        grid.setHorizontalSpacing(SPACE_S)
        grid.setVerticalSpacing(SPACE_XS)
        grid.setColumnStretch(0, 1)
        for column, title in ((1, "estimated"), (2, "measured")):
            grid.addWidget(label(title, "small"), 0, column, Qt.AlignmentFlag.AlignRight)
        self._cells: dict[str, tuple[QLabel, QLabel, QLabel]] = {}
        for row, name in enumerate(("Weights", "KV cache", "Workspace", "Runtime", "In all"), start=1):
            cells = (label(name, "small"), label(role="figure"), label(role="figure"))
            for column, cell in enumerate(cells):
                grid.addWidget(cell, row, column, Qt.AlignmentFlag.AlignRight if column else Qt.AlignmentFlag.AlignLeft)
            self._cells[name] = cells
        self.hide()
        engine.changed.connect(self.refresh)
        library.changed.connect(self._estimate_again)
        telemetry.updated.connect(self._show_measured)

    def rows(self) -> list[tuple[str, str, str]]:
        """What is shown: part, estimated, measured."""
        shown = [cells for cells in self._cells.values() if not cells[0].isHidden()]
        return [(name.text(), estimated.text(), measured.text()) for name, estimated, measured in shown]

    def refresh(self) -> None:
        """Follows the model that is loaded."""
        if self._engine.model is not self._model:
            self._estimate_again()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._show_measured()

    def _estimate_again(self) -> None:
        self._model, self._estimate = self._engine.model, None
        config, model = self._engine.config, self._model
        entry = self._entry(model.path) if model is not None else None
        if model is not None and config is not None and entry is not None:
            draft = self._entry(config.draft_model) if config.speculation == "draft" else None
            fit = fit_on(entry, self._engine.worker, config, draft)
            self._estimate = fit.granted if fit is not None else None
        self.setVisible(self._estimate is not None)
        if self._estimate is None:
            return
        parts = _estimated(self._estimate)
        for name, (title, estimated, measured) in self._cells.items():
            for cell in (title, estimated, measured):
                cell.setVisible(name == "In all" or not self._estimate.draft)
            estimated.setText(format_bytes(parts[name]))
            measured.setText("–")
        self._show_measured()

    def _show_measured(self) -> None:
        telemetry = self._telemetry.latest
        if telemetry is None or self._estimate is None or not self.isVisible():
            return
        for name, size in _measured(telemetry.memory).items():
            self._cells[name][2].setText(format_bytes(size))

    def _entry(self, name: str | None) -> CatalogEntry | None:
        return next((entry for entry in self._library.entries if name in (entry.name, str(entry.path))), None)


def _estimated(estimate: MemoryEstimate) -> dict[str, int]:
    return {
        "Weights": estimate.weights,
        "KV cache": estimate.kv_cache,
        "Workspace": estimate.workspace,
        "Runtime": estimate.runtime,
        "In all": estimate.total,
    }


def _measured(memory: MemoryBreakdown) -> dict[str, int]:
    parts = {
        "Weights": memory.weights,
        "KV cache": memory.kv_cache,
        "Workspace": memory.workspace,
        "Runtime": memory.runtime,
    }
    return parts | {"In all": sum(parts.values())}
