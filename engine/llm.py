"""The in-process API: a model, its engine, and calls that wait for answers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, overload

import msgspec
import torch

from engine.answer import RequestOutput
from engine.engine import AddedRequest, Engine
from engine.parameters import SamplingParams
from engine.protocol import ChatMessage, EngineConfig, FinishReason, ModelInfo, RequestMetrics, TokenLogprob
from engine.text.prompt import build_prompt

Prompt = str | Sequence[int]
Conversation = Sequence[ChatMessage | Mapping[str, str]]


@dataclass(slots=True)
class Completion:
    """One finished answer. `token_ids` includes a final end token, `text` does not.

    `stop_reason` is the stop string or token id that ended it, None for an end-of-text token.
    `logprobs` is None unless they were asked for. `error` says what failed when `finish_reason` is "error".
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    metrics: RequestMetrics | None = None
    error: str | None = None
    seed: int = 0
    dropped_messages: int = 0
    """Oldest messages of the conversation that `params.overflow` left out."""

    def take(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        if self.logprobs is not None:
            self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.metrics = output.metrics
        self.error = output.error


class AnswerStream(Iterator[RequestOutput]):
    """One answer as it comes, see `LLM.stream`; the last output has a `finish_reason`."""

    def __init__(self, llm: LLM, request_id: str) -> None:
        self._llm = llm
        self._request_id = request_id
        self._is_over = False

    def __next__(self) -> RequestOutput:
        if self._is_over:
            raise StopIteration
        output = self._llm._next_output(self._request_id)
        if output.finish_reason is not None:
            self.close()
        return output

    def close(self) -> None:
        """Cancels the request unless it is finished."""
        self._is_over = True
        self._llm._drop(self._request_id)

    def __del__(self) -> None:
        self.close()


class LLM:
    """A loaded model. Arguments are those of `protocol.EngineConfig`; `model` is a folder, a .gguf
    file, or a name from the catalog.

    All requests of a call run in one batch. Usable as a context manager; `close` gives the memory
    back. Raises `ValueError` or `LookupError` with a message for people. Not thread-safe.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto",
        backend: Literal["auto", "native", "transformers"] = "auto",
        quantization: Literal["int8", "int4"] | None = None,
        kv_dtype: Literal["auto", "fp32", "fp16", "bf16", "int8"] = "auto",
        max_context: int | None = None,
        max_num_seqs: int = 8,
        max_batched_tokens: int | None = None,
        num_kv_blocks: int | None = None,
        block_size: int = 16,
        prefix_caching: bool = True,
        speculation: Literal["ngram", "draft"] | None = None,
        draft_model: str | None = None,
        num_draft_tokens: int = 4,
        quantization_group_size: Literal[32, 64, 128] = 32,
        gpu_memory_share: float = 0.9,
        cuda_graphs: bool = True,
    ) -> None:
        config = EngineConfig(
            model=str(model),
            device=device,
            dtype=dtype,
            backend=backend,
            quantization=quantization,
            kv_dtype=kv_dtype,
            max_context=max_context,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            prefix_caching=prefix_caching,
            speculation=speculation,
            draft_model=draft_model,
            num_draft_tokens=num_draft_tokens,
            quantization_group_size=quantization_group_size,
            gpu_memory_share=gpu_memory_share,
            cuda_graphs=cuda_graphs,
        )
        # A round trip through the wire format checks types and choices the way the worker does.
        config = msgspec.convert(msgspec.to_builtins(config), EngineConfig)
        self._use(Engine.load(config))

    @classmethod
    def over(cls, engine: Engine) -> LLM:
        """The same API over an engine that is there already."""
        llm = cls.__new__(cls)
        llm._use(engine)
        return llm

    def _use(self, engine: Engine) -> None:
        self.engine = engine
        self._ids = itertools.count()
        # What came of each request that somebody here waits for and has not been read yet.
        self._outputs: dict[str, deque[RequestOutput]] = {}

    @property
    def info(self) -> ModelInfo:
        return self.engine.info

    # ------------------------------------------------------------ answers

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None) -> list[Completion]: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt] | Sequence[int], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: str | Sequence[Prompt] | Sequence[int],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continues each prompt, text or token ids; `params` is one for all or one for each.

        One prompt alone may be given without a list. Completions are in the order of the prompts.
        A request that fails while it runs has `finish_reason` "error" and does not disturb the others.
        """
        batch = _as_batch(prompts)
        token_ids = [self._encode(prompt) for prompt in batch]
        return self._run(token_ids, _params_for(batch, params))

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answers each conversation, a list of {"role", "content"}; one alone may be given without a list.

        A conversation too long for the context follows `params.overflow`.
        """
        batch = _as_conversations(conversations)
        own_params = _params_for(batch, params)
        prompts = [
            build_prompt(self.engine.tokenizer, messages, self.engine.token_limit, own.max_tokens, own.overflow)
            for messages, own in zip(batch, own_params)
        ]
        completions = self._run([prompt.token_ids for prompt in prompts], own_params)
        for completion, prompt in zip(completions, prompts):
            completion.dropped_messages = prompt.dropped_messages
        return completions

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AnswerStream:
        """Iterates over the answer to one prompt as it comes.

        Several streams may be read in turn, with other calls between: all are computed in one batch.
        Closing a stream, or letting go of it, cancels its request.
        """
        request_id = self._new_id()
        self._add(request_id, self._encode(prompt), params or SamplingParams())
        return AnswerStream(self, request_id)

    def _run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        completions: dict[str, Completion] = {}
        try:
            for token_ids, own in zip(prompts, params, strict=True):
                request_id = self._new_id()
                added = self._add(request_id, token_ids, own)
                logprobs = None if own.logprobs is None else []
                completions[request_id] = Completion(logprobs=logprobs, seed=added.seed)
            for request_id, completion in completions.items():
                while completion.finish_reason is None:
                    completion.take(self._next_output(request_id))
        finally:
            for request_id in completions:
                self._drop(request_id)
        return list(completions.values())

    def _add(self, request_id: str, token_ids: Sequence[int], params: SamplingParams) -> AddedRequest:
        added = self.engine.add_request(request_id, token_ids, params)
        self._outputs[request_id] = deque()
        return added

    def _next_output(self, request_id: str) -> RequestOutput:
        """Steps until there is something new of a request; what comes of the others waits for their readers."""
        own = self._outputs[request_id]
        while not own:
            if not self.engine.has_work:
                raise RuntimeError(f"the engine has lost {request_id}: was it stepped by somebody else?")
            for output in self.engine.step():
                if (waiting := self._outputs.get(output.request_id)) is not None:
                    waiting.append(output)
        return own.popleft()

    def _drop(self, request_id: str) -> None:
        if self._outputs.pop(request_id, None) is not None:
            self.engine.cancel(request_id)

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _new_id(self) -> str:
        return f"llm-{next(self._ids)}"

    # ------------------------------------------------------------ looking inside

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Teacher-forced logits, float32 [num_tokens, vocab_size]: row i follows token i. Goes the paged path."""
        return self.engine.logits(token_ids)

    def stats(self) -> dict[str, int]:
        """Counters since loading; blocks as they are now."""
        engine = self.engine
        return {
            "steps": engine.metrics.num_steps,
            "finished_requests": engine.metrics.num_finished,
            "running": len(engine.scheduler.running),
            "waiting": len(engine.scheduler.waiting),
            "prefill_tokens": engine.metrics.num_prefill_tokens,
            "decode_tokens": engine.metrics.num_decode_tokens,
            "prefix_query_tokens": engine.scheduler.prefix_query_tokens,
            "prefix_hit_tokens": engine.scheduler.prefix_hit_tokens,
            "preemptions": engine.scheduler.num_preemptions,
            "evicted_blocks": engine.pool.num_evictions,
            "kv_blocks_total": engine.pool.num_blocks,
            "kv_blocks_used": engine.pool.num_used,
            "kv_blocks_cached": engine.pool.num_cached,
            "drafted_tokens": sum(engine.metrics.drafted_by_position),
            "accepted_tokens": sum(engine.metrics.accepted_by_position),
        }

    def close(self) -> None:
        """Gives the memory back; the LLM cannot be used afterwards."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _as_batch(prompts: str | Sequence[Prompt] | Sequence[int]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(token_id, int) for token_id in prompts):
        return [[token_id for token_id in prompts if isinstance(token_id, int)]]
    batch: list[Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, int):
            raise ValueError("a prompt is text or a list of token ids; this list mixes token ids with prompts")
        batch.append(prompt)
    return batch


def _as_conversations(conversations: Conversation | Sequence[Conversation]) -> list[list[ChatMessage]]:
    batch: list[list[ChatMessage]] = []
    alone: list[ChatMessage] = []
    for each in conversations:
        if isinstance(each, (ChatMessage, Mapping)):
            alone.append(_as_message(each))
        else:
            batch.append([_as_message(message) for message in each])
    if alone and batch:
        raise ValueError("a conversation is a list of messages; this list mixes messages with conversations")
    return [alone] if alone else batch


def _as_message(message: ChatMessage | Mapping[str, str]) -> ChatMessage:
    return message if isinstance(message, ChatMessage) else msgspec.convert(dict(message), ChatMessage)


def _params_for(
    batch: Sequence[object], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(batch)
    if len(params) != len(batch):
        raise ValueError(f"{len(batch)} prompts need one set of sampling parameters or one each, not {len(params)}")
    return list(params)
