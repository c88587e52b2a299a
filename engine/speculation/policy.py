"""How many tokens to draft: as many as make the step pay, by what was measured. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.request import Request

FADING = 0.9
"""What an older verification counts for, compared with the next."""
TRUST = 2.0
"""How many verified drafts the expectation before the first one is worth."""
RECOVERY = 0.003
"""How far a step without drafts takes an expectation back, so that drafting is tried again some day."""
FIRST_ACCEPTANCE = 0.7
NUM_SAMPLES = 5
STALE_STEPS = 512
"""Steps after which a duration is measured anew."""
PAYBACK_STEPS = 64
"""Steps with drafts over which the time spent on following a prompt is to be won back."""
MARGIN = 1.02
"""How much more tokens a second drafts have to promise."""


class StepCosts:
    """Seconds that a step takes, by its number of rows, from the latest durations measured.

    Two durations make a number of rows known; the lower median of the last ones ignores a hiccup. What is not
    known is thought cheap, so that it gets tried: more rows as much as those known, fewer in proportion.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}
        self._now = 0

    def add(self, num_rows: int, seconds: float) -> None:
        self._now += 1
        if self._is_stale(num_rows):
            self._samples[num_rows] = deque(maxlen=NUM_SAMPLES)
        self._samples[num_rows].append(seconds)
        self._measured_at[num_rows] = self._now

    def curve(self, max_rows: int) -> list[float]:
        """The expected duration for 0 to `max_rows` rows; all 0 before anything is known."""
        known = sorted(
            (rows, _lower_median(samples))
            for rows, samples in self._samples.items()
            if len(samples) >= 2 and not self._is_stale(rows)
        )
        if not known:
            return [0.0] * (max_rows + 1)
        points = [(0, 0.0), *known, (max(max_rows, known[-1][0]) + 1, known[-1][1])]
        curve: list[float] = []
        for (left, low), (right, high) in pairwise(points):
            for rows in range(left, min(right, max_rows + 1)):
                curve.append(low + (high - low) * (rows - left) / (right - left))
        return curve

    def _is_stale(self, num_rows: int) -> bool:
        return self._now - self._measured_at.get(num_rows, -STALE_STEPS) >= STALE_STEPS


def _lower_median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


class Acceptance:
    """How likely a request's next draft is accepted if those before it are, from its latest verifications."""

    def __init__(self, expected: float) -> None:
        self._expected = expected
        self._accepted = TRUST * expected
        self._verified = TRUST

    @property
    def rate(self) -> float:
        return self._accepted / self._verified

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Takes in one verification; what follows the first draft refused says nothing."""
        self._accepted = self._accepted * FADING + num_accepted
        self._verified = self._verified * FADING + min(num_drafts, num_accepted + 1)

    def recover(self, expected: float) -> None:
        """Drifts back to an expectation, for want of anything new."""
        self._accepted += (expected * self._verified - self._accepted) * RECOVERY


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step as the policy sees it.

    `num_rows` counts the tokens the model computed, `seconds` the time it took with sampling; where prompts
    were among them (`decodes_only` false) that says nothing. `verified` gives drafts and accepted ones,
    `refrained` are the requests that could have had drafts and were not worth any.
    """

    num_rows: int
    decodes_only: bool
    seconds: float
    verified: Mapping[Request, tuple[int, int]]
    refrained: Sequence[Request] = ()


class DraftPolicy:
    """Chooses the numbers of drafts that promise the most tokens a second.

    A request with acceptance a is expected to gain a + a^2 + ... tokens; the price is the time of a step with so
    many more rows, of the drafting, and of following prompts as far as it is not won back yet. Where nothing
    promises more than a plain step, nothing is drafted. All estimates drift back to where drafts are tried again.
    """

    def __init__(self) -> None:
        self._step_costs = StepCosts()
        self._draft_costs = StepCosts()
        self._acceptance: dict[Request, Acceptance] = {}
        self._overall = Acceptance(FIRST_ACCEPTANCE)
        self._debt = 0.0
        self._activity = 1.0
        self._objection = ""

    def choose(self, available: Mapping[Request, int], num_decodes: int) -> dict[Request, int]:
        """How many drafts each request should get in a step that decodes `num_decodes` requests."""
        gains = sorted(
            (
                (self._acceptance_of(request).rate ** depth, request.arrival_index, depth, request)
                for request, limit in available.items()
                for depth in range(1, limit + 1)
            ),
            key=lambda gain: (-gain[0], gain[1], gain[2]),
        )
        step_seconds = self._step_costs.curve(num_decodes + len(gains))
        draft_seconds = self._draft_costs.curve(len(available))
        plain_seconds = step_seconds[num_decodes]
        if not gains or plain_seconds == 0.0:
            return dict(available)
        at_depth = [0] * (max(available.values()) + 1)
        tokens, drafting = float(num_decodes), self._debt / PAYBACK_STEPS
        best, best_speed, price = 0, 0.0, 1.0
        for count, (gain, _, depth, _) in enumerate(gains, start=1):
            tokens += gain
            drafting += draft_seconds[at_depth[depth] + 1] - draft_seconds[at_depth[depth]]
            at_depth[depth] += 1
            seconds = step_seconds[num_decodes + count] + drafting
            if tokens / seconds > best_speed:
                best, best_speed, price = count, tokens / seconds, seconds / plain_seconds
        if best_speed < MARGIN * num_decodes / plain_seconds:
            self._objection = (
                f"{self._overall.rate:.0%} of the drafts would be accepted, and a step with {best} of them "
                f"takes {price:.1f} times as long"
            )
            return {}
        counts: dict[Request, int] = {}
        for _, _, depth, request in gains[:best]:
            counts[request] = depth
        return counts

    def _acceptance_of(self, request: Request) -> Acceptance:
        if request not in self._acceptance:
            self._acceptance[request] = Acceptance(self._overall.rate)
        return self._acceptance[request]

    def prepared(self, seconds: float) -> None:
        """Notes the time that following requests took before drafting."""
        self._debt += seconds

    def drafted(self, num_requests: int, seconds: float) -> None:
        """Notes the time that one draft for each of so many requests took."""
        self._draft_costs.add(num_requests, seconds)

    def observe(self, outcome: Outcome) -> None:
        """Takes in how a step went."""
        if outcome.decodes_only:
            self._step_costs.add(outcome.num_rows, outcome.seconds)
        for request, (num_drafts, num_accepted) in outcome.verified.items():
            self._acceptance_of(request).verified(num_drafts, num_accepted)
            self._overall.verified(num_drafts, num_accepted)
        if outcome.verified:
            self._debt -= self._debt / PAYBACK_STEPS
            self._activity += (1.0 - self._activity) * (1 - FADING)
        elif outcome.refrained:
            self._debt -= self._debt * RECOVERY
            self._activity -= self._activity * (1 - FADING)
            for request in outcome.refrained:
                self._acceptance_of(request).recover(self._overall.rate)
            self._overall.recover(FIRST_ACCEPTANCE)

    def forget(self, request: Request) -> None:
        """Drops what it knows of a request that is over."""
        self._acceptance.pop(request, None)

    @property
    def note(self) -> str:
        """For people: what it does now."""
        if self._activity < 0.3:
            return f"Paused, because it would lose time: {self._objection}. It is tried again from time to time."
        return ""
