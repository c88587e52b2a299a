"""Exporting through the dialog, as a person does it."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication, QFileDialog, QLineEdit, QMessageBox, QWidget

from app.panels.chat_files import ChatFiles
from app.panels.toast import Toast
from app.theme import ThemeManager
from tests.app.app_parts import wait_until


class Person:
    """Types a name into the file dialog and answers whether a file may be replaced."""

    def __init__(self, name: str, answer: QMessageBox.StandardButton) -> None:
        self.name, self.answer = name, answer
        self.questions: list[str] = []
        self._has_typed = False
        self._is_done = False
        QTimer.singleShot(10, self._act)

    def leave(self) -> None:
        self._is_done = True

    def _act(self) -> None:
        if self._is_done:
            return
        QTimer.singleShot(10, self._act)  # first: what follows may open another dialog inside
        dialog = QApplication.activeModalWidget()
        if isinstance(dialog, QMessageBox):
            self.questions.append(dialog.text())
            dialog.button(self.answer).click()
        elif isinstance(dialog, QFileDialog) and not self._has_typed:
            self._has_typed = True
            dialog.findChild(QLineEdit).setText(self.name)  # type: ignore[union-attr]
            dialog.accept()
        elif isinstance(dialog, QFileDialog):
            dialog.reject()


@pytest.fixture
def exporting(qtbot, make_parts, tmp_path: Path):
    parts = make_parts(tokens_per_second=2000)
    session = parts.workspace.new_session()
    parts.ask(session, "Question")
    host = QWidget()
    qtbot.addWidget(host)
    files = ChatFiles(parts.workspace, Toast(host, ThemeManager("light")), host)
    files._folder = tmp_path
    done: list[str] = []
    parts.workspace.export_finished.connect(done.append)
    return lambda: files.export(session.conversation_id, "markdown"), done


@pytest.mark.parametrize(("typed", "there"), [("chat", "chat.md"), ("v1.2 notes", "v1.2 notes.md")])
def test_a_file_whose_suffix_was_not_typed_is_replaced_only_if_allowed(
    exporting, tmp_path: Path, typed: str, there: str
) -> None:
    export, done = exporting
    path = tmp_path / there
    path.write_text("a letter")
    person = Person(typed, QMessageBox.StandardButton.No)
    export()
    person.leave()
    assert len(person.questions) == 1 and there in person.questions[0]
    assert path.read_text() == "a letter" and done == []
    person = Person(typed, QMessageBox.StandardButton.Yes)
    export()
    person.leave()
    assert len(person.questions) == 1
    wait_until(lambda: done)
    assert done == [str(path)] and "Question" in path.read_text()


def test_a_new_file_gets_the_suffix_without_a_question(exporting, tmp_path: Path) -> None:
    export, done = exporting
    person = Person("notes", QMessageBox.StandardButton.No)
    export()
    person.leave()
    wait_until(lambda: done)
    assert done == [str(tmp_path / "notes.md")] and person.questions == []
