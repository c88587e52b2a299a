"""The real worker process with the real model, driven through the real client."""

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
import torch

from engine import memory
from engine.client import LocalEngineClient, worker_command
from engine.protocol import (
    Accepted,
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
    ModelUnloaded,
    SamplingParams,
    Telemetry,
    TokenCount,
    UnloadModel,
    WorkerStarted,
)
from engine.telemetry import unpack_block_update
from engine.worker import measure_memory
from kernels.ops import kernel_backend
from tests.fake_engine import ROOT

E = TypeVar("E", bound=AnyEvent)
TIMEOUT = 150.0
JAPAN = [ChatMessage(role="user", content="What is the capital of Japan?")]


class Engine:
    """The client with the events of the test at hand; keeps the order in which they came."""

    def __init__(self, client: LocalEngineClient) -> None:
        self.client = client
        self.events: list[AnyEvent] = []
        self.last_id = 0

    def until(self, done: Callable[[AnyEvent], bool]) -> AnyEvent:
        deadline = time.monotonic() + TIMEOUT
        while (remaining := deadline - time.monotonic()) > 0:
            batch = self.client.wait_events(remaining)
            self.events += batch
            for event in batch:
                if done(event):
                    return event
        kinds = [type(event).__name__ for event in self.events][-30:]
        raise AssertionError(f"no such event in {TIMEOUT} s; seen {kinds}\n{self.client.stderr_tail}")

    def until_type(self, kind: type[E], request_id: str | None = None) -> E:
        event = self.until(
            lambda event: (
                isinstance(event, kind) and (request_id is None or getattr(event, "request_id", None) == request_id)
            )
        )
        assert isinstance(event, kind)
        return event

    def of(self, kind: type[E], request_id: str | None = None) -> list[E]:
        return [
            event
            for event in self.events
            if isinstance(event, kind) and (request_id is None or getattr(event, "request_id", None) == request_id)
        ]

    def ask(self, owner: str = "tab", temperature: float = 0.0, **fields: Any) -> str:
        """Sends a `Generate`; keywords that are no source of the prompt are sampling parameters."""
        self.last_id += 1
        request_id = f"r{self.last_id}"
        source = {name: fields.pop(name) for name in ("messages", "prompt", "token_ids") if name in fields}
        params = SamplingParams(temperature=temperature, **fields)
        self.client.send(Generate(request_id=request_id, owner=owner, params=params, **source))
        return request_id

    def text(self, request_id: str) -> str:
        return "".join(delta.text for delta in self.of(Delta, request_id))


@pytest.fixture(scope="module")
def running(starter_model: Path) -> Iterator[Engine]:
    """One worker with the starter model loaded. The first requests are sent before the load is done."""
    client = LocalEngineClient()
    client.start()
    engine = Engine(client)
    assert engine.ask(messages=JAPAN) == "r1"
    client.send(CountTokens(query_id="too early", messages=JAPAN))
    client.send(LoadModel(config=EngineConfig(model=str(starter_model.with_name("missing.gguf")))))
    client.send(LoadModel(config=EngineConfig(model=str(starter_model), num_kv_blocks=256, max_num_seqs=4)))
    assert engine.ask(messages=JAPAN, max_tokens=24) == "r2"
    yield engine
    client.close()


@pytest.fixture
def engine(running: Engine) -> Engine:
    if not running.of(ModelLoaded):
        running.until_type(ModelLoaded)
        running.until_type(Finished, "r2")
    return running


def test_it_says_what_it_runs_on_and_answers_in_order_of_arrival(engine: Engine) -> None:
    started = engine.events[0]
    assert isinstance(started, WorkerStarted)
    assert started.kernels == kernel_backend() and started.device in ("cpu", "cuda") and started.device_name
    assert {"python", "torch", "transformers"} <= set(started.versions)
    assert "No model is loaded" in (engine.of(Finished, "r1")[0].error or "")
    assert engine.of(TokenCount)[0].error is not None
    assert "no such file" in engine.of(LoadFailed)[0].message.lower()
    loaded = engine.of(ModelLoaded)[0].info
    assert loaded.name == "SmolLM2-135M-Instruct.Q4_1" and loaded.num_kv_blocks == 256
    progress = engine.of(LoadProgress)
    assert any(event.done_bytes == event.total_bytes > 0 for event in progress)


def test_a_request_sent_during_the_load_is_answered_after_it(engine: Engine) -> None:
    accepted, finished = engine.of(Accepted, "r2")[0], engine.of(Finished, "r2")[0]
    assert "Tokyo" in engine.text("r2")
    assert finished.finish_reason == "stop" and finished.metrics is not None
    assert finished.metrics.prompt_tokens == accepted.prompt_tokens
    kinds = [type(event) for event in engine.events if getattr(event, "request_id", None) == "r2"]
    assert kinds[0] is Accepted and kinds[-1] is Finished and set(kinds[1:-1]) == {Delta}


def test_counting_tokens_agrees_with_the_prompt_of_a_request(engine: Engine) -> None:
    engine.client.send(CountTokens(query_id="q1", messages=JAPAN))
    counted = engine.until_type(TokenCount)
    assert counted.count == engine.of(Accepted, "r2")[0].prompt_tokens


def test_several_requests_share_the_steps_and_a_cancelled_one_keeps_its_start(engine: Engine) -> None:
    stories = [engine.ask(owner=f"tab {index}", messages=JAPAN, max_tokens=400, ignore_eos=True) for index in "ab"]
    for request_id in stories:
        engine.until(lambda event, wanted=request_id: isinstance(event, Delta) and event.request_id == wanted)
    telemetry = engine.until(lambda event: isinstance(event, Telemetry) and event.running == 2)
    assert isinstance(telemetry, Telemetry)
    assert {"tab a", "tab b"} <= set(telemetry.owners.values())
    for request_id in stories:
        engine.client.send(Cancel(request_id=request_id))
    began = time.monotonic()
    for request_id in stories:
        if not engine.of(Finished, request_id):
            engine.until_type(Finished, request_id)
    assert time.monotonic() - began < 15
    assert [engine.of(Finished, request_id)[0].finish_reason for request_id in stories] == ["cancelled"] * 2
    assert all(engine.text(request_id) for request_id in stories)


def test_cancelling_at_once_or_twice_gives_one_finished(engine: Engine) -> None:
    request_id = engine.ask(messages=JAPAN, max_tokens=300, ignore_eos=True)
    for _ in range(2):
        engine.client.send(Cancel(request_id=request_id))
    engine.client.send(Cancel(request_id="never heard of"))
    assert engine.until_type(Finished, request_id).finish_reason == "cancelled"
    engine.client.send(CountTokens(query_id="after", messages=JAPAN))
    engine.until_type(TokenCount)
    assert len(engine.of(Finished, request_id)) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "word " * 9000}, "context"),
        ({"messages": [ChatMessage(role="user", content="word " * 9000)]}, "context"),
        ({"token_ids": [1, 2, 10**6]}, "token id 1000000"),
        ({"token_ids": []}, "empty"),
        ({"prompt": "a", "token_ids": [1]}, "exactly one of messages, prompt and token_ids"),
        ({}, "exactly one of messages, prompt and token_ids"),
        ({"prompt": "word " * 3500, "max_tokens": 2048}, "block"),
    ],
)
def test_a_request_that_cannot_be_answered_says_why_and_harms_nobody(
    engine: Engine, fields: dict[str, Any], words: str
) -> None:
    finished = engine.until_type(Finished, engine.ask(**fields))
    assert finished.finish_reason == "error" and words in (finished.error or ""), finished.error
    assert engine.client.is_alive


def test_a_plain_prompt_is_continued_with_log_probabilities(engine: Engine) -> None:
    request_id = engine.ask(prompt="1 2 3 4 5 6 7", max_tokens=4, logprobs=2)
    assert engine.until_type(Finished, request_id).finish_reason == "length"
    described = [logprob for delta in engine.of(Delta, request_id) for logprob in delta.logprobs]
    assert len(described) == 4 and all(len(each.top) == 2 and each.logprob <= 0 for each in described)


def test_memory_parts_add_up_and_the_block_map_is_whole(engine: Engine) -> None:
    first = engine.of(Telemetry)[0]
    assert first.blocks.full and first.blocks.num_blocks == 256
    latest = engine.until_type(Telemetry)
    parts = latest.memory
    held = parts.weights + parts.kv_cache + parts.workspace + parts.runtime + parts.other + parts.free
    assert held == parts.total and parts.weights > 0 and parts.kv_cache > 0
    states: dict[int, int] = {}
    for telemetry in engine.of(Telemetry):
        if telemetry.blocks.full:
            states = {}
        states.update(unpack_block_update(telemetry.blocks))
    cached = sum(state >> 6 == 3 for state in states.values())
    assert latest.running == 0 and cached == latest.kv_blocks_cached > 0


def test_an_idle_worker_reports_a_few_times_a_second_and_computes_nothing(engine: Engine) -> None:
    pid = engine.client.pid
    assert pid is not None
    process = psutil.Process(pid)
    engine.client.take_events()
    before = process.cpu_times()
    began = time.monotonic()
    count = 0
    while (left := began + 2.0 - time.monotonic()) > 0:
        count += sum(isinstance(event, Telemetry) for event in engine.client.wait_events(left))
    after = process.cpu_times()
    assert 2 <= count <= 6
    assert after.user + after.system - before.user - before.system < 0.4


def test_unloading_ends_requests_and_gives_the_memory_back(engine: Engine, starter_model: Path) -> None:
    """The last test of this worker: it changes what is loaded."""
    pid = engine.client.pid
    assert pid is not None
    process = psutil.Process(pid)
    weights = engine.of(ModelLoaded)[0].info.weight_bytes
    resident = process.memory_info().rss
    request_id = engine.ask(messages=JAPAN, max_tokens=300, ignore_eos=True)
    engine.until_type(Delta, request_id)
    engine.client.send(UnloadModel())
    engine.until_type(ModelUnloaded)
    assert engine.of(Finished, request_id)[0].finish_reason == "cancelled"
    assert resident - process.memory_info().rss > 0.8 * weights

    failures = len(engine.of(LoadFailed))
    engine.client.send(LoadModel(config=EngineConfig(model=str(starter_model))))
    engine.until_type(LoadProgress)
    engine.client.send(UnloadModel())
    engine.until_type(ModelUnloaded)
    stopped = engine.of(LoadFailed)[failures:]
    assert [event.message for event in stopped] == ["Loading was stopped."]
    assert engine.client.is_alive


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_it_ends_when_its_client_is_killed() -> None:
    code = """
        import time
        from engine.client import LocalEngineClient
        client = LocalEngineClient()
        client.start()
        while client.pid is None:
            time.sleep(0.01)
        print(client.pid, flush=True)
        time.sleep(0.5)  # it is connected by now and importing torch
        print("go", flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "go\n"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    psutil.wait_procs([worker], timeout=15)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_started_by_hand_it_says_what_it_is() -> None:
    done = subprocess.run(
        worker_command(),
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "is started by Kvasir" in done.stderr and "Traceback" not in done.stderr


def test_a_prompt_prepared_for_a_model_that_is_replaced_meanwhile_is_cancelled(starter_model: Path) -> None:
    code = """
        import time
        from engine import intake, worker
        prepare = intake.prepare
        def slow(command, *arguments):
            prepared = prepare(command, *arguments)
            time.sleep(1.0 if command.prompt == "slow" else 0.0)
            return prepared
        intake.prepare = slow
        worker.main()
    """
    client = LocalEngineClient([sys.executable, "-P", "-c", textwrap.dedent(code)])
    client.start()
    engine = Engine(client)
    load = LoadModel(config=EngineConfig(model=str(starter_model), num_kv_blocks=16))
    client.send(load)
    engine.until_type(ModelLoaded)
    slow = engine.ask(prompt="slow", max_tokens=4)
    client.send(load)
    after = engine.ask(prompt="after", max_tokens=4, ignore_eos=True)
    assert engine.until_type(Finished, after).finish_reason == "length"
    assert [event.finish_reason for event in engine.of(Finished, slow)] == ["cancelled"]
    assert not engine.of(Accepted, slow)
    client.close()


def test_a_gpu_that_the_driver_library_cannot_read_is_still_measured_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "vram", lambda device=0: memory.NoGPU("not today"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 250)
    measured = measure_memory(memory.WorkerParts(weights=100, kv_cache=80, workspace=20), "cuda:0")
    assert (measured.kind, measured.total, measured.free) == ("VRAM", 1000, 600)
    assert (measured.weights, measured.kv_cache, measured.workspace) == (100, 80, 20)
    assert (measured.runtime, measured.other) == (50, 150)


def test_kernels_that_cannot_run_are_an_error_and_no_silent_fallback() -> None:
    client = LocalEngineClient(env={"KVASIR_KERNELS": "abacus"})
    client.start()
    died = Engine(client).until(lambda event: True)
    assert "KVASIR_KERNELS" in getattr(died, "reason", "")
    client.close()
