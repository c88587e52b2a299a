"""Steps padded to the few sizes that CUDA graphs are captured for, on CPU tensors: the numbers of the plain step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.graph_sizes import batch_sizes, length_bounds, most_tokens, num_graphs
from engine.kv_cache import KVCache
from engine.models import LoadedModel
from engine.quantization.triton_tiles import TritonWeight
from engine.request import Request
from engine.runner import ModelRunner
from engine.runner.graphs import StaticSteps, step_shapes
from engine.runner.rows import StepArrays, StepRows, StepShape
from engine.runner.staging import Staging, StepTensors
from engine.scheduler import ScheduledRequest, StepPlan
from kernels import ops
from kernels.kv import KVLayer
from tests.engine.families import save_family
from tests.engine.tiny_llama import CPU, decoder_of, load, random_llama, random_tokens, tiny_config

BLOCK_SIZE = 8
NUM_BLOCKS = 64
DUMMY = NUM_BLOCKS
MAX_SEQS, MAX_DRAFTS = 5, 3


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    """Chooses the kernels for the rest of a test."""

    def choose(name: str) -> None:
        monkeypatch.setenv(ops.BACKEND_VARIABLE, name)
        ops._backend.cache_clear()

    yield choose
    monkeypatch.undo()
    ops._backend.cache_clear()


def family_model(family: str, folder: Path) -> LoadedModel:
    save_family(family, folder)
    return load(folder)


class Twins:
    """The same requests in two caches: one computed as steps come, the other padded."""

    def __init__(self, loaded: LoadedModel, shapes: list[StepShape], lengths: list[int]) -> None:
        caches = [KVCache(loaded.config, NUM_BLOCKS + 1, BLOCK_SIZE, torch.float32, CPU) for _ in range(2)]
        self.plain = ModelRunner(loaded, caches[0], 512)
        self.filler = ModelRunner(loaded, caches[1], 512)
        self.static = StaticSteps(decoder_of(loaded), caches[1], Staging(CPU), shapes)
        self.cache = caches[1]
        for layer in self.cache.layers:
            layer.data.fill_(float("nan"))  # nobody may read what nobody has written
        blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
        self.requests: list[Request] = []
        for length in lengths:
            needed = -(-(length + 16) // BLOCK_SIZE)
            table, blocks = blocks[:needed], blocks[needed:]
            self.requests.append(Request(f"r{length}", random_tokens(length, seed=length), block_table=table))
        self.free = blocks
        prompts = [ScheduledRequest(r, 0, r.num_tokens - 1, False) for r in self.requests if r.num_tokens > 1]
        for runner in (self.plain, self.filler):
            runner.execute(StepPlan(prompts, []))

    def step_ahead(self, indices: list[int]) -> None:
        """One step of the requests named that takes their tokens from where only the device knows them."""
        entries, before = [], torch.tensor([3, 1, 4, 1, 5])
        latest = [ScheduledRequest(self.requests[i], self.requests[i].num_tokens - 1, 1, True) for i in indices]
        for runner in (self.plain, self.filler):
            runner.execute(StepPlan(latest, []))
        for index in indices:
            request = self.requests[index]
            entries.append(ScheduledRequest(request, request.num_tokens, 1, True, source_row=4 - index))
        rows = StepRows(StepPlan(entries, []), False, 512)
        shape = self.static.shape_of(rows)
        assert shape is not None
        padded = self.static.prepare(shape, rows, before)().clone()
        for entry, index in zip(entries, indices):
            entry.request.token_ids.append(int(before[4 - index]))
        plain = [ScheduledRequest(entry.request, entry.start, 1, True) for entry in entries]
        torch.testing.assert_close(padded, self.plain.execute(StepPlan(plain, [])), atol=1e-4, rtol=1e-4)

    def step(self, drafts: dict[int, int]) -> StepShape:
        """One step of the requests named, each with so many drafts; all go on with the likeliest token."""
        entries = []
        for index, count in drafts.items():
            request = self.requests[index]
            request.draft_token_ids = random_tokens(count, seed=request.num_tokens)
            entries.append(ScheduledRequest(request, request.num_tokens - 1, 1 + count, True))
        plan = StepPlan(entries, [])
        shape = self.static.shape_of(StepRows(plan, False, 512))
        assert shape is not None
        before = [layer.data[self.free].clone() for layer in self.cache.layers]
        padded = self.static.prepare(shape, StepRows(plan, False, 512))()
        expected = self.plain.execute(plan)
        torch.testing.assert_close(padded, expected, atol=1e-4, rtol=1e-4)
        for layer, kept in zip(self.cache.layers, before):
            assert torch.equal(layer.data[self.free].isnan(), kept.isnan()), "a block of nobody was written"
        first = 0
        for entry in entries:
            entry.request.token_ids.append(int(expected[first].argmax()))
            first += entry.num_new_tokens
        return shape


STEPS = [({0: 0, 1: 0, 2: 0}, 4, 1), ({2: 0}, 1, 1), ({0: 2, 1: 0, 3: 3}, 8, 4), ({1: 1, 0: 0}, 8, 4)]
"""Drafts of each request, and the tokens and the longest query of the size that is to be chosen."""


@pytest.mark.parametrize("family", ["gemma2", "phi3", "mixtral"])
def test_padded_steps_give_the_logits_of_plain_ones(family, tmp_path, kernels):
    """Between them: windows, caps, rope that depends on the length, experts. One request grows beyond phi3's 40."""
    kernels("reference")
    twins = Twins(family_model(family, tmp_path), step_shapes(MAX_SEQS, MAX_DRAFTS, 160), [38, 7, 1, 60])
    for drafts, num_tokens, query_len in (*STEPS, ({0: 1}, 8, 4), ({0: 3, 1: 3, 2: 3, 3: 3}, 16, 4)):
        shape = twins.step(drafts)
        assert (shape.num_tokens, shape.max_query_len) == (num_tokens, query_len)
    twins.step_ahead([3, 0, 1])


def test_what_was_captured_with_padding_computes_any_step_of_its_size(tmp_path, kernels):
    """As a graph would, the replay sees no list of lengths but those of the capture, where nobody was there."""
    pytest.importorskip("triton", reason="triton is made for Linux only")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "hidden_size": 32}
    random_llama(tiny_config(max_position_embeddings=320, **heads)).save_pretrained(tmp_path)
    shapes = [StepShape(2, 2, 1, 320), StepShape(4, 4, 2, 320)]  # the keys of both are split
    kernels("reference")
    twins = Twins(load(tmp_path), shapes, [262, 7, 38])
    kernels("triton")
    captured: list[Callable[[], None]] = []

    def capture(compute: Callable[[], None]) -> Callable[[], None]:
        captured.append(compute)
        return compute

    twins.static.record(capture)
    assert len(captured) == len(shapes)
    for drafts in ({0: 0, 2: 0}, {0: 1, 1: 0}, {1: 0}, {2: 1}):
        twins.step(drafts)


# ------------------------------------------------------------ which sizes there are, and which is chosen


def test_sizes_are_few_and_no_step_is_much_smaller_than_its_own():
    assert batch_sizes(1) == [1]
    assert batch_sizes(8) == [1, 2, 4, 8]
    assert batch_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert batch_sizes(200)[-7:] == [80, 96, 112, 128, 160, 192, 200]
    assert length_bounds(100) == [100]
    assert length_bounds(8192) == [256, 2048, 8192]
    for max_num_seqs, num_drafts in ((1, 0), (1, 4), (8, 4), (64, 0), (300, 3)):
        shapes = step_shapes(max_num_seqs, num_drafts, 8192)
        assert len(set(shapes)) == len(shapes) == num_graphs(max_num_seqs, num_drafts, 8192) <= 120
        assert max(shape.num_tokens for shape in shapes) == most_tokens(max_num_seqs, num_drafts) <= 256


def test_a_step_gets_the_cheapest_size_that_holds_it_and_is_padded_to_it(tmp_path):
    loaded = family_model("llama", tmp_path)
    cache = KVCache(loaded.config, 4, BLOCK_SIZE, torch.float32, CPU)
    shapes = step_shapes(MAX_SEQS, MAX_DRAFTS, 4000)
    static = StaticSteps(decoder_of(loaded), cache, Staging(CPU), shapes)
    luck = random.Random(5)
    for _ in range(100):
        entries = []
        for _ in range(luck.randint(1, MAX_SEQS)):
            seq_len, num_drafts = luck.choice((9, 200, 256, 257, 2048, 2049, 4000)), luck.choice((0, 0, 1, MAX_DRAFTS))
            request = Request(
                "r", [7] * (seq_len - num_drafts), block_table=[1] * 500, draft_token_ids=[5] * num_drafts
            )
            entries.append(ScheduledRequest(request, request.num_tokens - 1, 1 + num_drafts, True))
        rows = StepRows(StepPlan(entries, []), False, 512)
        shape = static.shape_of(rows)
        assert shape is not None
        own = rows.shape
        assert (shape.max_query_len == 1) == (own.max_query_len == 1)
        assert shape.num_tokens == min(s.num_tokens for s in shapes if s.holds(own))
        assert shape.max_seq_len == min(bound for bound in length_bounds(4000) if bound >= own.max_seq_len)
        arrays = StepArrays.of(rows, loaded.config, BLOCK_SIZE, shape, dummy_block=3)
        assert arrays.input_ids.shape == arrays.slot_mapping.shape == (shape.num_tokens,)
        assert arrays.block_table.shape[0] == arrays.seq_lens.size == shape.num_seqs
        assert max(arrays.query_lens) <= shape.max_query_len and max(arrays.seq_lens_list) <= shape.max_seq_len
        assert set(arrays.slot_mapping[rows.num_tokens :] // BLOCK_SIZE) <= {3}


def test_steps_with_a_prompt_or_too_many_sequences_have_no_size(tmp_path):
    loaded = family_model("llama", tmp_path)
    cache = KVCache(loaded.config, 4, BLOCK_SIZE, torch.float32, CPU)
    static = StaticSteps(decoder_of(loaded), cache, Staging(CPU), step_shapes(4, 2, 160))

    def shape_of(*counts: int) -> StepShape | None:
        entries = [ScheduledRequest(Request("r", [1] * 20), 20 - count, count, True) for count in counts]
        return static.shape_of(StepRows(StepPlan(entries, []), False, 512))

    assert shape_of(1, 1, 1, 1) is not None and shape_of(3, 3, 3, 3) is not None
    assert shape_of(4) is None and shape_of(1, 17) is None and shape_of(*[1] * 13) is None


# ------------------------------------------------------------ nothing asks the device


def on_meta(thing: Any) -> Any:
    """The same object with all tensors in it replaced by ones without numbers, in place where it can be."""
    if isinstance(thing, torch.Tensor):
        return thing.to("meta")
    if isinstance(thing, list | tuple):
        return type(thing)(map(on_meta, thing))
    if not type(thing).__module__.startswith(("engine.layers", "engine.quantization", "engine.models.d", "kernels.")):
        return thing
    names = getattr(thing, "__slots__", None) or vars(thing)
    for name in names:
        object.__setattr__(thing, name, on_meta(getattr(thing, name)))
    return thing


class DeviceOnly(TorchDispatchMode):
    """Refuses what brings numbers from the host: tensors there, and what `torch.tensor` does last."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)}
        assert devices <= {"meta"} and func not in (torch.ops.aten.detach_.default, torch.ops.aten.lift_fresh.default)
        return out


def compute_on_meta(loaded: LoadedModel) -> None:
    """A static step with tensors that have no numbers and so can answer nothing, as while a graph is captured."""
    from kernels.triton.launch import recording

    shape = StepShape(8, 8, 4, 160)
    arrays = StepArrays.of(StepRows(StepPlan([], []), False, 0), loaded.config, BLOCK_SIZE, shape, dummy_block=2)
    upload = Staging(CPU).upload(arrays)
    step = StepTensors(**{f.name: getattr(upload, f.name).to("meta") for f in dataclasses.fields(StepTensors)})
    kv = torch.empty(3, BLOCK_SIZE, 2, loaded.config.num_kv_heads, loaded.config.head_dim, device="meta")
    context = step.context(arrays, BLOCK_SIZE, [KVLayer(kv)] * loaded.config.num_layers, bounds=(4, 160))
    logits = torch.empty(8, loaded.config.vocab_size, device="meta")
    decoder = on_meta(loaded.model)
    with recording((9, 0)) as launches, DeviceOnly():
        decoder.logits(step.input_ids, step.positions, context, out=logits)
    assert launches


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in ("gemma2", "phi3", "olmo2", "granite", "gpt_oss")),
        ("llama", {"quantization": "int4"}),
        ("qwen3_moe", {"quantization": "int8"}),
    ],
)
def test_a_captured_step_asks_neither_host_nor_device(family, changes, tmp_path, kernels):
    pytest.importorskip("triton", reason="triton is made for Linux only")
    kernels("triton")
    save_family(family, tmp_path)
    loaded = load(tmp_path, "triton", **changes)
    assert decoder_of(loaded).is_capturable
    compute_on_meta(loaded)


def test_experts_that_wait_for_their_counts_are_not_captured(tmp_path, kernels):
    pytest.importorskip("triton", reason="triton is made for Linux only")
    kernels("triton")
    save_family("mixtral", tmp_path)
    loaded = load(tmp_path, "triton")
    decoder_of(loaded).layers[0].mlp.grouped = None
    assert not decoder_of(loaded).is_capturable
    with pytest.raises(NotImplementedError, match="bincount"):
        compute_on_meta(loaded)


def test_an_embedding_that_is_unpacked_by_numbers_of_the_host_is_not_captured(tmp_path, kernels):
    pytest.importorskip("triton", reason="triton is made for Linux only")
    kernels("triton")
    save_family("llama", tmp_path)
    decoder = decoder_of(load(tmp_path, "triton", quantization="int4"))
    assert decoder.is_capturable and isinstance(decoder.embedding, TritonWeight)
    decoder.embedding = TritonWeight(dataclasses.replace(decoder.embedding.tiled, bits=4, is_float=True))
    assert not decoder.is_capturable
