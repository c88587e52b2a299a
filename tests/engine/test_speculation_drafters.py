"""What is drafted from the text itself, whose tokenizers fit, and how many drafts are worth their time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.parameters import SamplingParams
from engine.request import Request
from engine.speculation.ngram import MAX_CANDIDATES, MAX_MATCH, MIN_MATCH, NgramDrafter, NgramIndex
from engine.speculation.policy import FIRST_ACCEPTANCE, STALE_STEPS, DraftPolicy, Outcome, StepCosts
from engine.speculation.vocabulary import check_same_tokens
from engine.text.load import load_tokenizer
from tests.engine.tiny_gguf import BYTE_ALPHABET, write_model

# ---------------------------------------------------------------- prompt lookup


def by_scanning(tokens: list[int], limit: int) -> list[int]:
    """The definition: the latest of the longest matches among the latest candidates, found by looking everywhere."""
    last = len(tokens) - 1
    ends = [end for end in range(last - 1, 0, -1) if tokens[end - 1 : end + 1] == tokens[last - 1 : last + 1]]
    best, best_length = None, 0
    for end in ends[:MAX_CANDIDATES]:
        length = 0
        while length < MAX_MATCH and length <= end and tokens[end - length] == tokens[last - length]:
            length += 1
        if length > best_length:
            best, best_length = end, length
    if best is None or last < MIN_MATCH:
        return []
    text = list(tokens)
    for offset in range(limit):
        text.append(text[best + 1 + offset])
    return text[len(tokens) :]


@given(start=st.lists(st.integers(0, 2), max_size=60), more=st.lists(st.integers(0, 2), max_size=30))
def test_the_index_finds_what_scanning_the_whole_text_finds(start, more):
    tokens = list(start)
    index = NgramIndex(tokens)
    for token_id in more:
        assert index.continuation(5) == by_scanning(tokens, 5)
        tokens.append(token_id)
    assert index.continuation(5) == by_scanning(tokens, 5)


def test_a_repeated_passage_is_drafted_and_a_repetition_goes_on_with_itself():
    index = NgramIndex([5, 6, 7, 8, 9, 1, 5, 6, 7])
    assert index.continuation(4) == [8, 9, 1, 5]
    assert NgramIndex([3, 1, 2, 1, 2, 1, 2]).continuation(5) == [1, 2, 1, 2, 1]
    assert NgramIndex([1, 2, 3, 4]).continuation(4) == []
    assert NgramIndex([1]).continuation(4) == []


def test_the_drafter_follows_requests_only_while_they_run():
    drafter = NgramDrafter()
    repeats, fresh = Request("a", [1, 2, 3, 1, 2]), Request("b", [1, 2, 3, 4])
    drafter.follow([repeats, fresh], [])
    assert (drafter.available(repeats, 2), drafter.available(fresh, 2)) == (2, 0)
    drafter.draft({repeats: 1})
    assert repeats.draft_token_ids == [3] and drafter.probabilities(repeats) is None
    drafter.follow([fresh], [])
    drafter.forget(fresh)
    assert not drafter._indexes


# ---------------------------------------------------------------- vocabularies


def tokenizer(folder: Path, name: str, tokens: list[str], **changes):
    special = changes.pop("special", 4)
    types = [1] * (len(tokens) - special) + [3] * special
    return load_tokenizer(write_model(folder / f"{name}.gguf", tokens=tokens, types=types, **changes))


SPECIAL = ["ab", "<|im_start|>", "<|im_end|>", "<s>", "<think>"]


def test_the_same_tokens_fit_and_padding_of_either_vocabulary_is_tolerated(tmp_path):
    plain = tokenizer(tmp_path, "plain", [*BYTE_ALPHABET, *SPECIAL])
    padded = tokenizer(tmp_path, "padded", [*BYTE_ALPHABET, *SPECIAL, "[PAD261]", "[PAD262]"], special=6)
    longer = tokenizer(tmp_path, "longer", [*BYTE_ALPHABET, *SPECIAL, "<tool>"], special=5)
    for one, other in ((plain, plain), (plain, padded), (padded, plain), (padded, longer), (longer, padded)):
        check_same_tokens(one, other, "draft")


def test_another_tokenizer_of_the_same_size_is_refused_with_the_first_token_that_differs(tmp_path):
    plain = tokenizer(tmp_path, "plain", [*BYTE_ALPHABET, *SPECIAL])
    swapped = [*BYTE_ALPHABET, *SPECIAL]
    swapped[7], swapped[8] = swapped[8], swapped[7]
    with pytest.raises(ValueError, match=r"small cannot draft .* token 7 is '\)' to it and '\(' to the model"):
        check_same_tokens(plain, tokenizer(tmp_path, "swapped", swapped), "small")


# ---------------------------------------------------------------- how many drafts


def test_step_costs_ignore_hiccups_think_the_unknown_cheap_and_measure_anew_what_is_old():
    costs = StepCosts()
    assert costs.curve(3) == [0.0] * 4
    costs.add(2, 9.0)
    assert costs.curve(3) == [0.0] * 4, "once is not known"
    for seconds in (1.0, 1.1, 30.0, 1.2):
        costs.add(2, seconds)
    assert costs.curve(4) == [0.0, 0.6, 1.2, 1.2, 1.2]
    for _ in range(2):
        costs.add(4, 2.2)
    assert costs.curve(5) == pytest.approx([0.0, 0.6, 1.2, 1.7, 2.2, 2.2])
    for _ in range(STALE_STEPS):
        costs.add(4, 2.2)
    assert costs.curve(2) == pytest.approx([0.0, 0.55, 1.1])


class Workload:
    """Steps on a clock of our own: what a row and a draft cost, and how often drafts are accepted."""

    def __init__(self, acceptance: list[float], row: float, draft: float = 0.0, preparation: float = 0.0) -> None:
        self.policy = DraftPolicy()
        self.requests = [Request(f"r{i}", [1], arrival_index=i) for i in range(len(acceptance))]
        self.acceptance = dict(zip(self.requests, acceptance))
        self.row, self.draft, self.preparation = row, draft, preparation
        self.credit = dict.fromkeys(self.requests, 0.0)
        self.seconds = self.tokens = 0.0

    def step(self, limit: int = 4) -> dict[Request, int]:
        counts = self.policy.choose(dict.fromkeys(self.requests, limit), len(self.requests))
        depth = max(counts.values(), default=0)
        if counts:
            self.policy.drafted(len(counts), self.draft)
        verified = {}
        for request, count in counts.items():
            accepted = 0
            while accepted < count:  # exactly the share that the acceptance says
                self.credit[request] += self.acceptance[request]
                if self.credit[request] < 1.0:
                    break
                self.credit[request] -= 1.0
                accepted += 1
            verified[request] = (count, accepted)
        rows = len(self.requests) + sum(counts.values())
        seconds = 1.0 + self.row * (rows - 1)
        refrained = [request for request in self.requests if request not in counts]
        self.policy.observe(Outcome(rows, True, seconds, verified, refrained))
        self.seconds += seconds + self.draft * depth
        self.tokens += len(self.requests) + sum(accepted for _, accepted in verified.values())
        return counts

    def speed(self, num_steps: int) -> float:
        self.seconds = self.tokens = 0.0
        for _ in range(num_steps):
            self.step()
        return self.tokens / self.seconds


def plain_speed(workload: Workload) -> float:
    n = len(workload.requests)
    return n / (1.0 + workload.row * (n - 1))


def test_cheap_rows_and_good_drafts_are_used_to_the_full():
    workload = Workload([0.9], row=0.02)
    workload.speed(100)
    assert workload.step() == {workload.requests[0]: 4}
    assert workload.speed(100) > 2.5 * plain_speed(workload)
    assert workload.policy.note == ""


@pytest.mark.parametrize(
    "workload",
    [
        Workload([0.1, 0.1], row=0.5),
        Workload([0.0], row=0.2),
        Workload([0.6], row=0.05, draft=0.9),
        Workload([0.9] * 4, row=1.0),
    ],
    ids=["poor drafts and dear rows", "useless drafts", "a dear draft model", "rows cost as much as steps"],
)
def test_where_drafts_lose_time_they_stop_and_it_says_so(workload):
    workload.speed(100)
    assert workload.speed(1000) > 0.97 * plain_speed(workload)
    assert workload.policy.note.startswith("Paused, because it would lose time:")
    assert "of the drafts would be accepted" in workload.policy.note


def test_after_a_pause_drafts_are_tried_again_and_come_back_when_they_pay():
    workload = Workload([0.0], row=0.2)
    workload.speed(200)
    assert workload.policy.note
    workload.acceptance[workload.requests[0]] = 0.95
    workload.speed(1000)
    assert workload.policy.note == "" and workload.speed(100) > 1.5 * plain_speed(workload)


def test_the_number_of_drafts_follows_each_requests_acceptance():
    workload = Workload([0.95, 0.05], row=0.1)
    workload.speed(200)
    good, poor = workload.requests
    chosen = [workload.step() for _ in range(50)]
    assert all(counts.get(good, 0) >= 3 for counts in chosen)
    assert sum(counts.get(poor, 0) for counts in chosen) <= 5


def test_a_new_request_starts_with_what_the_others_taught():
    workload = Workload([0.0], row=0.2)
    workload.speed(100)
    stranger = Request("stranger", [1], arrival_index=9)
    assert sum(workload.policy.choose({stranger: 4}, 1).values()) <= 1
    assert DraftPolicy().choose({stranger: 4}, 1) == {stranger: 4}
    assert 0 < FIRST_ACCEPTANCE < 1


def test_following_prompts_that_are_never_won_back_stops_the_drafts():
    workload = Workload([0.8], row=0.02, draft=0.1)
    workload.speed(50)
    assert workload.step()
    workload.policy.prepared(64 * 5.0)
    assert not workload.step()
    for _ in range(3000):
        workload.step()
    assert workload.step(), "but not for ever"


def test_steps_with_prompts_say_nothing_about_the_cost_of_rows():
    policy = DraftPolicy()
    request = Request("r", [1], SamplingParams(), arrival_index=0)
    for _ in range(5):
        policy.observe(Outcome(500, False, 100.0, {}, ()))
    assert policy.choose({request: 3}, 1) == {request: 3}
