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
from engine.models.native_decoder import why_not_native
from engine.placement import choose_num_blocks, max_batched_tokens, resolve_device
from engine.protocol import EngineConfig, ModelInfo
from engine.runner import Runner, make_runner, runner_kv_dtype
from engine.scheduler import check_budget
from engine.text.tokenizer import Tokenizer, load_tokenizer
from kernels import ops


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of. `max_batched_tokens` is the most a step computes."""

    info: ModelInfo
    tokenizer: Tokenizer
    runner: Runner
    max_batched_tokens: int
    workspace_bytes: int
    prefix_caching: bool


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
    try:
        on_progress("Making room for the KV cache", 0, 0)
        parts = assemble(config, path, loaded, tokenizer, started)
        if cancelled():
            raise LoadCancelled
        return parts
    except BaseException:
        del loaded
        release_memory()
        raise


def assemble(
    config: EngineConfig, path: Path, loaded: LoadedModel, tokenizer: Tokenizer, started: float | None = None
) -> EngineParts:
    """Makes a KV cache for weights that are loaded already. `started` is when loading began.

    Raises `ValueError` for options that cannot be, or if the cache does not fit into memory.
    """
    refuse_unavailable(config)
    if loaded.native and (obstacle := why_not_native(loaded.config, config.block_size)) is not None:
        raise ValueError(f"the weights are packed for the native CPU kernels, which do not support {obstacle}")
    kv_dtype = runner_kv_dtype(loaded, config.kv_dtype)
    bytes_per_token = kv_bytes_per_token(loaded.config, kv_dtype)
    num_blocks = choose_num_blocks(config, loaded.config.max_context, bytes_per_token, loaded.device)
    budget = max_batched_tokens(config, loaded.device)
    runner = make_runner(loaded, num_blocks, config.block_size, kv_dtype, budget)
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
        dtype=dtype_name(loaded.dtype),
        kv_dtype=dtype_name(kv_dtype),
        weight_bytes=loaded.weight_bytes,
        kv_bytes_per_token=bytes_per_token,
        num_kv_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        load_seconds=0.0 if started is None else time.monotonic() - started,
        supports_system_role=template is None or template.supports_system_role,
    )
    return EngineParts(info, tokenizer, runner, budget, workspace, config.prefix_caching)


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
        raise ValueError("kv_dtype='int8' is not available yet: use auto, fp32 or fp16")
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
