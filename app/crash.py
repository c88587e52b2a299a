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
        """Takes over fatal signals, the exception hooks of all threads, and Qt's own messages.

        Where no file can be written there will be no report; the hooks still tell and log.
        """
        try:
            self._file = open(self.path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 - open for the whole run
            faulthandler.enable(self._file)
        except OSError as error:
            _log.warning("a crash would leave no report: %s", error)
        sys.excepthook = self.record
        threading.excepthook = lambda args: self.record(args.exc_type, args.exc_value, args.exc_traceback)
        qInstallMessageHandler(_log_qt_message)

    def record(
        self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None = None
    ) -> None:
        """Writes one unhandled exception to the report and the log, and tells `on_error` its last line.

        Runs on the thread that failed, and so does `on_error`.
        """
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error or kind(), trace)
            return
        text = "".join(traceback.format_exception(kind, error, trace))
        _log.error("unhandled exception\n%s", text)
        if self._file is not None:
            try:
                self._file.write(text if self._header_written else _environment() + text)
                self._header_written = True
            except OSError as failure:
                _log.error("the crash report cannot be written: %s", failure)
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
        sys.excepthook = sys.__excepthook__
        threading.excepthook = threading.__excepthook__
        qInstallMessageHandler(None)
        file, self._file = self._file, None
        if file is None:
            return
        faulthandler.disable()
        try:
            file.close()
            kept = self.path.with_suffix(".txt")
            self.path.replace(kept) if self._header_written else self.path.unlink(missing_ok=True)
        except OSError as error:
            _log.error("the crash report %s cannot be put away: %s", self.path, error)


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
