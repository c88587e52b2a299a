"""Measures one engine from outside, as whoever calls it waits for it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from engine.answer import RequestOutput
from engine.llm import LLM
from engine.models.decoder import Decoder
from engine.models.loader import LoadedModel
from engine.protocol import SamplingParams
from tests.gpu.clock import Clock
from tests.gpu.random_model import RandomModel

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=50, min_p=0.02, repetition_penalty=1.1, ignore_eos=True, seed=1
)
WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of a model. `batches` answer prompts of `prompt_tokens` for `steps` steps each."""

    batches: tuple[int, ...] = (1, 8, 32, 64)
    prompt_tokens: int = 128
    steps: int = 64
    prefills: tuple[int, ...] = (512, 4096, 16384)
    peer_batches: tuple[int, ...] = (1, 8)
    peer_steps: int = 24
    peer_prefill: int = 4096

    @property
    def max_context(self) -> int:
        return max(*self.prefills, self.peer_prefill, self._decoded) + 16

    @property
    def num_kv_tokens(self) -> int:
        return max(self.max_context, max(self.batches) * (self._decoded + 16))

    @property
    def _decoded(self) -> int:
        return self.prompt_tokens + self.steps + WARM_STEPS + 16


class Bench:
    """Measures one engine. Steps are timed from outside, as whoever calls the engine waits for them."""

    def __init__(self, model: RandomModel, loaded: LoadedModel, work: Workload, **options: Any) -> None:
        assert isinstance(loaded.model, Decoder)
        self.model = model
        self.work = work
        self.clock = Clock(model.device)
        self.llm: LLM = model.llm(
            loaded,
            max_num_seqs=max(work.batches),
            num_kv_blocks=work.num_kv_tokens // 16 * 5 // 4 + 8,
            prefix_caching=False,
            **options,
        )
        # What a step reads whatever the batch: the embedding gives only the rows of its tokens.
        self._weights_read = loaded.model.head.nbytes + sum(layer.nbytes for layer in loaded.model.layers)
        self._config = loaded.config
        self._num_requests = 0

    def decode(self, batch: int, params: SamplingParams = GREEDY) -> tuple[float, float]:
        """(tokens a second, bytes a second that have to be read for them), all answers in step."""
        engine, work = self.llm.engine, self.work
        request_ids = [self._add(self.model.prompt(work.prompt_tokens, seed), params) for seed in range(batch)]
        waiting = set(request_ids)
        while waiting:
            outputs = engine.step()
            waiting -= {output.request_id for output in outputs if output.token_ids}
            if ended := [output for output in outputs if output.finish_reason is not None]:
                raise RuntimeError(f"an answer ended at once: {ended[0].finish_reason} {ended[0].error or ''}")
        for _ in range(WARM_STEPS):
            engine.step()
        made = 0

        def steps() -> None:
            nonlocal made
            for _ in range(work.steps):
                made += sum(len(output.token_ids) for output in engine.step())

        seconds = self.clock.wall_seconds(steps)
        self._cancel(request_ids)
        if made < 0.9 * batch * work.steps:  # preempted, or ended
            raise RuntimeError(f"{work.steps} steps of {batch} answers made {made} tokens")
        context = work.prompt_tokens + WARM_STEPS + work.steps / 2
        read = self._weights_read + batch * context * self.llm.info.kv_bytes_per_token
        return made / seconds, read * work.steps / seconds

    def prefill(self, num_tokens: int, repeats: int = 3) -> tuple[float, float]:
        """(tokens a second, operations a second of the matrix products and of attention) of one prompt alone."""
        times = [self._first_token(num_tokens, seed) for seed in range(repeats + 1)]
        seconds = statistics.median(times[1:])
        return num_tokens / seconds, self._operations(num_tokens) / seconds

    def _first_token(self, num_tokens: int, seed: int) -> float:
        prompt, engine = self.model.prompt(num_tokens, seed), self.llm.engine

        outputs: list[RequestOutput] = []

        def answer() -> None:
            self._add(prompt, GREEDY, max_tokens=1)
            while engine.has_work:
                outputs.extend(engine.step())

        seconds = self.clock.wall_seconds(answer)
        if outputs[-1].finish_reason != "length":
            raise RuntimeError(
                f"a prompt of {num_tokens} tokens: {outputs[-1].finish_reason} {outputs[-1].error or ''}"
            )
        return seconds

    def _operations(self, num_tokens: int) -> float:
        config = self._config
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        matrices = config.hidden_size * (rows + config.num_heads * config.head_dim + 3 * config.intermediate_size)
        attention = config.num_heads * config.head_dim * num_tokens  # half of the square, two products
        head = config.hidden_size * config.vocab_size
        return 2.0 * (num_tokens * config.num_layers * (matrices + attention) + head)

    def _add(self, prompt: list[int], params: SamplingParams, max_tokens: int | None = None) -> str:
        self._num_requests += 1
        request_id = f"bench-{self._num_requests}"
        limit = self.work.steps + WARM_STEPS + 16 if max_tokens is None else max_tokens
        self.llm.engine.add_request(request_id, prompt, replace(params, max_tokens=limit))
        return request_id

    def _cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.llm.engine.cancel(request_id)
        while self.llm.engine.has_work:
            self.llm.engine.step()

    def close(self) -> None:
        self.llm.close()
