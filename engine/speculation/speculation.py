"""What an engine does about drafts in each step: propose, hand over for verification, learn."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence

from engine.protocol import StepEntry
from engine.request import Request
from engine.sampling.verify import Drafts
from engine.scheduler import ScheduledRequest, Scheduler
from engine.speculation.base import Drafter
from engine.speculation.policy import DraftPolicy, Outcome


class Speculation:
    """Drafts at most `num_draft_tokens` tokens for each request and step. `clock` tells seconds."""

    def __init__(self, drafter: Drafter, num_draft_tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.drafter = drafter
        self.policy = DraftPolicy()
        self.num_draft_tokens = num_draft_tokens
        self._clock = clock
        self._refrained: list[Request] = []
        self._failure = ""

    @property
    def note(self) -> str:
        """For people: what speculation does now, if there is something to say."""
        return self._failure or self.policy.note

    def propose(self, scheduler: Scheduler) -> None:
        """Gives drafts to the running requests that have room for them and where they are worth it.

        Should drafting fail, it is switched off and the note says why; answers go on without.
        """
        self._refrained = []
        for request in scheduler.running:
            request.draft_token_ids.clear()
        if self._failure:
            return
        try:
            self._propose(scheduler)
        except Exception as error:
            traceback.print_exc()
            self._failure = f"Switched off, because drafting failed: {type(error).__name__}: {error}"
            for request in scheduler.running:
                request.draft_token_ids.clear()

    def _propose(self, scheduler: Scheduler) -> None:
        running = [request for request in scheduler.running if request.params.speculation]
        num_running = len(scheduler.running)
        wanted = self.policy.choose(dict.fromkeys(running, self.num_draft_tokens), num_running)
        started = self._clock()
        self.drafter.follow(running, wanted.keys())
        self.policy.prepared(self._clock() - started)
        room = scheduler.draft_room(self.num_draft_tokens)
        available: dict[Request, int] = {}
        for request, limit in room.items():
            count = self.drafter.available(request, limit) if limit > 0 and request in wanted else 0
            if count > 0:
                available[request] = count
        counts = self.policy.choose(available, num_running)
        self._refrained = [
            request
            for request, limit in room.items()
            if limit > 0 and (request not in wanted or (request in available and request not in counts))
        ]
        if counts:
            started = self._clock()
            self.drafter.draft(counts)
            self.policy.drafted(len(counts), (self._clock() - started) / max(counts.values()))

    def drafts(self, request: Request) -> Drafts:
        """What is to be verified of a request in the step that was planned."""
        if not request.draft_token_ids:
            return Drafts()
        return Drafts(list(request.draft_token_ids), self.drafter.probabilities(request))

    def observe(self, scheduled: Sequence[ScheduledRequest], entries: Sequence[StepEntry], seconds: float) -> None:
        """Takes in how a step went: its share for each request, and how long the model took with sampling."""
        self.policy.observe(
            Outcome(
                num_rows=sum(entry.decode_tokens + entry.draft_tokens for entry in entries),
                decodes_only=not any(entry.prefill_tokens for entry in entries),
                seconds=seconds,
                verified={
                    each.request: (entry.draft_tokens, entry.accepted_tokens)
                    for each, entry in zip(scheduled, entries)
                    if entry.draft_tokens
                },
                refrained=self._refrained,
            )
        )

    def forget(self, request: Request) -> None:
        """Drops what is held for a request that is over."""
        self.drafter.forget(request)
        self.policy.forget(request)
