"""Turns a step's plan into tensors, runs the model once, and returns logits."""

from __future__ import annotations

import torch

from engine.kv_cache import KVCache, NativeKVCache, kv_cache_dtype, native_kv_dtype
from engine.models.loader import LoadedModel
from engine.request import Request
from engine.runner.base import Runner as Runner
from engine.runner.eager import ModelRunner as ModelRunner
from engine.runner.native import NativeRunner as NativeRunner
from engine.scheduler import ScheduledRequest, StepPlan


def make_runner(loaded: LoadedModel, num_blocks: int, block_size: int, kv_dtype: torch.dtype, budget: int) -> Runner:
    """The runner of a loaded model with a KV cache of its own; `budget` is the most tokens of a step."""
    if loaded.whole_step(block_size):
        native_cache = NativeKVCache(loaded.config, num_blocks, block_size, kv_dtype)
        return NativeRunner(loaded, native_cache, budget)
    # On a GPU steps are padded with tokens that lie in a block of their own.
    num_dummies = 1 if loaded.device.type == "cuda" else 0
    kv_cache = KVCache(loaded.config, num_blocks + num_dummies, block_size, kv_dtype, loaded.device)
    return ModelRunner(loaded, kv_cache, budget)


def runner_kv_dtype(loaded: LoadedModel, name: str) -> torch.dtype:
    """What `EngineConfig.kv_dtype` means for a loaded model. Raises ValueError for what it cannot do."""
    return native_kv_dtype(name) if loaded.native else kv_cache_dtype(name, loaded.dtype)


def teacher_forced(runner: Runner, request: Request, chunk: int) -> torch.Tensor:
    """Logits after every token of a request that has its blocks, float32 [num_tokens, vocab_size], in chunks."""
    parts: list[torch.Tensor] = []
    for start in range(0, request.num_tokens, chunk):
        entry = ScheduledRequest(request, start, min(chunk, request.num_tokens - start), samples=True)
        # A copy, because the next step may write over what this one returns.
        parts.append(runner.execute(StepPlan([entry], []), all_logits=True).clone())
    return torch.cat(parts)
