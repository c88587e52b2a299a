from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PySide6.QtCore import QCoreApplication, QEvent
from PySide6.QtNetwork import QLocalSocket

from app.single_instance import SingleInstance

ROOT = Path(__file__).resolve().parents[2]
SECOND = """
import sys
from pathlib import Path
from PySide6.QtCore import QCoreApplication
from app.single_instance import SingleInstance
app = QCoreApplication([])
instance = SingleInstance(Path(sys.argv[1]))
print("first" if instance.acquire() else f"second {instance.ask_first_to_focus(5000)}", flush=True)
if len(sys.argv) > 2:
    sys.stdin.read()
"""


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SECOND, str(folder), *more]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_second_start_brings_the_first_window_to_the_front(qtbot, tmp_path: Path) -> None:
    instance = SingleInstance(tmp_path)
    assert instance.acquire()
    with qtbot.waitSignal(instance.focus_requested, timeout=20_000):
        second = start(tmp_path)
    qtbot.waitUntil(lambda: second.poll() is not None, timeout=20_000)
    assert second.communicate()[0].strip() == "second True"
    instance.release()


def test_a_caller_may_stay_connected_longer_than_the_first_is_there(qtbot, tmp_path: Path) -> None:
    instance = SingleInstance(tmp_path)
    assert instance.acquire()
    caller = QLocalSocket()
    caller.connectToServer(instance.server_name)
    with qtbot.waitSignal(instance.focus_requested, timeout=20_000):
        caller.write(b"focus\n")
    gone = []
    instance.destroyed.connect(lambda: gone.append(True))
    instance.release()
    del instance
    assert gone, "something still holds it"
    qtbot.waitUntil(lambda: caller.state() == QLocalSocket.LocalSocketState.UnconnectedState)
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)


def test_another_folder_is_another_instance(qtbot, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = SingleInstance(tmp_path / "a"), SingleInstance(tmp_path / "b")
    assert first.acquire()
    assert second.acquire()
    first.release()
    second.release()


def test_after_the_first_has_gone_the_next_is_first(qtbot, tmp_path: Path) -> None:
    first = SingleInstance(tmp_path)
    assert first.acquire()
    first.release()
    again = SingleInstance(tmp_path)
    assert again.acquire()
    again.release()


def test_a_first_that_was_killed_does_not_lock_out_the_next(qtbot, tmp_path: Path) -> None:
    killed = start(tmp_path, "stay")
    assert killed.stdout is not None
    assert killed.stdout.readline().strip() == "first"
    killed.kill()
    killed.wait(10)
    killed.communicate()
    instance = SingleInstance(tmp_path)
    assert instance.acquire()
    instance.release()


def test_a_first_that_hangs_is_noticed(qtbot, tmp_path: Path) -> None:
    hanging = start(tmp_path, "stay")  # holds the lock, runs no event loop
    assert hanging.stdout is not None
    assert hanging.stdout.readline().strip() == "first"
    second = SingleInstance(tmp_path)
    assert not second.acquire()
    assert not second.ask_first_to_focus(300)
    hanging.communicate("")


def test_a_folder_that_cannot_be_written_is_an_error(qtbot, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot be written"):
        SingleInstance(tmp_path / "missing").acquire()
