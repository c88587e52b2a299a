"""Starts that cannot succeed say why, in words."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlite_utils import Database
from sqlite_utils.db import Table

from app.application import set_up_logging
from app.store import Store

ROOT = Path(__file__).resolve().parents[2]
# Runs the application and presses the button of whatever dialog it shows.
PROGRAM = """
import sys
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication
from app import application
qt = application.make_qt_application([])
def answer():
    dialog = QApplication.activeModalWidget()
    if dialog is not None:
        print(dialog.text(), flush=True)
        dialog.accept()
timer = QTimer()
timer.timeout.connect(answer)
timer.start(50)
sys.exit(application.run([]))
"""


def start(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KVASIR_DATA": str(folder), "QT_QPA_PLATFORM": "offscreen"}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90)


def test_a_database_of_a_newer_kvasir_is_left_alone_and_explained(tmp_path: Path) -> None:
    path = tmp_path / "kvasir.db"
    Store(path).close()
    db = Database(path)
    table = next(name for name in db.table_names() if "migration" in name)
    migrations = Table(db, table)
    row = next(iter(migrations.rows))
    migrations.insert({**row, "name": "m999_from_the_future", **({"id": None} if "id" in row else {})})
    db.close()
    before = path.read_bytes()
    result = start(tmp_path)
    assert result.returncode == 1
    assert "newer Kvasir" in result.stdout
    assert "newer Kvasir" in result.stderr
    assert path.read_bytes() == before
    assert [path.name for path in (tmp_path / "logs").glob("*.crash")] == [], "a refusal is no crash"


def test_a_file_that_is_no_database_is_left_alone_and_explained(tmp_path: Path) -> None:
    path = tmp_path / "kvasir.db"
    path.write_bytes(b"this is a letter, not a database" * 100)
    result = start(tmp_path)
    assert result.returncode == 1
    assert "kvasir.db" in result.stdout
    assert path.read_bytes() == b"this is a letter, not a database" * 100


@pytest.mark.parametrize("obstacle", ["data folder", "logs"])
def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(tmp_path: Path, obstacle: str) -> None:
    folder = tmp_path / "data"
    if obstacle == "data folder":
        folder.write_text("a file where the folder should be")
    else:
        folder.mkdir()
        (folder / "logs").write_text("a file where the folder should be")
    result = start(folder)
    assert result.returncode == 1
    assert str(folder) in result.stdout and "KVASIR_DATA" in result.stdout
    assert "Traceback" not in result.stderr


def test_a_log_that_cannot_be_written_keeps_nobody_from_starting(tmp_path: Path) -> None:
    (tmp_path / "window.log").mkdir()
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        set_up_logging(tmp_path)
        added = [handler for handler in root.handlers if handler not in before]
        assert [type(handler) for handler in added] == [logging.StreamHandler]
    finally:
        root.handlers[:] = before
        root.setLevel(level)
