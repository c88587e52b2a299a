"""Turns a step's plan into tensors, runs the decoder once, and returns logits."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from engine.kv_cache import KVCache, NativeKVCache, kv_cache_dtype, native_kv_dtype
from engine.layers.attention import AttentionContext
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loader import LoadedModel
from engine.models.native_decoder import NativeDecoder
from engine.request import Request
from engine.scheduler import ScheduledRequest, StepPlan
from kernels.cpu.program import StepBatch
from kernels.metadata import AttentionMetadata

_NO_ROWS = torch.empty(0, dtype=torch.int32)


class Runner(Protocol):
    """Runs one ragged forward pass for all requests of a step together."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache."""
        ...

    @property
    def workspace_bytes(self) -> int | None:
        """Bytes of activations and scratch; None where they come and go with each step."""
        ...

    def execute(self, plan: StepPlan, all_logits: bool = False) -> torch.Tensor:
        """Computes a step and writes its keys and values. Returns logits, float32 [num_rows, vocab_size].

        Rows follow `plan.scheduled`: one for each entry that samples, plus one for each of its draft
        tokens, which come first in the entry's rows. With `all_logits`, one for every scheduled token.
        Raises ValueError for a plan beyond the token budget or with too few blocks.
        """
        ...


def make_runner(loaded: LoadedModel, num_blocks: int, block_size: int, kv_dtype: torch.dtype, budget: int) -> Runner:
    """The runner of a loaded model with a KV cache of its own; `budget` is the most tokens of a step."""
    if loaded.whole_step(block_size):
        native_cache = NativeKVCache(loaded.config, num_blocks, block_size, kv_dtype)
        return NativeRunner(loaded, native_cache, budget)
    return ModelRunner(loaded, KVCache(loaded.config, num_blocks, block_size, kv_dtype, loaded.device), budget)


def runner_kv_dtype(loaded: LoadedModel, name: str) -> torch.dtype:
    """What `EngineConfig.kv_dtype` means for a loaded model. Raises ValueError for what it cannot do."""
    return native_kv_dtype(name) if loaded.native else kv_cache_dtype(name, loaded.dtype)


class ModelRunner:
    """Calls the model's layers one after another, ours or those of transformers; runs on every device."""

    def __init__(self, loaded: LoadedModel, kv_cache: KVCache, max_batched_tokens: int) -> None:
        self.loaded = loaded
        self.kv_cache = kv_cache
        self.max_batched_tokens = max_batched_tokens

    @property
    def kv_bytes(self) -> int:
        return self.kv_cache.nbytes

    @property
    def workspace_bytes(self) -> int | None:
        return None

    @torch.inference_mode()
    def execute(self, plan: StepPlan, all_logits: bool = False) -> torch.Tensor:
        step = _Step(plan, all_logits, self.max_batched_tokens)
        device = self.loaded.device
        if not step.input_ids:
            return torch.empty(0, self.loaded.config.vocab_size, device=device)
        rows = None
        if len(step.wanted_rows) < len(step.input_ids):
            rows = torch.tensor(step.wanted_rows, dtype=torch.int64, device=device)
        return self.loaded.model.logits(
            torch.tensor(step.input_ids, device=device),
            torch.tensor(step.positions, device=device),
            AttentionContext(
                step.metadata(self.kv_cache.block_size, device),
                self.kv_cache.layers,
                step.rope_lengths(self.loaded.config, device),
            ),
            rows,
        )


class NativeRunner:
    """Runs the decoder as one list of operations of the native CPU kernels."""

    def __init__(self, loaded: LoadedModel, kv_cache: NativeKVCache, max_batched_tokens: int) -> None:
        self.loaded = loaded
        self.kv_cache = kv_cache
        self.max_batched_tokens = max_batched_tokens
        assert isinstance(loaded.model, Decoder), "only our own decoder is packed for these kernels"
        self.decoder = NativeDecoder(loaded.model, loaded.config, kv_cache, max_batched_tokens)

    @property
    def kv_bytes(self) -> int:
        return self.kv_cache.nbytes

    @property
    def workspace_bytes(self) -> int | None:
        return self.decoder.workspace_bytes

    @torch.inference_mode()
    def execute(self, plan: StepPlan, all_logits: bool = False) -> torch.Tensor:
        step = _Step(plan, all_logits, self.max_batched_tokens)
        if step.input_ids:
            lengths = step.rope_lengths(self.loaded.config, self.loaded.device)
            self.decoder.forward(step.native_batch(self.kv_cache.block_size), lengths)
        return self.decoder.logits(step.wanted_rows)


class _Step:
    """The rows of a plan, one request after another."""

    def __init__(self, plan: StepPlan, all_logits: bool, budget: int) -> None:
        self.plan = plan
        self.input_ids: list[int] = []
        self.positions: list[int] = []
        self.wanted_rows: list[int] = []
        for entry in plan.scheduled:
            self.input_ids.extend(_tokens(entry))
            self.positions.extend(range(entry.start, entry.start + entry.num_new_tokens))
            if all_logits:
                self.wanted_rows = list(range(len(self.input_ids)))
            elif entry.samples:
                self.wanted_rows.extend(range(len(self.input_ids) - 1 - entry.num_drafts, len(self.input_ids)))
        if len(self.input_ids) > budget:
            raise ValueError(f"a step of {len(self.input_ids)} tokens is beyond the limit of {budget}")

    def rope_lengths(self, config: ModelConfig, device: torch.device) -> torch.Tensor | None:
        """How long each token's sequence counts as, where that matters: its own, whatever else is in the batch."""
        if not config.depends_on_length:
            return None
        lengths: list[int] = []
        for entry in self.plan.scheduled:
            request = entry.request
            floor = config.length_floor(request.num_prompt_tokens, request.num_tokens)
            lengths.extend(max(entry.start + row + 1, floor) for row in range(entry.num_new_tokens))
        return torch.tensor(lengths, device=device)

    def native_batch(self, block_size: int) -> StepBatch:
        """For the native kernels. Every microsecond counts here: one chat's step takes a few thousand.

        Raises ValueError where a request has more tokens than its blocks hold.
        """
        entries = self.plan.scheduled
        ends = [entry.start + entry.num_new_tokens for entry in entries]
        tables = np.zeros((len(entries), -(-max(ends) // block_size)), dtype=np.int32)
        first_rows, slots = [0], []
        for table, entry, end in zip(tables, entries, ends):
            blocks = entry.request.block_table
            used = -(-end // block_size)
            if used > len(blocks):
                raise ValueError(f"{end} tokens need {used} blocks of {block_size}, got {len(blocks)}")
            table[:used] = blocks[:used]
            slots += [blocks[at // block_size] * block_size + at % block_size for at in range(entry.start, end)]
            first_rows.append(len(slots))
        return StepBatch(
            _int32(self.input_ids),
            _int32(self.positions),
            torch.from_numpy(np.array(slots, dtype=np.int64)),
            _int32(first_rows),
            _int32(ends),
            torch.from_numpy(tables),
            selected=_NO_ROWS,
        )

    def metadata(self, block_size: int, device: torch.device) -> AttentionMetadata:
        entries = self.plan.scheduled
        return AttentionMetadata.build(
            [entry.request.block_table for entry in entries],
            [entry.num_new_tokens for entry in entries],
            [entry.start + entry.num_new_tokens for entry in entries],
            block_size,
            device,
        )


def _int32(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32))


def _tokens(entry: ScheduledRequest) -> list[int]:
    """The tokens an entry computes; those beyond the request's own are its drafts."""
    request, end = entry.request, entry.start + entry.num_new_tokens
    tokens = request.token_ids[entry.start : end]
    missing = entry.num_new_tokens - len(tokens)
    return tokens + request.draft_token_ids[:missing] if missing else tokens


def teacher_forced(runner: Runner, request: Request, chunk: int) -> torch.Tensor:
    """Logits after every token of a request that has its blocks, float32 [num_tokens, vocab_size], in chunks."""
    parts: list[torch.Tensor] = []
    for start in range(0, request.num_tokens, chunk):
        entry = ScheduledRequest(request, start, min(chunk, request.num_tokens - start), samples=True)
        # A copy, because the next step may write over what this one returns.
        parts.append(runner.execute(StepPlan([entry], []), all_logits=True).clone())
    return torch.cat(parts)
