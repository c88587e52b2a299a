"""Runs our decoder as one list of operations of the native CPU kernels."""

from __future__ import annotations

import torch

from engine.kv_cache import NativeKVCache
from engine.models.decoder import Decoder
from engine.models.loader import LoadedModel
from engine.models.native_decoder import HEAD_ROWS, NativeDecoder
from engine.runner.rows import StepRows
from engine.scheduler import StepPlan
from kernels.cpu.program import StepBatch
from kernels.sampling import SamplingBatch


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

    @property
    def graph_bytes(self) -> int:
        return 0

    def execute(self, plan: StepPlan, all_logits: bool = False, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        rows = StepRows(plan, all_logits, self.max_batched_tokens)
        if not rows.input_ids:
            return torch.empty(0, self.loaded.config.vocab_size)
        return self.decoder.logits(self._batch(rows, token_ids), rows.wanted_rows, self._rope_lengths(rows))

    def decodes_alone(self, num_rows: int) -> bool:
        """Whether several steps of so many rows can be computed without the host in between."""
        return num_rows <= HEAD_ROWS and not self.decoder.needs_host

    def decode(self, plan: StepPlan, sampling: SamplingBatch, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes `plan.num_steps` steps of one token for each entry, see `NativeDecoder.decode`."""
        rows = StepRows(plan, False, self.max_batched_tokens)
        return self.decoder.decode(self._batch(rows, None, plan.num_steps), sampling, vocab_size, plan.num_steps)

    def _rope_lengths(self, rows: StepRows) -> torch.Tensor | None:
        if not self.loaded.config.depends_on_length:
            return None
        lengths: list[int] = []
        for entry, floor in zip(rows.entries, rows.length_floors(self.loaded.config)):
            lengths.extend(max(entry.start + row + 1, floor) for row in range(entry.num_new_tokens))
        return torch.tensor(lengths)

    def _batch(self, rows: StepRows, token_ids: torch.Tensor | None, num_steps: int = 1) -> StepBatch:
        """Raises ValueError where a request has more tokens than its blocks hold, those of later steps among them."""
        entries, block_size = rows.entries, self.kv_cache.block_size
        ends = [entry.start + entry.num_new_tokens for entry in entries]
        width = -(-(max(ends) + num_steps - 1) // block_size)
        first_rows, slots, tables = [0], [], []
        for entry, end in zip(entries, ends):
            blocks = entry.request.block_table
            used = -(-(end + num_steps - 1) // block_size)
            if used > len(blocks):
                raise ValueError(f"{end + num_steps - 1} tokens need {used} blocks of {block_size}, got {len(blocks)}")
            tables.append(blocks[:used] + [0] * (width - used))
            slots += [blocks[at // block_size] * block_size + at % block_size for at in range(entry.start, end)]
            first_rows.append(len(slots))
        input_ids = rows.input_ids
        if rows.sourced_rows:
            assert token_ids is not None, "a step with a source_row needs the tokens of the one before"
            for row, source in zip(rows.sourced_rows, rows.source_rows):
                input_ids[row] = int(token_ids[source])
        selected = rows.wanted_rows if len(rows.wanted_rows) <= HEAD_ROWS else ()
        return StepBatch(input_ids, rows.positions, slots, first_rows, ends, tables, selected)
