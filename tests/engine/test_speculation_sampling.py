"""Whatever is drafted, tokens follow the model's own distribution exactly.

The models here are tables, so that every distribution is known; requests, penalties, drafting and verification
are the engine's own.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.parameters import SamplingParams
from engine.request import Request
from engine.sampling import batch as batch_module
from engine.sampling.batch import make_batch
from engine.sampling.counts import PENDING, CountTables
from engine.sampling.noise import Stream, uniform, uniforms
from engine.sampling.rows import RequestSampling, SamplingRow
from engine.sampling.verify import Drafts, Verified, draw_drafts, verify
from kernels import ops
from kernels.reference_sampling import residual
from tests.engine.sampling_rows import logits_to_probs, penalised_row, row_counts, sample, sampling_row, with_params

VOCAB_SIZE = 6
PADDED_SIZE = 8
PROMPT = [1, 4, 1]
NUM_TOKENS = 3
EVERYTHING = {
    "temperature": 1.3,
    "min_p": 0.05,
    "top_k": 5,
    "top_p": 0.95,
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "logit_bias": {2: 1.0, 5: -0.5},
}
Draw = Callable[[torch.Tensor, list[SamplingRow], list[bool]], tuple[list[int | None], torch.Tensor | None]]


class TableModel:
    """The next logits are a function of the last two tokens."""

    def __init__(self, seed: int, likeness: torch.Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = 1.5 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, PADDED_SIZE, generator=generator)
        if likeness is not None:
            self.table = likeness + 0.6 * self.table
        self.table[:, :, VOCAB_SIZE:] = 9.0  # padding that must never be drawn

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.table[tokens[-2], tokens[-1]].clone()


TARGET = TableModel(1)
DRAFT = TableModel(2, TARGET.table)


def exact_distribution(**params) -> dict[tuple[int, ...], float]:
    """Probability of each continuation of NUM_TOKENS tokens, by the definition, without speculation."""
    prefixes = [p for count in range(NUM_TOKENS) for p in itertools.product(range(VOCAB_SIZE), repeat=count)]
    tables = CountTables()
    rows = [penalised_row(PROMPT, prefix, tables, **params) for prefix in prefixes]
    logits = torch.stack([TARGET([*PROMPT, *prefix]) for prefix in prefixes])
    following = dict(zip(prefixes, logits_to_probs(logits, rows, VOCAB_SIZE).double().tolist()))
    return {
        tokens: math.prod(following[tokens[:count]][tokens[count]] for count in range(NUM_TOKENS))
        for tokens in itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS)
    }


def lookup_drafts(requests: Sequence[Request], samplings: Sequence[RequestSampling], draw: Draw) -> list[Drafts]:
    """Certain drafts, as from an n-gram: no chance is in them."""
    result: list[Drafts] = []
    for request in requests:
        tokens = list(request.token_ids)
        for _ in range(room(request)):
            tokens.append(int(DRAFT(tokens)[:VOCAB_SIZE].argmax()))
        result.append(Drafts(tokens[request.num_tokens :]))
    return result


def room(request: Request) -> int:
    return 3 - request.seed % 3  # any number of drafts, as budgets have it


def model_drafts(requests: Sequence[Request], samplings: Sequence[RequestSampling], draw: Draw) -> list[Drafts]:
    """Drawn by a model of its own, all requests together, one token at a time."""
    drafts: list[list[int]] = [[] for _ in requests]
    probs: list[list[torch.Tensor]] = [[] for _ in requests]
    for depth in range(3):
        active = [index for index, request in enumerate(requests) if room(request) > depth]
        logits = torch.stack([DRAFT([*requests[i].token_ids, *drafts[i]]) for i in active])[:, :VOCAB_SIZE]
        rows = [samplings[i].row(drafts[i]) for i in active]
        token_ids, own = draw(logits, rows, [False] * len(active))
        assert own is not None
        for i, token_id, q in zip(active, token_ids, own):
            assert token_id is not None
            drafts[i].append(token_id)
            probs[i].append(q)
    return [Drafts(tokens, torch.stack(each)) for tokens, each in zip(drafts, probs)]


Drafter = Callable[[Sequence[Request], Sequence[RequestSampling], Draw], list[Drafts]]
Verify = Callable[[torch.Tensor, list[SamplingRow], list[Drafts]], list[Verified]]


def true_verify(logits: torch.Tensor, rows: list[SamplingRow], drafts: list[Drafts]) -> list[Verified]:
    return verify(logits, rows, drafts, VOCAB_SIZE).result()


def speculate(
    drafter: Drafter, count: int, check: Verify = true_verify, draw: Draw = draw_drafts, **params
) -> tuple[Counter[tuple[int, ...]], float]:
    """The first NUM_TOKENS tokens of so many answers, and the share of drafts accepted."""
    requests = [
        Request(str(seed), list(PROMPT), SamplingParams(**{"temperature": 1.0, "top_p": 1.0, **params}), seed=seed)
        for seed in range(count)
    ]
    tables = CountTables()
    samplings = [RequestSampling(request, tables) for request in requests]
    num_drafted = num_accepted = 0
    while open_ := [i for i, request in enumerate(requests) if request.num_output_tokens < NUM_TOKENS]:
        own_requests, own_samplings = [requests[i] for i in open_], [samplings[i] for i in open_]
        drafts = drafter(own_requests, own_samplings, draw)
        rows: list[SamplingRow] = []
        logits: list[torch.Tensor] = []
        for request, sampling, each in zip(own_requests, own_samplings, drafts):
            rows += sampling.rows(each.token_ids)
            known = [*request.token_ids, *each.token_ids]
            logits += [TARGET(known[: request.num_tokens + n]) for n in range(len(each.token_ids) + 1)]
        for request, each, result in zip(own_requests, drafts, check(torch.stack(logits), rows, drafts)):
            assert result.token_ids is not None
            request.token_ids += result.token_ids
            num_drafted += len(each.token_ids)
            num_accepted += len(result.token_ids) - 1
    outputs = Counter(tuple(r.token_ids[len(PROMPT) : len(PROMPT) + NUM_TOKENS]) for r in requests)
    return outputs, num_accepted / num_drafted


def p_value(outputs: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square test; continuations expected less than five times count together."""
    total = outputs.total()
    impossible = [tokens for tokens in outputs if expected[tokens] == 0.0]
    if impossible:
        return 0.0
    rare = [tokens for tokens, p in expected.items() if 0 < p * total < 5]
    common = [tokens for tokens, p in expected.items() if p * total >= 5]
    observed = [outputs[tokens] for tokens in common] + [sum(outputs[tokens] for tokens in rare)]
    predicted = [expected[tokens] * total for tokens in common] + [sum(expected[tokens] for tokens in rare) * total]
    if predicted[-1] < 5:
        observed[-2:], predicted[-2:] = [sum(observed[-2:])], [sum(predicted[-2:])]
    scale = total / sum(predicted)
    return stats.chisquare(observed, np.array(predicted) * scale).pvalue


@pytest.mark.parametrize("drafter", [lookup_drafts, model_drafts])
def test_over_20000_draws_the_answer_follows_the_models_distribution_with_everything_on(drafter):
    outputs, acceptance = speculate(drafter, 6700, **EVERYTHING)
    assert outputs.total() * NUM_TOKENS >= 20_000
    assert 0.05 < acceptance < 0.95, "drafts have to be accepted and refused for the test to say something"
    expected = exact_distribution(**EVERYTHING)
    assert sum(p > 0 for p in expected.values()) > 50
    assert p_value(outputs, expected) > 1e-3


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6, "temperature_last": True, "min_p": 0.2},
        {"top_k": 2, "penalty_window": 3, "presence_penalty": 1.0},
    ],
)
@pytest.mark.parametrize("drafter", [lookup_drafts, model_drafts])
def test_the_answer_follows_the_models_distribution_with_few_settings_on(drafter, params):
    own = {"temperature": 1.0, "top_p": 1.0, **params}
    outputs, _ = speculate(drafter, 500, **own)
    assert p_value(outputs, exact_distribution(**own)) > 1e-3


# ---------------------------------------------------------------- known wrong ways, which the test has to notice


FILTERS_OFF = {"min_p": 0.0, "top_k": 0, "top_p": 1.0}


def raw_q(logits: torch.Tensor, rows: list[SamplingRow], certain: list[bool]):
    """Drafts are drawn from the filtered distribution and judged by the unfiltered one."""
    raw = torch.softmax(logits, -1)
    token_ids, _ = draw_drafts(logits, rows, certain)
    return token_ids, raw


def filters_skipped(logits: torch.Tensor, rows: list[SamplingRow], drafts: list[Drafts]) -> list[Verified]:
    own = iter(rows)
    changed = []
    for each in drafts:
        changed += [with_params(next(own), **FILTERS_OFF) for _ in each.token_ids] + [next(own)]
    return verify(logits, changed, drafts, VOCAB_SIZE).result()


def bias_skipped(logits: torch.Tensor, rows: list[SamplingRow], drafts: list[Drafts]) -> list[Verified]:
    own = iter(rows)
    changed = []
    for each in drafts:
        changed += [with_params(next(own), logit_bias={}) for _ in each.token_ids] + [next(own)]
    return verify(logits, changed, drafts, VOCAB_SIZE).result()


def penalties_without_drafts(logits: torch.Tensor, rows: list[SamplingRow], drafts: list[Drafts]) -> list[Verified]:
    """All rows of a request count the tokens before its first draft."""
    for row in rows:
        row.following = [PENDING] * len(row.following)
    return verify(logits, rows, drafts, VOCAB_SIZE).result()


def same_noise(logits: torch.Tensor, rows: list[SamplingRow], drafts: list[Drafts]) -> list[Verified]:
    """One number decides about a draft, about what replaces it, and drew it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            batch_module, "uniforms", lambda seeds, at, streams: uniforms(seeds, at, [Stream.DRAFT] * len(seeds))
        )
        return verify(logits, rows, drafts, VOCAB_SIZE).result()


def replaced_from_p(logits: torch.Tensor, rows: list[SamplingRow], drafts: list[Drafts]) -> list[Verified]:
    true = ops.verify_drafts

    def wrong(logits, batch, draft_ids, draft_probs, accept_uniforms):
        accepted, _, healthy = true(logits, batch, draft_ids, draft_probs, accept_uniforms)
        return accepted, ops.sample(logits, batch)[0], healthy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "verify_drafts", wrong)
        return verify(logits, rows, drafts, VOCAB_SIZE).result()


@pytest.mark.parametrize(
    ("drafter", "wrong"),
    [
        (model_drafts, {"draw": raw_q}),
        (model_drafts, {"check": filters_skipped}),
        (lookup_drafts, {"check": filters_skipped}),
        (model_drafts, {"check": bias_skipped}),
        (lookup_drafts, {"check": penalties_without_drafts}),
        (model_drafts, {"check": penalties_without_drafts}),
        (model_drafts, {"check": same_noise}),
        (model_drafts, {"check": replaced_from_p}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or "-".join(each.__name__ for each in value.values()),
)
def test_the_test_notices_known_wrong_ways(drafter, wrong):
    outputs, _ = speculate(drafter, 700, **EVERYTHING, **wrong)
    assert p_value(outputs, exact_distribution(**EVERYTHING)) < 1e-4


# ---------------------------------------------------------------- one verification


def rows_for(count: int, seed: int = 0, **params) -> list[SamplingRow]:
    return [sampling_row(seed, position, **params) for position in range(count)]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000), temperature=st.sampled_from([0.0, 0.7, 1.5]))
def test_certain_drafts_change_no_token_of_a_seed(data, seed, temperature):
    """What is said with them is what the same seed says without, whatever was drafted."""
    logits = torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    rows = rows_for(5, seed, temperature=temperature, top_p=0.9)
    plain = sample(logits.clone(), rows).token_ids
    drafts = [data.draw(st.sampled_from([plain[i], (plain[i] or 0) + 1])) for i in range(4)]
    (result,) = verify(logits, rows, [Drafts(drafts)]).result()
    length = next((i for i, draft in enumerate(drafts) if draft != plain[i]), 4) + 1
    assert result.token_ids == plain[:length]


def test_greedy_rows_compare_the_likeliest_token():
    logits = torch.eye(4)[[2, 0, 3]]
    rows = rows_for(3, temperature=0.0)
    assert verify(logits.clone(), rows, [Drafts([2, 0])]).result()[0].token_ids == [2, 0, 3]
    assert verify(logits.clone(), rows, [Drafts([2, 1])]).result()[0].token_ids == [2, 0]
    assert verify(logits.clone(), rows, [Drafts([1, 0])]).result()[0].token_ids == [2]


def test_where_the_residual_is_empty_the_models_distribution_takes_its_place():
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.1, 0.9]])
    q = torch.tensor([[0.25, 0.75], [0.1, 0.9], [0.5, 0.5]])
    weights = residual(p, q)
    torch.testing.assert_close(weights, torch.tensor([[0.25, 0.75], [0.4, 0.0], [0.0, 0.4]]), check_dtype=False)
    # A draft that can never be accepted, because q says too much; nothing is left of p - q.
    logits = torch.tensor([[0.0, 0.0, -torch.inf]] * 2)
    for seed in range(20):
        drafts = Drafts([2], torch.tensor([[1.0, 1.0, 1.0]]))
        (result,) = verify(logits.clone(), rows_for(2, seed), [drafts]).result()
        assert result.token_ids is not None and len(result.token_ids) == 1 and result.token_ids[0] in (0, 1)


def test_drafts_with_the_models_own_distribution_are_always_accepted():
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    for seed in range(30):
        rows = rows_for(4, seed, top_p=0.8)
        token_ids, probs = draw_drafts(logits[:3].clone(), rows[:3], [False] * 3)
        drafts = Drafts([token_id for token_id in token_ids if token_id is not None], probs)
        (result,) = verify(logits.clone(), rows, [drafts]).result()
        assert result.token_ids is not None and result.token_ids[:3] == token_ids


def test_requests_with_and_without_drafts_are_verified_side_by_side_as_alone():
    generator = torch.Generator().manual_seed(7)
    kinds = [(0, False), (3, False), (3, True), (0, False), (1, True), (2, False)]
    parts = []
    for seed, (count, drawn) in enumerate(kinds):
        rows = rows_for(count + 1, seed, temperature=[0.0, 0.8][drawn or seed % 2], top_p=0.9, logprobs=2)
        logits = torch.randn(count + 1, VOCAB_SIZE, generator=generator)
        token_ids, probs = draw_drafts(logits[:count] * 0.8, rows[:count], [not drawn] * count) if count else ([], None)
        drafts = Drafts([each for each in token_ids if each is not None], probs if drawn else None)
        parts.append((logits, rows, drafts))
    alone = [verify(logits.clone(), rows, [drafts]).result()[0] for logits, rows, drafts in parts]
    for order in (range(6), (5, 2, 0, 4, 3, 1)):
        chosen = [parts[i] for i in order]
        together = verify(
            torch.cat([logits for logits, _, _ in chosen]),
            [row for _, rows, _ in chosen for row in rows],
            [drafts for _, _, drafts in chosen],
        ).result()
        assert [each.token_ids for each in together] == [alone[i].token_ids for i in order]
        assert together[0].logprobs == alone[order[0]].logprobs


def test_logprobs_of_accepted_tokens_are_the_models_own():
    logits = torch.tensor([[0.0, 2.0, 1.0], [1.0, 0.0, 3.0], [5.0, 0.0, 0.0]])
    expected = torch.log_softmax(logits, -1)
    rows = rows_for(3, temperature=0.0, logprobs=2, logit_bias={1: 0.5})
    (result,) = verify(logits.clone(), rows, [Drafts([1, 2])]).result()
    assert result.token_ids == [1, 2, 0] and len(result.logprobs) == 3
    for row, (token_id, report) in enumerate(zip([1, 2, 0], result.logprobs)):
        assert report is not None and report.chosen == pytest.approx(float(expected[row, token_id]))
        assert [token for token, _ in report.top] == torch.topk(expected[row], 2).indices.tolist()


@pytest.mark.parametrize("probs", [None, torch.full((2, 3), 1 / 3)])
def test_a_bad_row_fails_its_request_only_and_only_if_it_is_reached(probs):
    good = torch.tensor([[9.0, 0.0, 0.0]] * 3)
    bad = good.clone()
    bad[1, 2] = torch.nan
    rows = rows_for(3, temperature=0.01)
    results = verify(
        torch.cat([good, bad, bad, good[:1]]),
        [*rows, *rows, *rows, rows[0]],
        [Drafts([0, 0], probs), Drafts([0, 0], probs), Drafts([1, 0], probs), Drafts()],
    ).result()
    assert [each.token_ids for each in results] == [[0, 0, 0], None, [0], [0]]


def test_padding_of_the_vocabulary_is_neither_said_nor_accepted():
    logits = torch.zeros(2, 4)
    logits[:, 3] = 50.0
    for seed in range(20):
        (result,) = verify(logits.clone(), rows_for(2, seed), [Drafts([3])], vocab_size=3).result()
        assert result.token_ids is not None and len(result.token_ids) == 1 and result.token_ids[0] < 3


def test_bad_logits_of_a_draft_model_draft_nothing_and_leave_the_others_alone():
    logits = torch.tensor([[0.0, 5.0], [torch.nan, 0.0], [5.0, 0.0]])
    token_ids, probs = draw_drafts(logits.clone(), rows_for(3, temperature=0.01), [True, True, False])
    assert token_ids == [1, None, 0] and probs is not None and probs.dtype == torch.float32
    token_ids, probs = draw_drafts(logits, rows_for(3, temperature=0.0), [True] * 3)
    assert token_ids == [1, None, 0] and probs is None


# ---------------------------------------------------------------- rows and noise


def test_drafts_before_a_position_count_as_output_there():
    params = SamplingParams(presence_penalty=0.5, min_tokens=3, stop_token_ids=(5,))
    request = Request("r", [1, 2, 3], params, num_prompt_tokens=2, end_token_ids=frozenset({0}))
    rows = RequestSampling(request, CountTables()).rows([4, 3])
    assert [row.position for row in rows] == [3, 4, 5]
    assert [counts for _, counts in counts_of(rows)] == [{3: 1}, {3: 1, 4: 1}, {3: 2, 4: 1}]
    assert [set(row.forbidden_token_ids) for row in rows] == [{0, 5}, {0, 5}, set()]
    request.token_ids += [4, 1]
    assert counts_of(RequestSampling(request, CountTables()).rows())[0][1] == {3: 1, 4: 1, 1: 1}


def test_texts_that_are_counted_first_for_drafts_go_on_to_be_counted_for_what_verifies_them():
    tables = CountTables()
    drawn_for, verified = (penalised_row(PROMPT, [2], tables, presence_penalty=2.0) for _ in range(2))
    draw_drafts(torch.zeros(1, VOCAB_SIZE), [drawn_for], [True])
    logits = torch.zeros(1, VOCAB_SIZE)
    assert not logits.is_inference(), "as the native kernels' are"
    verify(logits, [verified], [Drafts()]).result()
    assert logits[0].tolist() == [0.0, 0.0, -2.0, 0.0, 0.0, 0.0]


def counts_of(rows: Sequence[SamplingRow]) -> list[tuple[Counter[int], Counter[int]]]:
    penalties = make_batch(torch.zeros(len(rows), VOCAB_SIZE), rows, [Stream.DRAW] * len(rows)).penalties
    assert penalties is not None
    return [row_counts(penalties, index) for index in range(len(rows))]


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    output=st.lists(st.integers(0, 3), max_size=8),
    drafts=st.lists(st.integers(0, 3), max_size=6),
    window=st.integers(0, 9),
)
def test_counts_after_drafts_equal_counts_made_afresh(prompt, output, drafts, window):
    params = SamplingParams(presence_penalty=0.5, penalty_window=window)
    request = Request("r", [*prompt, *output], params, num_prompt_tokens=len(prompt))
    sampling = RequestSampling(request, CountTables())
    before, *rest = counts_of(sampling.rows(drafts))
    for count, after in enumerate(rest, start=1):
        known = [*output, *drafts[:count]]
        fresh = penalised_row(prompt, known, CountTables(), presence_penalty=0.5, penalty_window=window)
        assert after == counts_of([fresh])[0]
    assert counts_of(sampling.rows()) == [before]


def test_the_streams_of_noise_at_a_position_are_independent():
    values = {s: np.array([uniform(seed, p, s) for seed in range(60) for p in range(60)]) for s in Stream}
    for stream in Stream:
        assert stats.kstest(values[stream], "uniform").pvalue > 1e-3
    for one, other in itertools.combinations(Stream, 2):
        assert abs(np.corrcoef(values[one], values[other])[0, 1]) < 0.05
