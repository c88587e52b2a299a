"""The window's top bar: menu, product name, model switcher with status, palette hint, theme toggle."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QMenu, QProgressBar, QPushButton, QSizePolicy, QVBoxLayout

from app.panels.widgets import ElidedLabel, IconButton, label
from app.state.engine_state import EngineState
from app.theme import SPACE_M, SPACE_S, ThemeManager, pixmap
from engine.memory import format_bytes
from engine.protocol import LoadProgress

STATUS_WORDS = {
    "starting": "starting",
    "no_model": "no model",
    "loading": "loading",
    "ready": "ready",
    "dead": "stopped",
}
STATUS_COLOURS = {
    "starting": "warning",
    "no_model": "text_faint",
    "loading": "warning",
    "ready": "success",
    "dead": "danger",
}


def model_title(name_or_path: str) -> str:
    """A model's name as people know it: the last part of a path, without the file's extension."""
    name = name_or_path.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return name.removesuffix(".gguf")


def progress_words(progress: LoadProgress) -> str:
    """What loading does now and how far it is: "Loading weights · 41.0 MiB of 93.8 MiB"."""
    if not progress.total_bytes:
        return progress.stage
    return f"{progress.stage} · {format_bytes(progress.done_bytes)} of {format_bytes(progress.total_bytes)}"


class StatusDot(QFrame):
    """A dot in the colour of the engine's status."""

    def __init__(self, themes: ThemeManager) -> None:
        super().__init__()
        self._themes, self._colour = themes, "text_faint"
        self.setFixedSize(10, 10)
        themes.changed.connect(self.update)

    def set_colour(self, token: str) -> None:
        self._colour = token
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(getattr(self._themes.theme, self._colour)))
        painter.drawEllipse(QRectF(1, 1, 8, 8))


class ModelButton(QPushButton):
    """Names the model and its state; opens the model menu."""

    def __init__(self, themes: ThemeManager) -> None:
        super().__init__()
        self._themes = themes
        self.setObjectName("modelButton")
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setFixedHeight(34)
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        row = QHBoxLayout(self)
        row.setContentsMargins(SPACE_S + 4, 0, SPACE_S + 2, 0)
        row.setSpacing(SPACE_S)
        self.dot = StatusDot(themes)
        self.model_name = ElidedLabel(role="strong", mode=Qt.TextElideMode.ElideMiddle)
        self.status = label(role="small")
        self._arrow = QLabel()
        for part in (self.dot, self.model_name, self.status, self._arrow):
            part.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        row.addWidget(self.dot)
        row.addWidget(self.model_name, 1)
        row.addWidget(self.status)
        row.addWidget(self._arrow)
        themes.changed.connect(self._draw_arrow)
        self._draw_arrow()

    def _draw_arrow(self, *_: object) -> None:
        self._arrow.setPixmap(pixmap("chevron-down", self._themes.theme.text_muted, 14))

    def show_model(self, name: str, status: str, colour: str) -> None:
        self.model_name.set_text(name)
        self.status.setText(status)
        self.dot.set_colour(colour)
        self.setAccessibleName(f"Model: {name}, {status}. Opens the list of models")
        self.updateGeometry()

    def sizeHint(self) -> QSize:
        text = self.model_name.fontMetrics().horizontalAdvance(self.model_name.full_text)
        return QSize(min(460, text + self.status.sizeHint().width() + 88), 34)

    def minimumSizeHint(self) -> QSize:
        return QSize(160, 34)


class HeaderBar(QFrame):
    """Composes the top bar. `model_menu` is filled anew by its owner whenever it opens."""

    palette_requested = Signal()
    theme_toggled = Signal()

    def __init__(self, engine: EngineState, themes: ThemeManager, menu: QMenu) -> None:
        super().__init__()
        self._engine, self._themes = engine, themes
        self.setObjectName("header")
        self.setFixedHeight(53)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        row = QHBoxLayout()
        row.setContentsMargins(SPACE_S, 0, SPACE_S + 4, 0)
        row.setSpacing(SPACE_S)

        self.menu_button = IconButton("menu", "Menu", themes, size=34)
        self.menu_button.setPopupMode(self.menu_button.ToolButtonPopupMode.InstantPopup)
        self.menu_button.setMenu(menu)
        mark = QLabel()
        mark.setPixmap(pixmap("kvasir", "#000000", 24))
        product = label("Kvasir")
        product.setObjectName("productName")

        self.model_button = ModelButton(themes)
        self.model_menu = QMenu(self)
        self.model_menu.setToolTipsVisible(True)
        self.model_button.setMenu(self.model_menu)
        self.kernels = label(role="chip")
        self.kernels.setToolTip("The compute kernels in use and the device they run on")

        self.palette_hint = QPushButton()
        self.palette_hint.setObjectName("paletteHint")
        self.palette_hint.setCursor(Qt.CursorShape.PointingHandCursor)
        self.palette_hint.setAccessibleName("Open the command palette")
        self.palette_hint.clicked.connect(self.palette_requested)
        self.theme_button = IconButton("moon", "Dark theme", themes, size=34)
        self.theme_button.clicked.connect(self.theme_toggled)

        row.addWidget(self.menu_button)
        row.addWidget(mark)
        row.addWidget(product)
        row.addSpacing(SPACE_M)
        row.addWidget(self.model_button)
        row.addWidget(self.kernels, 0, Qt.AlignmentFlag.AlignVCenter)
        row.addStretch(1)
        row.addWidget(self.palette_hint, 0, Qt.AlignmentFlag.AlignVCenter)
        row.addWidget(self.theme_button)
        column.addLayout(row, 1)

        self.progress = QProgressBar()
        self.progress.setObjectName("loadProgress")
        self.progress.setTextVisible(False)
        self.progress.setFixedHeight(2)
        self.progress.setAccessibleName("Loading the model")
        policy = self.progress.sizePolicy()
        policy.setRetainSizeWhenHidden(True)
        self.progress.setSizePolicy(policy)
        column.addWidget(self.progress)

        engine.changed.connect(self.refresh)
        themes.changed.connect(self._show_theme)
        self._show_theme()
        self.refresh()

    def set_palette_shortcut(self, keys: str) -> None:
        self.palette_hint.setText(f"Commands   {keys}")

    def _show_theme(self, *_: object) -> None:
        dark = self._themes.theme.is_dark
        self.theme_button.set_icon("sun" if dark else "moon")
        self.theme_button.set_tip("Light theme" if dark else "Dark theme")

    def refresh(self) -> None:
        """Shows the engine's state as it is now."""
        engine = self._engine
        words, colour = STATUS_WORDS[engine.status], STATUS_COLOURS[engine.status]
        name = engine.model.name if engine.model is not None else "No model"
        if engine.status == "no_model":
            words = "choose one"
        progress = engine.progress
        loading = engine.status == "loading"
        if engine.model is None and engine.config is not None:
            name = model_title(engine.config.model)
        if loading and progress is not None and progress.total_bytes > 0:
            share = min(progress.done_bytes, progress.total_bytes) / progress.total_bytes
            words = f"loading {share:.0%}"
            self.progress.setRange(0, 1000)
            self.progress.setValue(round(share * 1000))
        elif loading:
            self.progress.setRange(0, 1000)
            self.progress.setValue(20)
        self.progress.setVisible(loading)
        self.model_button.show_model(name, words, colour)
        worker = engine.worker
        self.kernels.setVisible(worker is not None)
        if worker is not None:
            kernels = engine.model.kernels if engine.model is not None else worker.kernels
            self.kernels.setText(kernels if kernels == worker.device else f"{kernels} · {worker.device}")
            versions = [f"{package} {version}" for package, version in worker.versions.items()]
            facts = [f"Compute kernels: {kernels}", f"Device: {worker.device_name}", *versions, *worker.warnings]
            self.kernels.setToolTip("\n".join(facts))
