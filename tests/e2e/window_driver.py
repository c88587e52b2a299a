"""Runs the real window until it is killed: `python -m tests.e2e.window_driver NUMBER_OF_CHATS`.

Asks a long question in each of that many chats and prints a line of JSON when the window is on screen,
when the model is loaded, and when every chat is in mid-answer; seconds count from the start of the process.
"""

from __future__ import annotations

import json
import sys
import time

import psutil
from PySide6.QtCore import QEvent, QObject, QTimer

from app.application import Application, make_qt_application
from app.paths import database_path, settings_path
from app.settings import SettingsFile
from engine.protocol import SamplingParams

STARTED = psutil.Process().create_time()
QUESTION = "Tell me a long story about the sea, number {}."


def say(what: str) -> None:
    print(json.dumps({"what": what, "seconds": round(time.time() - STARTED, 3)}), flush=True)  # noqa: T201


class FirstPaint(QObject):
    """Says once that the watched window was painted."""

    said = False

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Paint and not self.said:
            self.said = True
            QTimer.singleShot(0, lambda: say("painted"))
        return False


def main() -> None:
    number = int(sys.argv[1])
    qt = make_qt_application([])
    application = Application(SettingsFile(settings_path()), database_path())
    first_paint = FirstPaint()
    application.window.installEventFilter(first_paint)
    timer = QTimer()
    asked = []

    def step() -> None:
        workspace = application.workspace
        if not asked and application.engine.is_ready and workspace.sessions:
            say("ready")
            for n in range(number):
                session = workspace.sessions[0] if n == 0 else workspace.new_session()
                # Nothing may end by itself before the kill.
                session.set_params(SamplingParams(ignore_eos=True, max_tokens=4096))
                if session.send(QUESTION.format(n)):
                    asked.append(session)
        elif asked and all(len(session.messages[-1].text) > 12 for session in asked):
            timer.stop()
            # Longer than the store's flush interval: what is there now must survive.
            QTimer.singleShot(1500, lambda: say("streaming"))

    timer.timeout.connect(step)
    timer.start(20)
    application.start()
    sys.exit(qt.exec())


if __name__ == "__main__":
    main()
