"""Tokens are drawn from exactly the distribution that the parameters describe."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.parameters import SamplingParams
from engine.request import Request
from engine.sampling import transfer
from engine.sampling.batch import feed_forward, make_batch
from engine.sampling.counts import CountTables
from engine.sampling.noise import Stream, uniform, uniforms
from engine.sampling.rows import RequestSampling, SamplingRow
from engine.sampling.verify import Drafts, verify
from kernels import ops
from tests.engine.sampling_rows import PLAIN, logits_to_probs, penalised_row, row_counts, sample
from tests.engine.sampling_rows import sampling_row as row

FIXED_LOGITS = [2.0, 1.5, 1.5, 0.3, 0.0, -0.5, -1.0, -3.0]


def naive_probs(logits, params: SamplingParams) -> np.ndarray:
    """The definition, one token at a time, in float64."""
    z = np.asarray(logits, dtype=np.float32).astype(np.float64)
    first = z if params.temperature_last else z / params.temperature
    p = np.exp(first - first.max())
    p /= p.sum()
    kept = p >= params.min_p * p.max()
    if 0 < params.top_k < len(p):
        kept &= p >= sorted(p, reverse=True)[params.top_k - 1]
    if params.top_p < 1.0:
        mass, target, last = 0.0, params.top_p * p[kept].sum(), p.max()
        for value in sorted(p[kept], reverse=True):
            if mass >= target:
                break
            mass, last = mass + value, value
        kept &= p >= last
    final = np.where(kept, np.exp((z - z.max()) / params.temperature), 0.0)
    return final / final.sum()


def assert_follows(drawn: list[int], expected: np.ndarray) -> None:
    """Chi-square test; a fixed set of seeds makes it deterministic."""
    observed = np.bincount(drawn, minlength=len(expected))
    assert observed[expected == 0].sum() == 0, "a token outside the distribution was drawn"
    possible = expected > 0
    assert stats.chisquare(observed[possible], expected[possible] * len(drawn)).pvalue > 1e-3


def draw_many(logits: list[float], count: int = 3000, **params) -> list[int]:
    rows = [row(seed=seed, position=seed % 7, **params) for seed in range(count)]
    return [t for t in sample(torch.tensor([logits] * count), rows).token_ids if t is not None]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_k": 2},  # the second and third tie
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.5, "top_p": 0.8, "temperature_last": True},
        {"temperature": 0.5, "min_p": 0.3, "temperature_last": True},
    ],
)
def test_draws_follow_the_exact_distribution(params):
    expected = naive_probs(FIXED_LOGITS, SamplingParams(**{**PLAIN, **params}))
    assert_follows(draw_many(FIXED_LOGITS, **params), expected)


def test_successive_positions_of_one_seed_follow_the_distribution():
    rows = [row(seed=5, position=position) for position in range(4000)]
    drawn = sample(torch.tensor([FIXED_LOGITS] * 4000), rows).token_ids
    assert_follows([t for t in drawn if t is not None], naive_probs(FIXED_LOGITS, SamplingParams(**PLAIN)))


def test_noise_is_uniform_and_uncorrelated_between_neighbours():
    values = np.array([[uniform(seed, position) for position in range(100)] for seed in range(100)])
    assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.03
    assert uniform(2**63 - 1, 10_000_000) != uniform(2**63 - 2, 10_000_000)


def test_noise_made_as_arrays_is_that_made_one_by_one():
    seeds = [0, 2**63 - 1, 2**40 + 3, 7, 8, 9, 10, 11, 12]
    positions = [0, 10_000_000, 5, 2**31, 1, 2, 3, 4, 5]
    streams = [list(Stream)[index % 4] for index in range(9)]
    one_by_one = [uniform(*each) for each in zip(seeds, positions, streams)]
    assert uniforms(seeds, positions, streams).tolist() == one_by_one
    assert uniforms(seeds[:2], positions[:2], streams[:2]).tolist() == one_by_one[:2]


# Values nearer to each other than float32 can tell after scaling are ties for the engine.
finite = st.integers(-30_000, 30_000).map(lambda n: n / 1000)
# Few distinct values, so that ties at thresholds are common.
coarse = st.sampled_from([-5.0, -1.0, 0.0, 0.5, 1.0, 3.0])


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.one_of(coarse, finite), min_size=1, max_size=40),
    temperature=st.floats(0.05, 5),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    top_k=st.one_of(st.just(0), st.integers(1, 45)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    temperature_last=st.booleans(),
)
def test_filters_agree_with_their_definition(logits, temperature, top_p, top_k, min_p, temperature_last):
    own = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    actual = logits_to_probs(torch.tensor([logits]), [row(**own, temperature_last=temperature_last)])[0].numpy()
    assert abs(actual.sum() - 1) < 1e-5
    expected = naive_probs(logits, SamplingParams(**own, temperature_last=temperature_last))
    if not np.array_equal(actual > 1e-12, expected > 1e-12):
        # A threshold met within rounding may fall either way: nudging it must explain the result.
        nudged = (
            naive_probs(
                logits,
                SamplingParams(
                    temperature=temperature,
                    top_p=min(1.0, top_p * (1 + nudge)) if top_p < 1 else 1.0,
                    top_k=top_k,
                    min_p=min(1.0, min_p * (1 + nudge)),
                    temperature_last=temperature_last,
                ),
            )
            for nudge in (-1e-5, 1e-5)
        )
        expected = next(e for e in nudged if np.array_equal(actual > 1e-12, e > 1e-12))
    np.testing.assert_allclose(actual, expected, atol=2e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_top_p_over_a_large_vocabulary_needs_no_sort_to_be_exact(temperature, top_p):
    logits = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.1], [2.0], [5.0]])
    params = SamplingParams(temperature=temperature, top_p=top_p)
    actual = logits_to_probs(logits.clone(), [row(temperature=temperature, top_p=top_p)] * 3).numpy()
    for index in range(3):
        expected = naive_probs(logits[index].numpy(), params)
        # float32 probabilities may put the edge a few tokens off; their mass is what counts.
        assert np.abs(actual[index] - expected).sum() < 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9e-6])
def test_a_temperature_near_zero_is_greedy_and_skips_the_filters(temperature):
    assert set(draw_many(FIXED_LOGITS, count=50, temperature=temperature, top_p=0.0, top_k=1, min_p=1.0)) == {0}


def test_large_logits_do_not_overflow():
    probs = logits_to_probs(torch.tensor([[1e4, 1e4 - 1, -1e4]]), [row(temperature=0.5)])
    np.testing.assert_allclose(
        probs[0], naive_probs([2.0, 1.0, -1e4], SamplingParams(temperature=0.5, top_p=1)), atol=1e-6
    )
    assert sample(torch.tensor([[1e4, -1e4]]), [row(temperature=1e-4)]).token_ids == [0]


@pytest.mark.parametrize("params", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}])
def test_each_filter_keeps_the_likeliest_and_all_that_tie_with_it(params):
    probs = logits_to_probs(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), [row(**params)])
    np.testing.assert_allclose(probs[0], [0, 0.5, 0.5, 0])


def test_repetition_penalty_is_sign_aware_and_covers_prompt_and_output():
    r = penalised_row([0, 1], [2, 2], CountTables(), repetition_penalty=2.0)
    probs = logits_to_probs(torch.tensor([[4.0, -1.0, 2.0, 1.0]]), [r])[0]
    np.testing.assert_allclose(probs, naive_probs([2.0, -2.0, 1.0, 1.0], SamplingParams(**PLAIN)), atol=1e-6)


def test_presence_and_frequency_penalties_cover_the_output_only():
    r = penalised_row([0, 0, 1], [1, 2, 2], CountTables(), presence_penalty=0.5, frequency_penalty=0.25)
    probs = logits_to_probs(torch.tensor([[1.0, 1.0, 1.0, 1.0]]), [r])[0]
    np.testing.assert_allclose(probs, naive_probs([1.0, 0.25, 0.0, 1.0], SamplingParams(**PLAIN)), atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_counts_kept_by_difference_equal_counts_made_afresh(data):
    """Of several texts, which come, grow by any number of tokens, and go; with ids that have no logit."""
    tables, texts = CountTables(), {}
    logits = torch.zeros(1, 4)
    for step in range(6):
        if not texts or (len(texts) < 6 and data.draw(st.booleans())):
            prompt = data.draw(st.lists(st.integers(0, 5), max_size=10))
            params = SamplingParams(presence_penalty=1.0, penalty_window=data.draw(st.integers(0, 8)))
            request = Request(str(step), prompt, params)
            texts[request] = RequestSampling(request, tables)
        for request in list(texts):
            request.token_ids += data.draw(st.lists(st.integers(0, 3), max_size=4))
        rows = [sampling.row() for sampling in texts.values()]
        penalties = make_batch(logits.expand(len(rows), -1), rows, [Stream.DRAW] * len(rows)).penalties
        assert penalties is not None and len(set(penalties.slots.tolist())) == len(rows)
        for index, request in enumerate(texts):
            window = request.params.penalty_window or request.num_tokens
            start = max(0, request.num_tokens - window)
            sequence = request.token_ids[start:]
            output = request.token_ids[max(start, request.num_prompt_tokens) :]
            assert row_counts(penalties, index) == tuple(Counter(t for t in s if t < 4) for s in (sequence, output))
        if data.draw(st.booleans()):
            texts.pop(data.draw(st.sampled_from(sorted(texts, key=lambda request: request.request_id)))).release()


@pytest.mark.parametrize("window", [0, 1, 3])
def test_a_token_still_on_the_device_counts_as_if_it_were_known(window):
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.3, "penalty_window": window}
    tables = CountTables()
    request = Request("r", [1, 2, 2], SamplingParams(**PLAIN, **penalties, min_tokens=2, stop_token_ids=(5,)))
    others = [row(seed=9), penalised_row([4], [4, 0], tables, **penalties)]
    before = RequestSampling(request, tables)
    ahead = [others[0], before.row(pending=1), others[1]]
    request.token_ids.append(3)
    known = [others[0], RequestSampling(request, tables).row(), others[1]]
    assert ahead[1].position == known[1].position == 4 and ahead[1].forbidden_token_ids == (5,)
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    batch = make_batch(logits, ahead, [Stream.DRAW] * 3)
    feed_forward(batch, torch.tensor([0, 3]), torch.tensor([-1, 1, -1]))
    assert batch.penalties is not None
    expected = make_batch(logits, known, [Stream.DRAW] * 3).penalties
    assert expected is not None and all(
        row_counts(batch.penalties, index) == row_counts(expected, index) for index in (1, 2)
    )
    drafts = [Drafts()] * 3
    looked_ahead, plain = logits.clone(), logits.clone()
    verify(looked_ahead, ahead, drafts, pending=torch.tensor([0, 3]), sources=[-1, 1, -1])
    verify(plain, known, drafts)
    assert torch.equal(looked_ahead, plain) and not torch.equal(plain[1], logits[1])


def test_arrays_that_travel_packed_arrive_as_they_were():
    arrays = {
        "bools": np.array([True, False, True]),
        "doubles": np.array([0.1, 0.2]),
        "none": np.zeros((3, 0), dtype=np.int32),
        "matrix": np.arange(6, dtype=np.int32).reshape(2, 3),
        "ids": np.array([-1, 2**40]),
        "floats": np.array([1.5], dtype=np.float32),
    }
    arrived = transfer._unpacked(transfer._packed(arrays, pinned=False), arrays)
    for name, array in arrays.items():
        expected = transfer.upload({name: array}, torch.device("cpu"))[name]
        assert arrived[name].dtype == expected.dtype and torch.equal(arrived[name], expected)


@pytest.mark.parametrize("drawn", [False, True])
def test_nothing_waits_for_the_device_before_the_result_is_asked_for(drawn, monkeypatch):
    """Tensors of the meta device have no contents, so that whoever asks for them fails; the operations keep to that
    on their own."""
    token_ids, healthy = (torch.empty(4, dtype=dtype, device="meta") for dtype in (torch.int64, torch.bool))
    adjusted: list[torch.Tensor] = []
    monkeypatch.setattr(ops, "adjust_logits", lambda logits, batch: adjusted.append(batch.penalties.delta_ids))
    monkeypatch.setattr(ops, "sample", lambda logits, batch: (token_ids, healthy))
    monkeypatch.setattr(ops, "verify_drafts", lambda *arguments: (healthy, token_ids, healthy))
    request = Request("r", [1, 2], SamplingParams(repetition_penalty=1.1, logprobs=2, logit_bias={1: 1.0}))
    ahead = RequestSampling(request, CountTables()).row(pending=1)
    drafts = Drafts([4, 5], torch.empty(2, 8, device="meta") if drawn else None)
    result = verify(
        torch.empty(4, 10, device="meta"),
        [*(row(position=position, top_p=0.5, logprobs=1) for position in range(3)), ahead],
        [drafts, Drafts()],
        vocab_size=8,
        pending=torch.empty(5, dtype=torch.int64, device="meta"),
        sources=[-1, -1, -1, 4],
    )
    assert result.token_ids.shape == (4,) and adjusted[0].shape == (4, 1) and adjusted[0].is_meta
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        result.result()


def test_logit_bias_forces_and_forbids():
    assert set(draw_many(FIXED_LOGITS, count=50, logit_bias={7: 100.0})) == {7}
    assert 0 not in draw_many(FIXED_LOGITS, count=500, logit_bias={0: -100.0})


def test_forbidden_ends_are_never_drawn_even_if_likeliest():
    for temperature in (0.0, 1.0):
        r = row(temperature=temperature)
        r.forbidden_token_ids = (0, 1)
        assert sample(torch.tensor([FIXED_LOGITS]), [r]).token_ids[0] not in (0, 1)
        biased = row(temperature=temperature, logit_bias={0: 100.0, 2: 50.0})
        biased.forbidden_token_ids = (0, 1)
        assert sample(torch.tensor([FIXED_LOGITS]), [biased]).token_ids == [2]


def test_padded_vocabulary_is_never_drawn():
    logits = torch.zeros(300, 8)
    logits[:, 5:] = 50.0
    rows = [row(seed=seed, temperature=float(seed % 3 > 0)) for seed in range(300)]
    assert max(t for t in sample(logits, rows, vocab_size=5).token_ids if t is not None) < 5


def test_tokens_in_the_padding_of_the_vocabulary_are_left_out_of_penalties_and_forbidden_ends():
    def penalised(*extra: int) -> SamplingRow:
        penalties = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 0.5}
        own = penalised_row([1, *extra], [2, 2, *extra], CountTables(), **penalties)
        own.forbidden_token_ids = (0, *extra)
        return own

    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(3))
    expected = logits_to_probs(logits.clone(), [penalised()], vocab_size=5)
    adjusted = logits.clone()
    assert torch.equal(logits_to_probs(adjusted, [penalised(5, 7)], vocab_size=5), expected)
    assert torch.equal(adjusted[:, 5:], logits[:, 5:])


def test_logits_that_lie_transposed_are_the_same_logits():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(8))
    rows = [row(seed=seed, top_p=0.9, logit_bias={3: 1.0}) for seed in range(3)]
    assert sample(logits.t().contiguous().t(), rows, 40).token_ids == sample(logits.clone(), rows, 40).token_ids


def test_a_bad_row_yields_no_token_and_leaves_the_others_alone():
    good = [row(seed=seed, temperature=seed % 2, top_p=0.9) for seed in range(5)]
    alone = sample(torch.tensor([FIXED_LOGITS] * 5), good).token_ids
    logits = torch.tensor([FIXED_LOGITS] * 8)
    logits[1, 3] = torch.nan
    logits[4, 0] = torch.inf
    logits[6, :] = -torch.inf
    rows = [good[0], row(), good[1], good[2], row(), good[3], row(), good[4]]
    together = sample(logits, rows).token_ids
    assert [together[i] for i in (1, 4, 6)] == [None, None, None]
    assert [together[i] for i in (0, 2, 3, 5, 7)] == alone


def test_a_seed_gives_the_same_tokens_alone_and_in_company():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(24, 5000, generator=generator) * 3
    rows = [
        row(
            seed=seed * 1009,
            position=seed,
            temperature=[0.0, 0.7, 1.0, 3.0][seed % 4],
            top_p=[1.0, 0.9, 0.99][seed % 3],
            top_k=[0, 40][seed % 2],
            temperature_last=seed % 5 == 0,
        )
        for seed in range(24)
    ]
    alone = [sample(logits[i : i + 1].clone(), rows[i : i + 1]).token_ids[0] for i in range(24)]
    assert sample(logits.clone(), rows).token_ids == alone
    order = torch.randperm(24, generator=generator).tolist()
    assert sample(logits[order].clone(), [rows[i] for i in order]).token_ids == [alone[i] for i in order]


def test_logprobs_report_the_model_itself_best_first():
    r = row(temperature=0.0, logprobs=3, logit_bias={5: 50.0})
    other = row(temperature=0.0)
    result = sample(torch.tensor([FIXED_LOGITS, FIXED_LOGITS]), [r, other])
    assert result.token_ids[0] == 5 and result.logprobs[1] is None
    report = result.logprobs[0]
    assert report is not None
    expected = torch.log_softmax(torch.tensor(FIXED_LOGITS), -1)
    assert math.isclose(report.chosen, expected[5], abs_tol=1e-6)
    assert report.top[0][0] == 0 and len(report.top) == 3
    assert all(math.isclose(value, expected[token], abs_tol=1e-6) for token, value in report.top)


def test_no_alternatives_still_report_the_chosen_token():
    report = sample(torch.tensor([FIXED_LOGITS]), [row(temperature=0.0, logprobs=0)]).logprobs[0]
    assert report is not None and report.top == [] and report.chosen < 0


def test_what_is_sampled_is_what_the_probabilities_say():
    """`sample` and `logits_to_probs` are one function: speculative decoding depends on it."""
    first = penalised_row([0, 3], [3], CountTables(), temperature=0.8, top_p=0.7, repetition_penalty=1.5)
    r = [replace(first, seed=seed) for seed in range(2000)]
    probs = logits_to_probs(torch.tensor([FIXED_LOGITS]), r[:1])[0].double().numpy()
    drawn = sample(torch.tensor([FIXED_LOGITS] * len(r)), r).token_ids
    assert_follows([t for t in drawn if t is not None], probs / probs.sum())
