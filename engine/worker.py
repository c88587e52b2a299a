"""The engine worker: `python -m engine.worker`, started by `engine.client`.

    reader thread -> intake thread -> engine loop (main thread) -> sender thread

The reader waits for nobody, so the process ends as soon as the client is gone. Only the
engine loop touches the engine. It drains commands between two steps and sleeps when there
is nothing to compute.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import os
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from engine import memory, pipe
from engine.failures import describe_error, explain_load_failure, is_fatal
from engine.intake import Intake, PreparedRequest, Text
from engine.openmp import limit_spinning
from engine.outbox import Outbox
from engine.protocol import (
    Accepted,
    Cancel,
    CountTokens,
    Delta,
    Finished,
    Generate,
    LoadFailed,
    LoadModel,
    LoadProgress,
    MemoryBreakdown,
    ModelLoaded,
    ModelUnloaded,
    Shutdown,
    UnloadModel,
    decode_command,
)

if TYPE_CHECKING:
    from engine.engine import Engine, RequestOutput

TELEMETRY_SECONDS = 1 / 15
IDLE_TELEMETRY_SECONDS = 0.5
# Asking the system and the driver takes longer than the rest of the telemetry.
MEMORY_SECONDS = 0.25
PROGRESS_SECONDS = 0.05
# A client that asked for the end gets its last events within this time.
SHUTDOWN_FLUSH_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class _ModelChange:
    """A load or unload and its number; requests wait for the one before them, see `Intake`."""

    epoch: int
    command: LoadModel | UnloadModel


_Work = _ModelChange | Cancel | PreparedRequest | Shutdown


class Worker:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outbox = Outbox(connection.send_bytes)
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._intake = Intake(self._outbox.put, self._work.put)
        self._epoch_read = 0
        self._started = False
        self._shutdown = threading.Event()
        self._engine: Engine | None = None
        self._engine_epoch = 0
        self._active: dict[str, None] = {}
        self._next_telemetry = 0.0
        self._next_memory = 0.0
        self._runtime_bytes = 0
        threading.Thread(target=self._read, name="kvasir-reader", daemon=True).start()

    def run(self) -> None:
        """The engine loop. Returns after `Shutdown`."""
        from engine.machine import describe_worker, num_compute_threads
        from kernels import ops

        ops.set_num_threads(num_compute_threads())
        self._outbox.put(describe_worker())
        self._intake.set_model(0, None)
        self._started = True
        while self._drain():
            if self._engine is not None and self._engine.has_work:
                self._step(self._engine)
            self._send_telemetry()
        self._unload()
        self._outbox.close(SHUTDOWN_FLUSH_SECONDS)

    # ------------------------------------------------------------ reader thread

    def _read(self) -> None:
        try:
            while True:
                self._dispatch(self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # the client is gone, and with it everybody who could want an answer
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _dispatch(self, message: bytes) -> None:
        command = decode_command(message)
        match command:
            case LoadModel() | UnloadModel():
                self._epoch_read += 1
                self._work.put(_ModelChange(self._epoch_read, command))
            case Generate() | CountTokens():
                self._intake.submit(self._epoch_read, command)
            case Cancel():
                self._work.put(command)
            case Shutdown():
                if not self._started:
                    os._exit(0)  # in the middle of imports, which cannot be stopped otherwise
                self._shutdown.set()
                self._work.put(command)

    # ------------------------------------------------------------ engine loop

    def _drain(self) -> bool:
        """Handles the commands that wait, sleeping until the next one or telemetry if the engine is idle.

        Returns False when the worker shall end.
        """
        timeout: float | None = None
        if self._engine is not None:
            timeout = 0.0 if self._engine.has_work else max(0.0, self._next_telemetry - time.monotonic())
        try:
            # A timeout of zero still takes the queue's lock with a deadline; not blocking is cheaper.
            work = self._work.get(block=timeout != 0.0, timeout=timeout or None)
            while True:
                if isinstance(work, Shutdown):
                    return False
                self._handle(work)
                work = self._work.get_nowait()
        except queue.Empty:
            return not self._shutdown.is_set()

    def _handle(self, work: _ModelChange | Cancel | PreparedRequest) -> None:
        match work:
            case PreparedRequest():
                self._add(work)
            case Cancel(request_id=request_id):
                if self._intake.claim(request_id):
                    self._outbox.put(Finished(request_id=request_id, finish_reason="cancelled"))
                elif self._engine is not None:
                    self._engine.cancel(request_id)  # its last output comes with the next step
            case _ModelChange(epoch=epoch, command=LoadModel() as command):
                self._unload()
                self._load(epoch, command)
            case _ModelChange(epoch=epoch):
                self._unload()
                self._intake.set_model(epoch, None)
                self._outbox.put(ModelUnloaded())

    def _load(self, epoch: int, command: LoadModel) -> None:
        from engine.engine import Engine
        from engine.models import LoadCancelled, release_memory

        def superseded() -> bool:
            return self._shutdown.is_set() or self._epoch_read > epoch

        config = command.config
        self._outbox.put(LoadProgress(stage="Starting to load", done_bytes=0, total_bytes=0))
        engine, message = None, ""
        try:
            progress = _Progress(self._outbox)
            engine = Engine.load(config, progress, superseded)
            self._runtime_bytes = max(0, progress.resident_bytes - engine.memory_parts().weights)
        except Exception as error:
            if isinstance(error, LoadCancelled):
                message = "Loading was stopped."
            else:
                message = explain_load_failure(error)
                if not isinstance(error, (ValueError, LookupError, OSError, MemoryError)):
                    traceback.print_exc()
        if engine is None:
            release_memory()  # only now that the error is gone, whose traceback held what was loaded
            self._intake.set_model(epoch, None)
            self._outbox.put(LoadFailed(model=config.model, message=message))
            return
        self._engine, self._engine_epoch = engine, epoch
        self._intake.set_model(epoch, Text(engine.tokenizer, engine.token_limit))
        # What a model is made of lives as long as the model: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        self._next_telemetry = self._next_memory = 0.0
        self._outbox.put(ModelLoaded(info=engine.info))

    def _unload(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        for request_id in self._active:
            engine.cancel(request_id)
        while engine.has_work:
            self._step(engine)
        gc.unfreeze()
        engine.close()

    def _add(self, prepared: PreparedRequest) -> None:
        command = prepared.command
        request_id = command.request_id
        if not self._intake.claim(request_id):
            return  # cancelled meanwhile, and told so
        if self._engine is None or prepared.epoch != self._engine_epoch:  # prepared for a model that is gone
            self._outbox.put(Finished(request_id=request_id, finish_reason="cancelled"))
            return
        try:
            added = self._engine.add_request(
                request_id, prepared.token_ids, command.params, command.owner, prepared.arrival_time
            )
        except Exception as error:
            if not isinstance(error, ValueError):
                traceback.print_exc()
            self._outbox.put(Finished(request_id=request_id, finish_reason="error", error=describe_error(error)))
            return
        self._active[request_id] = None
        self._outbox.put(
            Accepted(
                request_id=request_id,
                prompt_tokens=len(prepared.token_ids),
                seed=added.seed,
                max_tokens=added.max_tokens,
                dropped_messages=prepared.dropped_messages,
            )
        )

    def _step(self, engine: Engine) -> None:
        for output in engine.step():
            self._publish(output)

    def _publish(self, output: RequestOutput) -> None:
        if output.text or output.token_ids:
            self._outbox.put(
                Delta(
                    request_id=output.request_id,
                    text=output.text,
                    token_ids=output.token_ids,
                    logprobs=output.logprobs,
                )
            )
        if output.finish_reason is not None:
            self._active.pop(output.request_id, None)
            self._outbox.put(
                Finished(
                    request_id=output.request_id,
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                    error=output.error,
                    metrics=output.metrics,
                )
            )
        if output.error is not None and is_fatal(output.error):
            self._outbox.close(SHUTDOWN_FLUSH_SECONDS)
            raise RuntimeError(output.error)

    def _send_telemetry(self) -> None:
        engine, now = self._engine, time.monotonic()
        if engine is None or now < self._next_telemetry:
            return
        self._next_telemetry = now + (TELEMETRY_SECONDS if engine.has_work else IDLE_TELEMETRY_SECONDS)
        if now >= self._next_memory:
            self._next_memory = now + MEMORY_SECONDS
            runtime = self._runtime_bytes if engine.info.device == "cpu" else 0  # a GPU's driver tells
            parts = dataclasses.replace(engine.memory_parts(), runtime=runtime)
            self._memory = measure_memory(parts, engine.info.device)
        self._outbox.put(engine.telemetry(self._memory))


def measure_memory(parts: memory.WorkerParts, device: str) -> MemoryBreakdown:
    """Where the memory of the engine's device is, see `engine.memory`."""
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or 0)
        measured = memory.measure_vram(parts, index)
        return measured if isinstance(measured, MemoryBreakdown) else _measure_vram_by_torch(parts, device)
    return memory.measure_ram(parts)


def _measure_vram_by_torch(parts: memory.WorkerParts, device: str) -> MemoryBreakdown:
    """For a GPU that NVML cannot read. What the worker holds beyond torch's tensors counts as other."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    gpu = memory.DeviceMemory("VRAM", torch.cuda.get_device_name(device), total, free)
    return memory.break_down(gpu, parts, torch.cuda.memory_reserved(device))


class _Progress:
    """Passes load progress on, not more often than anybody can see.

    `resident_bytes` is the RAM that was held when the latest stage began; the last one makes the KV cache.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._stage = ""
        self._next = 0.0
        self.resident_bytes = 0

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self.resident_bytes = memory.resident_bytes()
        if stage != self._stage or done_bytes >= total_bytes or now >= self._next:
            self._stage, self._next = stage, now + PROGRESS_SECONDS
            self._outbox.put(LoadProgress(stage=stage, done_bytes=done_bytes, total_bytes=total_bytes))


def main() -> None:
    faulthandler.enable()
    limit_spinning()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is the client's business
    try:
        connection = pipe.connect(sys.stdin.buffer)
    except ValueError as error:
        sys.exit(str(error))
    except (OSError, EOFError):
        sys.exit("the program that started this worker is gone")
    # Connected before torch is imported: if the client goes away meanwhile, so does this process.
    Worker(connection).run()


if __name__ == "__main__":
    main()
