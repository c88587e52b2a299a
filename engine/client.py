"""The client's side of the engine: starts the worker process, watches it, restarts it.

Knows neither Qt nor torch; the window, the command line and the tests use it alike.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from engine.protocol import (
    AnyCommand,
    AnyEvent,
    CountTokens,
    Finished,
    Generate,
    LoadFailed,
    LoadModel,
    ModelLoaded,
    ModelUnloaded,
    Telemetry,
    TokenCount,
    WorkerDied,
    WorkerStarted,
    encode,
)
from engine.telemetry import merge_telemetry
from engine.worker_process import WorkerProcess

# A worker that lived this long was healthy: the next restart waits for nothing.
HEALTHY_SECONDS = 60.0
MAX_BACK_OFF_SECONDS = 30.0

_LIFE_EVENTS = (WorkerStarted, WorkerDied, ModelLoaded, ModelUnloaded, LoadFailed)


def worker_command(python: str = "") -> list[str]:
    """The command line of a worker run by `python` (default: this one)."""
    # -P keeps a folder named `engine` or a file `torch.py` in the current folder out of the way.
    return [python or sys.executable, "-P", "-m", "engine.worker"]


def _encode(command: AnyCommand) -> bytes:
    try:
        return encode(command)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the engine cannot be sent {error.object[error.start : error.end]!r}: it is no text"
        ) from error


class EngineUnavailable(RuntimeError):
    """A command was given to a client that was not started or is closed."""


class EngineClient(Protocol):
    """An engine as its users see it: commands go in, events come out. No method blocks unless it says so.

    Every `Generate` is answered by exactly one `Finished`, every `CountTokens` by one `TokenCount`,
    even if the engine dies on the way.
    """

    @property
    def is_alive(self) -> bool:
        """Whether the engine is running or starting."""
        ...

    @property
    def stderr_tail(self) -> str:
        """The end of what the engine wrote to its error output."""
        ...

    def start(self) -> None:
        """Starts the engine; the first event is `WorkerStarted` or `WorkerDied`."""
        ...

    def send(self, command: AnyCommand) -> None:
        """Queues a command. To a dead engine, the answer is an event that says so.

        Raises `EngineUnavailable` before `start` and after `close`, and `ValueError` for a request id that is
        in use or text that cannot be sent (half of a surrogate pair); nothing is sent then.
        """
        ...

    def take_events(self) -> list[AnyEvent]:
        """Everything that has arrived, oldest first."""
        ...

    def wait_events(self, timeout: float | None = None) -> list[AnyEvent]:
        """Like `take_events`, but blocks until there is something or `timeout` seconds are over."""
        ...

    def restart(self) -> None:
        """Ends the engine if it runs and starts a fresh one, later each time it keeps dying.

        Requests under way are finished with an error; nothing is sent again.
        """
        ...

    def close(self, timeout: float = 5.0) -> None:
        """Ends the engine, blocking for at most about `timeout` seconds. May be called twice."""
        ...


class LocalEngineClient:
    """`EngineClient` for a worker process on this machine.

    `command` is the worker's command line (default: this Python, `-m engine.worker`), `env` adds to
    the environment, `log_path` gets a copy of the worker's error output. Thread-safe.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        log_path: str | Path | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        self._environment = {**os.environ, **(env or {})}
        self._command = list(command) if command is not None else worker_command()
        if self._command[0] == sys.executable:
            # The worker finds the engine this client belongs to, installed or not; another Python has its own.
            root = str(Path(__file__).resolve().parent.parent)
            inherited = self._environment.get("PYTHONPATH")
            self._environment["PYTHONPATH"] = os.pathsep.join([root, inherited] if inherited else [root])
        self._log_path = Path(log_path) if log_path is not None else None
        self._start_timeout = start_timeout

        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._events: list[AnyEvent] = []
        self._telemetry: list[Telemetry] = []
        self._worker: WorkerProcess | None = None
        self._started_at = 0.0
        self._requests: dict[str, None] = {}
        self._counts: dict[str, None] = {}
        self._death: WorkerDied | None = None
        self._early_deaths = 0
        self._closed = False

    # ------------------------------------------------------------ EngineClient

    @property
    def is_alive(self) -> bool:
        with self._lock:
            return self._worker is not None and self._death is None and not self._closed

    @property
    def stderr_tail(self) -> str:
        with self._lock:
            worker = self._worker
        return worker.stderr_tail if worker is not None else ""

    @property
    def pid(self) -> int | None:
        """The worker's process id, None while it is not running."""
        with self._lock:
            return self._worker.pid if self._worker is not None and self._death is None else None

    def start(self) -> None:
        """See `EngineClient`. Does nothing if the worker is already running."""
        with self._lock:
            if self._closed:
                raise EngineUnavailable("this engine client is closed")
            if not self.is_alive:
                self._launch()

    def send(self, command: AnyCommand) -> None:
        message = _encode(command)
        with self._lock:
            if self._closed:
                raise EngineUnavailable("this engine client is closed")
            if self._worker is None:
                raise EngineUnavailable("the engine has not been started: call start() first")
            if isinstance(command, Generate):
                if command.request_id in self._requests:
                    raise ValueError(f"request id {command.request_id!r} is already in use")
                self._requests[command.request_id] = None
            elif isinstance(command, CountTokens):
                self._counts[command.query_id] = None
            if self._death is not None:
                reason = f"The engine is not running. {self._death.reason}"
                if isinstance(command, LoadModel):
                    self._deliver(LoadFailed(model=command.config.model, message=reason))
                self._fail_pending(reason)
                return
            self._worker.send_bytes(message)

    def take_events(self) -> list[AnyEvent]:
        with self._lock:
            self._settle_telemetry()
            events, self._events = self._events, []
            return events

    def wait_events(self, timeout: float | None = None) -> list[AnyEvent]:
        with self._arrived:
            self._arrived.wait_for(lambda: self._events or self._telemetry, timeout)
            return self.take_events()

    def restart(self) -> None:
        with self._lock:
            if self._closed:
                raise EngineUnavailable("this engine client is closed")
            previous = self._worker
            if previous is not None and self._death is None:
                self._fail_pending("The engine was restarted before the answer was finished.")
                self._forgive_if_healthy()
                previous.end(grace=1.0)
            self._launch(previous)

    def close(self, timeout: float = 5.0) -> None:
        with self._lock:
            already_closed, self._closed = self._closed, True
            worker = self._worker
        if worker is None or already_closed:
            return
        worker.end(grace=timeout)
        worker.join(timeout + 2.0)
        with self._lock:
            for request_id in self._requests:
                self._deliver(Finished(request_id=request_id, finish_reason="cancelled"))
            self._requests.clear()
            self._fail_pending("The engine was closed.")

    # ------------------------------------------------------------ the worker's life

    @property
    def back_off_seconds(self) -> float:
        """How long the next restart will wait: 0 once, then doubling from half a second."""
        if self._early_deaths <= 1:
            return 0.0
        return min(MAX_BACK_OFF_SECONDS, 0.5 * 2 ** (self._early_deaths - 2))

    def _forgive_if_healthy(self) -> None:
        if time.monotonic() - self._started_at >= HEALTHY_SECONDS:
            self._early_deaths = 0

    def _launch(self, previous: WorkerProcess | None = None) -> None:
        self._death = None
        self._started_at = time.monotonic() + self.back_off_seconds
        self._worker = WorkerProcess(
            self._command,
            self._environment,
            log_path=self._log_path,
            start_timeout=self._start_timeout,
            delay=self.back_off_seconds,
            after=previous,
            on_event=self._receive,
            on_death=self._worker_died,
        )
        self._worker.start()

    def _receive(self, worker: WorkerProcess, event: AnyEvent) -> None:
        with self._lock:
            if worker is not self._worker:
                return  # a late word from a worker that has been replaced
            if isinstance(event, Finished):
                if event.request_id not in self._requests:
                    return
                del self._requests[event.request_id]
            elif isinstance(event, TokenCount):
                self._counts.pop(event.query_id, None)
            self._deliver(event)

    def _worker_died(self, worker: WorkerProcess, death: WorkerDied) -> None:
        with self._lock:
            if worker is not self._worker or self._closed:
                return
            self._forgive_if_healthy()
            self._early_deaths += 1
            self._death = death = WorkerDied(
                reason=death.reason,
                detail=death.detail,
                exit_code=death.exit_code,
                out_of_memory=death.out_of_memory,
                lost_requests=list(self._requests),
            )
            self._deliver(death)
            self._fail_pending(death.reason)

    # ------------------------------------------------------------ the inbox, under the lock

    def _deliver(self, event: AnyEvent) -> None:
        if isinstance(event, Telemetry):
            self._telemetry.append(event)
            if len(self._telemetry) > 64:
                self._telemetry = [merge_telemetry(self._telemetry)]
        else:
            # Telemetry must not be read after the end or the replacement of the model it speaks of.
            if isinstance(event, _LIFE_EVENTS):
                self._settle_telemetry()
            self._events.append(event)
        self._arrived.notify_all()

    def _settle_telemetry(self) -> None:
        if self._telemetry:
            self._events.append(merge_telemetry(self._telemetry))
            self._telemetry = []

    def _fail_pending(self, message: str) -> None:
        requests, self._requests = self._requests, {}
        counts, self._counts = self._counts, {}
        for request_id in requests:
            self._deliver(Finished(request_id=request_id, finish_reason="error", error=message))
        for query_id in counts:
            self._deliver(TokenCount(query_id=query_id, count=None, error=message))
