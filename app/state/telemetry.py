"""What the engine's telemetry says now and said lately: the state behind the dashboard, without widgets."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from PySide6.QtCore import QObject, Signal, Slot

from app.state.engine_state import EngineState
from app.state.rings import SeriesRing
from engine.protocol import BLOCK_FREE, BlockMapUpdate, StepRecord, Telemetry

log = logging.getLogger(__name__)

HISTORY_SECONDS = 60
MAX_TELEMETRY_HZ = 20
# After a longer silence, what was known before is held up to the new figures: a step and no ramp.
HOLD_AFTER_SECONDS = 1.0
CURVE_STRIDE = 4
NUM_STEPS_KEPT = 1024
NUM_FIRST_TOKENS_KEPT = 256

# Columns of TelemetryState.history.
TIME, TTFT_P50, TTFT_P95, TPOT_P50, TPOT_P95, TPOT_LAST, DECODE_RATE, PREFILL_RATE, RUNNING, WAITING = range(10)


class EventSource(Protocol):
    """The part of the bridge that this state needs."""

    def subscribe(self, event_type: type, handler: Callable) -> object: ...


class TelemetryState(QObject):
    """Merges telemetry into a block map, histories and a ring of step records.

    `history` has a row for each telemetry (columns TIME ... WAITING above, latencies in ms, NaN while
    a window is empty), `first_tokens` a row (time, TTFT in ms) for each first token seen. Times are
    `clock()` at arrival, so that neither a remote worker's clock nor a change of the wall clock matters.
    Figures belong to the model that `engine` has ready: without one none are taken, and all go with it.
    `updated` follows each telemetry.
    """

    updated = Signal()

    def __init__(
        self,
        bridge: EventSource,
        engine: EngineState,
        clock: Callable[[], float] = time.monotonic,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self.engine = engine
        self.clock = clock
        self._model = engine.model
        self.latest: Telemetry | None = None
        self.history = SeriesRing(HISTORY_SECONDS * MAX_TELEMETRY_HZ, 10)
        self.first_tokens = SeriesRing(NUM_FIRST_TOKENS_KEPT, 2)
        self.steps: deque[StepRecord] = deque(maxlen=NUM_STEPS_KEPT)
        self.steps_version = 0
        self.block_states = np.zeros(0, dtype=np.uint8)
        self.blocks_version = 0
        self.last_busy = self.last_arrival = -float("inf")
        engine.changed.connect(self._follow_model)
        bridge.subscribe(Telemetry, self._on_telemetry)

    def owner_name(self, slot: int) -> str | None:
        """Who holds an owner slot now; None if nobody does."""
        return self.latest.owners.get(slot) if self.latest is not None else None

    @property
    def block_counts(self) -> np.ndarray:
        """int64 [4]: how many blocks are free, active, shared and cached."""
        return np.bincount(self.block_states >> 6, minlength=4)

    def curve_rows(self) -> np.ndarray:
        """float64 [columns, n]: every fourth row of `history`, both sides of every silence, and the newest.

        Five points a second are all that a minute on a few hundred pixels can show. Rows are picked by
        their number since the start, so that one picked once stays picked and a curve does not shimmer.
        """
        rows = self.history.columns()
        total = self.history.total
        keep = np.arange(total - rows.shape[1], total) % CURVE_STRIDE == 0
        if len(keep):
            silent = np.diff(rows[TIME]) > HOLD_AFTER_SECONDS / 2
            keep[:-1] |= silent
            keep[1:] |= silent
            keep[-1] = True
        return rows[:, keep]

    @Slot()
    def _follow_model(self) -> None:
        """Drops figures that belong to another model or a dead worker."""
        if self.engine.model is self._model:
            return
        self._model = self.engine.model
        self.latest = None
        self.history.clear()
        self.first_tokens.clear()
        self.steps.clear()
        self.steps_version += 1
        self.block_states = np.zeros(0, dtype=np.uint8)
        self.blocks_version += 1
        self.last_busy = -float("inf")

    def _on_telemetry(self, event: Telemetry) -> None:
        if self._model is None:
            return
        now = self.clock()
        before = self.latest
        self.latest = event
        self._merge_blocks(event.blocks)
        if event.steps:
            self.steps.extend(event.steps)
            self.steps_version += 1
        if event.running or event.waiting:
            self.last_busy = now
        if len(self.history) and now - self.last_arrival > HOLD_AFTER_SECONDS:
            previous = self.history.columns()[:, -1].copy()
            previous[TIME] = now - 1e-3
            self.history.append(*previous)
        self.last_arrival = now
        ttft, tpot = event.ttft, event.tpot
        self.history.append(
            now,
            _number(ttft.p50),
            _number(ttft.p95),
            _number(tpot.p50),
            _number(tpot.p95),
            _number(tpot.last if event.running else None),
            event.decode_tokens_per_s,
            event.prefill_tokens_per_s,
            event.running,
            event.waiting,
        )
        # The count also falls, as old samples leave the window; that alone is no new first token.
        count, last = (before.ttft.count, before.ttft.last) if before is not None else (0, None)
        if ttft.last is not None and (ttft.count > count or ttft.last != last):
            self.first_tokens.append(now, ttft.last)
        self.updated.emit()

    def _merge_blocks(self, update: BlockMapUpdate) -> None:
        if update.full or update.num_blocks != len(self.block_states):
            self.block_states = np.full(update.num_blocks, BLOCK_FREE, dtype=np.uint8)
            self.blocks_version += 1
        block_ids = np.frombuffer(update.block_ids, dtype="<u4")
        states = np.frombuffer(update.states, dtype=np.uint8)
        if len(block_ids) != len(states) or (len(block_ids) and int(block_ids.max()) >= update.num_blocks):
            log.error(
                "block map update left out: %d ids, %d states, %d blocks",
                len(block_ids),
                len(states),
                update.num_blocks,
            )
            return
        if len(block_ids):
            self.block_states[block_ids] = states
            self.blocks_version += 1


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
