"""The right panel: Sampling or Model, and the context meter below both."""

from __future__ import annotations

from PySide6.QtWidgets import QFrame, QStackedWidget, QVBoxLayout

from app.panels.context_meter import ContextMeter
from app.panels.model import ModelPanel
from app.panels.sampling import SamplingPanel
from app.panels.widgets import Segments
from app.state.session import ChatSession
from app.theme import SPACE_M, SPACE_S


class Inspector(QFrame):
    """`meter` stands below both pages, which are "sampling" and "model"."""

    def __init__(self, sampling: SamplingPanel, model: ModelPanel, meter: ContextMeter) -> None:
        super().__init__()
        self.setObjectName("inspector")
        self.setMinimumWidth(272)
        self.sampling, self.model, self.meter = sampling, model, meter
        self._segments = Segments({"sampling": "Sampling", "model": "Model"}, "Right panel")
        self._segments.chosen.connect(self.show_page)
        self._pages = QStackedWidget()
        self._pages.addWidget(sampling)
        self._pages.addWidget(model)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, SPACE_S, 0, 0)
        column.setSpacing(0)
        head = QVBoxLayout()
        head.setContentsMargins(SPACE_M, 0, SPACE_M, SPACE_S)
        head.addWidget(self._segments)
        column.addLayout(head)
        column.addWidget(self._pages, 1)
        column.addWidget(meter)
        self.show_page("sampling")

    @property
    def page(self) -> str:
        return "model" if self._pages.currentWidget() is self.model else "sampling"

    def show_page(self, name: str) -> None:
        """Shows "sampling" or "model"."""
        self._segments.choose(name)
        self._pages.setCurrentWidget(self.model if name == "model" else self.sampling)

    def set_session(self, session: ChatSession | None) -> None:
        self.sampling.set_session(session)
