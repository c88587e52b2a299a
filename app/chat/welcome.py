"""What an empty chat shows: what this is, and a few questions to begin with."""

from __future__ import annotations

from PySide6.QtCore import QRect, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFontMetrics, QKeyEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QAbstractButton, QGridLayout, QLabel, QSizePolicy, QVBoxLayout, QWidget

from app.theme import RADIUS_L, Theme, mix, ui_font

EXAMPLES = (
    ("Explain an idea", "Explain in three short paragraphs why the sky is blue."),
    ("Write some code", "Write a Python function that merges two sorted lists, and show how to use it."),
    ("Compare things", "Compare bicycles and trains for commuting, as a table with three rows."),
    ("Plan something", "Make a checklist for a weekend hike with a tent."),
)
MAX_WIDTH = 640
_MARGIN, _BELOW_TITLE, _ABOVE_EXAMPLES = 24, 8, 32
_TWO_COLUMNS_FROM = 520
_CARD_PADDING = 14


class Welcome(QWidget):
    """A greeting and example prompts; choosing one fills the composer."""

    prompt_chosen = Signal(str)

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.title = QLabel("What would you like to know?", self)
        self.title.setObjectName("welcomeTitle")
        self.title.setAlignment(Qt.AlignmentFlag.AlignHCenter)
        self.title.setWordWrap(True)
        self.text = QLabel(self)
        self.text.setObjectName("welcomeText")
        self.text.setAlignment(Qt.AlignmentFlag.AlignHCenter)
        self.text.setWordWrap(True)
        self._theme = theme
        self.buttons = [self._make_button(title, prompt) for title, prompt in EXAMPLES]
        self._grid = QGridLayout()
        self._grid.setSpacing(12)
        self._columns = 0
        layout = QVBoxLayout(self)
        layout.setContentsMargins(_MARGIN, _MARGIN, _MARGIN, _MARGIN)
        layout.addStretch(2)
        layout.addWidget(self.title)
        layout.addSpacing(_BELOW_TITLE)
        layout.addWidget(self.text)
        layout.addSpacing(_ABOVE_EXAMPLES)
        layout.addLayout(self._grid)
        layout.addStretch(3)
        self.set_model_name("")

    def set_model_name(self, name: str) -> None:
        by = f"{name} answers on this machine." if name else "The model answers on this machine."
        self.text.setText(f"{by} Open more tabs and ask at the same time: they share one engine.")

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        for button in self.buttons:
            button.set_theme(theme)

    def _make_button(self, title: str, prompt: str) -> ExampleButton:
        button = ExampleButton(title, prompt, self._theme, self)
        button.clicked.connect(lambda: self.prompt_chosen.emit(prompt))
        return button

    def resizeEvent(self, event: object) -> None:
        side = max(_MARGIN, (self.width() - MAX_WIDTH) // 2)
        layout = self.layout()
        assert layout is not None
        layout.setContentsMargins(side, _MARGIN, side, _MARGIN)
        columns = 2 if self.width() - 2 * side >= _TWO_COLUMNS_FROM else 1
        if columns != self._columns:
            self._columns = columns
            for number, button in enumerate(self.buttons):
                self._grid.addWidget(button, number // columns, number % columns)
        self._show_rows_that_fit(self.width() - 2 * side)

    def _show_rows_that_fit(self, width: int) -> None:
        """Leaves out examples, whole rows of them, rather than squeezing them."""
        spacing = self._grid.spacing()
        above = self.title.sizeHint().height() + self.text.heightForWidth(width) + _BELOW_TITLE + _ABOVE_EXAMPLES
        room = self.height() - 2 * _MARGIN - above + spacing
        card_width = (width - spacing * (self._columns - 1)) // self._columns
        row_height = max(button.heightForWidth(card_width) for button in self.buttons) + spacing
        for number, button in enumerate(self.buttons):
            button.setVisible((number // self._columns + 1) * row_height <= room)


class ExampleButton(QAbstractButton):
    """A card with a short title and the prompt under it, as high as its text."""

    def __init__(self, title: str, prompt: str, theme: Theme, parent: QWidget) -> None:
        super().__init__(parent)
        self._title, self._prompt, self._theme = title, prompt, theme
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAttribute(Qt.WidgetAttribute.WA_Hover)
        self.setAccessibleName(f"{title}: {prompt}")
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.updateGeometry()
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(240, self.heightForWidth(240))

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        text = self._text_rect(QRect(0, 0, width - 2 * _CARD_PADDING, 1000))
        return 2 * _CARD_PADDING + self._title_height() + 4 + text.height()

    def _title_height(self) -> int:
        return QFontMetrics(ui_font(self._theme.font_size, bold=True)).height()

    def _text_rect(self, room: QRect) -> QRect:
        metrics = QFontMetrics(ui_font(self._theme.font_size_small))
        return metrics.boundingRect(room, Qt.TextFlag.TextWordWrap, self._prompt)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.click()
        else:
            super().keyPressEvent(event)

    def paintEvent(self, event: QPaintEvent) -> None:
        theme = self._theme
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        active = self.underMouse() or self.isDown()
        border = theme.accent if self.hasFocus() else theme.text_faint if active else theme.border
        painter.setPen(QPen(QColor(border), 1))
        painter.setBrush(QColor(mix(theme.surface_raised, theme.text, 0.05) if active else theme.surface_raised))
        painter.drawRoundedRect(QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5), RADIUS_L, RADIUS_L)
        room = self.rect().adjusted(_CARD_PADDING, _CARD_PADDING, -_CARD_PADDING, -_CARD_PADDING)
        painter.setPen(QColor(theme.text))
        painter.setFont(ui_font(theme.font_size, bold=True))
        painter.drawText(room, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop, self._title)
        painter.setPen(QColor(theme.text_muted))
        painter.setFont(ui_font(theme.font_size_small))
        painter.drawText(room.adjusted(0, self._title_height() + 4, 0, 0), Qt.TextFlag.TextWordWrap, self._prompt)
