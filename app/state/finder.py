"""Searches all chats without keeping the database from its other work."""

from __future__ import annotations

from collections.abc import Callable

from sqlite_utils import Database

from app.state.delivery import Delivery
from app.state.records import SearchResult
from app.store import Store
from app.store.search import SearchSlice, search_slice

MAX_RESULTS = 100


class Finder:
    """Answers the latest query only. `found(query, results)` and `failed(error)` are called on the GUI thread."""

    def __init__(
        self,
        store: Store,
        delivery: Delivery,
        found: Callable[[str, list[SearchResult]], object],
        failed: Callable[[BaseException], object],
    ) -> None:
        self._store = store
        self._delivery = delivery
        self._found = found
        self._failed = failed
        self._latest = ""

    def search(self, text: str) -> None:
        self._latest = text
        self._go_on(text, [], None)

    def _go_on(self, text: str, results: list[SearchResult], below: int | None) -> None:
        def run(db: Database) -> SearchSlice | None:
            # While this waited a person may have typed on; only the latest query is worth an answer.
            return search_slice(db, text, below, MAX_RESULTS - len(results)) if self._latest == text else None

        def finished(part: SearchSlice | None, error: BaseException | None) -> None:
            if error is not None:
                self._failed(error)
            elif part is None or self._latest != text:
                return
            elif part.next_below is None or len(results) + len(part.results) >= MAX_RESULTS:
                self._found(text, results + part.results)
            else:
                self._go_on(text, results + part.results, part.next_below)

        self._delivery.when_done(self._store.submit(run), finished)
