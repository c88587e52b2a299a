"""The whole application with its real window, on a real store and the fake engine's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PySide6.QtCore import QCoreApplication, QEvent
from PySide6.QtWidgets import QApplication

from app.application import Application
from app.settings import SettingsFile
from engine.protocol import EngineConfig
from tests.app.app_parts import wait_until
from tests.fake_engine import fake_client


@contextmanager
def open_application(folder: Path, *, ready: bool = True, **script: Any) -> Iterator[Application]:
    """An application whose data lies in `folder`, its window shown, its model loaded unless `ready` is false.

    `script` is what the fake engine is told to do. Quits it at the end, if it has not quit by then.
    """
    qt = QApplication.instance()
    assert isinstance(qt, QApplication)
    qt.setStyle("Fusion")
    file = SettingsFile(folder / "settings.json")
    file.settings.last_model = EngineConfig(model=str(Path(__file__)))  # any file that is there: the engine is a fake
    application = Application(file, folder / "kvasir.db", fake_client(**script))
    try:
        application.start()
        wait_until(lambda: application.workspace.sessions)
        wait_until(lambda: all(session.is_loaded for session in application.workspace.sessions))
        if ready:
            wait_until(lambda: application.engine.status == "ready")
        yield application
    finally:
        application.quit()
        application.window.deleteLater()
        application.deleteLater()
        QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
        QCoreApplication.processEvents()
