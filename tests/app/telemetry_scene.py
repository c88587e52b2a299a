"""Builds telemetry as a busy engine sends it, on a clock that the test owns."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any, cast

from app.state.engine_state import EngineState
from app.state.telemetry import TelemetryState
from engine.protocol import (
    BLOCK_ACTIVE,
    BLOCK_CACHED,
    BLOCK_SHARED,
    AnyCommand,
    BlockMapUpdate,
    Distribution,
    EngineConfig,
    Event,
    MemoryBreakdown,
    ModelInfo,
    ModelLoaded,
    StepEntry,
    StepRecord,
    Telemetry,
    WorkerStarted,
    pack_block_state,
)
from engine.telemetry import pack_block_update

GIB = 1 << 30
MEMORY = MemoryBreakdown("VRAM", 80 * GIB, 16 * GIB, 24 * GIB, 2 * GIB, GIB, 3 * GIB, 34 * GIB)
STARTED = WorkerStarted(1, 1, "reference", "cuda:0", "NVIDIA H200", {})


class Source:
    """Bridge and engine client in one, without a process behind them: the test says what the worker says."""

    def __init__(self) -> None:
        self._handlers: dict[type, list[Callable]] = {}
        self.sent: list[AnyCommand] = []

    def start(self) -> None:
        """There is nothing to start."""

    def restart(self) -> None:
        """There is nothing to start anew."""

    def send(self, command: AnyCommand) -> None:
        self.sent.append(command)

    def subscribe(self, event_type: type, handler: Callable) -> None:
        self._handlers.setdefault(event_type, []).append(handler)

    def emit(self, event: Event) -> None:
        for handler in self._handlers.get(type(event), ()):
            handler(event)


def engine_on(source: Source) -> EngineState:
    """The engine's state as it follows a source, before the worker has said anything."""
    part = cast(Any, source)
    return EngineState(part, part)


def load_model(source: Source, engine: EngineState, num_kv_blocks: int = 1024) -> None:
    """Starts the worker and has a model loaded."""
    engine.start(EngineConfig(model="/models/fake.gguf"))
    source.emit(STARTED)
    source.emit(ModelLoaded(model_info(num_kv_blocks)))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def model_info(num_kv_blocks: int = 1024) -> ModelInfo:
    return ModelInfo(
        name="fake-135M",
        path="/models/fake.gguf",
        architecture="llama",
        format="GGUF Q4_1",
        num_parameters=135_000_000,
        num_layers=30,
        vocab_size=49152,
        max_context=8192,
        device="cuda:0",
        kernels="reference",
        dtype="bf16",
        kv_dtype="bf16",
        weight_bytes=16 * GIB,
        kv_bytes_per_token=46080,
        num_kv_blocks=num_kv_blocks,
        block_size=16,
        max_num_seqs=8,
        load_seconds=1.0,
    )


def block_update(num_blocks: int, changes: Mapping[int, int] | None = None, full: bool = False) -> BlockMapUpdate:
    return pack_block_update(num_blocks, full, changes or {})


def telemetry(**changes: object) -> Telemetry:
    """Telemetry of an engine at rest with 64 blocks, but for `changes`."""
    fields: dict = {
        "timestamp": 0.0,
        "memory": MEMORY,
        "blocks": block_update(64),
        "owners": {},
        "running": 0,
        "waiting": 0,
        "prefill_tokens_per_s": 0.0,
        "decode_tokens_per_s": 0.0,
        "ttft": Distribution(0),
        "tpot": Distribution(0),
        "queue": Distribution(0),
        "kv_blocks_used": 0,
        "kv_blocks_cached": 0,
        "kv_blocks_total": 64,
        "prefix_hit_tokens": 0,
        "prefix_query_tokens": 0,
        "preemptions": 0,
    }
    return Telemetry(**{**fields, **changes})


class BusyEngine:
    """Sends telemetry of `num_tabs` chats that take turns reading prompts and writing answers."""

    def __init__(self, num_blocks: int = 1024, num_tabs: int = 6, hz: float = 20.0) -> None:
        self.source, self.clock = Source(), Clock()
        self.engine = engine_on(self.source)
        self.state = TelemetryState(self.source, self.engine, self.clock)
        self.num_blocks, self.num_tabs, self.hz = num_blocks, num_tabs, hz
        self._random = random.Random(7)
        self._ticks = 0
        self._step = 0
        self._next_block = 0
        self._owner_of: dict[int, int] = {}
        load_model(self.source, self.engine, num_blocks)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * self.hz)):
            self.clock.now += 1 / self.hz
            self.source.emit(self.next_telemetry())

    def next_telemetry(self) -> Telemetry:
        self._ticks += 1
        second = self._ticks / self.hz
        prefilling = second % 9 < 1.2
        running = min(self.num_tabs, 1 + int(second / 4))
        wave = 1 + 0.25 * math.sin(second / 3) + 0.04 * self._random.random()
        tpot = 21 * wave * (1.9 if prefilling else 1)
        count = int(second / 4) + 1
        ttft = 180 + 90 * math.sin(count * 1.7) + 5 * (count % 7)
        steps = [self._next_step(running, prefilling, tpot) for _ in range(2)]
        return telemetry(
            timestamp=second,
            blocks=block_update(self.num_blocks, self._changes(running), full=self._ticks == 1),
            owners={slot: f"tab{slot}" for slot in range(running)},
            running=running,
            waiting=2 if prefilling else 0,
            prefill_tokens_per_s=2300 * wave if prefilling else 0.0,
            decode_tokens_per_s=running * 1000 / tpot,
            ttft=Distribution(count, 210 + 40 * math.sin(second / 13), 420 + 60 * math.sin(second / 17), None, ttft),
            tpot=Distribution(
                count,
                23 + math.sin(second / 15),
                44 + 3 * math.sin(second / 9),
                None,
                tpot * self._random.uniform(0.9, 1.2),
            ),
            kv_blocks_used=len(self._owner_of),
            kv_blocks_total=self.num_blocks,
            prefix_hit_tokens=410,
            prefix_query_tokens=1000,
            steps=steps,
        )

    def _next_step(self, running: int, prefilling: bool, tpot: float) -> StepRecord:
        self._step += 1
        entries = [StepEntry(f"r{slot}", slot, 0, 1) for slot in range(running)]
        milliseconds = tpot
        if prefilling and self._step % 3 == 0:
            entries.append(StepEntry("p", (running + 2) % self.num_tabs, 48, 0))
            milliseconds *= 2.4
        return StepRecord(self._step, 0.0, milliseconds / 1000, entries)

    def _changes(self, running: int) -> dict[int, int]:
        changes = {}
        for _ in range(max(1, self.num_blocks // 700)):
            block = self._next_block
            self._next_block = (self._next_block + 1) % self.num_blocks
            slot = (block // 5) % running if block > 12 else 0
            self._owner_of[block] = slot
            changes[block] = pack_block_state(BLOCK_SHARED if block <= 12 else BLOCK_ACTIVE, slot)
            old = (block - self.num_blocks // 3) % self.num_blocks
            if self._owner_of.get(old) is not None and old > 12:
                changes[old] = pack_block_state(BLOCK_CACHED, self._owner_of.pop(old))
        return changes
