"""From a configuration to the parts of an engine: options checked, weights loaded, KV cache made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from engine import catalog, memory
from engine.dtypes import dtype_name
from engine.failures import is_out_of_memory
from engine.kv_cache import kv_bytes_per_token
from engine.loading.describe import DescriptionError, describe
from engine.loading.gguf import GGUFFile
from engine.loading.gguf_split import open_gguf
from engine.machine import num_compute_threads
from engine.models import LoadCancelled, LoadedModel, load_model, release_memory
from engine.placement import (
    choose_num_blocks,
    device_memory,
    gpu_too_small,
    load_warnings,
    max_batched_tokens,
    resolve_device,
)
from engine.protocol import EngineConfig, ModelInfo
from engine.runner import ModelRunner, Runner, make_runner, runner_kv_dtype
from engine.scheduler import LengthFloor, check_budget
from engine.speculation.draft_loading import (
    CAUGHT_UP_WITH,
    DraftParts,
    LoadedDraft,
    check_speculation,
    load_draft,
)
from engine.text.load import load_tokenizer
from engine.text.tokenizer import Tokenizer
from engine.workspace import NUM_BLOCKS, peak_bytes, run_dummy_steps
from kernels import ops


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of. `max_batched_tokens` is the most a step computes; `workspace_bytes` is what steps
    take besides weights and cache, captured graphs included."""

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
    if ops.compute_on(device.type):
        ops.set_num_threads(num_compute_threads())
    on_progress("Reading the tokenizer", 0, 0)
    is_gguf = path.is_file() and path.suffix.lower() == ".gguf"
    with open_gguf(path) if is_gguf else nullcontext() as file, _TokenizerReader(path, file) as tokenizer:
        return _load_on(config, path, file, tokenizer, device, started, on_progress, cancelled)


_HEAD_START = 0.05
"""Seconds in which most of a small model's weights are found, so that native threads have something to pack."""


class _TokenizerReader:
    """Reads a model's tokenizer while its weights are packed, which needs Python only to find them, and that first."""

    def __init__(self, path: Path, file: GGUFFile | None) -> None:
        self._wanted = threading.Event()
        self._is_over = False
        self._pool = ThreadPoolExecutor(1, "kvasir-tokenizer")
        self._reading = self._pool.submit(self._read, path, file)

    def __enter__(self) -> _TokenizerReader:
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over = True
        self._wanted.set()
        self._pool.shutdown()

    def _read(self, path: Path, file: GGUFFile | None) -> Tokenizer:
        # Of a small model, it takes longer than to pack the weights.
        with ops.one_core_left():
            self._wanted.wait(_HEAD_START)
            if self._is_over:
                raise LoadCancelled
            tokenizer = load_tokenizer(path, file)
            if tokenizer.chat_template is not None:
                tokenizer.chat_template.supports_system_role  # noqa: B018  compiles it, and is asked for at the end
            return tokenizer

    @property
    def has_failed(self) -> bool:
        return self._reading.done() and self._reading.exception() is not None

    def result(self) -> Tokenizer:
        """Waits for it. Raises what `load_tokenizer` does."""
        self._wanted.set()
        return self._reading.result()


def _load_on(
    config: EngineConfig,
    path: Path,
    file: GGUFFile | None,
    tokenizer: _TokenizerReader,
    device: torch.device,
    started: float,
    on_progress: Callable[[str, int, int], None],
    cancelled: Callable[[], bool],
) -> EngineParts:
    if device.type == "cpu":
        return _load(config, path, file, tokenizer, device, started, on_progress, cancelled)
    torch.cuda.set_device(device)  # kernels are started on it, and others may be there
    before = device_memory(device)
    needed = _estimate(config, path)
    if needed.weights <= before.free:
        try:
            return _load(config, path, file, tokenizer, device, started, on_progress, cancelled)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
    # Only here is the error gone, whose traceback held what was loaded.
    release_memory()
    raise ValueError(gpu_too_small(config, model_name(config.model, path), needed, before, device))


def _load(
    config: EngineConfig,
    path: Path,
    file: GGUFFile | None,
    reader: _TokenizerReader,
    device: torch.device,
    started: float,
    on_progress: Callable[[str, int, int], None],
    cancelled: Callable[[], bool],
) -> EngineParts:
    try:
        loaded = load_model(path, config, device, on_progress, lambda: cancelled() or reader.has_failed, file)
    except LoadCancelled:
        if reader.has_failed:
            reader.result()
        raise
    draft = None
    try:
        tokenizer = reader.result()
        if config.speculation == "draft":
            draft = load_draft(config, tokenizer, loaded.config.max_context, device, on_progress, cancelled)
        on_progress("Making room for the KV cache", 0, 0)
        parts = assemble(config, path, loaded, tokenizer, started, draft, on_progress, cancelled)
        if cancelled():
            raise LoadCancelled
        return parts
    except BaseException:
        del loaded, draft
        release_memory()
        raise


def _estimate(config: EngineConfig, path: Path) -> memory.MemoryEstimate:
    """What a model takes on a GPU. Raises `ValueError` for one that cannot be read."""
    try:
        draft = None if config.draft_model is None else describe(catalog.resolve(config.draft_model)).shape
        return memory.estimate(describe(path).shape, config, memory.Hardware("VRAM"), draft)
    except DescriptionError as error:
        raise ValueError(f"{path}: {error}") from error


def assemble(
    config: EngineConfig,
    path: Path,
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    started: float | None = None,
    draft: LoadedDraft | None = None,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> EngineParts:
    """Makes KV caches for weights that are loaded already. `started` is when loading began.

    Raises `ValueError` for options that cannot be, or if the cache does not fit into memory.
    """
    refuse_unavailable(config)
    kv_dtype = runner_kv_dtype(loaded, config.kv_dtype)
    bytes_per_token = kv_bytes_per_token(loaded.config, kv_dtype)
    budget = max_batched_tokens(config, loaded.device)
    workspace = allowance = 0
    if loaded.device.type == "cuda":
        on_progress("Trying out the largest step", 0, 0)
        workspace = peak_bytes(
            loaded.device, lambda: _dummy_steps(config, loaded, kv_dtype, tokenizer.vocab_size, budget, draft)
        )
        allowance = _graph_allowance(config, path, draft)
    num_blocks = choose_num_blocks(
        config,
        loaded.config.max_context,
        bytes_per_token + (0 if draft is None else draft.kv_bytes_per_token),
        loaded.device,
        workspace + allowance,
    )
    runner = make_runner(loaded, num_blocks, config.block_size, kv_dtype, budget)
    parts_of_draft = None if draft is None else DraftParts.make(draft, config, num_blocks, budget)
    runners = [runner] if parts_of_draft is None else [runner, parts_of_draft.runner]
    if loaded.device.type == "cpu":
        workspace = runner.workspace_bytes
        if workspace is None:
            num_rows = config.max_num_seqs * (1 + config.most_drafts)
            workspace = memory.workspace_bytes(describe(path).shape, budget, num_rows)
        workspace += sum(each.workspace_bytes or 0 for each in runners[1:])
    for each in runners:
        if isinstance(each, ModelRunner) and config.cuda_graphs:
            drafts = config.most_drafts if each is runner else CAUGHT_UP_WITH
            try:
                each.record_graphs(config.max_num_seqs, drafts, _before_graph(on_progress, cancelled))
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                raise RuntimeError(f"steps cannot be recorded ({error}): load it without CUDA graphs") from error
    workspace += sum(each.graph_bytes for each in runners)
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
        warnings=load_warnings(config, loaded.device),
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


def _dummy_steps(
    config: EngineConfig,
    loaded: LoadedModel,
    kv_dtype: torch.dtype,
    vocab_size: int,
    budget: int,
    draft: LoadedDraft | None = None,
) -> None:
    """Runs the largest steps there can be, of the model and of the one that drafts for it, over tiny KV caches."""
    runner = make_runner(loaded, NUM_BLOCKS, config.block_size, kv_dtype, budget)
    vocab_size = min(loaded.config.vocab_size, vocab_size)
    run_dummy_steps(runner, config, budget, loaded.config.max_context, vocab_size, loaded.device)
    if draft is not None:
        parts = DraftParts.make(draft, config, NUM_BLOCKS, budget)
        alone = replace(config, speculation=None, draft_model=None)
        run_dummy_steps(parts.runner, alone, parts.budget, parts.max_context, parts.vocab_size, loaded.device)


def _graph_allowance(config: EngineConfig, path: Path, draft: LoadedDraft | None) -> int:
    """What CUDA graphs will take, before there are any: they hold the cache's addresses, so that comes first."""
    allowance = memory.graph_allowance(describe(path).shape, config)
    if draft is not None:
        alone = replace(config, speculation="ngram", draft_model=None, num_draft_tokens=CAUGHT_UP_WITH)
        allowance += memory.graph_allowance(describe(Path(draft.path)).shape, alone)
    return allowance


def _before_graph(
    on_progress: Callable[[str, int, int], None], cancelled: Callable[[], bool]
) -> Callable[[int, int], None]:
    """For `record_graphs`: says how far it is, and ends it once `cancelled()` is true."""

    def before_graph(done: int, total: int) -> None:
        on_progress(f"Capturing step {done + 1} of {total}", 0, 0)
        if cancelled():
            raise LoadCancelled

    return before_graph


def refuse_unavailable(config: EngineConfig) -> None:
    """Raises `ValueError` naming an option this engine does not have, so that none is silently ignored."""
    check_speculation(config)
    for name in ("max_num_seqs", "block_size", "max_batched_tokens", "num_kv_blocks", "max_context"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 0.0 < config.gpu_memory_share <= 1.0:
        raise ValueError(f"gpu_memory_share must lie in (0, 1], got {config.gpu_memory_share:g}")
    if config.max_batched_tokens is not None:
        check_budget(config.max_batched_tokens, config.max_num_seqs)


def model_name(asked_for: str, path: Path) -> str:
    """What people call the model: the name it was asked for by, or that of its file or folder."""
    if not Path(asked_for).expanduser().exists():
        return asked_for
    return path.stem if path.suffix == ".gguf" else path.resolve().name
