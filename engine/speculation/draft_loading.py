"""Loads a draft model and gives it a KV cache beside that of the model it drafts for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from engine import catalog
from engine.block_pool import BlockPool
from engine.kv_cache import kv_bytes_per_token
from engine.loading.describe import describe
from engine.models import LoadedModel, load_model
from engine.protocol import EngineConfig
from engine.request import Request
from engine.runner import Runner, make_runner, runner_kv_dtype
from engine.sampling.rows import RequestSampling
from engine.scheduler import LengthFloor
from engine.speculation.base import MAX_DRAFT_TOKENS
from engine.speculation.draft_model import DraftModel, draft_budget
from engine.speculation.vocabulary import check_same_tokens
from engine.text.load import load_tokenizer
from engine.text.tokenizer import Tokenizer

CAUGHT_UP_WITH = 1
"""Tokens that the draft model computes besides a request's latest one where all its drafts were accepted: the last
of them, which it has not seen yet."""


def check_speculation(config: EngineConfig) -> None:
    """Raises `ValueError` for options that do not go together."""
    if config.speculation == "draft" and config.draft_model is None:
        raise ValueError("speculation='draft' needs a draft_model: a small model with the same tokenizer")
    if config.speculation != "draft" and config.draft_model is not None:
        raise ValueError(f"draft_model={config.draft_model!r} is only used with speculation='draft'")
    if not 1 <= config.num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"num_draft_tokens must lie in [1, {MAX_DRAFT_TOKENS}], got {config.num_draft_tokens}")


@dataclass(frozen=True)
class LoadedDraft:
    """The weights of a draft model. `vocab_size` is that of its tokenizer, `kv_dtype` that of its cache."""

    loaded: LoadedModel
    path: str
    vocab_size: int
    kv_dtype: torch.dtype

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.loaded.config, self.kv_dtype)


def load_draft(
    config: EngineConfig,
    tokenizer: Tokenizer,
    max_context: int,
    device: torch.device,
    on_progress: Callable[[str, int, int], None],
    cancelled: Callable[[], bool],
) -> LoadedDraft:
    """Loads `config.draft_model`, in the precision it is stored in, for a model of that tokenizer and context.

    Raises `ValueError` or `LookupError` with a message for people; another tokenizer is one reason.
    """
    assert config.draft_model is not None
    path = catalog.resolve(config.draft_model)
    draft_tokenizer = load_tokenizer(path)
    check_same_tokens(tokenizer, draft_tokenizer, config.draft_model)
    # What lies beyond the model's context the draft model never sees.
    context = min(max_context, describe(path).shape.max_context)
    own = msgspec.structs.replace(config, model=str(path), quantization=None, backend="auto", max_context=context)
    loaded = load_model(
        path, own, device, lambda stage, done, total: on_progress(f"{stage} of the draft model", done, total), cancelled
    )
    return LoadedDraft(loaded, str(path), draft_tokenizer.vocab_size, runner_kv_dtype(loaded, config.kv_dtype))


@dataclass(frozen=True)
class DraftParts:
    """A draft model ready to run: with as many KV blocks as the model itself, because it follows the same tokens."""

    runner: Runner
    pool: BlockPool
    budget: int
    max_context: int
    length_floor: LengthFloor
    vocab_size: int
    weight_bytes: int

    @classmethod
    def make(cls, draft: LoadedDraft, config: EngineConfig, num_blocks: int, max_batched_tokens: int) -> DraftParts:
        budget = draft_budget(max_batched_tokens, config.max_num_seqs)
        runner = make_runner(draft.loaded, num_blocks, config.block_size, draft.kv_dtype, budget)
        pool = BlockPool(num_blocks, config.block_size, draft.path, config.prefix_caching)
        model = draft.loaded.config
        vocab_size = min(draft.vocab_size, model.vocab_size)
        weight_bytes = draft.loaded.weight_bytes
        return cls(runner, pool, budget, model.max_context, model.length_floor, vocab_size, weight_bytes)

    def drafter(self, vocab_size: int, sampling: Callable[[Request], RequestSampling]) -> DraftModel:
        """Drafts for a model of `vocab_size`; `sampling` tells how a request samples."""
        return DraftModel(
            self.runner,
            self.pool,
            self.budget,
            self.max_context,
            self.length_floor,
            vocab_size,
            self.vocab_size,
            sampling,
        )
