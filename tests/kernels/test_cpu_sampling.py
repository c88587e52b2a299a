"""Native sampling against the reference, and against what the mathematics says."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import pytest
import torch

from kernels import reference_sampling
from kernels.cpu import library
from kernels.cpu.sampling import adjust_logits, sample, verify_drafts
from kernels.sampling import LogitCells, Penalties, SamplingBatch

GREEDY = {"temperature": 0.0}
PLAIN = {"temperature": 0.8}
NUCLEUS = {"temperature": 0.7, "top_p": 0.9}
SETTINGS = [
    GREEDY,
    PLAIN,
    NUCLEUS,
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 0.5, "top_p": 0.6, "temperature_last": True},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.9, "top_k": 3000, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 50, "min_p": 0.02, "top_p": 0.9, "temperature_last": True},
    {"temperature": 0.7, "top_k": 10**6, "temperature_last": True},
]


def batch_of(settings: list[dict], uniforms: torch.Tensor | None = None) -> SamplingBatch:
    def column(name: str, off: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([each.get(name, off) for each in settings]).to(dtype)

    temperature = column("temperature", 1.0, torch.float32)
    return SamplingBatch(
        temperature,
        column("min_p", 0.0, torch.float32),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float32),
        column("temperature_last", False, torch.bool),
        torch.rand(len(settings), dtype=torch.float64) if uniforms is None else uniforms,
        all_greedy=not temperature.any(),
        any_filter=any({"min_p", "top_k", "top_p"} & set(each) for each in settings),
    )


def rows_of(batch: SamplingBatch, rows: torch.Tensor) -> SamplingBatch:
    per_row = ("temperature", "min_p", "top_k", "top_p", "temperature_last", "uniforms")
    return replace(batch, **{name: getattr(batch, name)[rows] for name in per_row})


def distributions(sampler, logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    probs = torch.full(logits.shape, math.nan)
    token_ids, healthy = sampler(logits, batch, probs)
    assert healthy.all()
    return token_ids, probs


def assert_same_draws(token_ids: torch.Tensor, expected: torch.Tensor, probs: torch.Tensor, batch: SamplingBatch):
    """The same tokens, but where rounding alone puts the number drawn on the other side of a border of two."""
    for row in (token_ids != expected).nonzero().flatten().tolist():
        border = probs[row].double().cumsum(0)[min(token_ids[row], expected[row])]
        assert abs(border - batch.uniforms[row]) < 1e-6, row


@pytest.mark.parametrize("vocab_size", [1, 7, 256, 4099, 49152])
def test_rows_are_drawn_as_by_the_reference(instruction_set: str, vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    settings = SETTINGS * (4 if vocab_size < 5000 else 1)
    wide = torch.full((len(settings), vocab_size + 5), math.nan)  # padding, which nobody may read
    logits = wide[:, :vocab_size]
    logits.copy_(torch.randn(logits.shape) * torch.linspace(0.5, 8, len(settings)).unsqueeze(1))
    before, batch = logits.clone(), batch_of(settings)
    token_ids, probs = distributions(sample, logits, batch)
    expected_ids, expected = distributions(reference_sampling.sample, before, batch)
    assert torch.equal(logits, before)
    torch.testing.assert_close(probs, expected, rtol=2e-5, atol=1e-12)
    assert_same_draws(token_ids, expected_ids, expected, batch)
    # Not one token more or less, where probabilities are not too small to be floats at all.
    assert torch.equal(probs > 1e-30, expected > 1e-30)


def test_tokens_that_tie_at_a_threshold_are_all_kept(instruction_set: str) -> None:
    torch.manual_seed(0)
    logits = torch.randint(0, 6, (len(SETTINGS), 900)).float()
    token_ids, probs = distributions(sample, logits, batch_of(SETTINGS))
    batch = batch_of(SETTINGS)
    _, expected = distributions(reference_sampling.sample, logits, batch)
    assert torch.equal(probs > 0, expected > 0)
    assert token_ids[0] == logits[0].argmax()
    top_5 = SETTINGS.index({"temperature": 1.0, "top_k": 5})
    assert (probs[top_5] > 0).sum() == (logits[top_5] == 5).sum() > 5


@pytest.mark.parametrize("count", [20, 300, 5000], ids=lambda n: f"{n} tokens")
def test_the_nucleus_is_the_smallest_set_of_likeliest_tokens_that_reaches_top_p(
    instruction_set: str, count: int
) -> None:
    torch.manual_seed(count)
    logits = torch.randn(6, count) * 2
    top_p = [0.05, 0.3, 0.5, 0.8, 0.95, 0.9999]
    _, probs = distributions(sample, logits, batch_of([{"top_p": p} for p in top_p]))
    exact = torch.softmax(logits.double(), -1)
    for row, p in enumerate(top_p):
        kept = exact[row, probs[row] > 0]
        assert kept.sum() >= p - 1e-6
        assert kept.sum() - kept.min() < p + 1e-6
        assert kept.min() >= exact[row, probs[row] == 0].max()


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_bad_row_is_told_and_leaves_the_others_alone(instruction_set: str, bad: float) -> None:
    torch.manual_seed(0)
    places = [0, 5, 9, 17, 30, 255, 256, 300, 306]  # every lane of an unrolled loop, and the rest after it
    logits = torch.randn(2 * len(places) + 1, 307)
    for row, place in enumerate(places):
        logits[2 * row + 1, place] = bad
    batch = batch_of([NUCLEUS, GREEDY, PLAIN] * 20, torch.rand(60, dtype=torch.float64))
    batch = rows_of(batch, torch.arange(len(logits)))
    token_ids, healthy = sample(logits, batch)
    assert healthy.tolist() == [row % 2 == 0 for row in range(len(logits))]
    assert not token_ids[1::2].any()
    expected, expected_healthy = reference_sampling.sample(logits, batch)
    assert torch.equal(token_ids, expected) and torch.equal(healthy, expected_healthy)


def test_tokens_of_minus_infinity_are_never_drawn(instruction_set: str) -> None:
    logits = torch.full((len(SETTINGS) + 1, 300), -math.inf)
    logits[:-1, 270] = -5.0
    for uniform in (0.0, math.nextafter(1.0, 0.0)):
        batch = batch_of([*SETTINGS, PLAIN], torch.full((len(SETTINGS) + 1,), uniform, dtype=torch.float64))
        token_ids, healthy = sample(logits, batch)
        assert token_ids.tolist() == [270] * len(SETTINGS) + [0]
        assert healthy.tolist() == [True] * len(SETTINGS) + [False]


@pytest.mark.parametrize("offset", [1e4, -1e4], ids=str)
def test_logits_near_ten_thousand_are_exact(instruction_set: str, offset: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, -400.0]]) + offset
    _, probs = distributions(sample, logits, batch_of([{"temperature": 0.7}]))
    exact = torch.softmax(logits.double() / 0.7, -1)
    torch.testing.assert_close(probs.double(), exact, rtol=1e-6, atol=1e-37)


def test_weights_are_right_to_two_units_in_the_last_place(instruction_set: str) -> None:
    logits = torch.cat([torch.zeros(1), -80.0 * torch.rand(4000)]).unsqueeze(0)
    _, probs = distributions(sample, logits, batch_of([{"temperature": 1.0}]))
    relative = probs[0].double() / probs[0, 0].double() / torch.exp(logits[0].double()) - 1
    assert relative.abs().max() < 4 * 2**-24 + 2**-23


def test_greedy_takes_the_first_of_equals(instruction_set: str) -> None:
    logits = torch.zeros(3, 1000)
    logits[0, [999, 700, 20]] = 1.0
    logits[1, 999] = 1.0
    assert sample(logits, batch_of([GREEDY] * 3))[0].tolist() == [20, 999, 0]


def test_the_first_and_last_token_of_the_set_are_drawn_at_the_ends_of_the_range(instruction_set: str) -> None:
    logits = torch.zeros(2, 600)
    logits[:, 100:500] = 20.0
    for settings in (NUCLEUS | {"top_p": 0.99999}, PLAIN | {"min_p": 0.5}):
        ends = torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64)
        assert sample(logits, batch_of([settings] * 2, ends))[0].tolist() == [100, 499]


@pytest.mark.parametrize("settings", [PLAIN, NUCLEUS], ids=["plain", "nucleus"])
def test_draws_follow_the_distribution(settings: dict) -> None:
    num_draws = 4000
    torch.manual_seed(0)
    logits = torch.randn(1, 11).expand(num_draws, -1).contiguous()
    batch = batch_of([settings] * num_draws)
    token_ids, probs = distributions(sample, logits, batch)
    expected = num_draws * probs[0].double()
    drawn = torch.bincount(token_ids, minlength=11)
    possible = expected > 0
    assert not drawn[~possible].any()
    chi_square = ((drawn - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 30  # of at most 10 degrees of freedom: less than one in a thousand


def test_a_row_does_not_depend_on_its_batch_or_the_number_of_threads() -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(SETTINGS), 40_000) * 3
    batch = batch_of(SETTINGS)
    before = library.set_num_threads(1)
    together, probs = distributions(sample, logits, batch)
    for row in (2, 5, 9):
        alone = rows_of(batch, torch.tensor([row]))
        token_ids, own = distributions(sample, logits[row : row + 1], alone)
        assert token_ids[0] == together[row] and torch.equal(own[0], probs[row])
    try:
        library.set_num_threads(3)
        shared, shared_probs = distributions(sample, logits, batch)
    finally:
        library.set_num_threads(before)
    assert torch.equal(shared, together) and torch.equal(shared_probs, probs)


def test_logits_are_not_kept_until_the_next_step() -> None:
    logits, batch = torch.zeros(2, 10), batch_of([GREEDY] * 2)
    kept = weakref.ref(logits)
    sample(logits, batch)
    del logits
    assert kept() is None
    assert sample(torch.eye(10)[[3, 7]], batch)[0].tolist() == [3, 7]


# ---------------------------------------------------------------- verification


def random_drafts(num_rows: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.softmax(torch.randn(num_rows, vocab_size) * 2, -1)
    ids = torch.multinomial(q, 1).squeeze(1)
    ids[::5] = -1
    return ids, q, torch.rand(num_rows, dtype=torch.float64)


@pytest.mark.parametrize("vocab_size", [7, 2000])
def test_drafts_are_verified_as_by_the_reference(instruction_set: str, vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    settings = SETTINGS * 3
    logits = torch.randn(len(settings), vocab_size + 3)[:, :vocab_size] * 2
    batch, drafts = batch_of(settings), random_drafts(len(settings), vocab_size)
    logits[1, vocab_size // 2] = math.nan
    accepted, token_ids, healthy = verify_drafts(logits, batch, *drafts)
    expected_accepted, expected_ids, expected_healthy = reference_sampling.verify_drafts(logits, batch, *drafts)
    assert torch.equal(healthy, expected_healthy) and healthy.tolist() == [row != 1 for row in range(len(settings))]
    assert torch.equal(accepted, expected_accepted)
    assert accepted.any() and not accepted.all()
    assert torch.equal(token_ids, expected_ids)


def test_where_draft_and_model_agree_every_draft_is_accepted_and_the_residual_is_the_model_itself(
    instruction_set: str,
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(SETTINGS), 500) * 2
    batch = batch_of(SETTINGS)
    plain, q = distributions(sample, logits, batch)
    accepted, token_ids, _ = verify_drafts(logits, batch, plain, q, torch.rand(len(SETTINGS), dtype=torch.float64))
    assert accepted.all()
    assert torch.equal(token_ids, plain)


def test_verified_tokens_follow_the_model_whatever_was_drafted() -> None:
    num_draws = 6000
    torch.manual_seed(1)
    logits = torch.randn(1, 9).expand(num_draws, -1).contiguous()
    q = torch.softmax(torch.randn(1, 9), -1).expand(num_draws, -1).contiguous()
    drafts = torch.multinomial(q[0], num_draws, replacement=True)
    batch = batch_of([{"temperature": 0.9, "top_p": 0.95}] * num_draws)
    accepted, token_ids, _ = verify_drafts(logits, batch, drafts, q, torch.rand(num_draws, dtype=torch.float64))
    drawn = torch.bincount(torch.where(accepted, drafts, token_ids), minlength=9)
    expected = num_draws * distributions(sample, logits[:1], batch_of([{"temperature": 0.9, "top_p": 0.95}]))[1][0]
    possible = expected > 0
    assert not drawn[~possible].any()
    assert ((drawn - expected)[possible] ** 2 / expected[possible]).sum() < 27


# ---------------------------------------------------------------- penalties and single logits


def random_penalties(num_rows: int, vocab_size: int) -> Penalties:
    def counts(*shape: int) -> torch.Tensor:
        return (torch.rand(shape) < 0.02).int() * torch.randint(1, 5, shape, dtype=torch.int32)

    sequence = counts(4, vocab_size)
    delta_ids = torch.randint(-1, vocab_size, (num_rows, 6), dtype=torch.int32)
    delta_ids[:, 3] = delta_ids[:, 2]
    seen = int(sequence[1].argmax())
    delta_ids[1, 0] = seen
    delta_sequence = torch.randint(-1, 2, (num_rows, 6), dtype=torch.int32)
    delta_sequence[1, 0] = -int(sequence[1, seen])  # the token has left the window
    return Penalties(
        torch.tensor([1.0, 1.3, 0.8, 1.1] * 2)[:num_rows].contiguous(),
        torch.tensor([0.5, 0.0, -0.4, 0.0, 0.1, 0.0, 0.0])[:num_rows].contiguous(),
        torch.tensor([0.1, 0.0, 0.0, 0.3, 0.0, -0.2, 0.0])[:num_rows].contiguous(),
        torch.tensor([2, 1, -1, 0, 3, 1, 0], dtype=torch.int32)[:num_rows].contiguous(),
        sequence,
        torch.minimum(sequence, counts(4, vocab_size)),
        delta_ids,
        delta_sequence,
        torch.randint(0, 2, (num_rows, 6), dtype=torch.int32),
    )


@pytest.mark.parametrize("vocab_size", [1, 45, 3000])
def test_logits_are_adjusted_as_by_the_reference(vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    wide = torch.randn(7, vocab_size + 3)
    logits = wide[:, :vocab_size]
    cells = LogitCells(
        torch.tensor([0, 1, 2, 6]),
        torch.tensor([0, vocab_size - 1, vocab_size // 2, 0]),
        torch.tensor([2.5, -math.inf, -1.0, -math.inf]),
    )
    batch = replace(batch_of([PLAIN] * 7), cells=cells, penalties=random_penalties(7, vocab_size))
    expected = logits.clone()
    padding = wide[:, vocab_size:].clone()
    reference_sampling.adjust_logits(expected, batch)
    before = logits.clone()
    adjust_logits(logits, batch)
    torch.testing.assert_close(logits, expected, rtol=3e-7, atol=3e-7)
    assert torch.equal(wide[:, vocab_size:], padding)
    assert not torch.equal(logits, before)


def test_what_lies_outside_is_refused_and_changes_nothing() -> None:
    logits = torch.zeros(2, 10)
    batch = batch_of([PLAIN] * 2)
    cells = LogitCells(torch.tensor([0, 0]), torch.tensor([3, 10]), torch.ones(2))
    penalties = replace(random_penalties(2, 10), slots=torch.tensor([0, 4], dtype=torch.int32))
    for wrong in (replace(batch, cells=cells), replace(batch, penalties=penalties)):
        with pytest.raises(IndexError, match="outside"):
            adjust_logits(logits, wrong)
    assert not logits.any()
    drafts = torch.tensor([-1, 10]), torch.full((2, 10), 0.1), torch.zeros(2, dtype=torch.float64)
    with pytest.raises(IndexError, match="outside"):
        verify_drafts(logits, batch, *drafts)


def test_tensors_of_another_kind_are_refused() -> None:
    batch = batch_of([PLAIN] * 4)
    with pytest.raises(ValueError, match="float64"):
        sample(torch.zeros(4, 10, dtype=torch.float64), batch)
    with pytest.raises(ValueError, match="strides"):
        sample(torch.zeros(10, 4).T, batch)
    with pytest.raises(ValueError, match="strides"):
        sample(torch.zeros(4, 10), replace(batch, temperature=torch.ones(8)[::2]))
