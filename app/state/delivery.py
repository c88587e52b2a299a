"""Brings results from other threads to the GUI thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from PySide6.QtCore import QObject, Qt, Signal, Slot

T = TypeVar("T")


class Delivery(QObject):
    """Runs functions on the thread it was made on, in the order they were posted from any thread."""

    _posted = Signal()

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._functions: deque[Callable[[], Any]] = deque()
        self._posted.connect(self._run_one, Qt.ConnectionType.QueuedConnection)

    def post(self, function: Callable[[], Any]) -> None:
        self._functions.append(function)
        self._posted.emit()

    def when_done(self, future: Future[T], callback: Callable[[T | None, BaseException | None], Any]) -> None:
        """Calls `callback(result, error)` once the future is done; one of the two is None, or both for no result."""

        def deliver(done: Future[T]) -> None:
            error = done.exception()
            result = None if error is not None else done.result()
            self.post(lambda: callback(result, error))

        future.add_done_callback(deliver)

    @Slot()
    def _run_one(self) -> None:
        # One signal per function: an exception in one leaves the others to their own turns.
        if self._functions:
            self._functions.popleft()()
