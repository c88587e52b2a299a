"""The dummy steps that a GPU's memory is measured with are the largest there can be, and run on every device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.assembly import _dummy_steps
from engine.graph_sizes import most_tokens, num_graphs
from engine.models import LoadedModel
from engine.protocol import EngineConfig
from engine.runner import ModelRunner
from engine.runner.graphs import step_shapes
from engine.scheduler import StepPlan
from engine.speculation.draft_loading import LoadedDraft
from engine.workspace import NUM_BLOCKS, dummy_plans, peak_bytes
from tests.engine.tiny_llama import load, random_llama, tiny_config

OPTIONS: list[dict[str, Any]] = [
    {},
    {"speculation": "ngram", "num_draft_tokens": 3},
    {"max_num_seqs": 3, "speculation": "ngram"},
    {"max_num_seqs": 40, "block_size": 8},
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("tiny")
    random_llama(tiny_config()).save_pretrained(folder)
    return load(folder)


def rows_of(plan: StepPlan) -> int:
    return sum(1 + entry.num_drafts for entry in plan.scheduled)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_dummy_steps_have_the_most_tokens_rows_and_context_there_can_be(options: dict[str, Any]) -> None:
    config = EngineConfig(model="m", **options)
    full, decode = dummy_plans(config, budget=128, max_context=1000)
    assert sum(entry.num_new_tokens for entry in full.scheduled) == 128
    assert rows_of(full) == rows_of(decode) == config.max_num_seqs * (1 + config.most_drafts)
    assert len(full.scheduled) == len(decode.scheduled) == config.max_num_seqs
    assert max(entry.start + entry.num_new_tokens for entry in decode.scheduled) == 1000
    assert all(entry.samples for plan in (full, decode) for entry in plan.scheduled)
    short, _ = dummy_plans(config, budget=2048, max_context=10)
    assert {entry.num_new_tokens for entry in short.scheduled} == {10}, "a sequence is no longer than the context"


@pytest.mark.parametrize("options", [*OPTIONS, {"speculation": "draft", "draft_model": "itself"}])
def test_the_dummy_steps_run_over_a_cache_of_one_block(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []
    execute = ModelRunner.execute

    def watched(runner: ModelRunner, plan: StepPlan, *args: Any) -> torch.Tensor:
        assert runner.kv_cache.num_blocks == NUM_BLOCKS
        logits = execute(runner, plan, *args)
        seen.append((sum(entry.num_new_tokens for entry in plan.scheduled), tuple(logits.shape)))
        return logits

    monkeypatch.setattr(ModelRunner, "execute", watched)
    config = EngineConfig(model="m", max_context=64, **options)
    short = replace(loaded, config=replace(loaded.config, max_context=64))
    draft = LoadedDraft(short, "m", 97, torch.float32) if options.get("draft_model") else None
    _dummy_steps(config, short, torch.float32, 90, 128, draft)
    rows = [rows_of(plan) for plan in dummy_plans(config, 128, 64)]
    assert seen[:2] == [(128, (rows[0], 97)), (rows[1], (rows[1], 97))]
    assert len(seen) == (4 if draft else 2)


class Allocator:
    """Torch's statistics of a GPU, in bytes: segments that are reserved, and what of them is in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved, self.allocated, self.cached = 1000, 900, 300
        self.peak = (10**6, 10**6)
        self.calls: list[str] = []
        for name in ("memory_reserved", "memory_allocated", "max_memory_reserved", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: self.calls.append(name) or self.note(name))

    def note(self, name: str) -> None:
        if name == "empty_cache":
            self.cached = 0
        if name == "reset_peak_memory_stats":
            self.peak = (self.reserved, self.allocated)

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved + self.cached

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def max_memory_reserved(self, device: torch.device) -> int:
        return self.peak[0]

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak[1]

    def step(self, reserved: int, allocated: int) -> None:
        self.peak = (self.reserved + reserved, self.allocated + allocated)
        self.cached = reserved


@pytest.mark.parametrize(("reserved", "allocated"), [(500, 400), (0, 60)])
def test_a_peak_is_what_the_allocator_took_at_most_beyond_what_it_held(
    monkeypatch: pytest.MonkeyPatch, reserved: int, allocated: int
) -> None:
    allocator = Allocator(monkeypatch)
    assert peak_bytes(torch.device("cuda:0"), lambda: allocator.step(reserved, allocated)) == max(reserved, allocated)
    assert allocator.cached == 0, "what the steps took is given back before free memory is looked at"
    assert allocator.calls == ["synchronize", "empty_cache", "reset_peak_memory_stats", "synchronize", "empty_cache"]


@pytest.mark.parametrize("num_seqs", [1, 8, 300])
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_the_allowance_for_graphs_counts_those_that_are_recorded(num_seqs: int, num_drafts: int) -> None:
    for longest in (100, 8192, 10_000):
        shapes = step_shapes(num_seqs, num_drafts, longest)
        assert num_graphs(num_seqs, num_drafts, longest) == len(shapes)
        assert most_tokens(num_seqs, num_drafts) == max(shape.num_tokens for shape in shapes)
