"""Exporting and importing chats: where to, and what came of it."""

from __future__ import annotations

import re
from pathlib import Path

from PySide6.QtCore import QObject, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QFileDialog, QMessageBox, QWidget

from app.panels.toast import Toast
from app.state.workspace import Workspace

_KINDS = {"markdown": ("md", "Markdown (*.md)"), "json": ("json", "Kvasir chats (*.json)")}


def file_name(title: str, suffix: str) -> str:
    """A file name every system takes, made of a chat's title."""
    plain = re.sub(r'[\x00-\x1f<>:"/\\|?*]+', " ", title)
    plain = " ".join(plain.split())[:80].strip(". …") or "chat"
    return f"{plain}.{suffix}"


def with_suffix(path: Path, suffix: str) -> Path:
    """The path as it was typed if it ends like a file's name does, else with the suffix behind it."""
    return path if re.fullmatch(r"\.[A-Za-z][A-Za-z0-9]{0,8}", path.suffix) else path.with_name(f"{path.name}.{suffix}")


def ask_where(parent: QWidget, suggested: Path, pattern: str) -> Path | None:
    """Where to write a file of the suggested one's kind; None if the person changed their mind."""
    suffix = suggested.suffix.removeprefix(".")
    dialog = QFileDialog(parent, "Export", str(suggested.parent), pattern)
    dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
    dialog.setDefaultSuffix(suffix)  # so that the dialog's own question about overwriting is of the whole name
    dialog.selectFile(suggested.name)
    chosen = dialog.selectedFiles() if dialog.exec() else []
    dialog.deleteLater()
    if not chosen:
        return None
    typed = Path(chosen[0])
    path = with_suffix(typed, suffix)
    if path != typed and path.exists():
        question = f"{path.name} already exists. Do you want to replace it?"
        if QMessageBox.question(parent, "Export", question) != QMessageBox.StandardButton.Yes:
            return None
    return path


class ChatFiles(QObject):
    """Asks for file names and tells in a toast how it went."""

    def __init__(self, workspace: Workspace, toast: Toast, parent: QWidget) -> None:
        super().__init__(parent)
        self._workspace, self._toast, self._window = workspace, toast, parent
        self._folder = Path.home()
        workspace.export_finished.connect(self._exported)
        workspace.import_finished.connect(self._imported)

    def export(self, conversation_id: str, kind: str) -> None:
        """Exports one chat as "markdown" or "json"."""
        path = self._ask_where(self._workspace.title(conversation_id), kind)
        if path is None:
            return
        if kind == "markdown":
            self._workspace.export_markdown(conversation_id, path)
        else:
            self._workspace.export_json(path, [conversation_id])

    def export_all(self) -> None:
        path = self._ask_where("Kvasir chats", "json")
        if path is not None:
            self._workspace.export_json(path)

    def import_chats(self) -> None:
        name, _ = QFileDialog.getOpenFileName(self._window, "Import chats", str(self._folder), _KINDS["json"][1])
        if name:
            self._workspace.import_json(Path(name))

    def _ask_where(self, title: str, kind: str) -> Path | None:
        suffix, pattern = _KINDS[kind]
        path = ask_where(self._window, self._folder / file_name(title, suffix), pattern)
        if path is not None:
            self._folder = path.parent
        return path

    def _exported(self, path: str) -> None:
        folder = QUrl.fromLocalFile(str(Path(path).parent))
        self._toast.say(f"Exported to {path}", "Show folder", lambda: QDesktopServices.openUrl(folder), kind="success")

    def _imported(self, ids: list[str]) -> None:
        number = f"{len(ids)} chat{'' if len(ids) == 1 else 's'}"
        if ids:
            self._toast.say(f"Imported {number}", "Open", lambda: self._workspace.open(ids[0]), kind="success")
        else:
            self._toast.say("The file holds no chats.")
