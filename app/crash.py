"""Notices crashes of the window: writes a report while dying and finds it at the next start."""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import logging
import os
import platform
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil
from PySide6.QtCore import QMessageLogContext, QtMsgType, qInstallMessageHandler, qVersion

_log = logging.getLogger(__name__)
_PREFIX = "window-"
_MAX_REPORT_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True)
class CrashReport:
    """What the last run left behind. An empty `text` means it was ended from outside, without a trace."""

    text: str
    ended_at: datetime.datetime


class CrashWatch:
    """Writes unhandled exceptions and fatal signals of this run into one file of `folder`.

    The file carries the process id, so that runs never touch each other's; `close()` removes it
    unless something was written, and `previous()` finds what runs that are gone left behind.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / f"{_PREFIX}{os.getpid()}.crash"
        self.on_error: Callable[[str], None] | None = None
        self._file: IO[str] | None = None
        self._header_written = False

    def install(self) -> None:
        """Takes over fatal signals, the exception hooks of all threads, and Qt's own messages."""
        self._file = open(self.path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 - open for the whole run
        faulthandler.enable(self._file)
        sys.excepthook = self.record
        threading.excepthook = lambda args: self.record(args.exc_type, args.exc_value, args.exc_traceback)
        qInstallMessageHandler(_log_qt_message)

    def record(
        self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None = None
    ) -> None:
        """Writes one unhandled exception to the report and the log, and tells `on_error` its last line."""
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error or kind(), trace)
            return
        text = "".join(traceback.format_exception(kind, error, trace))
        _log.error("unhandled exception\n%s", text)
        if self._file is not None:
            if not self._header_written:
                self._file.write(_environment())
                self._header_written = True
            self._file.write(text + "\n")
        if self.on_error is not None:
            self.on_error(text.strip().splitlines()[-1])

    def previous(self) -> CrashReport | None:
        """The newest report of a run that is gone, None if all ended in good order. Reports are taken once."""
        newest: CrashReport | None = None
        for path in self.folder.glob(f"{_PREFIX}*.crash"):
            if path == self.path or _is_running(path):
                continue
            try:
                ended = datetime.datetime.fromtimestamp(path.stat().st_mtime)
                with open(path, encoding="utf-8", errors="replace") as file:
                    text = file.read(_MAX_REPORT_BYTES)
                path.replace(path.with_suffix(".txt")) if text.strip() else path.unlink()
            except OSError:
                _log.exception("cannot read the crash report %s", path)
                continue
            if newest is None or (bool(text.strip()), ended) > (bool(newest.text), newest.ended_at):
                newest = CrashReport(text.strip(), ended)
        return newest

    def close(self) -> None:
        """Ends the watch after a quit in good order."""
        if self._file is None:
            return
        faulthandler.disable()
        sys.excepthook = sys.__excepthook__
        threading.excepthook = threading.__excepthook__
        qInstallMessageHandler(None)
        self._file.close()
        self._file = None
        kept = self.path.with_suffix(".txt")
        self.path.replace(kept) if self._header_written else self.path.unlink(missing_ok=True)


def _is_running(path: Path) -> bool:
    number = path.stem.removeprefix(_PREFIX)
    if not number.isdigit() or not psutil.pid_exists(int(number)):
        return False
    try:
        # A process that started after the file was last written only reuses the number.
        return psutil.Process(int(number)).create_time() <= path.stat().st_mtime + 1
    except (psutil.Error, OSError):
        return False


def _environment() -> str:
    return (
        f"Kvasir window, {datetime.datetime.now().isoformat(timespec='seconds')}\n"
        f"Python {platform.python_version()}, Qt {qVersion()}, {platform.platform()}\n\n"
    )


_LEVELS = {
    QtMsgType.QtDebugMsg: logging.DEBUG,
    QtMsgType.QtInfoMsg: logging.INFO,
    QtMsgType.QtWarningMsg: logging.WARNING,
    QtMsgType.QtCriticalMsg: logging.ERROR,
    QtMsgType.QtFatalMsg: logging.CRITICAL,
}


def _log_qt_message(level: QtMsgType, context: QMessageLogContext, message: str) -> None:
    logging.getLogger("qt").log(_LEVELS.get(level, logging.WARNING), "%s", message)
