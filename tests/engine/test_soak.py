"""Hundreds of requests of all kinds through one engine with little room: all end, and nothing of them stays behind."""

from __future__ import annotations

import gc
import os
import random
import re
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.answer import RequestOutput
from engine.engine import Engine
from engine.models import release_memory
from engine.parameters import SamplingParams
from engine.protocol import RequestMetrics
from engine.speculation.draft_model import DraftModel
from tests.engine.families import VOCAB_SIZE
from tests.engine.test_speculation import AtRandom, Models

CONTEXT = 128
CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "ngram": (200, {"speculation": "ngram"}),
    "draft model, int8 cache": (80, {"speculation": "draft", "kv_dtype": "int8"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("soak"))


def random_params(rng: random.Random) -> SamplingParams:
    """Each setting is off in about half of the requests."""

    def sometimes(*values: Any, otherwise: Any) -> Any:
        return rng.choice(values) if rng.random() < 0.5 else otherwise

    max_tokens = rng.choice([1, 2, 5, 12, 30, 60])
    return SamplingParams(
        temperature=sometimes(0.5, 1.0, 3.0, otherwise=0.0),
        top_k=sometimes(1, 5, 500, otherwise=0),
        top_p=sometimes(0.3, 0.9, otherwise=1.0),
        min_p=sometimes(0.05, 0.5, otherwise=0.0),
        repetition_penalty=sometimes(0.8, 1.3, otherwise=1.0),
        presence_penalty=sometimes(-0.5, 1.5, otherwise=0.0),
        frequency_penalty=sometimes(-0.2, 0.7, otherwise=0.0),
        logit_bias=sometimes({5: 4.0, 7: -100.0}, otherwise={}),
        seed=sometimes(1, 2**31, otherwise=None),
        logprobs=sometimes(0, 3, otherwise=None),
        stop=sometimes(["e", "th", "zzzz"], [" "], otherwise=[]),
        stop_token_ids=sometimes([9, 11], otherwise=[]),
        ignore_eos=rng.random() < 0.5,
        min_tokens=min(max_tokens, sometimes(1, 3, otherwise=0)),
        max_tokens=max_tokens,
        speculation=rng.random() < 0.7,
    )


def random_prompt(rng: random.Random) -> list[int]:
    """Fresh, repeating itself, or beginning as others do."""
    length = rng.choice([1, 3, 15, 16, 17, 40, 60])
    kind = rng.randrange(3)
    if kind == 0:
        return [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]
    if kind == 1:
        return ([4, 9, 8] * length)[:length]
    return ([*range(2, 40)] + [rng.randrange(2, VOCAB_SIZE) for _ in range(length)])[:length]


class Soak:
    """Feeds an engine step by step and keeps what comes of each request."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.params: dict[str, SamplingParams] = {}
        self.prompts: dict[str, list[int]] = {}
        self.cancelled: set[str] = set()
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.num_steps = 0

    def run(self, num_requests: int) -> None:
        waiting = [f"r{index}" for index in range(num_requests)]
        while waiting or self.engine.has_work:
            # In bursts, so that the engine is now crowded, now alone with one request, now idle.
            if waiting and (self.rng.random() < 0.2 or not self.engine.has_work):
                for request_id in waiting[: self.rng.randint(1, 14)]:
                    self.add(request_id)
                    waiting.remove(request_id)
            running = [request_id for request_id in self.params if not self.is_over(request_id)]
            if running and self.rng.random() < 0.08:
                victim = self.rng.choice(running)
                assert self.engine.cancel(victim)
                assert not self.engine.cancel(victim)
                self.cancelled.add(victim)
                self.engine.check_integrity()
            for output in self.engine.step():
                self.outputs[output.request_id].append(output)
            self.num_steps += 1
            self.engine.check_integrity()
            self.check_blocks()

    def add(self, request_id: str) -> None:
        self.params[request_id], self.prompts[request_id] = random_params(self.rng), random_prompt(self.rng)
        self.outputs[request_id] = []
        self.engine.add_request(
            request_id, self.prompts[request_id], self.params[request_id], owner=f"tab {self.rng.randrange(12)}"
        )

    def is_over(self, request_id: str) -> bool:
        outputs = self.outputs[request_id]
        return request_id in self.cancelled or bool(outputs and outputs[-1].finish_reason)

    def check_blocks(self) -> None:
        """Every used block is some running request's."""
        used = {block for request in self.engine.scheduler.running for block in request.block_table}
        assert self.engine.pool.num_used == len(used)

    def check_answers(self) -> list[RequestMetrics]:
        """Each request ended once, in a way its settings explain, and its parts add up."""
        metrics = []
        for request_id, outputs in self.outputs.items():
            params, last = self.params[request_id], outputs[-1]
            assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
            token_ids = [token_id for output in outputs for token_id in output.token_ids]
            logprobs = [entry for output in outputs for entry in output.logprobs]
            assert last.finish_reason in ("stop", "length", "cancelled"), last.error
            assert (last.finish_reason == "cancelled") == (request_id in self.cancelled)
            assert params.max_tokens is not None and len(token_ids) <= params.max_tokens
            if last.finish_reason == "length":
                assert len(token_ids) == min(params.max_tokens, CONTEXT - len(self.prompts[request_id]))
            if last.finish_reason != "cancelled":
                assert len(token_ids) >= params.min_tokens
                assert len(logprobs) == (0 if params.logprobs is None else len(token_ids))
            assert last.metrics is not None
            assert last.metrics.output_tokens == len(token_ids)
            assert params.speculation or last.metrics.drafted_tokens == 0
            metrics.append(last.metrics)
        return metrics


@pytest.mark.parametrize("name", CONFIGS)
def test_requests_of_all_kinds_end_and_leave_nothing_behind(models, name):
    num_requests, options = CONFIGS[name]
    room = {"num_kv_blocks": 26, "max_context": CONTEXT, "max_num_seqs": 6, "max_batched_tokens": 40, "block_size": 8}
    before = things_held()
    with models.llm(policy=AtRandom(5), **options, **room) as llm:
        engine = llm.engine
        Soak(engine, seed=0).run(num_requests // 4)  # whatever is made once, is made here
        warm, counted = things_held(), llm.stats()

        soak = Soak(engine, seed=1)
        soak.run(num_requests)
        metrics = soak.check_answers()
        stats = {key: value - counted[key] for key, value in llm.stats().items()}

        assert len(metrics) == stats["finished_requests"] == num_requests
        reasons = Counter(outputs[-1].finish_reason for outputs in soak.outputs.values())
        assert min(reasons["stop"], reasons["length"], reasons["cancelled"]) >= num_requests // 20
        assert stats["preemptions"] > 0 and stats["evicted_blocks"] > 0 and stats["prefix_hit_tokens"] > 0
        assert sum(each.drafted_tokens for each in metrics) == stats["drafted_tokens"]
        assert sum(each.accepted_tokens for each in metrics) == stats["accepted_tokens"]
        assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
        assert stats["prefix_hit_tokens"] <= stats["prefix_query_tokens"]

        now = llm.stats()
        assert (now["running"], now["waiting"], now["kv_blocks_used"]) == (0, 0, 0)
        assert now["kv_blocks_cached"] <= now["kv_blocks_total"]
        assert engine.speculation is not None
        if isinstance(drafter := engine.speculation.drafter, DraftModel):
            assert drafter.pool.num_used == 0
        assert not engine._answers and not engine.has_work

        after = things_held()
        # What earlier tests left open may close meanwhile.
        assert after["threads"] <= warm["threads"] and after["files"] <= warm["files"]
        assert after["resident"] - warm["resident"] < 4 << 20
    after_closing = things_held()
    assert after_closing["files"] <= before["files"]
    assert after_closing["resident"] - warm["resident"] < 1 << 20


def things_held() -> dict[str, int]:
    """What could leak: bytes of memory (0 where the system does not tell), threads and open files."""
    release_memory()
    gc.collect()
    held = {"threads": threading.active_count(), "files": 0, "resident": 0}
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        held["resident"] = int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024
        held["threads"] = int(re.findall(r"Threads:\s+(\d+)", status)[0])
        held["files"] = len(os.listdir("/proc/self/fd"))
    return held
