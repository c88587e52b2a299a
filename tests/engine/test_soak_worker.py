"""200 requests of all kinds through one real worker with a small block pool."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import psutil
import pytest

from engine.client import LocalEngineClient
from engine.protocol import (
    Cancel,
    Delta,
    EngineConfig,
    Finished,
    Generate,
    LoadFailed,
    LoadModel,
    ModelLoaded,
    SamplingParams,
    Telemetry,
    WorkerDied,
    WorkerStarted,
)
from tests.engine.families import VOCAB_SIZE, save_family

NUM_BLOCKS = 26
CONTEXT = 96
AT_ONCE = 12


class Traffic:
    """Keeps a dozen requests under way and cancels some; every one must end exactly once."""

    def __init__(self, client: LocalEngineClient, seed: int) -> None:
        self.client = client
        self.random = random.Random(seed)
        self.tokens: Counter[str] = Counter()
        self.to_cancel: dict[str, int] = {}
        self.ended: dict[str, Finished] = {}
        self.latest: Telemetry | None = None
        self.name = f"round {seed}"

    def run(self, num_requests: int) -> None:
        sent = 0
        while len(self.ended) < num_requests:
            while sent < num_requests and sent - len(self.ended) < AT_ONCE:
                self._ask(f"{self.name} {sent}")
                sent += 1
            self._take(self.client.wait_events(5.0))

    def until_quiet(self) -> Telemetry:
        """The first telemetry in which nothing runs any more."""
        for _ in range(100):
            self._take(self.client.wait_events(1.0))
            latest = self.latest
            if latest is not None and latest.running == latest.waiting == latest.kv_blocks_used == 0:
                return latest
        raise AssertionError(f"blocks are still held: {self.latest}")

    def _ask(self, request_id: str) -> None:
        draw = self.random
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.8, 1.5]),
            top_p=draw.choice([1.0, 0.9]),
            min_p=draw.choice([0.0, 0.05]),
            top_k=draw.choice([0, 20]),
            repetition_penalty=draw.choice([1.0, 1.2]),
            frequency_penalty=draw.choice([0.0, 0.5]),
            logprobs=draw.choice([None, None, 2]),
            seed=draw.choice([None, 7]),
            max_tokens=draw.randrange(1, 24),
            stop_token_ids=draw.choice([(), tuple(draw.sample(range(2, VOCAB_SIZE), 12))]),
            ignore_eos=draw.random() < 0.5,
            speculation=draw.random() < 0.7,
            overflow="stop_at_limit",
        )
        start = draw.choice([[3, 5, 7, 9] * 5, []])
        prompt = start + [draw.randrange(2, VOCAB_SIZE) for _ in range(draw.randrange(1, 60))]
        self.client.send(Generate(request_id=request_id, owner=draw.choice("abc"), params=params, token_ids=prompt))
        if draw.random() < 0.15:
            self.to_cancel[request_id] = draw.choice([0, 0, 1, 3])
            self._cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        """Cancels a request that was chosen for it, once it has as many tokens as was drawn."""
        if self.tokens[request_id] >= self.to_cancel.get(request_id, CONTEXT):
            self.client.send(Cancel(request_id=request_id))

    def _take(self, events: list) -> None:
        for event in events:
            assert not isinstance(event, WorkerDied), event
            if isinstance(event, Delta):
                assert event.request_id not in self.ended
                self.tokens[event.request_id] += len(event.token_ids)
                self._cancel(event.request_id)
            elif isinstance(event, Finished):
                assert event.request_id not in self.ended
                self.ended[event.request_id] = event
            elif isinstance(event, Telemetry):
                self.latest = event


@pytest.fixture
def worker(tmp_path: Path):
    """A client whose worker holds a tiny model, and the worker's process."""
    save_family("llama", tmp_path)
    client = LocalEngineClient()
    client.start()
    config = EngineConfig(
        model=str(tmp_path),
        max_context=CONTEXT,
        num_kv_blocks=NUM_BLOCKS,
        max_num_seqs=6,
        max_batched_tokens=40,
        block_size=8,
        speculation="ngram",
    )
    client.send(LoadModel(config=config))
    pid = None
    while True:
        for event in client.wait_events(30.0):
            assert not isinstance(event, LoadFailed | WorkerDied), event
            if isinstance(event, WorkerStarted):
                pid = event.pid
            if isinstance(event, ModelLoaded):
                yield client, psutil.Process(pid)
                client.close()
                return


def test_every_request_ends_once_and_the_worker_is_as_it_was(worker):
    client, process = worker
    warm_up = Traffic(client, 0)
    warm_up.run(60)
    warm_up.until_quiet()
    resident, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()

    traffic = Traffic(client, 1)
    traffic.run(200)
    telemetry = traffic.until_quiet()

    reasons = Counter(finished.finish_reason for finished in traffic.ended.values())
    assert sum(reasons.values()) == 200 and reasons["error"] == 0
    assert min(reasons["stop"], reasons["length"], reasons["cancelled"]) > 5, reasons
    for request_id, finished in traffic.ended.items():
        if finished.metrics is None:  # it never reached the engine
            assert finished.finish_reason == "cancelled" and traffic.tokens[request_id] == 0
        else:
            assert finished.metrics.output_tokens == traffic.tokens[request_id]
    assert telemetry.preemptions > 0 and telemetry.drafted_tokens > 0 and telemetry.prefix_hit_tokens > 0
    assert telemetry.kv_blocks_total == NUM_BLOCKS
    assert process.memory_info().rss - resident < 6 << 20
    assert process.num_fds() <= files and process.num_threads() <= threads
