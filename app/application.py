"""The composition root: makes every part, in the order that shows a window soonest, and ends them in good order."""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec
from PySide6.QtCore import QCoreApplication, QObject, QTimer, Slot
from PySide6.QtWidgets import QApplication, QMessageBox

from app.bridge import Bridge
from app.crash import CrashReport, CrashWatch
from app.panels.library import ModelLibrary
from app.paths import data_folder, database_path, log_folder, settings_path
from app.settings import SettingsFile
from app.single_instance import SingleInstance
from app.state.benchmark import BenchmarkState
from app.state.delivery import Delivery
from app.state.engine_state import EngineState
from app.state.records import Preset
from app.state.telemetry import TelemetryState
from app.state.workspace import Workspace
from app.store import Store, StoreError
from app.theme import ThemeManager, application_icon
from app.window import MainWindow, WindowServices
from engine.client import EngineClient, LocalEngineClient, worker_command
from engine.protocol import SamplingParams

STORE_TIMEOUT_S = 5.0
WORKER_TIMEOUT_S = 3.0
LONGEST_FIRST_PAINT_MS = 1000
_log = logging.getLogger(__name__)


def run(arguments: Sequence[str] | None = None) -> int:
    """Opens the window and returns its exit code: 0 after a quit in good order, 1 if it could not open.

    A second start on the same data brings the first one's window to the front and returns 0.
    """
    started = time.perf_counter()
    qt = make_qt_application(arguments)
    try:
        folder, logs = data_folder(), log_folder()
        instance = SingleInstance(folder)
        is_first = instance.acquire()
    except OSError as error:
        _say_fatal(
            f"Kvasir cannot keep its files: {error}. Free some space on that disk or allow writing there, or name "
            "another folder in the environment variable KVASIR_DATA; then start again."
        )
        return 1
    if not is_first:
        if instance.ask_first_to_focus():
            print("Kvasir is open already: its window comes to the front.")  # noqa: T201
            return 0
        _say_fatal(f"Kvasir is already running on {folder}, but it does not answer. End it, then start again.")
        return 1
    set_up_logging(logs)
    crash = CrashWatch(logs)
    previous_crash = crash.previous()
    crash.install()
    try:
        application = Application(SettingsFile(settings_path()), database_path())
    except StoreError as error:
        _log.error("the database cannot be used: %s", error)
        crash.close()
        instance.release()
        _say_fatal(str(error))
        return 1
    instance.focus_requested.connect(application.window.bring_to_front)
    crash.on_error = application.say_internal_error
    application.start(previous_crash)
    _log.info("window shown after %.2f s", time.perf_counter() - started)
    code = qt.exec()
    crash.close()
    instance.release()
    return code


def make_qt_application(arguments: Sequence[str] | None = None) -> QApplication:
    """The Qt application with its names and icon; the one that exists, if there is one."""
    existing = QApplication.instance()
    if isinstance(existing, QApplication):
        return existing
    qt = QApplication(list(arguments) if arguments is not None else sys.argv[:1])
    qt.setApplicationName("Kvasir")
    qt.setOrganizationName("Kvasir")
    qt.setDesktopFileName("kvasir")
    qt.setStyle("Fusion")
    qt.setQuitOnLastWindowClosed(False)
    qt.setWindowIcon(application_icon())
    return qt


def set_up_logging(folder: Path) -> None:
    """Logs to a file of bounded size, if there can be one, and warnings to the terminal."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    terminal = logging.StreamHandler()
    terminal.setLevel(logging.WARNING)
    root.addHandler(terminal)
    try:
        file = logging.handlers.RotatingFileHandler(
            folder / "window.log", maxBytes=1 << 20, backupCount=2, encoding="utf-8"
        )
    except OSError as error:
        _log.warning("nothing is logged to a file: %s", error)
        return
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(file)


def builtin_presets() -> list[Preset]:
    """The presets of `resources/presets.json`."""
    text = resources.files("resources").joinpath("presets.json").read_text("utf-8")
    return [
        Preset(item["name"], msgspec.convert(item["params"], SamplingParams), item.get("system_prompt", ""), True)
        for item in json.loads(text)
    ]


class Application(QObject):
    """All parts of one running Kvasir. Make it, `start` it, and `quit` it once.

    `client` is the engine to use instead of a worker process on this machine. Raises `StoreError` if the
    database cannot be used; nothing is left running then.
    """

    def __init__(self, file: SettingsFile, database: Path, client: EngineClient | None = None) -> None:
        super().__init__()
        self.file = file
        self._delivery = Delivery(self)
        settings = file.settings
        self.store = Store(database)
        self.themes = ThemeManager(settings.theme, settings.font_size, self)
        self.themes.apply()
        self.client: EngineClient = client or LocalEngineClient(
            worker_command(settings.engine_python), log_path=log_folder() / "engine.log"
        )
        self.bridge = Bridge(self.client, self)
        self.engine = EngineState(self.client, self.bridge, self)
        self.telemetry = TelemetryState(self.bridge, self.engine, parent=self)
        self.workspace = Workspace(self.store, self.bridge, self.engine, builtin_presets=builtin_presets(), parent=self)
        self.benchmark = BenchmarkState(self.engine, self.bridge, self.workspace, self)
        self.library = ModelLibrary(lambda: settings.model_folders, self)
        self.window = MainWindow(
            WindowServices(file, self.themes, self.engine, self.telemetry, self.workspace, self.library, self.benchmark)
        )
        self.window.close_requested.connect(self.quit)
        self._has_gone_on = self._has_quit = False

    def start(self, previous_crash: CrashReport | None = None) -> None:
        """Shows the window; then starts the engine beside it and brings the chats back."""
        self.workspace.restored.connect(self._restored)
        self.window.first_painted.connect(self._go_on)
        self.window.show()
        QTimer.singleShot(LONGEST_FIRST_PAINT_MS, self._go_on)  # a window that starts minimised is not painted
        if previous_crash is not None:
            QTimer.singleShot(0, lambda: self._tell_crash(previous_crash))
        elif self.file.problem:
            QTimer.singleShot(0, lambda: self.window.toast.say(self.file.problem, kind="danger", milliseconds=0))

    def say_internal_error(self, last_line: str) -> None:
        """Tells of an unhandled exception without stopping anybody's work. May be called on any thread."""
        message = f"Something went wrong inside Kvasir: {last_line}"
        self._delivery.post(lambda: self.window.toast.say(message, kind="danger", milliseconds=12_000))

    @Slot()
    def quit(self) -> None:
        """Ends everything: answers, database, engine, window. Asks first if something could not be saved."""
        if self._has_quit:
            return
        trouble = self.store.trouble
        if trouble is not None and not self._quit_with_unsaved(str(trouble)):
            return
        self._has_quit = True
        self.window.save_state()
        try:
            self.file.save()
        except OSError:
            _log.exception("the settings could not be saved")
        self.window.hide()
        self.bridge.stop()
        if lost := self.workspace.shutdown(STORE_TIMEOUT_S):
            _log.error("%d changes could not be saved", lost)
        self.client.close(WORKER_TIMEOUT_S)
        self.library.close()
        self.window.may_close = True
        self.window.close()
        QCoreApplication.quit()

    @Slot()
    def _go_on(self) -> None:
        """All that the first picture of the window does not need."""
        if self._has_gone_on or self._has_quit:
            return
        self._has_gone_on = True
        self.engine.start(self.window.models.config_at_start())
        self.workspace.restore()
        self.library.refresh()
        QTimer.singleShot(0, self.window.dashboard.build)

    def _restored(self) -> None:
        if not self.workspace.sessions:
            self.workspace.new_session()

    def _quit_with_unsaved(self, reason: str) -> bool:
        box = QMessageBox(self.window)
        box.setIcon(QMessageBox.Icon.Warning)
        box.setWindowTitle("Kvasir")
        box.setText("Some of your latest words are not saved yet.")
        box.setInformativeText(f"{reason}\n\nIf you quit now, they are lost.")
        leave = box.addButton("Quit anyway", QMessageBox.ButtonRole.DestructiveRole)
        stay = box.addButton("Keep Kvasir open", QMessageBox.ButtonRole.RejectRole)
        box.setDefaultButton(stay)
        box.exec()
        return box.clickedButton() is leave

    def _tell_crash(self, report: CrashReport) -> None:
        toast = self.window.toast
        if not report.text:
            toast.say("Kvasir was ended from outside last time. Your chats are back, up to the last second.")
            return
        toast.say(
            "Kvasir ended unexpectedly last time.", "Show report", lambda: self._show_report(report), milliseconds=0
        )

    def _show_report(self, report: CrashReport) -> None:
        when = report.ended_at.strftime("%Y-%m-%d %H:%M")
        explanation = f"This is what Kvasir wrote down when it ended on {when}. Your chats are not part of it."
        from app.panels.dialogs import ReportDialog

        ReportDialog(self.window, "Crash report", explanation, report.text).open()


def _say_fatal(message: str) -> None:
    print(f"kvasir: {message}", file=sys.stderr)  # noqa: T201 - there may be no window to say it in
    box = QMessageBox(QMessageBox.Icon.Critical, "Kvasir", message)
    box.exec()
