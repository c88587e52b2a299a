"""Sampling as Triton kernels, in the interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import reference_sampling as reference
from kernels.sampling import LogitCells, Penalties, SamplingBatch

pytest.importorskip("triton", reason="triton is made for Linux only")
from kernels.triton import sampling
from kernels.triton.cases import CASES, record
from kernels.triton.tuning import SamplingTiles

ALMOST_ONE = 1 - 2**-53
SMALL_TILES = SamplingTiles(split=64, block=64, num_warps=4, row_warps=4, row_registers=255)

GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 1}
KINDS: list[dict[str, Any]] = [
    GREEDY,
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 2.0, "min_p": 0.05},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 1.5, "temperature_last": True},
    {"top_k": 1_000_000, "top_p": 0.0},
]


def make_batch(rows: list[dict[str, Any]], uniforms: list[float] | None = None) -> SamplingBatch:
    def column(name: str, off: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row.get(name, off) for row in rows], dtype=dtype)

    temperature = column("temperature", 1.0, torch.float32)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand(len(rows), generator=generator, dtype=torch.float64)
    return SamplingBatch(
        temperature,
        column("min_p", 0.0, torch.float32),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float32),
        column("temperature_last", False, torch.bool),
        drawn if uniforms is None else torch.tensor(uniforms, dtype=torch.float64),
        all_greedy=not bool(temperature.any()),
        any_filter=any(row.keys() & {"min_p", "top_k", "top_p"} for row in rows if row is not GREEDY),
    )


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def padded(logits: torch.Tensor) -> torch.Tensor:
    """The same logits as a view of wider rows, whose padding would win every draw."""
    wide = torch.full((logits.shape[0], logits.shape[1] + 13), 1e9)
    wide[:, : logits.shape[1]] = logits
    return wide[:, : logits.shape[1]]


def assert_same(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Samples with and without probabilities, as the reference does; returns the probabilities."""
    before = logits.clone()
    probs, expected_probs = torch.full(logits.shape, torch.nan), torch.zeros(logits.shape)
    token_ids, healthy = sampling.sample(logits, batch, probs)
    expected_ids, expected_healthy = reference.sample(before, batch, expected_probs)
    assert torch.equal(logits, before) or bool(before.isnan().any())
    assert token_ids.dtype == torch.int64 and healthy.dtype == torch.bool
    assert torch.equal(healthy, expected_healthy)
    assert token_ids.tolist() == expected_ids.tolist()
    probs, expected_probs = probs[healthy], expected_probs[healthy]
    assert torch.equal(probs > 1e-12, expected_probs > 1e-12)
    torch.testing.assert_close(probs, expected_probs, atol=1e-7, rtol=1e-5)
    return probs


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts small vocabularies into as many splits and blocks as large ones are."""
    monkeypatch.setattr(sampling, "sampling_tiles", lambda num_rows, vocab_size: SMALL_TILES)


@pytest.mark.usefixtures("small_tiles")
def test_every_kind_of_row_in_one_batch():
    logits = normal(len(KINDS), 60) * 3
    logits[1] *= 1e4
    logits[2, ::2] = -torch.inf
    assert_same(padded(logits), make_batch(KINDS))


@pytest.mark.parametrize("kind", [GREEDY, {}, {"top_p": 0.5}])
@pytest.mark.usefixtures("small_tiles")
def test_rows_that_are_no_numbers_fail_alone(kind):
    logits = normal(4, 100)
    logits[0, 90] = torch.nan
    logits[1, 2] = torch.inf
    logits[2] = -torch.inf
    token_ids, healthy = sampling.sample(logits, make_batch([kind] * 3 + [GREEDY]))
    assert healthy.tolist() == [False] * 3 + [True]
    assert token_ids.tolist() == [0] * 3 + [int(logits[3].argmax())]


@pytest.mark.parametrize("vocab_size", [1, 7])
def test_tiny_vocabularies(vocab_size):
    assert_same(padded(normal(3, vocab_size)), make_batch([{"top_k": 3, "top_p": 0.8}, {}, GREEDY]))


def test_splits_of_several_blocks(monkeypatch):
    monkeypatch.setattr(sampling, "sampling_tiles", lambda *shape: replace(SMALL_TILES, split=128))
    assert_same(normal(2, 200) * 3, make_batch([{"top_p": 0.97}, {}]))


def test_greedy_rows_take_the_first_of_equals():
    logits = torch.zeros(2, 4099)
    logits[0, [4098, 2100, 2099]] = 2.0
    token_ids, healthy = sampling.sample(logits, make_batch([GREEDY] * 2))
    assert token_ids.tolist() == [2099, 0] and healthy.all()


@pytest.mark.usefixtures("small_tiles")
def test_ties_at_a_threshold_are_all_kept():
    logits = (normal(2, 60) * 2).round()
    probs = assert_same(logits, make_batch([{"top_k": 3}, {"top_k": 30, "top_p": 0.6}]))
    for row, kept in zip(logits, probs > 0):
        assert kept.sum() > 1 and torch.equal(kept, row >= row[kept].min())


@pytest.mark.usefixtures("small_tiles")
def test_thresholds_far_below_the_likeliest_token():
    """Beyond what the first passes look at, and where fewer tokens have a chance than are to be kept."""
    logits = torch.full((2, 70), -torch.inf)
    logits[:, [5, 64, 68, 69]] = torch.tensor([0.0, -60.0, -40.0, -15.0])
    last = {"temperature": 30.0, "temperature_last": True}
    probs = assert_same(logits, make_batch([last | {"top_k": 3}, last | {"top_k": 9, "top_p": 0.9999999}]))
    assert (probs > 0).sum(-1).tolist() == [3, 2]


@pytest.mark.usefixtures("small_tiles")
def test_draws_from_the_first_to_the_last_token_with_a_chance():
    logits = torch.full((1, 100), -torch.inf)
    logits[0, [70, 80]] = torch.tensor([0.0, 1.0])
    share = float(torch.sigmoid(torch.tensor(-1.0)))
    uniforms = [0.0, share - 1e-6, share + 1e-6, ALMOST_ONE]
    for kind, drawn, expected in (({}, uniforms, [70, 70, 80, 80]), ({"top_k": 100}, uniforms[::3], [70, 80])):
        rows = len(drawn)
        token_ids, _ = sampling.sample(logits.expand(rows, -1), make_batch([kind] * rows, drawn))
        assert token_ids.tolist() == expected


def test_a_row_depends_neither_on_its_batch_nor_on_how_it_is_cut(monkeypatch):
    logits, kinds, uniforms = normal(2, 100) * 2, [{"top_p": 0.95}, {}], [0.3, 0.9]
    probs = torch.empty(2, 100)
    token_ids, _ = sampling.sample(logits, make_batch(kinds, uniforms), probs)
    monkeypatch.setattr(sampling, "sampling_tiles", lambda *shape: SMALL_TILES)
    for row in range(2):
        alone = torch.empty(1, 100)
        token_id, _ = sampling.sample(logits[row : row + 1], make_batch([kinds[row]], [uniforms[row]]), alone)
        assert token_id[0] == token_ids[row] and torch.equal(alone[0], probs[row])


def test_cells_and_penalties():
    num_rows, vocab_size = 4, 1100
    generator = torch.Generator().manual_seed(0)
    output = torch.randint(0, 3, (2, vocab_size), generator=generator, dtype=torch.int32)
    prompt = torch.randint(0, 2, (2, vocab_size), generator=generator, dtype=torch.int32)
    # A window lets tokens go, drafts come twice, and places may be empty.
    deltas = torch.tensor([[3, 3, -1], [1099, 0, 5], [-1, -1, -1], [7, 8, 9]], dtype=torch.int32)
    changes = torch.tensor([[1, 1, 9], [-1, 1, 0], [5, 5, 5], [1, 1, 1]], dtype=torch.int32)
    penalties = Penalties(
        torch.tensor([1.3, 0.5, 1.0, 5.0]),
        torch.tensor([0.0, 0.7, -1.0, 2.0]),
        torch.tensor([0.0, -0.2, 0.4, 2.0]),
        torch.tensor([1, 0, 0, -1], dtype=torch.int32),
        output + prompt,
        output,
        deltas,
        changes,
        changes,
    )
    cells = LogitCells(torch.tensor([0, 1, 3]), torch.tensor([3, 1099, 7]), torch.tensor([-torch.inf, 2.5, -1.0]))
    for each in (penalties, None):
        batch = replace(make_batch([{}] * num_rows), cells=cells, penalties=each)
        logits = padded(normal(num_rows, vocab_size) * 3)
        expected = logits.clone()
        sampling.adjust_logits(logits, batch)
        reference.adjust_logits(expected, batch)
        torch.testing.assert_close(logits, expected)


def test_no_deltas_and_no_rows_are_no_errors():
    ones, none = torch.ones(1), torch.zeros(1, 0, dtype=torch.int32)
    counts = torch.ones(1, 9, dtype=torch.int32)
    penalties = Penalties(2 * ones, ones, ones, torch.zeros(1, dtype=torch.int32), counts, counts, none, none, none)
    logits = torch.ones(1, 9)
    sampling.adjust_logits(logits, replace(make_batch([{}]), penalties=penalties))
    assert torch.equal(logits, torch.full((1, 9), -1.5))
    token_ids, healthy = sampling.sample(torch.empty(0, 9), make_batch([]))
    assert token_ids.shape == healthy.shape == (0,)


@pytest.mark.usefixtures("small_tiles")
def test_drafts_are_accepted_or_replaced_from_the_residual():
    kinds = [{}, {}, {}, {"temperature": 0.6}, {"temperature": 0.6}, GREEDY, {}, {}]
    logits = normal(len(kinds), 100) * 2
    logits[6, 3] = torch.nan
    batch = make_batch(kinds, [0.0, 0.25, ALMOST_ONE, 0.7, 0.4, 0.9, 0.5, 0.6])
    p = torch.empty(logits.shape)
    reference.sample(logits, batch, p)
    q = torch.softmax(normal(len(kinds), 100, seed=1) * 2, -1)
    sampling.sample(logits[4:5], make_batch(kinds[4:5]), q[4:5])  # nothing is left of p - q
    q[7] = torch.nan
    drafts = q.argmax(-1)
    drafts[[0, 5]] = p.argmax(-1)[[0, 5]]
    drafts[7] = -1
    accept = torch.tensor([0.5, 0.0, 0.999, 0.3, 0.6, 0.9, 0.0, 0.0], dtype=torch.float64)
    own = sampling.verify_drafts(logits, batch, drafts, padded(q), accept)
    q[4] = p[4]
    expected = reference.verify_drafts(logits, batch, drafts, q, accept)
    assert [each.tolist() for each in own] == [each.tolist() for each in expected]
    accepted, token_ids, healthy = own
    assert healthy.tolist() == [row != 6 for row in range(len(kinds))]
    assert accepted.tolist() == [True, True, False, False, True, True, False, False]
    assert (p > q).gather(-1, token_ids.unsqueeze(-1))[:4].all()
    assert accepted.dtype == torch.bool and token_ids.dtype == torch.int64


@pytest.mark.parametrize(("kind", "num_kernels"), [("greedy", 2), ("plain", 3), ("filters", 7), ("drafts", 10)])
def test_what_is_started_follows_from_shapes_alone(kind, num_kernels):
    """So that a graph can hold it: these tensors have no values that the host could wait for."""
    for size in ("1 of 262144", "64 of 151936"):
        assert len(record(CASES[f"sampling {kind} {size}"], (9, 0))) == num_kernels
