"""One answer being written: applies the engine's events to its message and its run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from sqlite_utils import Database

from app.state.conversation_tree import Node
from app.state.records import RunRecord
from app.store import conversations
from engine.protocol import Accepted, Delta, Finished, Generate, TokenLogprob

RENEW_PACE_SECONDS = 0.25
STOPPED_FROM_OUTSIDE = "The model was unloaded or replaced before the answer was finished."


class _Pace:
    """Time per output token of an answer under way, until the engine tells it exactly.

    The figure is renewed only so often that it can be read.
    """

    def __init__(self) -> None:
        self._first_tokens = 0
        self._first_at = self._renewed_at = 0.0
        self._tpot_ms: float | None = None

    def tpot_ms(self, num_tokens: int, now: float) -> float | None:
        """The mean so far, given all tokens seen at `now` (monotonic seconds); None for the first ones alone."""
        if not self._first_tokens:
            self._first_tokens, self._first_at, self._renewed_at = num_tokens, now, now
        elif num_tokens > self._first_tokens and now - self._renewed_at >= RENEW_PACE_SECONDS:
            self._renewed_at = now
            self._tpot_ms = (now - self._first_at) * 1000 / (num_tokens - self._first_tokens)
        return self._tpot_ms


class Generation:
    """The answer `node`, the request that makes it, and what of it is not in the database yet."""

    def __init__(self, node: Node, command: Generate) -> None:
        assert node.run is not None
        self.node = node
        self.command = command
        self.is_sent = False
        self.stop_requested = False
        self.delay_told = False
        self._unsaved = False
        self._traces: list[TokenLogprob] = []
        self._pace = _Pace()

    @property
    def request_id(self) -> str:
        return self.command.request_id

    @property
    def run(self) -> RunRecord:
        assert self.node.run is not None
        return self.node.run

    def accept(self, event: Accepted) -> None:
        self._update(seed=event.seed, prompt_tokens=event.prompt_tokens, dropped_messages=event.dropped_messages)

    def mark_streaming(self) -> bool:
        """Returns whether this is news."""
        if self.run.status != "waiting":
            return False
        self._update(status="streaming")
        return True

    def append(self, event: Delta) -> None:
        self.node.text += event.text
        self._traces.extend(event.logprobs)
        output_tokens = (self.run.output_tokens or 0) + len(event.token_ids)
        self._update(output_tokens=output_tokens, tpot_ms=self._pace.tpot_ms(output_tokens, time.monotonic()))

    def finish(self, event: Finished) -> None:
        if event.finish_reason == "error":
            self.fail(event.error or "The engine gave no reason.")
        elif event.finish_reason == "cancelled" and not self.stop_requested:
            self.interrupt(event.error or STOPPED_FROM_OUTSIDE)
        else:
            self._update(
                status="finished",
                finish_reason=event.finish_reason,
                stop_reason=event.stop_reason,
                finished_at=time.time(),
            )
        metrics = event.metrics
        if metrics is not None:
            self._update(
                prompt_tokens=metrics.prompt_tokens,
                cached_tokens=metrics.cached_tokens,
                output_tokens=metrics.output_tokens,
                queue_ms=metrics.queue_ms,
                ttft_ms=metrics.ttft_ms,
                tpot_ms=metrics.tpot_ms,
                preemptions=metrics.preemptions,
                drafted_tokens=metrics.drafted_tokens,
                accepted_tokens=metrics.accepted_tokens,
            )

    def fail(self, message: str) -> None:
        self._update(status="failed", finish_reason="error", error=message, finished_at=time.time())

    def cancel(self) -> None:
        """Ends it before it reached the engine."""
        self._update(status="finished", finish_reason="cancelled", finished_at=time.time())

    def interrupt(self, message: str) -> None:
        self._update(status="interrupted", finish_reason="cancelled", error=message, finished_at=time.time())

    def take_unsaved(self) -> Callable[[Database], None] | None:
        """What to run on the database to bring it up to date; None if it is. Each change is given out once."""
        if not self._unsaved:
            return None
        self._unsaved = False
        node, run = self.node, self.run
        text, complete = node.text, not run.is_open
        traces, self._traces = self._traces, []
        return lambda db: conversations.save_answer(db, node.id, text, complete=complete, run=run, traces=traces)

    def _update(self, **changes: Any) -> None:
        self.node.run = msgspec.structs.replace(self.run, **changes)
        self._unsaved = True
