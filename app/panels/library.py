"""The models on this machine, looked for on a thread of its own so that a slow disk never holds the window."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from PySide6.QtCore import QObject, Signal

from app.state.delivery import Delivery
from engine.catalog import CatalogEntry, find_models

_log = logging.getLogger(__name__)


class ModelLibrary(QObject):
    """What the catalog found. `changed` follows each search; `entries` keeps the last result until then."""

    changed = Signal()

    def __init__(self, folders: Callable[[], Sequence[str]], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._folders = folders
        self._delivery = Delivery(self)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="library")
        self.entries: list[CatalogEntry] = []
        self.is_searching = False
        self.failure = ""

    def refresh(self) -> None:
        """Looks again; nothing happens while a search is under way."""
        if self.is_searching:
            return
        self.is_searching = True
        future: Future[list[CatalogEntry]] = self._thread.submit(find_models, list(self._folders()))
        self._delivery.when_done(future, self._found)

    def entry(self, path: str) -> CatalogEntry | None:
        """The entry of a model file or folder."""
        return next((entry for entry in self.entries if str(entry.path) == path or entry.name == path), None)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _found(self, entries: list[CatalogEntry] | None, error: BaseException | None) -> None:
        self.is_searching = False
        if error is not None or entries is None:
            _log.error("the search for models failed", exc_info=error)
            self.failure = f"The search for models failed: {error}"
        else:
            self.failure = ""
            self.entries = sorted(entries, key=lambda entry: (entry.error is not None, entry.name.casefold()))
        self.changed.emit()
