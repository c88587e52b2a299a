"""The state half of the application, without widgets, on a real store and the fake engine's process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PySide6.QtCore import QCoreApplication

from app.bridge import Bridge
from app.state.engine_state import EngineState
from app.state.session import ChatSession
from app.state.workspace import Workspace
from app.store import Store
from engine.protocol import EngineConfig
from tests.fake_engine import fake_client

MODEL = EngineConfig(model="fake-135M")


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Runs the event loop until `condition` holds; fails if it does not within the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "this did not come true in time"
        QCoreApplication.processEvents()
        time.sleep(0.002)


class AppParts:
    """Store, client, bridge, engine state and workspace, wired as the application wires them.

    `script` is what the fake engine is told to do, see `tests.fake_engine.FakeScript`.
    """

    def __init__(self, database: Path, *, busy_timeout_s: float = 0.05, retry_interval_s: float = 0.1, **script: Any):
        self.store = Store(database, busy_timeout_s=busy_timeout_s, retry_interval_s=retry_interval_s)
        self.client = fake_client(**script)
        self.bridge = Bridge(self.client)
        self.engine = EngineState(self.client, self.bridge)
        self.workspace = Workspace(self.store, self.bridge, self.engine)
        self.errors: list[str] = []
        self.workspace.error_occurred.connect(self.errors.append)
        self.workspace.session_opened.connect(self._watch)
        self._is_closed = False

    def start(self) -> AppParts:
        """Restores the workspace and waits until it and the model are ready."""
        restored: list[bool] = []
        self.workspace.restored.connect(lambda: restored.append(True))
        self.workspace.restore()
        self.engine.start(MODEL)
        wait_until(lambda: restored and all(session.is_loaded for session in self.workspace.sessions))
        wait_until(lambda: self.engine.status in ("ready", "dead"))
        return self

    def ask(self, session: ChatSession, text: str) -> str:
        """Sends a question and waits for the whole answer."""
        assert session.send(text), self.errors
        wait_until(lambda: not session.is_generating)
        return session.messages[-1].text

    def read(self, function: Callable[..., Any]) -> Any:
        """Runs a function on the database thread, after all that was written before, and returns what it returns."""
        return self.store.submit(function).result(10)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.workspace.shutdown()
        self.bridge.stop()
        self.client.close(2.0)
        QCoreApplication.processEvents()

    def _watch(self, session: ChatSession) -> None:
        session.error_occurred.connect(self.errors.append)
