"""`kvasir doctor` and what it looks at: the display, Qt's libraries, the database, the engine."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.__main__ import main
from app.cli import display, doctor
from app.cli.database_check import check_database
from app.store import ForeignDatabaseError, Store
from engine.protocol import WorkerStarted
from tests.fake_engine import ROOT, fake_client

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="X11")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor with the fake engine in place of the real one."""
    real = doctor._engine
    monkeypatch.setattr(doctor, "_engine", lambda: real(lambda: fake_client(warnings=["the driver is too old"])))


@pytest.fixture
def x_server() -> Iterator[str]:
    """Something that listens where an X server would."""
    number = 4242
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0/tmp/.X11-unix/X{number}")
        listener.listen()
        yield f":{number}"


def test_the_doctor_tells_what_works(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for subject in ("Python", "GPU", "torch", "Triton", "CPU kernels", "Display", "Qt", "Database", "Models"):
        assert f"  {subject} " in out
    assert "Fake CPU" in out and "the driver is too old" in out and out.endswith("Kvasir can work here.\n")


@pytest.mark.parametrize(
    ("kernels", "device", "forced", "status", "text"),
    [
        ("cpu", "cpu", "", "ok", "native ones compute"),
        ("reference", "cpu", "", "note", "native ones are not in use: plain torch computes, slower"),
        ("reference", "cpu", "reference", "note", "not in use: KVASIR_KERNELS=reference asks for plain torch"),
        ("reference", "cuda:0", "", "ok", "not needed beside a GPU"),
    ],
)
def test_the_kernels_in_use_are_told_in_words(
    monkeypatch: pytest.MonkeyPatch, kernels: str, device: str, forced: str, status: str, text: str
) -> None:
    monkeypatch.setenv("KVASIR_KERNELS", forced)
    worker = WorkerStarted(
        1, 1, kernels, device, "a device", {}, ["The engine runs slower than it could: no compiler."]
    )
    findings = list(doctor._engine_parts(worker))
    (told,) = (finding for finding in findings if finding.subject == "CPU kernels")
    assert told.status == status and text in told.text
    assert findings[-1].text == worker.warnings[0]


def test_a_broken_engine_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = doctor._engine
    monkeypatch.setattr(doctor, "_engine", lambda: real(lambda: fake_client(start_crash="missing_torch")))
    assert main(["doctor", "--json"]) == 1
    findings = {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["Engine"]["status"] == "broken" and "pip install torch" in findings["Engine"]["text"]
    assert findings["Models"]["status"] == "ok"


@linux_only
def test_a_display_is_believed_only_if_it_answers(x_server: str, tmp_path: Path) -> None:
    assert display.why_no_display({"DISPLAY": x_server}) is None
    assert display.why_no_display({"DISPLAY": f"{x_server}.0"}) is None
    assert "does not answer" in (display.why_no_display({"DISPLAY": ":4243"}) or "")
    assert "does not answer" in (display.why_no_display({"DISPLAY": "nonsense"}) or "")
    assert "no display" in (display.why_no_display({}) or "")
    assert "no display" in (
        display.why_no_display({"WAYLAND_DISPLAY": "wayland-0", "XDG_RUNTIME_DIR": str(tmp_path)}) or ""
    )
    assert display.why_no_display({"QT_QPA_PLATFORM": "offscreen"}) is None


@linux_only
def test_missing_system_libraries_come_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_missing_by_loader", lambda libraries: {"libxcb-cursor.so.0", "libEGL.so.1"})
    reason = display.why_no_window({"DISPLAY": ":0"})
    assert reason is not None
    assert "libEGL.so.1, libxcb-cursor.so.0" in reason
    assert reason.endswith("sudo apt-get install libegl1 libxcb-cursor0")


def test_the_set_up_and_the_doctor_name_the_same_package_for_a_library() -> None:
    script = (ROOT / "packaging" / "system_libraries.sh").read_text()
    wanted = dict(line.split() for line in script.partition('wanted="')[2].partition('"')[0].split("\n") if line)
    assert wanted and wanted.items() <= display.SYSTEM_PACKAGES.items()


@linux_only
def test_the_loader_finds_what_a_library_lacks(tmp_path: Path) -> None:
    """A library that needs another, which is then taken away."""
    compiler = "/usr/bin/cc"
    if not os.path.exists(compiler):
        pytest.skip("no C compiler")
    (tmp_path / "a.c").write_text("int a(void) { return 1; }")
    (tmp_path / "b.c").write_text("int a(void); int b(void) { return a(); }")
    for command in ("cc -shared -fPIC a.c -o libgone.so.1", "cc -shared -fPIC b.c ./libgone.so.1 -o libb.so"):
        assert os.system(f"cd {tmp_path} && {command}") == 0
    (tmp_path / "libgone.so.1").unlink()
    assert display._missing_by_loader([tmp_path / "libb.so"]) == {"./libgone.so.1"}


def test_a_fresh_and_a_used_database_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "kvasir.db"
    assert check_database(path)[0] == "ok"
    assert not path.exists(), "looking must not make one"
    Store(path).close()
    assert check_database(path)[0] == "ok"


def test_damaged_foreign_and_newer_databases_are_told_apart(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"this is no database" * 100)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE shopping (item)")
    newer = tmp_path / "newer.db"
    Store(newer).close()
    with sqlite3.connect(newer) as connection:
        table = connection.execute("SELECT name FROM sqlite_master WHERE name LIKE '%migrations%'").fetchone()[0]
        connection.execute(f"UPDATE {table} SET name = 'm999_from_the_future' WHERE id = 1")
    findings = {path.stem: check_database(path) for path in (damaged, foreign, newer)}
    assert {status for status, _, _ in findings.values()} == {"broken"}
    assert "cannot be read" in findings["damaged"][1]
    assert "not a Kvasir chat database" in findings["foreign"][1]
    assert "newer Kvasir (it has m999_from_the_future)" in findings["newer"][1]


def test_the_migrations_of_another_program_are_not_taken_for_ours(tmp_path: Path) -> None:
    path = tmp_path / "kvasir.db"
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE _sqlite_migrations SET migration_set = 'shopping'")
    assert check_database(path)[:1] == ("broken",)
    assert "another program" in check_database(path)[1]
    with pytest.raises(ForeignDatabaseError):
        Store(path)


def test_a_database_of_an_older_kvasir_is_told_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "kvasir.db"
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM _sqlite_migrations WHERE id = (SELECT max(id) FROM _sqlite_migrations)")
    before = path.read_bytes()
    status, text, advice = check_database(path)
    assert (status, "older Kvasir" in text, "backs it up" in advice) == ("note", True, True)
    assert path.read_bytes() == before


def test_a_read_only_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert "read-only" in check_database(tmp_path / "kvasir.db")[1]
