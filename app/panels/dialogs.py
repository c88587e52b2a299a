"""Small dialogs in the window's own dress: ask for a text, show a long text, show what Kvasir is."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QDialog, QHBoxLayout, QLabel, QLineEdit, QPlainTextEdit, QVBoxLayout, QWidget

from app.panels.widgets import button, label
from app.theme import SPACE_L, SPACE_M, SPACE_S, mono_font, pixmap

# What stays free of the window around a dialog, its title bar included.
_ROUND_DIALOG = QSize(64, 48)


def resize_within(dialog: QDialog, window: QWidget | None, preferred: QSize, least: QSize) -> None:
    """Makes a dialog as large as is comfortable, but inside the window it belongs to."""
    size = preferred if window is None else preferred.boundedTo(window.size() - _ROUND_DIALOG)
    dialog.setMinimumSize(least.boundedTo(size))
    dialog.resize(size)


class TextDialog(QDialog):
    """Asks for one line of text; OK is possible once there is some."""

    def __init__(self, parent: QWidget | None, title: str, prompt: str, text: str) -> None:
        super().__init__(parent)
        self.setWindowTitle(title)
        self.setMinimumWidth(380)
        column = QVBoxLayout(self)
        column.setContentsMargins(SPACE_L, SPACE_L, SPACE_L, SPACE_M)
        column.setSpacing(SPACE_S)
        self.field = QLineEdit(text)
        self.field.selectAll()
        self.field.setAccessibleName(prompt)
        name = label(prompt, "strong")
        name.setBuddy(self.field)
        self.ok = button("Save", "primary")
        self.ok.setDefault(True)
        self.ok.clicked.connect(self.accept)
        cancel = button("Cancel")
        cancel.clicked.connect(self.reject)
        row = QHBoxLayout()
        row.setContentsMargins(0, SPACE_S, 0, 0)
        row.addStretch(1)
        row.addWidget(cancel)
        row.addWidget(self.ok)
        column.addWidget(name)
        column.addWidget(self.field)
        column.addLayout(row)
        self.field.textChanged.connect(self._text_changed)
        self._text_changed(text)

    def _text_changed(self, text: str) -> None:
        self.ok.setEnabled(bool(text.strip()))


def ask_text(parent: QWidget | None, title: str, prompt: str, text: str = "") -> str:
    """What was entered, white space tidied; empty when the dialog was cancelled."""
    dialog = TextDialog(parent, title, prompt, text)
    accepted = dialog.exec() == QDialog.DialogCode.Accepted
    entered = " ".join(dialog.field.text().split())
    dialog.deleteLater()
    return entered if accepted else ""


class ReportDialog(QDialog):
    """Shows a long text, such as a crash report, with a button that copies it."""

    def __init__(self, parent: QWidget | None, title: str, explanation: str, text: str) -> None:
        super().__init__(parent)
        self.setWindowTitle(title)
        resize_within(self, parent, preferred=QSize(720, 480), least=QSize(480, 320))
        column = QVBoxLayout(self)
        column.setContentsMargins(SPACE_L, SPACE_L, SPACE_L, SPACE_M)
        column.setSpacing(SPACE_M)
        column.addWidget(label(explanation, wrap=True))
        self.text = QPlainTextEdit(text)
        self.text.setReadOnly(True)
        self.text.setFont(mono_font(12))
        self.text.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.text.setAccessibleName(title)
        column.addWidget(self.text, 1)
        copy = button("Copy")
        copy.clicked.connect(lambda: QGuiApplication.clipboard().setText(text))
        close = button("Close", "primary")
        close.setDefault(True)
        close.clicked.connect(self.accept)
        row = QHBoxLayout()
        row.addStretch(1)
        row.addWidget(copy)
        row.addWidget(close)
        column.addLayout(row)


class AboutDialog(QDialog):
    """What this is, in which versions."""

    def __init__(self, parent: QWidget | None, facts: list[tuple[str, str]]) -> None:
        super().__init__(parent)
        self.setWindowTitle("About Kvasir")
        column = QVBoxLayout(self)
        column.setContentsMargins(SPACE_L * 2, SPACE_L, SPACE_L * 2, SPACE_L)
        column.setSpacing(SPACE_S)
        mark = QLabel()
        mark.setPixmap(pixmap("kvasir", "#000000", 72))
        name = label("Kvasir", "display")
        words = label("Chat with open-weight models, and see what the engine does.", "muted")
        for part in (mark, name, words):
            part.setAlignment(Qt.AlignmentFlag.AlignHCenter)
            column.addWidget(part)
        column.addSpacing(SPACE_S)
        for title, value in facts:
            line = label(f"{title}  {value}", "small")
            line.setAlignment(Qt.AlignmentFlag.AlignHCenter)
            line.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
            column.addWidget(line)
        column.addSpacing(SPACE_M)
        close = button("Close", "primary")
        close.clicked.connect(self.accept)
        column.addWidget(close, 0, Qt.AlignmentFlag.AlignHCenter)
