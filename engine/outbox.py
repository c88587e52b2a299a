"""The worker's way out: a thread that sends events, so that the engine never waits for a socket."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from engine.protocol import Delta, Event, Telemetry, encode, merge_deltas
from engine.telemetry import merge_telemetry

FLUSH_SECONDS = 0.010


class Outbox:
    """Merges and sends events from any thread.

    Deltas of one request that wait together leave as one; they are flushed about every
    `FLUSH_SECONDS`, everything else at once. A client that does not read makes the outbox
    grow by text only: telemetry that waits is merged, latest wins. When sending fails for another reason than
    a client that is gone, `on_failure` is called: by default the process ends, because a worker that nobody
    hears would leave its client waiting for ever.

    Invariant: events of one request leave in the order they came.
    """

    def __init__(self, send_bytes: Callable[[bytes], None], on_failure: Callable[[], None] | None = None) -> None:
        self._send_bytes = send_bytes
        self._on_failure = on_failure or _end_process
        self._changed = threading.Condition()
        self._events: list[Event | list[Delta]] = []
        self._open_deltas: dict[str, list[Delta]] = {}
        self._telemetry: list[Telemetry] = []
        self._urgent = False
        self._closing = False
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="kvasir-sender", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        with self._changed:
            if self._broken:
                return
            if isinstance(event, Delta):
                waiting = self._open_deltas.get(event.request_id)
                if waiting is None:
                    waiting = self._open_deltas[event.request_id] = []
                    self._events.append(waiting)
                waiting.append(event)
            elif isinstance(event, Telemetry):
                self._telemetry.append(event)
                if len(self._telemetry) > 16:
                    self._telemetry = [merge_telemetry(self._telemetry)]
            else:
                # What is put later must not slip in front of this event.
                self._settle_telemetry()
                self._open_deltas.clear()
                self._events.append(event)
                self._urgent = True
            self._changed.notify()

    def close(self, timeout: float) -> None:
        """Sends what is left, waiting at most `timeout` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def _settle_telemetry(self) -> None:
        if self._telemetry:
            self._events.append(merge_telemetry(self._telemetry))
            self._telemetry = []

    def _take(self, last_flush: float) -> list[Event | list[Delta]]:
        with self._changed:
            while not self._events and not self._telemetry and not self._closing:
                self._changed.wait()
            while not self._urgent and not self._closing:
                remaining = last_flush + FLUSH_SECONDS - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(remaining)
            self._settle_telemetry()
            events, self._events = self._events, []
            self._open_deltas.clear()
            self._urgent = False
            return events

    def _run(self) -> None:
        last_flush = 0.0
        while True:
            events = self._take(last_flush)
            if not events:
                return
            try:
                for event in events:
                    self._send_bytes(_encode(merge_deltas(event) if isinstance(event, list) else event))
            except OSError:  # the client is gone; the reader thread ends the process
                self._break_off()
                return
            except Exception:
                traceback.print_exc()
                self._break_off()
                self._on_failure()
                return
            last_flush = time.monotonic()

    def _break_off(self) -> None:
        with self._changed:
            self._broken = True
            self._events.clear()


def _end_process() -> None:
    sys.stderr.flush()
    os._exit(1)


def _encode(event: Event) -> bytes:
    try:
        return encode(event)
    except UnicodeEncodeError:  # a file name of bytes that are no UTF-8, in a message for people
        return msgspec.msgpack.encode(_readable(msgspec.to_builtins(event, builtin_types=(bytes,))))


def _readable(value: Any) -> Any:
    """The same with question marks for halves of surrogate pairs."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_readable(key): _readable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_readable(item) for item in value]
    return value
