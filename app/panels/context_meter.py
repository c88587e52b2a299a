"""How much of the model's context the chat takes."""

from __future__ import annotations

from PySide6.QtWidgets import QFrame, QHBoxLayout, QProgressBar, QVBoxLayout

from app.panels.widgets import label, set_role
from app.state.context_usage import ContextUsage
from app.theme import SPACE_M, SPACE_S


class ContextMeter(QFrame):
    """Tokens used of the context, as a figure and a bar."""

    def __init__(self, usage: ContextUsage) -> None:
        super().__init__()
        self.setObjectName("footer")
        self._usage = usage
        column = QVBoxLayout(self)
        column.setContentsMargins(SPACE_M, SPACE_S + 2, SPACE_M, SPACE_S + 4)
        column.setSpacing(SPACE_S - 2)
        row = QHBoxLayout()
        row.addWidget(label("Context", "strong"))
        row.addStretch(1)
        self.figure = label(role="figure")
        self.figure.setAccessibleName("Context used")
        row.addWidget(self.figure)
        column.addLayout(row)
        self.bar = QProgressBar()
        self.bar.setTextVisible(False)
        self.bar.setAccessibleName("Share of the context in use")
        column.addWidget(self.bar)
        usage.changed.connect(self._show)
        self._show()

    def _show(self) -> None:
        used, limit = self._usage.used, self._usage.limit or 0
        self.setToolTip(self._usage.error)
        self.bar.setRange(0, max(1, limit))
        self.bar.setValue(min(used or 0, max(1, limit)))
        over = used is not None and used > limit
        set_role(self.figure, "role", "danger" if over else "figure")
        if not limit:
            self.figure.setText("no model")
        elif used is None:
            self.figure.setText(f"– / {limit:,}")
        else:
            self.figure.setText(f"{used:,} / {limit:,}")
