"""The fake worker process: `python -m tests.fake_engine.worker SCRIPT`, SCRIPT a `FakeScript` as JSON."""

from __future__ import annotations

import faulthandler
import os
import queue
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import msgspec

from engine import pipe
from engine.outbox import Outbox
from engine.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    AnyCommand,
    Cancel,
    CountTokens,
    Delta,
    Distribution,
    Finished,
    FinishReason,
    Generate,
    LoadFailed,
    LoadModel,
    LoadProgress,
    MemoryBreakdown,
    ModelInfo,
    ModelLoaded,
    ModelUnloaded,
    RequestMetrics,
    Shutdown,
    StepEntry,
    StepRecord,
    Telemetry,
    TokenCount,
    TokenLogprob,
    UnloadModel,
    WorkerStarted,
    decode_command,
)
from tests.fake_engine.blocks import BLOCK_SIZE, FakeBlocks
from tests.fake_engine.crashes import die
from tests.fake_engine.drafts import FakeDrafts
from tests.fake_engine.script import FakeScript

STEP_SECONDS = 0.010
_CHANGES = (LoadModel, UnloadModel, Shutdown)
WEIGHT_BYTES = 120 << 20
KV_BYTES_PER_TOKEN = 46080
_TOKEN = re.compile(r"\s*\S{1,5}|\s+")


def tokenize(text: str) -> list[str]:
    return _TOKEN.findall(text)


@dataclass
class FakeRequest:
    command: Generate
    pieces: list[str]
    prompt_tokens: int
    arrival: float
    first_token_at: float = 0.0
    start: float | None = None
    sent: int = 0
    token_times: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0


class FakeWorker:
    def __init__(self, connection: Connection, script: FakeScript) -> None:
        self._script = script
        self._connection = connection
        self._outbox = Outbox(connection.send_bytes)
        self._inbox: queue.SimpleQueue[AnyCommand] = queue.SimpleQueue()
        self._num_changes_read = self._num_changes_handled = 0  # a later change of model stops a load
        self._model: ModelInfo | None = None
        self._waiting: list[FakeRequest] = []
        self._running: list[FakeRequest] = []
        self._blocks = FakeBlocks(script.num_kv_blocks)
        self._drafts = FakeDrafts(())
        self._num_deltas = 0
        self._steps: list[StepRecord] = []
        self._step_index = 0
        self._ttft: list[float] = []
        self._tpot: list[float] = []
        self._queue_ms: list[float] = []
        self._decoded: list[float] = []
        self._prefilled: list[tuple[float, int]] = []

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        self._outbox.put(
            WorkerStarted(
                pid=os.getpid(),
                protocol_version=self._script.protocol_version or PROTOCOL_VERSION,
                kernels="reference",
                device="cpu",
                device_name="Fake CPU",
                versions={"python": sys.version.split()[0], "torch": "0 (fake)"},
                warnings=self._script.warnings,
            )
        )
        next_telemetry = 0.0
        while True:
            busy = bool(self._running or self._waiting)
            idle = 0.1 if self._model is not None and self._script.telemetry else None
            try:
                command = self._inbox.get(timeout=STEP_SECONDS if busy else idle)
                while self._handle(command):
                    command = self._inbox.get_nowait()
                return
            except queue.Empty:
                pass
            self._step()
            now = time.monotonic()
            if self._model is not None and self._script.telemetry and now >= next_telemetry:
                next_telemetry = now + 1 / self._script.telemetry_hz
                self._outbox.put(self._telemetry(now))

    def _read(self) -> None:
        try:
            while True:
                command = decode_command(self._connection.recv_bytes())
                if isinstance(command, _CHANGES):
                    self._num_changes_read += 1
                self._inbox.put(command)
        except (EOFError, OSError):
            os._exit(0)

    # ------------------------------------------------------------ commands

    def _handle(self, command: AnyCommand) -> bool:
        """Returns False when the worker shall end."""
        if isinstance(command, _CHANGES):
            self._num_changes_handled += 1
        match command:
            case LoadModel():
                self._load(command)
            case UnloadModel():
                self._unload()
                self._outbox.put(ModelUnloaded())
            case Generate():
                self._generate(command)
            case Cancel(request_id=request_id):
                for request in self._running + self._waiting:
                    if request.command.request_id == request_id:
                        self._finish(request, "cancelled")
            case CountTokens():
                if self._model is None:
                    self._outbox.put(TokenCount(query_id=command.query_id, count=None, error="no model is loaded"))
                else:
                    count = sum(len(tokenize(message.content)) + 4 for message in command.messages)
                    self._outbox.put(TokenCount(query_id=command.query_id, count=count))
            case Shutdown():
                if not self._script.ignore_shutdown:
                    self._unload()
                    self._outbox.close(1.0)
                    return False
        return True

    def _load(self, command: LoadModel) -> None:
        number = self._num_changes_handled
        self._unload()
        steps = 10
        for step in range(steps + 1):
            self._outbox.put(
                LoadProgress(stage="Reading weights", done_bytes=WEIGHT_BYTES * step // steps, total_bytes=WEIGHT_BYTES)
            )
            time.sleep(self._script.load_seconds / (steps + 1))
            if self._num_changes_read > number:
                self._outbox.put(LoadFailed(model=command.config.model, message="Loading was stopped."))
                return
        if self._script.load_error is not None:
            self._outbox.put(LoadFailed(model=command.config.model, message=self._script.load_error))
            return
        self._model = ModelInfo(
            name=self._script.model_name,
            path=command.config.model,
            architecture="llama",
            format="GGUF Q4_1",
            num_parameters=134_515_008,
            num_layers=30,
            vocab_size=49152,
            max_context=self._script.max_context,
            device="cpu",
            kernels="reference",
            dtype="fp32",
            kv_dtype="fp32",
            weight_bytes=WEIGHT_BYTES,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            num_kv_blocks=self._script.num_kv_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=self._script.max_num_seqs,
            load_seconds=self._script.load_seconds,
            backend="transformers" if command.config.backend == "transformers" else "native",
            quantization=command.config.quantization,
            speculation=command.config.speculation,
            draft_model=command.config.draft_model,
        )
        self._drafts = FakeDrafts(self._script.draft_acceptance if command.config.speculation else ())
        self._outbox.put(ModelLoaded(info=self._model))

    def _unload(self) -> None:
        for request in self._running + self._waiting:
            self._finish(request, "cancelled")
        self._model = None
        self._blocks.clear()

    def _generate(self, command: Generate) -> None:
        script = self._script
        texts = [message.content for message in command.messages or []] or [command.prompt or ""]
        for key, crash in script.crash_on.items():
            if key in texts[-1]:
                die(crash)
        error = next((error for key, error in script.errors.items() if key in texts[-1]), None)
        if self._model is None:
            error = "no model is loaded"
        prompt_tokens = len(command.token_ids or []) or sum(len(tokenize(text)) + 4 for text in texts)
        if error is None and prompt_tokens > script.max_context:
            error = f"the prompt has {prompt_tokens} tokens, the context holds {script.max_context}"
        if error is not None:
            self._outbox.put(Finished(request_id=command.request_id, finish_reason="error", error=error))
            return
        answer = next((answer for key, answer in script.answers.items() if key in texts[-1]), script.text)
        request = FakeRequest(command, tokenize(answer * script.repeat), prompt_tokens, time.monotonic())
        self._waiting.append(request)
        self._outbox.put(
            Accepted(
                request_id=command.request_id,
                prompt_tokens=prompt_tokens,
                seed=command.params.seed if command.params.seed is not None else 1234,
                max_tokens=command.params.max_tokens or script.max_context - prompt_tokens,
            )
        )

    # ------------------------------------------------------------ steps

    def _step(self) -> None:
        start = time.monotonic()
        entries: list[StepEntry] = []
        while self._waiting and len(self._running) < self._script.max_num_seqs:
            request = self._waiting.pop(0)
            request.start = start
            request.first_token_at = start + self._script.ttft_ms / 1000
            self._queue_ms.append((start - request.arrival) * 1000)
            self._prefilled.append((start, request.prompt_tokens))
            self._running.append(request)
            entries.append(self._entry(request, request.prompt_tokens, 0))
        for request in list(self._running):
            count = self._emit(request, start)
            if count:
                drafted, accepted = self._drafts.verify(count)
                request.drafted += drafted
                request.accepted += accepted
                entries.append(self._entry(request, 0, count, drafted, accepted))
        if entries:
            self._steps.append(StepRecord(index=self._step_index, start=start, end=time.monotonic(), entries=entries))
            self._step_index += 1

    def _entry(self, request: FakeRequest, prefill: int, decode: int, drafted: int = 0, accepted: int = 0) -> StepEntry:
        slot = self._blocks.slot(request.command.owner)
        return StepEntry(request.command.request_id, slot, prefill, decode, drafted, accepted)

    def _emit(self, request: FakeRequest, now: float) -> int:
        """Sends the tokens that are due; returns how many."""
        command = request.command
        limit = len(request.pieces)
        if command.params.max_tokens is not None:
            limit = min(limit, command.params.max_tokens)
        due = 0
        if now >= request.first_token_at:
            due = min(limit, 1 + int((now - request.first_token_at) * self._script.tokens_per_second))
        count = max(0, due - request.sent)
        if count:
            self._send_delta(request, due)
            if not request.sent:
                self._ttft.append((now - request.arrival) * 1000)
            request.sent = due
            request.token_times += [now] * count
            self._decoded += [now] * count
        self._blocks.grow(command.request_id, command.owner, request.prompt_tokens + request.sent)
        if request.sent >= limit:
            self._finish(request, "stop" if limit == len(request.pieces) else "length")
        return count

    def _send_delta(self, request: FakeRequest, due: int) -> None:
        self._num_deltas += 1
        if self._num_deltas == self._script.crash_at_delta:
            time.sleep(0.05)  # let the sender get rid of the earlier ones
            die(self._script.crash)
        if self._num_deltas == self._script.garbage_at_delta:
            self._connection.send_bytes(b"\xc1 this is no message")
        pieces = request.pieces[request.sent : due]
        logprobs = []
        if request.command.params.logprobs is not None:
            logprobs = [TokenLogprob(token_id=len(piece), text=piece, logprob=-0.25) for piece in pieces]
        self._outbox.put(
            Delta(
                request_id=request.command.request_id,
                text="".join(pieces),
                token_ids=[len(piece) for piece in pieces],
                logprobs=logprobs,
            )
        )

    def _finish(self, request: FakeRequest, reason: FinishReason) -> None:
        for requests in (self._running, self._waiting):
            if request in requests:
                requests.remove(request)
        self._blocks.release(request.command.request_id)
        times = request.token_times
        tpot = (times[-1] - times[0]) * 1000 / (len(times) - 1) if len(times) > 1 else None
        if tpot is not None:
            self._tpot.append(tpot)
        self._outbox.put(
            Finished(
                request_id=request.command.request_id,
                finish_reason=reason,
                metrics=RequestMetrics(
                    prompt_tokens=request.prompt_tokens,
                    cached_tokens=min(32, request.prompt_tokens // 2),
                    output_tokens=request.sent,
                    queue_ms=((request.start or time.monotonic()) - request.arrival) * 1000,
                    ttft_ms=(times[0] - request.arrival) * 1000 if times else None,
                    tpot_ms=tpot,
                    drafted_tokens=request.drafted,
                    accepted_tokens=request.accepted,
                ),
            )
        )

    # ------------------------------------------------------------ telemetry

    def _telemetry(self, now: float) -> Telemetry:
        script = self._script
        self._decoded = [moment for moment in self._decoded if moment > now - 1]
        self._prefilled = [(moment, count) for moment, count in self._prefilled if moment > now - 1]
        steps, self._steps = self._steps, []
        kv_cache = script.num_kv_blocks * BLOCK_SIZE * KV_BYTES_PER_TOKEN
        workspace = (40 << 20) + len(self._running) * (3 << 20)
        runtime, other = 600 << 20, script.memory_total // 4
        free = script.memory_total - WEIGHT_BYTES - kv_cache - workspace - runtime - other
        return Telemetry(
            timestamp=time.time(),
            memory=MemoryBreakdown(
                kind=script.memory_kind,
                total=script.memory_total,
                weights=WEIGHT_BYTES,
                kv_cache=kv_cache,
                workspace=workspace,
                runtime=runtime,
                other=other,
                free=free,
            ),
            blocks=self._blocks.take_update(),
            owners={slot: owner for owner, slot in self._blocks.owners.items()},
            running=len(self._running),
            waiting=len(self._waiting),
            prefill_tokens_per_s=float(sum(count for _, count in self._prefilled)),
            decode_tokens_per_s=float(len(self._decoded)),
            ttft=distribution(self._ttft),
            tpot=distribution(self._tpot),
            queue=distribution(self._queue_ms),
            kv_blocks_used=self._blocks.used,
            kv_blocks_cached=self._blocks.cached,
            kv_blocks_total=script.num_kv_blocks,
            prefix_hit_tokens=32 * len(self._queue_ms),
            prefix_query_tokens=64 * len(self._queue_ms),
            preemptions=0,
            steps=steps,
            request_rates={
                request.command.request_id: float(sum(moment > now - 1 for moment in request.token_times))
                for request in self._running
            },
            drafted_tokens=sum(self._drafts.drafted),
            accepted_tokens=sum(self._drafts.accepted),
            drafted_by_position=list(self._drafts.drafted),
            accepted_by_position=self._drafts.accepted,
            speculation_note=script.speculation_note if self._drafts.drafted else "",
        )


def distribution(values: list[float]) -> Distribution:
    if not values:
        return Distribution(count=0)
    ordered = sorted(values[-500:])

    def percentile(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return Distribution(
        count=len(values), p50=percentile(0.50), p95=percentile(0.95), p99=percentile(0.99), last=values[-1]
    )


def main() -> None:
    faulthandler.enable()
    script = msgspec.json.decode(sys.argv[1], type=FakeScript)
    if script.stderr:
        print(script.stderr, file=sys.stderr, flush=True)  # noqa: T201
    time.sleep(script.start_delay)
    if script.start_crash is not None:
        die(script.start_crash)
    if script.start_hang:
        threading.Event().wait()
    try:
        connection = pipe.connect(sys.stdin.buffer)
    except (OSError, EOFError):
        sys.exit(0)
    FakeWorker(connection, script).run()


if __name__ == "__main__":
    main()
