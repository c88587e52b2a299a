"""Small controls the panels share: buttons, selects, switches, number boxes, labels that elide, scrolled columns."""

from __future__ import annotations

from PySide6.QtCore import Property as QtProperty
from PySide6.QtCore import QEvent, QPropertyAnimation, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QResizeEvent, QWheelEvent
from PySide6.QtWidgets import (
    QAbstractButton,
    QComboBox,
    QDoubleSpinBox,
    QFrame,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QSlider,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.theme import ICON_SIZE, SPACE_M, SPACE_S, ThemeManager, icon, mix, pixmap


def label(text: str = "", role: str = "", *, wrap: bool = False) -> QLabel:
    """A label in one of the style sheet's text roles."""
    result = QLabel(text)
    result.setTextFormat(Qt.TextFormat.PlainText)
    if role:
        result.setProperty("role", role)
    if wrap:
        result.setWordWrap(True)
        policy = QSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Minimum)
        policy.setHeightForWidth(True)
        result.setSizePolicy(policy)
    return result


def set_role(widget: QWidget, name: str, value: str) -> None:
    """Sets a style property and has the style sheet looked at again."""
    if widget.property(name) != value:
        widget.setProperty(name, value)
        widget.style().unpolish(widget)
        widget.style().polish(widget)


def button(text: str, variant: str = "", name: str = "") -> QPushButton:
    result = QPushButton(text)
    result.setCursor(Qt.CursorShape.PointingHandCursor)
    result.setAutoDefault(False)
    if variant:
        result.setProperty("variant", variant)
    result.setAccessibleName(name or text)
    return result


def separator() -> QFrame:
    line = QFrame()
    line.setObjectName("separator")
    return line


class IconButton(QToolButton):
    """A square button that shows one icon, recoloured with the theme; its tooltip is its name."""

    def __init__(
        self, icon_name: str, tip: str, themes: ThemeManager, size: int = 32, colour: str = "text_muted"
    ) -> None:
        super().__init__()
        self._icon_name, self._colour, self._themes = icon_name, colour, themes
        self.setFixedSize(size, size)
        self.setIconSize(QSize(ICON_SIZE, ICON_SIZE) if size >= 24 else QSize(12, 12))
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.set_tip(tip)
        themes.changed.connect(self._repaint_icon)
        self._repaint_icon()

    def set_tip(self, tip: str, shortcut: str = "") -> None:
        self.setToolTip(f"{tip}  ({shortcut})" if shortcut else tip)
        self.setAccessibleName(tip)

    def set_icon(self, icon_name: str) -> None:
        self._icon_name = icon_name
        self._repaint_icon()

    def _repaint_icon(self, *_: object) -> None:
        theme = self._themes.theme
        faded = mix(theme.window, theme.text, 0.3)
        self.setIcon(icon(self._icon_name, getattr(theme, self._colour), faded, self.iconSize().width()))


class Select(QComboBox):
    """A combo box with the theme's own arrow, deaf to the wheel unless it has the focus."""

    def __init__(self, themes: ThemeManager, name: str) -> None:
        super().__init__()
        self._themes = themes
        self.setAccessibleName(name)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.setMinimumContentsLength(8)

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        theme = self._themes.theme
        painter = QPainter(self)
        arrow = pixmap("chevron-down", theme.text_muted if self.isEnabled() else theme.border, 14)
        painter.drawPixmap(self.width() - 22, (self.height() - 14) // 2, arrow)

    def wheelEvent(self, event: QWheelEvent) -> None:
        if self.hasFocus():
            super().wheelEvent(event)
        else:
            event.ignore()


class NumberBox(QDoubleSpinBox):
    """A number box without arrows; what lies outside its range cannot be typed. Deaf to the wheel unless focused."""

    def __init__(self, name: str, low: float, high: float, decimals: int, step: float) -> None:
        super().__init__()
        self.setAccessibleName(name)
        self.setProperty("number", "true")
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAlignment(Qt.AlignmentFlag.AlignRight)
        self.lineEdit().setTextMargins(0, 0, 4, 0)
        self.setKeyboardTracking(False)
        self.setDecimals(decimals)
        self.setRange(low, high)
        self.setSingleStep(step)

    def wheelEvent(self, event: QWheelEvent) -> None:
        if self.hasFocus():
            super().wheelEvent(event)
        else:
            event.ignore()


class CalmSlider(QSlider):
    """A horizontal slider that leaves the wheel to the panel it sits in."""

    def __init__(self, name: str) -> None:
        super().__init__(Qt.Orientation.Horizontal)
        self.setAccessibleName(name)
        self.setCursor(Qt.CursorShape.PointingHandCursor)

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()


class Switch(QAbstractButton):
    """An on/off switch with its label on the left."""

    def __init__(self, text: str, themes: ThemeManager) -> None:
        super().__init__()
        self._themes = themes
        self._position = 0.0
        self.setText(text)
        self.setAccessibleName(text)
        self.setCheckable(True)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._slide = QPropertyAnimation(self, b"position", self)
        self._slide.setDuration(120)
        self.toggled.connect(self._start_slide)

    def sizeHint(self) -> QSize:
        return QSize(self.fontMetrics().horizontalAdvance(self.text()) + 52, max(24, self.fontMetrics().height() + 4))

    def minimumSizeHint(self) -> QSize:
        return QSize(64, self.sizeHint().height())

    def _start_slide(self, on: bool) -> None:
        self._slide.stop()
        if not self.isVisible():
            self._set_position(1.0 if on else 0.0)
            return
        self._slide.setEndValue(1.0 if on else 0.0)
        self._slide.start()

    def settle(self) -> None:
        """Shows the state it is in without sliding there, after `setChecked` with signals blocked."""
        self._slide.stop()
        self._set_position(1.0 if self.isChecked() else 0.0)

    def _get_position(self) -> float:
        return self._position

    def _set_position(self, value: float) -> None:
        self._position = value
        self.update()

    position = QtProperty(float, _get_position, _set_position)

    def paintEvent(self, event: QPaintEvent) -> None:
        theme = self._themes.theme
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        width, height = 32, 18
        track = QRectF(self.width() - width - 1, (self.height() - height) / 2, width, height)
        painter.setPen(QColor(theme.text if self.isEnabled() else theme.disabled))
        text = self.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideRight, int(track.left()) - SPACE_S)
        painter.drawText(self.rect().adjusted(0, 0, -width - SPACE_S, 0), int(Qt.AlignmentFlag.AlignVCenter), text)
        off = mix(theme.surface, theme.text, 0.25)
        on = theme.accent if self.isEnabled() else mix(off, theme.accent, 0.35)
        painter.setPen(QColor(theme.text) if self.hasFocus() else Qt.PenStyle.NoPen)
        painter.setBrush(QColor(mix(off, on, self._position)))
        painter.drawRoundedRect(track, height / 2, height / 2)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor("#ffffff" if not theme.is_dark else mix("#ffffff", theme.accent_text, self._position)))
        knob = track.left() + 2 + self._position * (width - height)
        painter.drawEllipse(QRectF(knob, track.top() + 2, height - 4, height - 4))


class ElidedLabel(QLabel):
    """A label that shortens its text with an ellipsis instead of forcing its parent wider."""

    def __init__(self, text: str = "", role: str = "", mode: Qt.TextElideMode = Qt.TextElideMode.ElideRight) -> None:
        super().__init__()
        self._full, self._mode = text, mode
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        if role:
            self.setProperty("role", role)
        self._elide()

    def set_text(self, text: str) -> None:
        self._full = text
        self._elide()

    @property
    def full_text(self) -> str:
        return self._full

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._elide()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange):
            self._elide()

    def _elide(self) -> None:
        shown = self.fontMetrics().elidedText(self._full, self._mode, max(0, self.width()))
        self.setText(shown)
        self.setToolTip(self._full if shown != self._full else "")


class Segments(QFrame):
    """Two or more buttons of which one is chosen, as tabs of a small panel."""

    chosen = Signal(str)

    def __init__(self, choices: dict[str, str], name: str) -> None:
        super().__init__()
        self.setObjectName("segments")
        self.setAccessibleName(name)
        row = QHBoxLayout(self)
        row.setContentsMargins(2, 2, 2, 2)
        row.setSpacing(2)
        self._buttons: dict[str, QPushButton] = {}
        for key, text in choices.items():
            choice = button(text)
            choice.setCheckable(True)
            choice.setAutoExclusive(True)
            choice.clicked.connect(lambda _checked=False, key=key: self.chosen.emit(key))
            row.addWidget(choice, 1)
            self._buttons[key] = choice

    def choose(self, key: str) -> None:
        self._buttons[key].setChecked(True)

    def set_title(self, key: str, text: str) -> None:
        self._buttons[key].setText(text)
        self._buttons[key].setAccessibleName(text)

    def set_reason(self, key: str, reason: str) -> None:
        """Takes a choice away, for a reason in words, or gives it back where there is none."""
        self._buttons[key].setEnabled(not reason)
        self._buttons[key].setToolTip(reason)
        self._buttons[key].setAccessibleDescription(reason)

    def is_possible(self, key: str) -> bool:
        return self._buttons[key].isEnabled()

    @property
    def choice(self) -> str:
        return next((key for key, item in self._buttons.items() if item.isChecked()), "")


class _Content(QWidget):
    """As high as it must be at the width it gets: asked without one, wrapped lines want more than they need."""

    def minimumSizeHint(self) -> QSize:
        least = super().minimumSizeHint()
        return QSize(least.width(), 0) if self.hasHeightForWidth() else least


class ScrolledColumn(QScrollArea):
    """Parts below one another in `column`, scrolled where they are taller than the room there is."""

    def __init__(self, left: int, top: int, right: int, bottom: int) -> None:
        super().__init__()
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        content = _Content()
        content.setObjectName("scrolled")
        self.column = QVBoxLayout(content)
        self.column.setContentsMargins(left, top, right, bottom)
        self.column.setSpacing(SPACE_M)
        self.setWidget(content)


class ErrorBox(QFrame):
    """Says what went wrong, in words; hidden while there is nothing to say."""

    def __init__(self) -> None:
        super().__init__()
        self.setObjectName("errorBox")
        row = QHBoxLayout(self)
        row.setContentsMargins(SPACE_S + 4, SPACE_S, SPACE_S + 4, SPACE_S)
        self._text = label(wrap=True)
        self._text.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        row.addWidget(self._text)
        self.hide()

    def say(self, text: str) -> None:
        self._text.setText(text)
        self.setVisible(bool(text))

    @property
    def text(self) -> str:
        return self._text.text()
