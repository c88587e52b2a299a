"""The engine: requests go in, every step moves all of them on, text comes out."""

from __future__ import annotations

import secrets
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine import catalog, memory
from engine.answer import Answer, RequestOutput
from engine.block_pool import BlockPool
from engine.figures import EngineFigures, collect_figures
from engine.loading.describe import describe
from engine.metrics import Metrics, request_metrics
from engine.models import LoadCancelled, LoadedModel, load_model, release_memory
from engine.models.native_decoder import why_not_native
from engine.owners import OwnerSlots
from engine.parameters import SamplingParams
from engine.placement import choose_num_blocks, max_batched_tokens, resolve_device
from engine.protocol import EngineConfig, ModelInfo, StepEntry, TokenLogprob
from engine.request import Request
from engine.runner import Runner, make_runner, runner_kv_dtype
from engine.sampling.sampler import Sampled, sample
from engine.scheduler import ScheduledRequest, Scheduler, StepPlan, check_budget
from engine.text.prompt import fit_tokens
from engine.text.tokenizer import Tokenizer, load_tokenizer
from kernels import ops

BAD_LOGITS = (
    "The model produced numbers that are no probabilities (NaN or infinity) for this request. "
    "Its weights may be damaged, or the compute type too narrow: try dtype='fp32', or download the model again."
)


@dataclass(frozen=True, slots=True)
class AddedRequest:
    """What a request was accepted with: its seed and the most tokens its answer can have."""

    seed: int
    max_tokens: int
    prompt_tokens: int


class Engine:
    """One loaded model and all requests to it. Not thread-safe: add, cancel and step from one thread."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        loaded: LoadedModel,
        tokenizer: Tokenizer,
        runner: Runner,
        workspace_bytes: int = 0,
    ) -> None:
        budget = max_batched_tokens(config, loaded.device)
        self.config = config
        self.info = info
        self.tokenizer = tokenizer
        self.workspace_bytes = workspace_bytes
        self.pool = BlockPool(
            info.num_kv_blocks,
            info.block_size,
            cache_key=f"{info.path} {info.dtype} {info.kv_dtype}",
            prefix_caching=config.prefix_caching,
        )
        self.scheduler = Scheduler(self.pool, config.max_num_seqs, budget)
        self.metrics = Metrics()
        self.owners = OwnerSlots()
        self._device = loaded.device
        self._runner: Runner | None = runner
        # Ids beyond the tokenizer's are padding of the weights: they mean nothing and are never drawn.
        self._vocab_size = min(loaded.config.vocab_size, tokenizer.vocab_size)
        self._answers: dict[str, Answer] = {}
        self._outputs: list[RequestOutput] = []
        self._block_map_shown = False

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Engine:
        """Loads a model and makes its KV cache.

        Raises `ValueError` or `LookupError` with a message for people for what cannot be loaded,
        `LoadCancelled` once `cancelled()` is true.
        """
        started = time.monotonic()
        refuse_unavailable(config)
        path = catalog.resolve(config.model)
        device = resolve_device(config.device)
        on_progress("Reading the tokenizer", 0, 0)
        tokenizer = load_tokenizer(path)
        loaded = load_model(path, config, device, on_progress, cancelled)
        try:
            on_progress("Making room for the KV cache", 0, 0)
            engine = cls.assemble(config, path, loaded, tokenizer, started)
            if cancelled():
                raise LoadCancelled
            return engine
        except BaseException:
            del loaded
            release_memory(device)
            raise

    @classmethod
    def assemble(
        cls, config: EngineConfig, path: Path, loaded: LoadedModel, tokenizer: Tokenizer, started: float | None = None
    ) -> Engine:
        """Makes an engine with a KV cache of its own over weights that are loaded already.

        `started` is when loading began. Raises `ValueError` if the cache does not fit into memory.
        """
        refuse_unavailable(config)
        if loaded.native and (obstacle := why_not_native(loaded.config, config.block_size)) is not None:
            raise ValueError(f"the weights are packed for the native CPU kernels, which do not support {obstacle}")
        dtype = runner_kv_dtype(loaded, config.kv_dtype)
        bytes_per_token = _kv_bytes_per_token(loaded, dtype)
        num_blocks = choose_num_blocks(config, loaded.config.max_context, bytes_per_token, loaded.device)
        budget = max_batched_tokens(config, loaded.device)
        runner = make_runner(loaded, num_blocks, config.block_size, dtype, budget)
        workspace = runner.workspace_bytes
        if workspace is None:
            workspace = memory.workspace_bytes(describe(path).shape, budget, config.max_num_seqs)
        template = tokenizer.chat_template
        info = ModelInfo(
            name=model_name(config.model, path),
            path=str(path),
            architecture=loaded.config.architecture,
            format=loaded.format,
            num_parameters=loaded.num_parameters,
            num_layers=loaded.config.num_layers,
            vocab_size=loaded.config.vocab_size,
            max_context=loaded.config.max_context,
            device=str(loaded.device),
            kernels=ops.describe_backend() if loaded.native else "reference",
            dtype=_dtype_name(loaded.dtype),
            kv_dtype=_dtype_name(dtype),
            weight_bytes=loaded.weight_bytes,
            kv_bytes_per_token=bytes_per_token,
            num_kv_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            load_seconds=0.0 if started is None else time.monotonic() - started,
            supports_system_role=template is None or template.supports_system_role,
        )
        return cls(config, info, loaded, tokenizer, runner, workspace)

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

        Latencies count from `arrival_time` (monotonic seconds), by default from now.
        """
        if self._runner is None:
            raise ValueError("the model is unloaded")
        if request_id in self._answers:
            raise ValueError(f"there is a request {request_id!r} already: ids must be unique among running requests")
        self._check_tokens(token_ids, params)
        max_tokens = fit_tokens(len(token_ids), self.info.max_context, params.max_tokens, params.overflow)
        capacity = self.pool.num_blocks * self.pool.block_size
        if params.max_tokens is None or params.overflow == "stop_at_limit":
            max_tokens = max(1, min(max_tokens, capacity - len(token_ids) + 1))
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
        self.scheduler.check_fits(request.num_prompt_tokens, max_tokens)
        request.owner_slot, vacated = self.owners.enter(owner)
        if vacated is not None:
            self.pool.forget_owner(vacated)
        self.scheduler.add(request)
        self._answers[request_id] = Answer(request, self.tokenizer)
        return AddedRequest(request.seed, max_tokens, request.num_prompt_tokens)

    def _check_tokens(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        size = self.info.vocab_size
        for name, ids in (
            ("the prompt", token_ids),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
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
        """Computes one step for all requests together and returns what is new about them.

        What goes wrong inside fails the requests of this step; the engine stays usable.
        """
        if self._runner is not None and self.scheduler.has_work:
            start = time.monotonic()
            plan = self.scheduler.schedule()
            for entry in plan.scheduled:
                if entry.request.scheduled_time is None:
                    self.metrics.scheduled(entry.request, start)
            try:
                sampled = self._execute(self._runner, plan)
                self._take_in(plan, sampled)
            except Exception as error:
                traceback.print_exc()
                self._fail(plan, f"The engine failed in this step: {type(error).__name__}: {error}")
            entries = [_step_entry(entry) for entry in plan.scheduled]
            self.metrics.step_done(start, time.monotonic(), entries, len(plan.preempted))
        outputs, self._outputs = self._outputs, []
        return outputs

    @torch.inference_mode()
    def _execute(self, runner: Runner, plan: StepPlan) -> Sampled:
        logits = runner.execute(plan)
        rows = [self._answers[entry.request.request_id].sampling_row() for entry in plan.scheduled if entry.samples]
        return sample(logits, rows, self._vocab_size)

    def _take_in(self, plan: StepPlan, sampled: Sampled) -> None:
        now = time.monotonic()
        results = iter(zip(sampled.token_ids, sampled.logprobs))
        new_token_ids: list[list[int]] = []
        logprobs: list[list[TokenLogprob]] = []
        for entry in plan.scheduled:
            token_id, raw = next(results) if entry.samples else (None, None)
            if entry.samples and token_id is None:
                self.scheduler.finish(entry.request, "error", error=BAD_LOGITS)
            new_token_ids.append([] if token_id is None else [token_id])
            answer = self._answers[entry.request.request_id]
            logprobs.append([answer.describe(token_id, raw)] if token_id is not None and raw is not None else [])
        self.scheduler.commit(plan, new_token_ids)
        for entry, token_ids, described in zip(plan.scheduled, new_token_ids, logprobs):
            answer = self._answers[entry.request.request_id]
            if token_ids:
                self.metrics.tokens_made(entry.request, len(token_ids), now)
            text, stop = answer.add(token_ids)
            if stop is not None:
                self._stop(entry.request, stop)
            if entry.request.is_finished:
                self._conclude(answer, text, token_ids, described)
            elif token_ids:
                self._outputs.append(RequestOutput(entry.request.request_id, text, token_ids, described))

    def _stop(self, request: Request, stop: str) -> None:
        if request.is_finished:  # by the limit, with the same token
            request.finish_reason, request.stop_reason = "stop", stop
        else:
            self.scheduler.finish(request, "stop", stop_reason=stop)

    def _fail(self, plan: StepPlan, message: str) -> None:
        for entry in plan.scheduled:
            answer = self._answers.get(entry.request.request_id)
            if answer is not None:
                self.scheduler.finish(entry.request, "error", error=message)
                self._conclude(answer)

    def _conclude(
        self, answer: Answer, text: str = "", token_ids: Sequence[int] = (), logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        """Queues the last output of a finished request and forgets it."""
        request = answer.request
        if not isinstance(request.stop_reason, str):
            rest, stop = answer.flush()
            text += rest
            if stop is not None and request.finish_reason == "length":
                self._stop(request, stop)
        self._outputs.append(
            RequestOutput(
                request.request_id,
                text,
                list(token_ids),
                list(logprobs),
                request.finish_reason,
                request.stop_reason,
                request.error,
                request_metrics(request),
            )
        )
        self.metrics.num_finished += 1
        self.owners.leave(request.owner)
        del self._answers[request.request_id]

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
        chunk = self.scheduler.max_batched_tokens
        try:
            parts = []
            for start in range(0, len(token_ids), chunk):
                entry = ScheduledRequest(request, start, min(chunk, len(token_ids) - start), samples=True)
                # A copy, because the next step may write over what this one returns.
                parts.append(self._runner.execute(StepPlan([entry], []), all_logits=True).clone())
            return torch.cat(parts)
        finally:
            self.pool.release(request.block_table)

    def telemetry(self) -> EngineFigures:
        """The figures since the last call; the first call carries the whole block map."""
        full, self._block_map_shown = not self._block_map_shown, True
        return collect_figures(self.scheduler, self.metrics, self.owners, full)

    def memory_parts(self) -> memory.WorkerParts:
        """What the engine itself holds on its device; nothing once it is closed."""
        if self._runner is None:
            return memory.WorkerParts()
        return memory.WorkerParts(self.info.weight_bytes, self._runner.kv_bytes, self.workspace_bytes)

    def check_integrity(self) -> None:
        """Asserts that no block is lost and none owned twice; to be called between steps."""
        self.scheduler.check_integrity()

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Cancels all requests and gives the memory of weights and KV cache back to the system."""
        for request_id in list(self._answers):
            self.cancel(request_id)
        self._runner = None
        release_memory(self._device)


def refuse_unavailable(config: EngineConfig) -> None:
    """Raises `ValueError` naming an option this engine does not have, so that none is silently ignored."""
    if config.backend == "transformers":
        raise ValueError("backend='transformers' is not available yet: use 'auto' or 'native'")
    if config.quantization is not None:
        raise ValueError(
            f"quantization={config.quantization!r} is not available yet: "
            "leave it out, or choose a model file that is quantised already"
        )
    if config.kv_dtype == "int8":
        raise ValueError("kv_dtype='int8' is not available yet: use auto, fp32, fp16 or bf16")
    if config.speculation is not None or config.draft_model is not None:
        raise ValueError("speculation and draft_model are not available yet: leave them out")
    for name in ("max_num_seqs", "block_size", "max_batched_tokens", "num_kv_blocks", "max_context"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if config.max_batched_tokens is not None:
        check_budget(config.max_batched_tokens, config.max_num_seqs)


def model_name(asked_for: str, path: Path) -> str:
    """What people call the model: the name it was asked for by, or that of its file or folder."""
    if not Path(asked_for).expanduser().exists():
        return asked_for
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def _step_entry(entry: ScheduledRequest) -> StepEntry:
    """A request's share of a step: computing its latest token is decoding, anything before is prefill."""
    decodes = entry.samples and entry.num_new_tokens == 1 and entry.request.num_output_tokens > 0
    return StepEntry(
        entry.request.request_id,
        entry.request.owner_slot,
        0 if decodes else entry.num_new_tokens,
        entry.num_new_tokens if decodes else 0,
    )


def _kv_bytes_per_token(loaded: LoadedModel, dtype: torch.dtype) -> int:
    config = loaded.config
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def _dtype_name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
