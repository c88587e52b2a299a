"""Runs the layers of a model one after another, on every device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.loader import LoadedModel
from engine.runner.graphs import CudaCapture, StaticSteps, step_shapes
from engine.runner.rows import StepArrays, StepRows
from engine.runner.staging import Staging
from engine.scheduler import StepPlan
from kernels import ops


class ModelRunner:
    """Calls the model's layers, ours or those of transformers; steps of usual sizes as CUDA graphs once recorded.

    `kv_cache` has one block more than the scheduler knows of if graphs are to be recorded: padding is written there.
    """

    def __init__(self, loaded: LoadedModel, kv_cache: KVCache, max_batched_tokens: int) -> None:
        self.loaded = loaded
        self.kv_cache = kv_cache
        self.max_batched_tokens = max_batched_tokens
        self._staging = Staging(loaded.device)
        self._static: StaticSteps | None = None
        self.graph_bytes = 0

    @property
    def kv_bytes(self) -> int:
        return self.kv_cache.nbytes

    @property
    def workspace_bytes(self) -> int | None:
        return None

    @property
    def can_record(self) -> bool:
        """Whether steps can be recorded as CUDA graphs: no layer asks for numbers that only the device knows."""
        model = self.loaded.model
        return (
            self.loaded.device.type == "cuda"
            and ops.kernel_backend() == "triton"
            and isinstance(model, Decoder)
            and model.is_capturable
        )

    def record_graphs(
        self, max_num_seqs: int, num_draft_tokens: int, on_graph: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Records steps of up to so many sequences, each with its next token alone or with up to so many drafts.

        Calls `on_graph(done, total)` before each. Nothing happens where `can_record` is false.
        Raises torch.OutOfMemoryError where there is no room for them.
        """
        if not self.can_record:
            return
        assert isinstance(self.loaded.model, Decoder)
        longest = min(self.loaded.config.max_context, (self.kv_cache.num_blocks - 1) * self.kv_cache.block_size)
        shapes = step_shapes(max_num_seqs, num_draft_tokens, longest)
        capture = CudaCapture(self.loaded.device)
        static = StaticSteps(self.loaded.model, self.kv_cache, self._staging, shapes)
        static.record(capture, on_graph)
        self._static, self.graph_bytes = static, capture.taken_bytes()

    @torch.inference_mode()
    def execute(self, plan: StepPlan, all_logits: bool = False, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        rows = StepRows(plan, all_logits, self.max_batched_tokens)
        if not rows.input_ids:
            return torch.empty(0, self.loaded.config.vocab_size, device=self.loaded.device)
        shape = None if self._static is None else self._static.shape_of(rows)
        if self._static is not None and shape is not None:
            return self.compute(self._static.prepare(shape, rows, token_ids))
        return self.compute(self._prepare(rows, token_ids))

    def compute(self, prepared: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Runs the model on a step that is on the device already; what is left of `execute` is the host's work."""
        return prepared()

    def _prepare(self, rows: StepRows, token_ids: torch.Tensor | None) -> Callable[[], torch.Tensor]:
        block_size = self.kv_cache.block_size
        arrays = StepArrays.of(rows, self.loaded.config, block_size)
        step = self._staging.upload(arrays)
        step.take_tokens(token_ids)
        context = step.context(arrays, block_size, self.kv_cache.layers)
        wanted = None if len(rows.wanted_rows) == rows.num_tokens else step.wanted_rows
        return functools.partial(self.loaded.model.logits, step.input_ids, step.positions, context, wanted)
