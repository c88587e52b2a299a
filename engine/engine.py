"""The engine: requests go in, every step moves all of them on, text comes out."""

from __future__ import annotations

import secrets
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from msgspec.structs import replace

from engine import memory
from engine.answer import Answer, AnswerPart, RequestOutput
from engine.assembly import EngineParts, load
from engine.block_pool import BlockPool
from engine.failures import is_out_of_memory
from engine.metrics import Metrics, collect_telemetry, request_metrics
from engine.models import release_memory
from engine.owners import OwnerSlots
from engine.pace import DecodePace
from engine.parameters import SamplingParams
from engine.protocol import EngineConfig, MemoryBreakdown, StepEntry, Telemetry
from engine.request import Request
from engine.runner import NativeRunner, Runner, teacher_forced
from engine.sampling.batch import forget_settings, make_steps
from engine.sampling.counts import CountTables
from engine.sampling.rows import SamplingRow
from engine.sampling.steps import DrawnSteps
from engine.sampling.verify import Drafts, Verification, Verified, verify
from engine.scheduler import ScheduledRequest, Scheduler, StepPlan
from engine.speculation.base import Drafter
from engine.speculation.ngram import NgramDrafter
from engine.speculation.speculation import Speculation
from engine.text.prompt import answer_room, fit_tokens

BAD_LOGITS = (
    "The model produced numbers that are no probabilities (NaN or infinity) for this request. "
    "Its weights may be damaged, or the compute type too narrow: try dtype='fp32', or download the model again."
)


NO_MEMORY = (
    "The device has no memory left even for one token of this request alone ({error}). Close other programs that use "
    "it, or load the model with a shorter context or a smaller KV cache."
)


@dataclass(frozen=True, slots=True)
class _QueuedStep:
    """A step that the device computes, or is about to. Times are monotonic seconds."""

    plan: StepPlan
    entries: list[StepEntry]
    start: float
    planned: float
    sampled: Verification | DrawnSteps

    @property
    def is_wanted(self) -> bool:
        return not all(entry.request.is_finished for entry in self.plan.scheduled)


@dataclass(frozen=True, slots=True)
class AddedRequest:
    """What a request was accepted with: its seed and the most tokens its answer can have."""

    seed: int
    max_tokens: int


class Engine:
    """One loaded model and all requests to it. Not thread-safe: add, cancel and step from one thread."""

    def __init__(self, parts: EngineParts) -> None:
        info = parts.info
        self.info = info
        self.tokenizer = parts.tokenizer
        self.pool = BlockPool(
            info.num_kv_blocks,
            info.block_size,
            cache_key=f"{info.path} {info.dtype} {info.kv_dtype}",
            prefix_caching=parts.prefix_caching,
        )
        self.scheduler = Scheduler(self.pool, info.max_num_seqs, parts.max_batched_tokens, parts.length_floor)
        self.metrics = Metrics()
        self.owners = OwnerSlots()
        self._workspace_bytes = parts.workspace_bytes
        self._runner: Runner | None = parts.runner
        # Ids beyond the tokenizer's are padding of the weights: they mean nothing and are never drawn.
        self._vocab_size = min(info.vocab_size, parts.tokenizer.vocab_size)
        self._answers: dict[str, Answer] = {}
        self._counts = CountTables()
        self._outputs: list[RequestOutput] = []
        self._block_map_shown = False
        self._draft = parts.draft
        self.looks_ahead = torch.device(info.device).type == "cuda"
        """Whether steps are queued ahead; where the host computes them itself, there is nothing to wait for."""
        self._ahead: _QueuedStep | None = None
        self._last_end = 0.0
        self._pace = DecodePace()
        self.speculation = self._make_speculation(parts)

    def _make_speculation(self, parts: EngineParts) -> Speculation | None:
        if parts.info.speculation is None:
            return None
        drafter: Drafter = NgramDrafter()
        if parts.draft is not None:
            drafter = parts.draft.drafter(self._vocab_size, lambda request: self._answers[request.request_id].sampling)
        return Speculation(drafter, parts.num_draft_tokens)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Engine:
        """Loads a model and makes its KV cache, see `engine.assembly.load`."""
        return cls(load(config, on_progress, cancelled))

    # ------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        owner: str = "",
        arrival_time: float | None = None,
    ) -> AddedRequest:
        """Queues a prompt. Raises `ValueError` with a message for people if it can never be answered.

        The answer is cut to what context and KV cache have room for, by the rules of `fit_tokens`.
        Latencies count from `arrival_time` (monotonic seconds), by default from now.
        """
        if self._runner is None:
            raise ValueError("the model is unloaded")
        if request_id in self._answers:
            raise ValueError(f"there is a request {request_id!r} already: ids must be unique among running requests")
        self._check_tokens(token_ids, params)
        max_tokens = self._fit(len(token_ids), params)
        if params.min_tokens > max_tokens:
            params = msgspec.structs.replace(params, min_tokens=max_tokens)
        request = Request(
            request_id,
            list(token_ids),
            params,
            max_tokens=max_tokens,
            seed=secrets.randbits(32) if params.seed is None else params.seed,
            end_token_ids=frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids,
            owner=owner,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
        )
        request.owner_slot, vacated = self.owners.enter(owner)
        if vacated is not None:
            self.pool.forget_owner(vacated)
        self.scheduler.add(request)
        self._answers[request_id] = Answer(request, self.tokenizer, self._counts)
        return AddedRequest(request.seed, max_tokens)

    @property
    def token_limit(self) -> int:
        """The most tokens a prompt and its answer can have: what both the context and the KV cache hold."""
        # The last token of an answer is never fed back and needs no place in the cache.
        return min(self.info.max_context, self.pool.num_blocks * self.pool.block_size + 1)

    def _fit(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """The most tokens the answer can have. Raises `ValueError` saying which of context and cache is too small."""
        max_tokens = fit_tokens(num_prompt_tokens, self.info.max_context, params.max_tokens, params.overflow)
        left = self.token_limit - num_prompt_tokens
        needed = 1
        if params.overflow == "refuse" and params.max_tokens is not None:
            needed = answer_room(self.token_limit, params.max_tokens)
        if left >= needed:
            return min(max_tokens, left)
        self.scheduler.check_fits(num_prompt_tokens, max_tokens)
        return max_tokens

    def _check_tokens(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        # The weights of padding tokens can be looked up, so a prompt may hold them; answers never do.
        for name, ids, size in (
            ("the prompt", token_ids, self.info.vocab_size),
            ("logit_bias", params.logit_bias, self._vocab_size),
            ("stop_token_ids", params.stop_token_ids, self._vocab_size),
        ):
            for token_id in ids:
                if not 0 <= token_id < size:
                    raise ValueError(f"token id {token_id} in {name} is outside the vocabulary (0 to {size - 1})")

    def cancel(self, request_id: str) -> bool:
        """Ends a request and frees its blocks at once; its last output comes with the next step.

        False if there is no such request (any more).
        """
        answer = self._answers.get(request_id)
        if answer is None:
            return False
        self.scheduler.finish(answer.request, "cancelled")
        self._conclude(answer)
        return True

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._outputs)

    # ------------------------------------------------------------ one step

    def step(self) -> list[RequestOutput]:
        """Computes one step for all requests together, or several of a small model, and returns what is new about them.

        Where the device computes on its own, the next step is queued behind this one before the host waits for
        its tokens. What goes wrong inside fails the requests of this step; the engine stays usable.
        """
        if self._runner is not None:
            queued, self._ahead = self._ahead, None
            if queued is None or not queued.is_wanted:
                queued = self._begin(self._runner) if self.scheduler.has_work else None
            if queued is not None:
                self._ahead = self._begin_ahead(self._runner, queued)
                self._complete(queued)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _begin(self, runner: Runner) -> _QueuedStep | None:
        """Plans a step and queues it; None where nothing could be."""
        start = time.monotonic()
        if self.speculation is not None:
            self.speculation.propose(self.scheduler)
        plan = self._prolonged(runner, self.scheduler.schedule())
        planned = time.monotonic()
        entries = [_step_entry(entry) for entry in plan.scheduled]
        for entry in plan.scheduled:
            if entry.request.scheduled_time is None:
                self.metrics.scheduled(entry.request, start)
        try:
            return _QueuedStep(plan, entries, start, planned, self._execute(runner, plan))
        except Exception as error:
            traceback.print_exc()
            # Not only torch's own: what it keeps for later, cuBLAS or a kernel that is loaded may lack.
            is_short = is_out_of_memory(error)
            message = f"The engine failed in this step: {type(error).__name__}: {error}"
            if is_short:
                message = NO_MEMORY.format(error=str(error).partition("\n")[0])
        # Only here is the error gone, whose traceback held the step's tensors.
        if is_short and self.scheduler.retreat(plan):
            release_memory()
        else:
            self._fail(plan, message)
        self.metrics.step_done(start, time.monotonic(), entries, len(plan.preempted))
        return None

    def _prolonged(self, runner: Runner, plan: StepPlan) -> StepPlan:
        """The plan, or several steps of it in a row where those need nothing but noise from the host."""
        num_steps = self._pace.num_steps
        if num_steps == 1 or self.speculation is not None or not isinstance(runner, NativeRunner):
            return plan
        samplings = [self._answers[entry.request.request_id].sampling for entry in plan.scheduled]
        if not runner.decodes_alone(len(samplings)) or not all(each.needs_only_noise for each in samplings):
            return plan
        return self.scheduler.prolong(plan, num_steps)

    def _begin_ahead(self, runner: Runner, queued: _QueuedStep) -> _QueuedStep | None:
        """Queues the step after one whose tokens are not known yet, where that is all there is to do."""
        # Drafts follow the latest token, which nobody knows yet.
        if not self.looks_ahead or self.speculation is not None:
            return None
        plan = self.scheduler.schedule_ahead(queued.plan)
        if plan is None:
            return None
        start = time.monotonic()
        try:
            sampled = self._execute(runner, plan, queued.sampled.token_ids)
        except Exception:
            # The requests are well; whatever is wrong comes up again in a step of their own.
            traceback.print_exc()
            return None
        entries = [StepEntry(e.request.request_id, e.request.owner_slot, 0, 1) for e in plan.scheduled]
        return _QueuedStep(plan, entries, start, start, sampled)

    def _complete(self, queued: _QueuedStep) -> None:
        """Waits for a step's tokens and takes them in."""
        plan, entries = queued.plan, queued.entries
        try:
            verified = queued.sampled.result()
            seconds = time.monotonic() - queued.planned
            followed = self._take_in(plan, verified)
            entries = [_step_entry_done(entry, plan.num_steps, count) for entry, count in zip(entries, followed)]
            if self.speculation is not None:
                self.speculation.observe(plan.scheduled, entries, seconds)
        except Exception as error:
            traceback.print_exc()
            self._ahead = None
            self._fail(plan, f"The engine failed in this step: {type(error).__name__}: {error}")
        # A step that was queued behind another begins where that one ended.
        start, end = max(queued.start, self._last_end), time.monotonic()
        self._last_end = end
        self._pace.observe(entries, plan.num_steps, end - start)
        self.metrics.step_done(start, end, entries, len(plan.preempted))

    def _execute(
        self, runner: Runner, plan: StepPlan, token_ids: torch.Tensor | None = None
    ) -> Verification | DrawnSteps:
        """Queues a step; its result will be that of the entries that sample, in their order.

        token_ids int64 [num_rows]: what the step before chose, for a plan made ahead.
        """
        if plan.num_steps > 1:
            assert isinstance(runner, NativeRunner), "only these compute several steps"
            own = [self._answers[entry.request.request_id].sampling.row() for entry in plan.scheduled]
            batch = make_steps(own, plan.num_steps, torch.device("cpu"))
            return DrawnSteps(*runner.decode(plan, batch, self._vocab_size), len(own))
        logits = runner.execute(plan, token_ids=token_ids)
        rows: list[SamplingRow] = []
        drafts: list[Drafts] = []
        sources: list[int] = []
        for entry in plan.scheduled:
            if not entry.samples:
                continue
            sampling = self._answers[entry.request.request_id].sampling
            if entry.source_row is not None:
                rows.append(sampling.row(pending=1))
                drafts.append(Drafts())
                sources.append(entry.source_row)
            else:
                own = self.speculation.drafts(entry.request) if self.speculation is not None else Drafts()
                rows += sampling.rows(own.token_ids)
                drafts.append(own)
                sources += [-1] * (len(own.token_ids) + 1)
        return verify(logits, rows, drafts, self._vocab_size, token_ids, sources)

    def _take_in(self, plan: StepPlan, verified: list[Verified]) -> list[int]:
        """Returns how many tokens of each entry became part of its answer and were followed by another one."""
        now = time.monotonic()
        results = iter(verified)
        parts: list[AnswerPart | None] = []
        for entry in plan.scheduled:
            result = next(results) if entry.samples else Verified([])
            if entry.request.is_finished:  # while the step was queued
                parts.append(None)
                continue
            if result.token_ids is None:
                self.scheduler.finish(entry.request, "error", error=BAD_LOGITS)
            parts.append(self._answers[entry.request.request_id].add(result.token_ids or [], result.logprobs))
        self.scheduler.commit(plan, [[] if part is None else part.token_ids for part in parts])
        for entry, part in zip(plan.scheduled, parts):
            request = entry.request
            if part is None:
                continue
            if part.token_ids:
                self.metrics.tokens_made(request, len(part.token_ids), now)
            if part.stop is not None:
                self._stop(request, part.stop)
            if request.is_finished:
                self._conclude(self._answers[request.request_id], part)
            elif part.token_ids:
                self._outputs.append(RequestOutput(request.request_id, part.text, part.token_ids, part.logprobs))
        return [0 if part is None else max(0, len(part.token_ids) - 1) for part in parts]

    def _stop(self, request: Request, stop: str) -> None:
        if request.is_finished:  # by the limit, with the same token
            request.finish_reason, request.stop_reason = "stop", stop
        else:
            self.scheduler.finish(request, "stop", stop_reason=stop)

    def _fail(self, plan: StepPlan, message: str) -> None:
        for entry in plan.scheduled:
            answer = self._answers.get(entry.request.request_id)
            # One that was cancelled while the step was queued may have left its id to another.
            if answer is not None and answer.request is entry.request:
                self.scheduler.finish(entry.request, "error", error=message)
                self._conclude(answer)

    def _conclude(self, answer: Answer, part: AnswerPart | None = None) -> None:
        """Queues the last output of a finished request and forgets it."""
        part = part or AnswerPart([])
        request, text = answer.request, part.text
        if not isinstance(request.stop_reason, str):
            rest, stop = answer.flush()
            text += rest
            if stop is not None and request.finish_reason == "length":
                self._stop(request, stop)
        self._outputs.append(
            RequestOutput(
                request.request_id,
                text,
                part.token_ids,
                part.logprobs,
                request.finish_reason,
                request.stop_reason,
                request.error,
                request_metrics(request),
            )
        )
        self.metrics.num_finished += 1
        self.owners.leave(request.owner)
        answer.sampling.release()
        del self._answers[request.request_id]
        if self.speculation is not None:
            self.speculation.forget(request)

    # ------------------------------------------------------------ looking inside

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after every token, float32 [num_tokens, vocab_size], through the paged path in usual chunks.

        Raises `ValueError` if the tokens are invalid or do not fit into the free blocks.
        """
        if self._runner is None:
            raise ValueError("the model is unloaded")
        self._check_tokens(token_ids, SamplingParams())
        if len(token_ids) > self.info.max_context:
            raise ValueError(f"{len(token_ids)} tokens are more than the context holds ({self.info.max_context})")
        needed = self.pool.blocks_for(len(token_ids))
        if needed > self.pool.num_free:
            raise ValueError(f"{len(token_ids)} tokens need {needed} KV blocks, {self.pool.num_free} are free")
        request = Request("logits", list(token_ids), block_table=self.pool.allocate(needed))
        try:
            return teacher_forced(self._runner, request, self.scheduler.max_batched_tokens)
        finally:
            self.pool.release(request.block_table)

    def telemetry(self, breakdown: MemoryBreakdown) -> Telemetry:
        """The figures since the last call, with the memory given; the first call carries the whole block map."""
        full, self._block_map_shown = not self._block_map_shown, True
        return collect_telemetry(
            self.scheduler,
            self.metrics,
            self.owners,
            breakdown,
            full,
            "" if self.speculation is None else self.speculation.note,
        )

    def memory_parts(self) -> memory.WorkerParts:
        """What the engine itself holds on its device; nothing once it is closed."""
        if self._runner is None:
            return memory.WorkerParts()
        weights, kv_cache = self.info.weight_bytes, self._runner.kv_bytes
        if self._draft is not None:
            weights += self._draft.weight_bytes
            kv_cache += self._draft.runner.kv_bytes
        # The largest step that was tried out on a GPU had such tables too.
        counts = self._counts.nbytes if self.info.device == "cpu" else 0
        return memory.WorkerParts(weights, kv_cache, self._workspace_bytes + counts)

    def check_integrity(self) -> None:
        """Asserts that no block is lost and none owned twice; to be called between steps."""
        self.scheduler.check_integrity()
        if self.speculation is not None:
            self.speculation.drafter.check_integrity()

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Cancels all requests and gives the memory of weights and KV cache back to the system."""
        for request_id in list(self._answers):
            self.cancel(request_id)
        self._runner = self._draft = self.speculation = self._ahead = None
        self._counts = CountTables()
        forget_settings()
        release_memory()


def _step_entry(entry: ScheduledRequest) -> StepEntry:
    """A request's share of a step that is about to run: feeding back its latest token is decoding, all else prefill."""
    num_known = entry.num_new_tokens - entry.num_drafts
    decodes = entry.samples and num_known == 1 and entry.request.num_output_tokens > 0
    return StepEntry(
        entry.request.request_id,
        entry.request.owner_slot,
        0 if decodes else num_known,
        num_known if decodes else 0,
        entry.num_drafts,
    )


def _step_entry_done(entry: StepEntry, num_steps: int, num_followed: int) -> StepEntry:
    """A request's share of what was computed; so many of its new tokens were followed by another one."""
    if num_steps > 1:
        return replace(entry, decode_tokens=1 + num_followed)
    return replace(entry, accepted_tokens=num_followed)
