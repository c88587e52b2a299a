from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from app.crash import CrashWatch

ROOT = Path(__file__).resolve().parents[2]


def run_watched(folder: Path, body: str, path: Path | None = None) -> int:
    """Runs `body` in a process with the watch, writing to `path`, installed as `watch`; returns its exit code."""
    program = f"from pathlib import Path\nfrom app.crash import CrashWatch\nwatch = CrashWatch(Path({str(folder)!r}))\n"
    if path is not None:
        program += f"watch.path = Path({str(path)!r})\n"
    program += "watch.install()\n" + textwrap.dedent(body)
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, timeout=60).returncode


def test_a_run_that_ends_in_good_order_leaves_nothing(tmp_path: Path) -> None:
    assert run_watched(tmp_path, "watch.close()") == 0
    assert list(tmp_path.iterdir()) == []
    assert CrashWatch(tmp_path).previous() is None


def test_a_fatal_signal_leaves_a_report_with_the_stack(tmp_path: Path) -> None:
    code = run_watched(tmp_path, "import os, signal\ndef deep():\n    os.kill(os.getpid(), signal.SIGSEGV)\ndeep()")
    assert code != 0
    report = CrashWatch(tmp_path).previous()
    assert report is not None
    assert "Segmentation fault" in report.text
    assert "in deep" in report.text


def test_an_unhandled_exception_leaves_a_report_that_names_versions(tmp_path: Path) -> None:
    run_watched(tmp_path, "def broken():\n    raise RuntimeError('the owl is out')\nbroken()")
    report = CrashWatch(tmp_path).previous()
    assert report is not None
    assert "RuntimeError: the owl is out" in report.text
    assert "Python 3" in report.text


def test_an_exception_in_a_thread_is_reported_too(tmp_path: Path) -> None:
    body = """
        import threading
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start(); thread.join()
    """
    run_watched(tmp_path, body)
    report = CrashWatch(tmp_path).previous()
    assert report is not None
    assert "ZeroDivisionError" in report.text


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
def test_a_run_killed_from_outside_is_told_from_a_crash(tmp_path: Path) -> None:
    run_watched(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    report = CrashWatch(tmp_path).previous()
    assert report is not None
    assert report.text == ""


def test_a_report_is_shown_once_but_kept_as_a_file(tmp_path: Path) -> None:
    run_watched(tmp_path, "raise RuntimeError('once')")
    assert CrashWatch(tmp_path).previous() is not None
    assert CrashWatch(tmp_path).previous() is None
    assert ["once" in path.read_text() for path in tmp_path.iterdir()] == [True]


def test_a_running_windows_file_is_no_report_of_a_crash(tmp_path: Path) -> None:
    (tmp_path / f"window-{os.getppid()}.crash").write_text("still running")
    assert CrashWatch(tmp_path).previous() is None


def test_the_window_is_told_the_last_line_and_the_process_goes_on(tmp_path: Path) -> None:
    watch = CrashWatch(tmp_path)
    told: list[str] = []
    watch.on_error = told.append
    try:
        raise ValueError("odd")
    except ValueError as error:
        watch.record(type(error), error, error.__traceback__)
    assert told == ["ValueError: odd"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device to write to")
def test_on_a_full_disk_an_exception_is_still_told_and_the_end_is_in_good_order(tmp_path: Path) -> None:
    body = """
        import threading
        told = []
        watch.on_error = told.append
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start(); thread.join()
        thread = threading.Thread(target=lambda: [][1])
        thread.start(); thread.join()
        watch.close()
        assert told == ["ZeroDivisionError: division by zero", "IndexError: list index out of range"], told
    """
    (tmp_path / "link").symlink_to("/dev/full")
    assert run_watched(tmp_path, body, path=tmp_path / "link") == 0


def test_without_a_file_the_hooks_still_tell(tmp_path: Path) -> None:
    body = """
        import threading
        told = []
        watch.on_error = told.append
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start(); thread.join()
        watch.close()
        assert told == ["ZeroDivisionError: division by zero"], told
    """
    (tmp_path / "folder").mkdir()
    assert run_watched(tmp_path, body, path=tmp_path / "folder") == 0
