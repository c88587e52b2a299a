"""The engine as a terminal command uses it: start, load, ask, one thing after another."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from app.cli.failure import CommandError, Interrupted
from engine.client import EngineClient, LocalEngineClient
from engine.protocol import (
    Accepted,
    AnyCommand,
    AnyEvent,
    Cancel,
    ChatMessage,
    Delta,
    EngineConfig,
    Finished,
    Generate,
    LoadFailed,
    LoadModel,
    LoadProgress,
    ModelInfo,
    ModelLoaded,
    SamplingParams,
    TokenLogprob,
    WorkerDied,
    WorkerStarted,
)

_POLL_SECONDS = 0.1


@dataclass
class Answer:
    """What one request brought."""

    finished: Finished
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    accepted: Accepted | None = None


class EngineSession:
    """One engine with one model loaded.

    Ctrl+C while it answers stops that answer; at other times it raises `KeyboardInterrupt` as usual.
    """

    def __init__(self, client: EngineClient, worker: WorkerStarted, info: ModelInfo) -> None:
        self._client = client
        self._numbers = itertools.count(1)
        self.worker = worker
        self.info = info

    @property
    def is_alive(self) -> bool:
        return self._client.is_alive

    def send(self, command: AnyCommand) -> None:
        self._client.send(command)

    def wait_events(self, timeout: float) -> list[AnyEvent]:
        """What arrives within `timeout` seconds. Raises `CommandError` if the engine dies."""
        events = self._client.wait_events(timeout)
        for event in events:
            _raise_failure(event, show=False)
        return events

    def ask(
        self,
        params: SamplingParams,
        *,
        messages: list[ChatMessage] | None = None,
        prompt: str | None = None,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Answer:
        """Streams one answer to `on_text`. Raises `CommandError` if the request fails or the engine dies."""
        request_id = f"cli-{next(self._numbers)}"
        with deferred_interrupt() as interrupted:
            self._client.send(
                Generate(request_id=request_id, owner="terminal", params=params, messages=messages, prompt=prompt)
            )
            answer = Answer(Finished(request_id=request_id, finish_reason="error"))
            cancelled = False
            while True:
                for event in self._client.wait_events(_POLL_SECONDS):
                    if _take(event, answer, on_text):
                        return answer
                if interrupted.is_set() and not cancelled:
                    cancelled = True
                    self._client.send(Cancel(request_id=request_id))


def _take(event: AnyEvent, answer: Answer, on_text: Callable[[str], None]) -> bool:
    """Adds one event to the answer; returns whether it was the last."""
    if isinstance(event, Accepted):
        answer.accepted = event
    elif isinstance(event, Delta):
        answer.text += event.text
        answer.token_ids += event.token_ids
        answer.logprobs += event.logprobs
        on_text(event.text)
    elif isinstance(event, WorkerDied):
        raise CommandError(event.reason)
    elif isinstance(event, Finished):
        if event.finish_reason == "error":
            raise CommandError(event.error or "the answer failed without a reason")
        answer.finished = event
        return True
    return False


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Makes Ctrl+C set an event instead of raising half-way through a step."""
    interrupted = threading.Event()

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        interrupted.set()

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def open_session(config: EngineConfig, log_path: str | None = None, quiet: bool = False) -> Iterator[EngineSession]:
    """Starts an engine, loads a model and ends the engine afterwards.

    Shows progress on a terminal's standard error. Raises `CommandError` if it cannot be loaded.
    """
    client = LocalEngineClient(log_path=log_path)
    try:
        with deferred_interrupt() as interrupted:
            client.start()
            client.send(LoadModel(config=config))
            worker, info = _wait_for_model(client, Path(config.model).name, interrupted, quiet)
        yield EngineSession(client, worker, info)
    finally:
        client.close(2.0)


def _wait_for_model(
    client: EngineClient, name: str, interrupted: threading.Event, quiet: bool
) -> tuple[WorkerStarted, ModelInfo]:
    show = not quiet and sys.stderr.isatty()
    worker: WorkerStarted | None = None
    if show:
        show_status("Starting the engine ...")
    while True:
        for event in client.wait_events(_POLL_SECONDS):
            _raise_failure(event, show)
            if isinstance(event, WorkerStarted):
                worker = event
            elif isinstance(event, LoadProgress) and show:
                percent = f" {100 * event.done_bytes // event.total_bytes} %" if event.total_bytes else ""
                show_status(f"Loading {name}: {event.stage}{percent}")
            elif isinstance(event, ModelLoaded):
                if show:
                    show_status("")
                assert worker is not None, "a worker speaks of its model before of itself"
                return worker, event.info
        if interrupted.is_set():
            if show:
                show_status("")
            raise Interrupted("interrupted while loading the model")


def _raise_failure(event: AnyEvent, show: bool) -> None:
    message = None
    if isinstance(event, WorkerDied):
        message = event.reason
    elif isinstance(event, LoadFailed):
        message = event.message
    if message is not None:
        if show:
            show_status("")
        raise CommandError(message)


def show_status(text: str) -> None:
    """Replaces the line of standard error that says what is going on."""
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()
