"""The sampling panel's fields that are no plain number: seed, stop strings, system prompt, limit switch."""

from __future__ import annotations

import random

from PySide6.QtCore import QEvent, QSignalBlocker, QTimer, Signal
from PySide6.QtGui import QFocusEvent, QValidator
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QPlainTextEdit, QSizePolicy, QVBoxLayout, QWidget

from app.panels.widgets import IconButton, label
from app.theme import SPACE_XS, ThemeManager
from engine.protocol import PARAMETER_RANGES

COMMIT_DELAY_MS = 500


class WholeNumberValidator(QValidator):
    """Accepts nothing, or a whole number in a range of any size (a QIntValidator ends at 32 bits)."""

    def __init__(self, low: int, high: int, parent: QWidget) -> None:
        super().__init__(parent)
        self._low, self._high = low, high

    def validate(self, text: str, position: int) -> tuple[QValidator.State, str, int]:  # type: ignore[override]
        if not text:
            return QValidator.State.Acceptable, text, position
        fits = text.isascii() and text.isdigit() and self._low <= int(text) <= self._high
        return (QValidator.State.Acceptable if fits else QValidator.State.Invalid), text, position


class SeedField(QWidget):
    """A fixed seed, or empty for a new one each time. `edited` carries an int or None."""

    edited = Signal(object)

    def __init__(self, themes: ThemeManager) -> None:
        super().__init__()
        allowed = PARAMETER_RANGES["seed"]
        self._high = int(allowed.high)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACE_XS)
        self.line = QLineEdit()
        self.line.setProperty("number", "true")
        self.line.setPlaceholderText("new each time")
        self.line.setAccessibleName("Seed")
        self.line.setAccessibleDescription(allowed.help)
        self.line.setClearButtonEnabled(False)
        self.line.setValidator(WholeNumberValidator(int(allowed.low), self._high, self))
        self.line.setFixedWidth(128)
        roll = IconButton("dice", "Draw a seed and keep it", themes, size=26)
        clear = IconButton("close", "Forget the seed", themes, size=26)
        row = QHBoxLayout()
        row.setSpacing(SPACE_XS)
        row.addWidget(label("Seed", "strong"), 1)
        row.addWidget(self.line)
        row.addWidget(roll)
        row.addWidget(clear)
        column.addLayout(row)
        column.addWidget(label(allowed.help, "faint", wrap=True))
        self._value: int | None = None
        self.line.editingFinished.connect(self._commit)
        roll.clicked.connect(lambda: self._choose(random.randrange(2**31)))
        clear.clicked.connect(lambda: self._choose(None))

    @property
    def value(self) -> int | None:
        return self._value

    def set_value(self, value: int | None) -> None:
        self._value = value
        self.line.setText("" if value is None else str(value))
        self.line.setCursorPosition(0)

    def _choose(self, value: int | None) -> None:
        self.set_value(value)
        self.edited.emit(value)

    def _commit(self) -> None:
        text = self.line.text()
        value = int(text) if text else None
        if value != self._value:
            self._value = value
            self.edited.emit(value)


class TextBox(QPlainTextEdit):
    """A few lines of text; `edited` follows a pause in typing, or at once when the focus leaves."""

    edited = Signal(str)

    def __init__(self, name: str, placeholder: str, lines: int) -> None:
        super().__init__()
        self.setAccessibleName(name)
        self.setPlaceholderText(placeholder)
        self.setTabChangesFocus(True)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._lines = lines
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(COMMIT_DELAY_MS)
        self._timer.timeout.connect(self.commit)
        self._value = ""
        self.textChanged.connect(self._timer.start)
        self._fit()

    def _fit(self) -> None:
        self.setFixedHeight(self.fontMetrics().lineSpacing() * self._lines + 18)

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == event.Type.FontChange and hasattr(self, "_lines"):
            self._fit()

    def set_value(self, text: str) -> None:
        """Shows a text that was set elsewhere, unless it is the one already there."""
        self._timer.stop()
        self._value = text
        if text != self.toPlainText():
            with QSignalBlocker(self):
                self.setPlainText(text)

    def commit(self) -> None:
        """Emits `edited` now if the text differs from what was last set or told."""
        self._timer.stop()
        text = self.toPlainText()
        if text != self._value:
            self._value = text
            self.edited.emit(text)

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self.commit()


def stops_to_text(stops: tuple[str, ...]) -> str:
    """One stop string a line; line breaks, tabs and backslashes inside one are written as \\n, \\t and \\\\."""
    escaped = (s.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r") for s in stops)
    return "\n".join(escaped)


def text_to_stops(text: str) -> tuple[str, ...]:
    """The other way round; empty lines and repetitions are left out."""
    stops = (_unescape(line) for line in text.split("\n"))
    return tuple(dict.fromkeys(stop for stop in stops if stop))


def _unescape(line: str) -> str:
    plain = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    result, rest = [], iter(line)
    for letter in rest:
        if letter != "\\":
            result.append(letter)
            continue
        following = next(rest, "")
        result.append(plain.get(following, "\\" + following))
    return "".join(result)
