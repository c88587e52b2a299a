"""Times the steps of one engine, as a whole and part by part."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from engine.answer import RequestOutput
from engine.engine import Engine
from engine.models.native_decoder import NativeDecoder
from engine.outbox import Outbox
from engine.pace import MOST_STEPS
from engine.protocol import Delta, ModelInfo, SamplingParams
from engine.runner import ModelRunner, NativeRunner, Runner
from engine.stopwatch import Stopwatch, replaced_methods
from engine.worker import MEMORY_SECONDS, TELEMETRY_SECONDS, measure_memory
from kernels.cpu.library import Sampling
from kernels.cpu.program import StepBatch

DECODE_ROUNDS = 4
STEPS_PER_ROUND = 16
WARM_UP_STEPS = 8
PREFILL_ROUNDS = 2

KERNELS = "native kernels"
HEAD = "logits head"
MODEL = "model, as a whole"
BATCH = "building the batch"
SAMPLING = "sampling"
REST = "rest of the step"
_PARTS = (
    KERNELS,
    MODEL,
    HEAD,
    "drafting",
    "scheduling",
    BATCH,
    SAMPLING,
    "detokenising and bookkeeping",
    "sending",
    "telemetry",
    REST,
)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """`share` is of the profiled total; `kinds` are milliseconds by kind of operation, of native kernels only."""

    name: str
    ms: float
    share: float
    kinds: dict[str, float] = {}


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """One step, or one prefill, on average. The parts add up to `profiled_ms`; `plain_ms` is the time without timing.

    `outside_native` is the share of the time outside native kernels, None where there are none.
    """

    sequences: int
    tokens: int
    runs: int
    plain_ms: float
    profiled_ms: float
    parts: list[Part]
    outside_native: float | None


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelInfo
    input_tokens: int
    prefill: Breakdown
    decode: Breakdown


class Profiler:
    """Drives one engine as the worker does, with or without a stopwatch on its parts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._client = Connection(os.open(os.devnull, os.O_WRONLY), readable=False)
        self._outbox = Outbox(self._client.send_bytes)
        self._numbers = itertools.count()
        self._next_telemetry = self._next_memory = 0.0

    def close(self) -> None:
        self._outbox.close(1.0)
        self._client.close()

    # ------------------------------------------------------------ what is measured

    def prefill(self, input_tokens: int, rounds: int = PREFILL_ROUNDS) -> Breakdown:
        """One prompt alone, from its arrival to its first token. Raises `ValueError` if it does not fit."""
        self._check_room(1, input_tokens + 1)
        measured = _Measured()
        self._prefill_once(input_tokens)  # warms up
        for _ in range(rounds):
            measured.plain_seconds += self._prefill_once(input_tokens)
            with self._watched(measured):
                self._prefill_once(input_tokens, measured.watch)
        measured.plain_runs = measured.profiled_runs = rounds
        return measured.breakdown(1, input_tokens)

    def decode(
        self, concurrency: int, input_tokens: int, rounds: int = DECODE_ROUNDS, steps: int = STEPS_PER_ROUND
    ) -> Breakdown:
        """A step in which every sequence decodes. Raises `ValueError` if they do not fit into the KV cache together."""
        engine = self.engine
        # The first decode already while the last are being read.
        reading = concurrency * (1 + input_tokens // max(1, engine.scheduler.max_batched_tokens - concurrency))
        num_steps = reading + WARM_UP_STEPS + 2 * rounds * steps + MOST_STEPS
        num_drafts = engine.speculation.num_draft_tokens if engine.speculation is not None else 0
        output_tokens = num_steps * (1 + num_drafts) + 1
        self._check_room(concurrency, input_tokens + output_tokens)
        for _ in range(concurrency):
            self._add(input_tokens, output_tokens)
        while engine.scheduler.waiting or any(not request.num_output_tokens for request in engine.scheduler.running):
            self._step()
        measured, wanted = _Measured(), WARM_UP_STEPS
        done = _run(wanted, self._step)
        for _ in range(rounds):
            # Steps in a row may have been more than were wanted, which the next time makes up for.
            wanted += steps
            start = time.perf_counter()
            measured.plain_runs += (made := _run(wanted - done, self._step))
            measured.plain_seconds += time.perf_counter() - start
            wanted, done = wanted + steps, done + made
            with self._watched(measured):
                measured.profiled_runs += (made := _run(wanted - done, lambda: self._watched_step(measured.watch)))
            done += made
        assert len(engine.scheduler.running) == concurrency, "every sequence has to decode to the end"
        for request in list(engine.scheduler.running):
            engine.cancel(request.request_id)
        self._step()
        return measured.breakdown(concurrency, concurrency)

    # ------------------------------------------------------------ requests and steps

    def _add(self, input_tokens: int, output_tokens: int) -> None:
        """A prompt of its own: what another one began with would be found in the cache."""
        number, vocab_size = next(self._numbers), self.engine.info.vocab_size
        generator = random.Random(number)
        token_ids = [generator.randrange(vocab_size // 8, vocab_size - vocab_size // 8) for _ in range(input_tokens)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_tokens, overflow="refuse")
        self.engine.add_request(f"profile-{number}", token_ids, params)

    def _check_room(self, concurrency: int, num_tokens: int) -> None:
        pool, limit = self.engine.pool, self.engine.token_limit
        if num_tokens > limit:
            raise ValueError(
                f"{num_tokens} tokens a sequence are needed, there is room for {limit}: lower --input-tokens"
            )
        needed = concurrency * pool.blocks_for(num_tokens)
        if needed > pool.num_blocks:
            raise ValueError(
                f"{concurrency} sequences of {num_tokens} tokens need {needed} KV blocks, there are {pool.num_blocks}: "
                "lower --concurrency or --input-tokens"
            )

    def _prefill_once(self, input_tokens: int, watch: Stopwatch | None = None) -> float:
        self._add(input_tokens, output_tokens=1)
        start = time.perf_counter()
        while self.engine.has_work:
            if watch is None:
                self._step()
            else:
                self._watched_step(watch)
        return time.perf_counter() - start

    def _watched_step(self, watch: Stopwatch) -> int:
        return watch.timed(REST, self._step)()

    def _step(self) -> int:
        """What the worker does for one step, or several in a row. Returns how many these were."""
        outputs = self.engine.step()
        self._send(outputs)
        self._send_telemetry()
        if self.engine.speculation is not None:
            return 1
        return max((len(output.token_ids) for output in outputs), default=1)

    def _send(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self._outbox.put(Delta(request_id=output.request_id, text=output.text, token_ids=output.token_ids))

    def _send_telemetry(self) -> None:
        now = time.monotonic()
        if now < self._next_telemetry:
            return
        self._next_telemetry = now + TELEMETRY_SECONDS
        if now >= self._next_memory:
            self._next_memory = now + MEMORY_SECONDS
            self._memory = measure_memory(self.engine.memory_parts(), self.engine.info.device)
        self._outbox.put(self.engine.telemetry(self._memory))

    def _watched(self, measured: _Measured) -> AbstractContextManager[None]:
        """While it lasts, the time of the engine's parts is booked."""
        engine, timed = self.engine, measured.watch.timed
        assert engine._runner is not None
        replacements = [
            (engine.scheduler, "schedule", timed("scheduling", engine.scheduler.schedule)),
            (engine, "_execute", timed(SAMPLING, engine._execute)),
            (engine, "_take_in", timed("detokenising and bookkeeping", engine._take_in)),
            (self, "_send", timed("sending", self._send)),
            (self, "_send_telemetry", timed("telemetry", self._send_telemetry)),
        ]
        if engine.speculation is not None:
            for name in ("propose", "observe"):
                replacements.append((engine.speculation, name, timed("drafting", getattr(engine.speculation, name))))
        for runner in (engine._runner, *([engine._draft.runner] if engine._draft is not None else [])):
            replacements.append((runner, "execute", timed(BATCH, runner.execute)))
            replacements += _watched_model(runner, measured)
        return replaced_methods(*replacements)


def _run(num_steps: int, step: Callable[[], int]) -> int:
    """At least so many steps, of which the engine may compute several in a row. Returns how many there were."""
    done = 0
    while done < num_steps:
        done += step()
    return done


class _Measured:
    """What a measurement adds up. Native operations are booked at the end: that costs more than measuring them."""

    def __init__(self) -> None:
        self.plain_seconds = 0.0
        self.plain_runs = self.profiled_runs = 0
        self.watch = Stopwatch()
        self._operations: list[tuple[NativeDecoder, int, torch.Tensor]] = []

    def timed_program(self, decoder: NativeDecoder) -> Callable[..., None]:
        def run(batch: StepBatch, first: int = 0, end: int | None = None) -> None:
            self._operations.append((decoder, first, decoder.program.run_profiled(batch, first, end)))

        return run

    def timed_steps(self, decoder: NativeDecoder) -> Callable[..., None]:
        run_plainly = decoder.program.run_steps

        def run_steps(batch: StepBatch, sampling: Sampling, num_steps: int, block_size: int) -> None:
            nanoseconds = torch.zeros(len(decoder.program.ops) + 1, dtype=torch.int64)
            run_plainly(batch, sampling, num_steps, block_size, nanoseconds)
            self._operations.append((decoder, 0, nanoseconds[:-1]))
            self.watch.move(BATCH, SAMPLING, float(nanoseconds[-1]) * 1e-9)

        return run_steps

    def breakdown(self, sequences: int, tokens: int) -> Breakdown:
        """The average of the runs, which are steps or prefills."""
        kinds: defaultdict[str, float] = defaultdict(float)
        for decoder, first, nanoseconds in self._operations:
            num_layer_ops = max(0, decoder.first_of_head - first)
            by_kind = decoder.program.seconds_by_kind(nanoseconds[:num_layer_ops], first)
            self.watch.move(BATCH, KERNELS, sum(by_kind.values()))
            self.watch.move(BATCH, HEAD, float(nanoseconds[num_layer_ops:].sum()) * 1e-9)
            for kind, seconds in by_kind.items():
                kinds[kind] += seconds
        total, booked = self.watch.total, self.watch.seconds
        per_run = 1e3 / self.profiled_runs
        parts = [
            Part(
                name=name,
                ms=booked[name] * per_run,
                share=booked[name] / total,
                kinds={kind: seconds * per_run for kind, seconds in kinds.items()} if name == KERNELS else {},
            )
            for name in _PARTS
            if name in booked
        ]
        native = sum(part.share for part in parts if part.name in (KERNELS, HEAD))
        return Breakdown(
            sequences=sequences,
            tokens=tokens,
            runs=self.profiled_runs,
            plain_ms=self.plain_seconds * 1e3 / self.plain_runs,
            profiled_ms=total * per_run,
            parts=parts,
            outside_native=1 - native if native and MODEL not in booked else None,
        )


def _watched_model(runner: Runner, measured: _Measured) -> list[tuple[object, str, Callable[..., Any]]]:
    """Times the operations of a native step one by one, and any other model as a whole."""
    if isinstance(runner, NativeRunner):
        program = runner.decoder.program
        return [
            (program, "run", measured.timed_program(runner.decoder)),
            (program, "run_steps", measured.timed_steps(runner.decoder)),
            (runner, "decode", measured.watch.timed(BATCH, runner.decode)),
        ]
    assert isinstance(runner, ModelRunner)
    is_cuda = runner.loaded.device.type == "cuda"
    compute = runner.compute

    def compute_to_the_end(prepared: Callable[[], torch.Tensor]) -> torch.Tensor:
        result = compute(prepared)
        if is_cuda:  # else its time would be booked where somebody waits for the result
            torch.cuda.synchronize()
        return result

    return [(runner, "compute", measured.watch.timed(MODEL, compute_to_the_end))]
