"""The chat database: one SQLite file, one thread that talks to it, writes that are kept until they succeed."""

from __future__ import annotations

import functools
import itertools
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from sqlite_utils import Database

from app.store.errors import StoreClosedError, StoreError, translate
from app.store.opening import open_database

T = TypeVar("T")
logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 1.0
RETRY_INTERVAL_S = 1.0


class _Job:
    def __init__(self, function: Callable[[Database], Any], future: Future) -> None:
        self.function = function
        self.future = future


class Store:
    """Opens, creates or migrates the database at `path` and serves it from a thread of its own.

    Work is a function of the `sqlite_utils.Database`, run in one transaction. `submit` is for reading and for
    anything whose caller deals with failure; `write` is for what must not be lost: it keeps its order, and while
    the disk is full, the file locked or read-only it waits in memory and is tried again. `on_trouble` is called
    on the database thread with the error that holds writes up, and with None when they flow again;
    `on_lost_write`, with the error of a write that trying again cannot save.

    Raises a `StoreError` subclass when the database cannot be used at all; the file is then left as it was.
    """

    def __init__(
        self,
        path: Path,
        *,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        retry_interval_s: float = RETRY_INTERVAL_S,
    ) -> None:
        self.path = Path(path)
        self.on_trouble: Callable[[StoreError | None], None] | None = None
        self.on_lost_write: Callable[[Exception], None] | None = None
        self._busy_timeout_s = busy_timeout_s
        self._retry_interval_s = retry_interval_s
        self._condition = threading.Condition()
        self._reads: deque[_Job] = deque()
        self._writes: deque[_Job] = deque()
        self._retry_at: float | None = None
        self._trouble: StoreError | None = None
        self._closing = False
        self._close_deadline = 0.0
        self._ids: itertools.count[int] = itertools.count(1)
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, args=(opened,), name="kvasir-store", daemon=True)
        self._thread.start()
        opened.result()

    @property
    def trouble(self) -> StoreError | None:
        """What holds writes up at the moment."""
        return self._trouble

    @property
    def num_unsaved(self) -> int:
        """Writes that are not in the file yet."""
        with self._condition:
            return len(self._writes)

    def new_id(self) -> int:
        """A number no message and no run has had before; usable at once, before anything is written."""
        return next(self._ids)

    def submit(self, function: Callable[[Database], T]) -> Future[T]:
        """Runs `function` in one transaction, after the writes made so far unless these are held up.

        The future gets a `StoreError` for anything SQLite refuses.
        """
        return self._enqueue(function, durable=False)

    def write(self, function: Callable[[Database], T]) -> Future[T]:
        """Like `submit`, in order with other writes and tried again until it succeeds.

        `function` may run more than once; a failed run leaves no trace.
        """
        return self._enqueue(function, durable=True)

    def write_each(self, functions: Sequence[Callable[[Database], object]]) -> Future[None]:
        """Like `write` for several functions at once: one transaction, in their order.

        One that fails for good is left out and `on_lost_write` told; the others are saved all the same.
        """
        return self.write(functools.partial(self._run_each, tuple(functions)))

    def close(self, timeout_s: float = 5.0) -> int:
        """Finishes what is queued, for at most `timeout_s` while writes are held up, and closes the file.

        Returns how many writes could not be saved. May be called twice.
        """
        with self._condition:
            if not self._closing:
                self._closing = True
                self._close_deadline = time.monotonic() + timeout_s
                self._retry_at = 0.0 if self._retry_at is not None else None
                self._condition.notify()
        self._thread.join(timeout_s + self._busy_timeout_s + 5.0)
        return self.num_unsaved

    def _enqueue(self, function: Callable[[Database], T], *, durable: bool) -> Future[T]:
        future: Future[T] = Future()
        with self._condition:
            if self._closing or not self._thread.is_alive():
                future.set_exception(StoreClosedError("The chat database is closed."))
                return future
            if durable:
                future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
            (self._writes if durable else self._reads).append(_Job(function, future))
            self._condition.notify()
        return future

    def _serve(self, opened: Future[None]) -> None:
        try:
            db = open_database(self.path, self._busy_timeout_s)
            self._ids = itertools.count(_highest_id(db) + 1)
        except StoreError as error:
            opened.set_exception(error)
            return
        except (sqlite3.Error, OSError) as error:
            opened.set_exception(translate(error, self.path))
            return
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(None)
        try:
            while (job := self._next_job()) is not None:
                self._run(db, *job)
        finally:
            self._refuse_rest()
            db.close()

    def _next_job(self) -> tuple[_Job, bool] | None:
        """The next job and whether it is a write; None when it is time to close. The write stays in its queue."""
        with self._condition:
            while True:
                now = time.monotonic()
                # Writes go first, so that a read sees what its caller has just written.
                if self._writes and (self._retry_at is None or now >= self._retry_at):
                    return self._writes[0], True
                if self._reads:
                    return self._reads.popleft(), False
                if self._closing and (not self._writes or now >= self._close_deadline):
                    return None
                wait = None if self._retry_at is None else max(0.0, self._retry_at - now)
                if self._closing:
                    left = max(0.0, self._close_deadline - now)
                    wait = left if wait is None else min(wait, left)
                self._condition.wait(wait)

    def _run(self, db: Database, job: _Job, durable: bool) -> None:
        if not durable and not job.future.set_running_or_notify_cancel():
            return
        try:
            result = _in_transaction(db, job.function, write=durable)
        except sqlite3.Error as error:
            self._failed(job, translate(error, self.path), durable)
        except StoreError as error:
            self._failed(job, error, durable)
        except Exception as error:
            self._refused(job, error, durable)
        else:
            self._done(job, durable)
            job.future.set_result(result)

    def _run_each(self, functions: Sequence[Callable[[Database], object]], db: Database) -> None:
        lost: list[Exception] = []
        for function in functions:
            db.conn.execute("SAVEPOINT one_of_several")
            try:
                function(db)
            except Exception as error:
                known = translate(error, self.path) if isinstance(error, sqlite3.Error) else error
                if isinstance(known, StoreError) and known.retryable:
                    raise  # all of them are tried again
                db.conn.execute("ROLLBACK TO one_of_several")
                lost.append(known)
            db.conn.execute("RELEASE one_of_several")
        # Told last: a run that ends in trying again has lost nothing.
        for error in lost:
            self._tell_lost(error)

    def _failed(self, job: _Job, error: StoreError, durable: bool) -> None:
        if not (durable and error.retryable):
            self._refused(job, error, durable)
            return
        interval = self._retry_interval_s
        with self._condition:
            self._retry_at = time.monotonic() + interval
        if type(self._trouble) is not type(error):
            logger.warning("writes are held up: %s", error)
            self._set_trouble(error)

    def _refused(self, job: _Job, error: Exception, durable: bool) -> None:
        self._done(job, durable)
        job.future.set_exception(error)
        if durable:
            self._tell_lost(error)

    def _tell_lost(self, error: Exception) -> None:
        logger.error("a write was lost", exc_info=error)
        if self.on_lost_write is not None:
            self.on_lost_write(error)

    def _done(self, job: _Job, durable: bool) -> None:
        if not durable:
            return
        with self._condition:
            assert self._writes[0] is job
            self._writes.popleft()
            self._retry_at = None
        if self._trouble is not None:
            self._set_trouble(None)

    def _set_trouble(self, error: StoreError | None) -> None:
        self._trouble = error
        if self.on_trouble is not None:
            self.on_trouble(error)

    def _refuse_rest(self) -> None:
        with self._condition:
            self._closing = True
            rest = [job.future for job in (*self._reads, *self._writes)]
        for future in rest:
            if not future.done():
                future.set_exception(self._trouble or StoreClosedError("The chat database is closed."))


def _in_transaction(db: Database, function: Callable[[Database], T], *, write: bool) -> T:
    # A deferred transaction that reads first and writes later fails at once when another program wrote in
    # between, whatever the busy timeout; writers therefore take the lock at the start.
    db.conn.execute("BEGIN IMMEDIATE" if write else "BEGIN")
    try:
        result = function(db)
        db.conn.execute("COMMIT")
    except BaseException:
        db.rollback()
        raise
    return result


def _highest_id(db: Database) -> int:
    query = "SELECT max(ifnull((SELECT max(id) FROM messages), 0), ifnull((SELECT max(id) FROM runs), 0))"
    return db.execute(query).fetchone()[0]
