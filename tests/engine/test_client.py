"""The client keeps its word whatever the worker does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from engine.client import MAX_BACK_OFF_SECONDS, EngineUnavailable, LocalEngineClient
from engine.protocol import (
    AnyEvent,
    Cancel,
    ChatMessage,
    CountTokens,
    Delta,
    EngineConfig,
    Finished,
    Generate,
    LoadFailed,
    LoadModel,
    LoadProgress,
    ModelLoaded,
    SamplingParams,
    Telemetry,
    TokenCount,
    WorkerDied,
    WorkerStarted,
)
from engine.telemetry import unpack_block_update
from tests.fake_engine import ROOT, fake_client

E = TypeVar("E", bound=AnyEvent)
LOAD = LoadModel(config=EngineConfig(model="fake"))

needs_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
posix_only = pytest.mark.skipif(os.name != "posix", reason="signals")


def question(request_id: str = "r1", text: str = "hello", **params: Any) -> Generate:
    return Generate(
        request_id=request_id,
        owner="tab",
        params=SamplingParams(**params),
        messages=[ChatMessage(role="user", content=text)],
    )


class Session:
    """Collects a client's events."""

    def __init__(self, client: LocalEngineClient) -> None:
        self.client = client
        self.events: list[AnyEvent] = []

    def until(self, done: Callable[[AnyEvent], bool], timeout: float = 20.0) -> AnyEvent:
        deadline = time.monotonic() + timeout
        while (remaining := deadline - time.monotonic()) > 0:
            batch = self.client.wait_events(remaining)
            self.events += batch
            for event in batch:
                if done(event):
                    return event
        kinds = [type(event).__name__ for event in self.events][-40:]
        raise AssertionError(f"the event did not come in {timeout} s; seen: {kinds}\n{self.client.stderr_tail}")

    def until_type(self, kind: type[E], timeout: float = 20.0) -> E:
        event = self.until(lambda event: isinstance(event, kind), timeout)
        assert isinstance(event, kind)
        return event

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def text(self, request_id: str = "r1") -> str:
        return "".join(delta.text for delta in self.of(Delta) if delta.request_id == request_id)


@pytest.fixture
def connect() -> Iterator[Callable[..., Session]]:
    clients: list[LocalEngineClient] = []

    def start(**script: Any) -> Session:
        client = fake_client(**script)
        clients.append(client)
        client.start()
        return Session(client)

    yield start
    for client in clients:
        client.close(1.0)


def test_an_answer_arrives_whole_and_in_order(connect: Callable[..., Session]) -> None:
    session = connect(text="one two three four five", tokens_per_second=500)
    session.client.send(LOAD)
    session.client.send(question())
    finished = session.until_type(Finished)
    assert session.text() == "one two three four five"
    assert finished.finish_reason == "stop"
    assert finished.metrics is not None and finished.metrics.output_tokens == 5
    kinds = [type(event) for event in session.events if not isinstance(event, Telemetry)]
    assert kinds.index(WorkerStarted) < kinds.index(LoadProgress) < kinds.index(ModelLoaded) < kinds.index(Delta)


def test_requests_run_side_by_side_and_max_tokens_ends_one(connect: Callable[..., Session]) -> None:
    session = connect(answers={"first": "a b c d e f", "second": "u v w x y z"}, tokens_per_second=50)
    session.client.send(LOAD)
    session.client.send(question("r1", "first"))
    session.client.send(question("r2", "second", max_tokens=3))
    session.until(lambda event: isinstance(event, Finished) and event.request_id == "r1")
    reasons = {event.request_id: event.finish_reason for event in session.of(Finished)}
    assert reasons == {"r1": "stop", "r2": "length"}
    assert (session.text("r1"), session.text("r2")) == ("a b c d e f", "u v w")


def test_a_cancelled_request_keeps_its_partial_answer(connect: Callable[..., Session]) -> None:
    session = connect(text="word " * 1000)
    session.client.send(LOAD)
    session.client.send(question())
    session.until_type(Delta)
    session.client.send(Cancel(request_id="r1"))
    assert session.until_type(Finished, timeout=5).finish_reason == "cancelled"
    assert session.text().startswith("word")


def test_send_before_start_and_after_close_is_refused() -> None:
    client = fake_client()
    with pytest.raises(EngineUnavailable, match=r"call start\(\) first"):
        client.send(LOAD)
    client.start()
    client.close()
    client.close()
    assert not client.is_alive
    with pytest.raises(EngineUnavailable, match="closed"):
        client.send(LOAD)
    with pytest.raises(EngineUnavailable, match="closed"):
        client.start()


def test_a_request_id_in_use_is_refused(connect: Callable[..., Session]) -> None:
    session = connect(text="word " * 1000)
    session.client.send(LOAD)
    session.client.send(question())
    with pytest.raises(ValueError, match="already in use"):
        session.client.send(question())


def test_text_that_cannot_be_sent_is_refused_and_leaves_nothing_behind(connect: Callable[..., Session]) -> None:
    session = connect(text="fine")
    session.client.send(LOAD)
    for stop, text in (((), "a\udcff"), (("\udcff",), "a")):
        with pytest.raises(ValueError, match=r"cannot be sent '\\udcff'"):
            session.client.send(question("r1", text, stop=stop))
    session.client.send(question("r1"))
    assert session.until_type(Finished).finish_reason == "stop"


def test_a_failing_load_and_a_failing_request_leave_the_worker_alive(connect: Callable[..., Session]) -> None:
    session = connect(load_error="the file ends too early", errors={"bad": "no such token"})
    session.client.send(LOAD)
    assert session.until_type(LoadFailed).message == "the file ends too early"
    session.client.send(question())
    assert session.until_type(Finished).error == "no model is loaded"
    assert session.client.is_alive


@posix_only
@pytest.mark.parametrize(
    ("crash", "words", "out_of_memory"),
    [
        ("kill", "killed from outside (SIGKILL)", False),
        ("segfault", "crashed (SIGSEGV)", False),
        ("abort", "crashed (SIGABRT)", False),
        ("exit", "exit code 3", False),
        ("exception", "RuntimeError: the script told the fake engine to fail", False),
        ("memory", "ran out of memory: MemoryError", True),
        ("missing_torch", "lacks the package torch. Install it with: ", False),
    ],
)
def test_a_death_is_told_in_words_and_every_request_ends(
    connect: Callable[..., Session], crash: str, words: str, out_of_memory: bool
) -> None:
    session = connect(crash_at_delta=4, crash=crash, text="word " * 1000)
    session.client.send(LOAD)
    session.client.send(question("r1"))
    session.client.send(question("r2"))
    session.client.send(CountTokens(query_id="q", messages=[ChatMessage(role="user", content="x")]))
    died = session.until_type(WorkerDied)
    session.events += session.client.take_events()
    assert words in died.reason
    assert died.out_of_memory is out_of_memory
    assert sorted(died.lost_requests) == ["r1", "r2"]
    assert {event.request_id: event.error for event in session.of(Finished)} == {"r1": died.reason, "r2": died.reason}
    assert len(session.of(TokenCount)) == 1
    assert session.text(), "what had arrived before the death is kept"
    assert not session.client.is_alive and session.client.pid is None


@posix_only
def test_the_detail_of_a_crash_holds_the_faulthandler_trace(connect: Callable[..., Session]) -> None:
    session = connect(crash_at_delta=1, crash="segfault", stderr="a line before the crash")
    session.client.send(LOAD)
    session.client.send(question())
    died = session.until_type(WorkerDied)
    assert "a line before the crash" in died.detail
    assert "Fatal Python error" in died.detail and "crashes.py" in died.detail


def test_a_dead_engine_answers_every_command(connect: Callable[..., Session]) -> None:
    session = connect(start_crash="exception")
    session.until_type(WorkerDied)
    client = session.client
    client.send(LOAD)
    client.send(question())
    client.send(CountTokens(query_id="q", messages=[]))
    client.send(Cancel(request_id="r1"))
    events = client.take_events()
    assert [type(event) for event in events] == [LoadFailed, Finished, TokenCount]
    assert isinstance(events[1], Finished) and "not running" in (events[1].error or "")


def test_restart_gives_a_fresh_worker_and_sends_nothing_again(connect: Callable[..., Session]) -> None:
    session = connect(crash_on={"poison": "exit"}, text="fine")
    client = session.client
    client.send(LOAD)
    first = session.until_type(WorkerStarted)
    client.send(question("r1", "poison"))
    session.until_type(WorkerDied)
    client.restart()
    assert client.is_alive
    assert session.until_type(WorkerStarted).pid != first.pid
    client.send(LOAD)
    client.send(question("r2"))
    finished = session.until(lambda event: isinstance(event, Finished) and event.request_id == "r2")
    assert isinstance(finished, Finished) and finished.finish_reason == "stop"
    assert [event.request_id for event in session.of(Finished)] == ["r1", "r2"]


def test_restart_of_a_living_worker_ends_it_and_its_requests(connect: Callable[..., Session]) -> None:
    session = connect(text="word " * 1000)
    session.client.send(LOAD)
    session.client.send(question())
    session.until_type(Delta)
    pid = session.client.pid
    assert pid is not None
    session.client.restart()
    assert "restarted" in (session.until_type(Finished).error or "")
    session.until_type(WorkerStarted)
    assert not psutil.pid_exists(pid)
    assert not session.of(WorkerDied)


def test_restarts_back_off_when_the_worker_keeps_dying(connect: Callable[..., Session]) -> None:
    session = connect(start_crash="exit")
    waits = []
    for _ in range(3):
        session.until_type(WorkerDied)
        waits.append(session.client.back_off_seconds)
        session.client.restart()
    assert waits == [0.0, 0.5, 1.0]
    began = time.monotonic()
    session.client.close()
    assert time.monotonic() - began < 0.9, "close does not wait for the back-off"


def test_a_worker_that_stayed_healthy_is_restarted_at_once(
    connect: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = connect(crash_on={"poison": "exit"})
    for request_id in ("r1", "r2"):
        session.client.send(LOAD)
        session.client.send(question(request_id, "poison"))
        session.until_type(WorkerDied)
        session.client.restart()
    assert session.client.back_off_seconds == 0.5
    session.until_type(WorkerStarted)
    session.client.restart()
    assert session.client.back_off_seconds == 0.5, "too young to be called healthy"
    monkeypatch.setattr("engine.client.HEALTHY_SECONDS", -MAX_BACK_OFF_SECONDS)
    session.client.restart()
    assert session.client.back_off_seconds == 0.0


def test_a_missing_python_is_named() -> None:
    client = LocalEngineClient(["/no/such/python", "-m", "engine.worker"])
    client.start()
    died = Session(client).until_type(WorkerDied)
    assert "not found: /no/such/python" in died.reason and died.exit_code is None
    client.close()


def test_a_worker_that_never_answers_is_stopped() -> None:
    client = fake_client(start_hang=True, start_timeout=0.5)
    client.start()
    died = Session(client).until_type(WorkerDied)
    assert "did not answer within 0.5 seconds" in died.reason
    client.close()


def test_a_worker_of_another_version_is_refused(connect: Callable[..., Session]) -> None:
    died = connect(protocol_version=99).until_type(WorkerDied)
    assert "protocol version 99" in died.reason and "update" in died.reason


def test_a_message_that_is_no_message_ends_the_worker(connect: Callable[..., Session]) -> None:
    session = connect(garbage_at_delta=2)
    session.client.send(LOAD)
    session.client.send(question())
    died = session.until_type(WorkerDied)
    assert "does not understand" in died.reason
    assert not psutil.pid_exists(session.of(WorkerStarted)[0].pid)


def test_close_ends_a_worker_that_ignores_shutdown() -> None:
    client = fake_client(ignore_shutdown=True)
    client.start()
    started = Session(client).until_type(WorkerStarted)
    client.close(timeout=0.3)
    assert not psutil.pid_exists(started.pid)


def test_telemetry_that_waits_is_merged_without_losing_a_block_or_a_step(connect: Callable[..., Session]) -> None:
    session = connect(text=("word " * 60).strip(), tokens_per_second=200, telemetry_hz=50, num_kv_blocks=64)
    session.client.send(LOAD)
    session.client.send(question())
    time.sleep(0.6)
    batch = session.client.take_events()
    session.events += batch
    assert any(isinstance(event, Delta) for event in batch)
    if not session.of(Finished):
        session.until_type(Finished)
    session.until_type(Telemetry)
    records = session.of(Telemetry)
    assert sum(isinstance(event, Telemetry) for event in batch) == 1
    assert records[0].blocks.full
    states = {}
    for record in records:
        states.update(unpack_block_update(record.blocks))
    assert sorted(states) == list(range(64))
    indices = [step.index for record in records for step in record.steps]
    assert (
        indices == list(range(len(indices)))
        and sum(entry.decode_tokens for record in records for step in record.steps for entry in step.entries) == 60
    )


def test_the_key_is_on_no_command_line(connect: Callable[..., Session]) -> None:
    session = connect()
    started = session.until_type(WorkerStarted)
    words = psutil.Process(started.pid).cmdline()
    assert not any("key" in word or "kvasir-" in word for word in words), words


def test_error_output_goes_to_the_log_file(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"
    client = fake_client(log_path=log, stderr="a word from the engine")
    client.start()
    session = Session(client)
    session.until_type(WorkerStarted)
    client.close()
    assert "a word from the engine" in log.read_text()
    assert "a word from the engine" in client.stderr_tail


@needs_full_disk
def test_a_full_disk_ends_the_log_and_not_the_worker() -> None:
    client = fake_client(log_path="/dev/full", stderr="a word\n" * 12_000, text="fine")
    client.start()
    session = Session(client)
    client.send(LOAD)
    client.send(question())
    assert session.until_type(Finished).finish_reason == "stop"
    assert "a word\na word\n" in client.stderr_tail
    client.close()


@needs_full_disk
def test_the_log_of_a_full_disk_says_where_it_ends() -> None:
    client = fake_client(log_path="/dev/full", stderr="a word")
    client.start()
    Session(client).until_type(WorkerStarted)
    client.close()
    assert "(the log file ends here: [Errno 28]" in client.stderr_tail


def test_a_large_log_file_is_put_aside(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"old words\n" * 200_000)
    client = fake_client(log_path=log, stderr="new words")
    client.start()
    Session(client).until_type(WorkerStarted)
    client.close()
    assert log.read_text() == "new words\n"
    assert log.with_name("engine.log.1").read_bytes().startswith(b"old words")


@posix_only
def test_the_worker_ends_when_its_client_is_killed() -> None:
    code = """
        import time
        from engine.protocol import EngineConfig, LoadModel, WorkerStarted
        from tests.fake_engine import fake_client
        client = fake_client()
        client.start()
        started = client.wait_events(20)[0]
        print(started.pid, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    try:
        worker.wait(timeout=5)
    except psutil.NoSuchProcess:
        pass
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_starting_and_sending_do_not_block(connect: Callable[..., Session]) -> None:
    began = time.monotonic()
    session = connect(start_delay=1.0)
    session.client.send(LOAD)
    for index in range(100):
        session.client.send(question(f"r{index}"))
    assert time.monotonic() - began < 0.5
    session.until_type(ModelLoaded)
