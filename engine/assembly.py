"""From a configuration to the parts of an engine: options checked, weights loaded, KV cache made."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine import catalog, memory
from engine.dtypes import dtype_name
from engine.kv_cache import kv_bytes_per_token
from engine.loading.describe import describe
from engine.models import LoadCancelled, LoadedModel, load_model, release_memory
from engine.placement import choose_num_blocks, max_batched_tokens, resolve_device
from engine.protocol import EngineConfig, ModelInfo
from engine.runner import Runner, make_runner, runner_kv_dtype
from engine.scheduler import LengthFloor, check_budget
from engine.speculation.draft_loading import DraftParts, LoadedDraft, check_speculation, load_draft
from engine.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of. `max_batched_tokens` is the most a step computes."""

    info: ModelInfo
    tokenizer: Tokenizer
    runner: Runner
    max_batched_tokens: int
    workspace_bytes: int
    prefix_caching: bool
    num_draft_tokens: int
    draft: DraftParts | None
    """The draft model, with `info.speculation` "draft"."""
    length_floor: LengthFloor


def load(
    config: EngineConfig,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> EngineParts:
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
    draft = None
    try:
        if config.speculation == "draft":
            draft = load_draft(config, tokenizer, loaded.config.max_context, device, on_progress, cancelled)
        on_progress("Making room for the KV cache", 0, 0)
        parts = assemble(config, path, loaded, tokenizer, started, draft)
        if cancelled():
            raise LoadCancelled
        return parts
    except BaseException:
        del loaded, draft
        release_memory()
        raise


def assemble(
    config: EngineConfig,
    path: Path,
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    started: float | None = None,
    draft: LoadedDraft | None = None,
) -> EngineParts:
    """Makes KV caches for weights that are loaded already. `started` is when loading began.

    Raises `ValueError` for options that cannot be, or if the cache does not fit into memory.
    """
    refuse_unavailable(config)
    kv_dtype = runner_kv_dtype(loaded, config.kv_dtype)
    bytes_per_token = kv_bytes_per_token(loaded.config, kv_dtype)
    draft_bytes_per_token = 0 if draft is None else draft.kv_bytes_per_token
    num_blocks = choose_num_blocks(
        config, loaded.config.max_context, bytes_per_token + draft_bytes_per_token, loaded.device
    )
    budget = max_batched_tokens(config, loaded.device)
    runner = make_runner(loaded, num_blocks, config.block_size, kv_dtype, budget)
    workspace = runner.workspace_bytes
    if workspace is None:
        num_rows = config.max_num_seqs * (1 + (config.num_draft_tokens if config.speculation is not None else 0))
        workspace = memory.workspace_bytes(describe(path).shape, budget, num_rows)
    parts_of_draft = None if draft is None else DraftParts.make(draft, config, num_blocks, budget)
    if parts_of_draft is not None:
        workspace += parts_of_draft.runner.workspace_bytes or 0
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
        kernels=loaded.kernels(config.block_size),
        dtype=dtype_name(loaded.dtype),
        kv_dtype=dtype_name(kv_dtype),
        weight_bytes=loaded.weight_bytes,
        kv_bytes_per_token=bytes_per_token,
        num_kv_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        load_seconds=0.0 if started is None else time.monotonic() - started,
        supports_system_role=template is None or template.supports_system_role,
        backend=loaded.backend,
        quantization=loaded.quantization,
        speculation=config.speculation,
        draft_model=None if draft is None else model_name(config.draft_model or draft.path, Path(draft.path)),
    )
    return EngineParts(
        info,
        tokenizer,
        runner,
        budget,
        workspace,
        config.prefix_caching,
        config.num_draft_tokens,
        parts_of_draft,
        loaded.config.length_floor,
    )


def refuse_unavailable(config: EngineConfig) -> None:
    """Raises `ValueError` naming an option this engine does not have, so that none is silently ignored."""
    check_speculation(config)
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
