"""One run of a worker process, from start to end, as the client's threads see it."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, BinaryIO

import msgspec

from engine.exit_reason import (
    ExitReason,
    count_oom_kills,
    explain_bad_message,
    explain_exit,
    explain_no_answer,
    explain_spawn_failure,
    explain_wrong_version,
)
from engine.pipe import Rendezvous
from engine.protocol import PROTOCOL_VERSION, AnyEvent, Shutdown, WorkerDied, WorkerStarted, decode_event, encode

STDERR_LINES = 200
MAX_LOG_BYTES = 1 << 20
_POLL_SECONDS = 0.05


class WorkerProcess:
    """Starts a worker, carries messages both ways and reports its end.

    Threads: the supervisor starts the process and reads events; a starter watches it until
    it has connected; a sender writes commands; one reads its error output. `on_event` and
    `on_death` are called on the supervisor; `on_death` at most once, never after `end`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        log_path: Path | None,
        start_timeout: float,
        delay: float,
        after: WorkerProcess | None,
        on_event: Callable[[WorkerProcess, AnyEvent], None],
        on_death: Callable[[WorkerProcess, WorkerDied], None],
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._log_path = log_path
        self._start_timeout = start_timeout
        self._delay = delay
        self._after = after
        self._on_event = on_event
        self._on_death = on_death
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        self._connected = threading.Event()
        self._ending = threading.Event()
        self._verdict: ExitReason | None = None  # a reason found before the process ended
        self._supervisor = threading.Thread(target=self._supervise, name="kvasir-client", daemon=True)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def stderr_tail(self) -> str:
        return "".join(list(self._stderr))

    def start(self) -> None:
        self._supervisor.start()

    def send_bytes(self, message: bytes) -> None:
        """Queues a message; it leaves as soon as the worker is connected."""
        self._outgoing.put(message)

    def end(self, grace: float) -> None:
        """Asks the worker to end, and ends it by force after `grace` seconds. Returns at once."""
        self._ending.set()
        self.send_bytes(encode(Shutdown()))
        threading.Thread(target=self._end_by_force, args=(grace,), name="kvasir-end", daemon=True).start()

    def join(self, timeout: float) -> None:
        self._supervisor.join(timeout)

    # ------------------------------------------------------------ supervisor

    def _supervise(self) -> None:
        if self._after is not None:
            self._after.join(10.0)  # its memory must be back before the next model is loaded
            self._after = None
        if self._ending.wait(self._delay):
            return
        oom_kills = count_oom_kills()
        rendezvous = None
        try:
            rendezvous = Rendezvous()
            process = self._spawn(rendezvous)
        except OSError as error:
            if rendezvous is not None:
                rendezvous.close()
            self._report(explain_spawn_failure(error, self._command[0]), exit_code=None)
            return
        stderr_reader = threading.Thread(
            target=self._read_stderr, args=(process.stdout,), name="kvasir-stderr", daemon=True
        )
        stderr_reader.start()
        threading.Thread(target=self._watch_start, args=(process, rendezvous), name="kvasir-start", daemon=True).start()

        try:
            connection = rendezvous.accept()
        except OSError as error:
            connection = None
            self._verdict = explain_spawn_failure(error, self._command[0])
        self._connected.set()
        rendezvous.close()
        if connection is not None:
            sender = threading.Thread(target=self._send, args=(connection,), name="kvasir-commands", daemon=True)
            sender.start()
            self._read_events(connection)
            self._outgoing.put(None)
            sender.join(1.0)
            connection.close()
        exit_code = self._reap(process)
        stderr_reader.join(1.0)  # a grandchild may hold the pipe open: do not wait for it
        verdict = self._verdict or explain_exit(
            exit_code, self.stderr_tail, self._command[0], count_oom_kills() - oom_kills
        )
        self._report(verdict, exit_code)

    def _spawn(self, rendezvous: Rendezvous) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl+C in the terminal is for the client, not for the worker.
        flags = 0
        if sys.platform == "win32":
            flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
        process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            creationflags=flags,
            start_new_session=True,
        )
        self._process = process
        assert process.stdin is not None
        try:
            process.stdin.write(rendezvous.handshake_line())
            process.stdin.close()
        except OSError:
            pass  # it ended before it could read; its exit code tells why
        return process

    def _read_events(self, connection: Connection) -> None:
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                return
            try:
                event = decode_event(message)
            except msgspec.MsgspecError as error:
                self._verdict = explain_bad_message(error)
                return
            if isinstance(event, WorkerStarted) and event.protocol_version != PROTOCOL_VERSION:
                self._verdict = explain_wrong_version(event.protocol_version)
                return
            self._on_event(self, event)

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        """Waits for a process whose pipe has closed; a worker that lingers is ended."""
        for end in (None, process.terminate, process.kill):
            if end is not None:
                end()
            try:
                return process.wait(timeout=0.5 if self._verdict is not None else 5.0)
            except subprocess.TimeoutExpired:
                continue
        return process.wait()

    def _report(self, reason: ExitReason, exit_code: int | None) -> None:
        if self._ending.is_set():
            return
        death = WorkerDied(
            reason=reason.text,
            detail=self.stderr_tail,
            exit_code=exit_code,
            out_of_memory=reason.out_of_memory,
        )
        self._on_death(self, death)

    # ------------------------------------------------------------ other threads

    def _watch_start(self, process: subprocess.Popen[bytes], rendezvous: Rendezvous) -> None:
        waited = 0.0
        while not self._connected.wait(_POLL_SECONDS):
            waited += _POLL_SECONDS
            if waited >= self._start_timeout:
                self._verdict = explain_no_answer(self._start_timeout)
                process.kill()
            if process.poll() is not None:
                rendezvous.abort()
                return

    def _send(self, connection: Connection) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                connection.send_bytes(message)
            except OSError:
                return  # the supervisor sees the same and reports it

    def _read_stderr(self, stream: IO[bytes]) -> None:
        log = self._open_log()
        with stream:
            # Read to the end whatever becomes of the log: a worker that cannot write its errors dies of the first.
            while line := stream.readline(8192):
                self._stderr.append(line.decode("utf-8", "replace"))
                if log is not None and not self._write_log(log, line):
                    log = None
        if log is not None:
            log.close()

    def _write_log(self, log: BinaryIO, line: bytes) -> bool:
        """Writes a line; closes the log and returns False if the disk does not take it."""
        try:
            log.write(line)
            return True
        except OSError as error:
            self._stderr.append(f"(the log file ends here: {error})\n")
            log.close()
            return False

    def _open_log(self) -> BinaryIO | None:
        """Opens the log to append; one that has grown large is put aside, replacing the one before it."""
        path = self._log_path
        if path is None:
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
                path.replace(path.with_name(path.name + ".1"))
            return path.open("ab", buffering=0)
        except OSError as error:
            self._stderr.append(f"(no log file: {error})\n")
            return None

    def _end_by_force(self, grace: float) -> None:
        self._supervisor.join(grace)
        process = self._process
        if process is None or not self._supervisor.is_alive():
            return
        process.terminate()
        self._supervisor.join(1.0)
        if self._supervisor.is_alive():
            process.kill()
