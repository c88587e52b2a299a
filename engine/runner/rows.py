"""The rows of a step as the host knows them: lists of the plan's tokens, and arrays that go to a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.models.config import ModelConfig
from engine.scheduler import ScheduledRequest, StepPlan

_TABLE_WIDTH = 16
"""Block tables are as wide as a multiple of it: Triton compiles a kernel anew for a stride that is none."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """How large a step is, or what one is padded to: then `max_query_len` and `max_seq_len` are upper bounds."""

    num_tokens: int
    num_seqs: int
    max_query_len: int
    max_seq_len: int

    def table_width(self, block_size: int) -> int:
        return _table_width(max(self.max_seq_len, self.max_query_len), block_size)

    def holds(self, other: StepShape) -> bool:
        """Whether a step fits in, and with it the padding: sequences of at most `max_query_len` tokens."""
        left = self.num_tokens - other.num_tokens
        return (
            left >= 0
            and other.max_seq_len <= self.max_seq_len
            and other.max_query_len <= self.max_query_len
            and other.num_seqs + -(-left // self.max_query_len) <= self.num_seqs
        )


class StepRows:
    """The rows of a plan, one request after another."""

    def __init__(self, plan: StepPlan, all_logits: bool, budget: int) -> None:
        self.entries = plan.scheduled
        self.input_ids: list[int] = []
        self.wanted_rows: list[int] = []
        self.sourced_rows: list[int] = []
        """Rows whose token is that of a row of the step before, and of which."""
        self.source_rows: list[int] = []
        for entry in self.entries:
            if entry.source_row is not None:
                self.sourced_rows.append(len(self.input_ids))
                self.source_rows.append(entry.source_row)
            self.input_ids.extend(_tokens(entry))
            if all_logits:
                self.wanted_rows = list(range(len(self.input_ids)))
            elif entry.samples:
                self.wanted_rows.extend(range(len(self.input_ids) - 1 - entry.num_drafts, len(self.input_ids)))
        if len(self.input_ids) > budget:
            raise ValueError(f"a step of {len(self.input_ids)} tokens is beyond the limit of {budget}")

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def positions(self) -> list[int]:
        return [at for entry in self.entries for at in range(entry.start, entry.start + entry.num_new_tokens)]

    @property
    def shape(self) -> StepShape:
        return StepShape(
            self.num_tokens,
            len(self.entries),
            max(entry.num_new_tokens for entry in self.entries),
            max(entry.start + entry.num_new_tokens for entry in self.entries),
        )

    def length_floors(self, config: ModelConfig) -> list[int]:
        """How long the sequence of each entry counts as at least, see `ModelConfig.length_floor`."""
        requests = [entry.request for entry in self.entries]
        return [config.length_floor(request.num_prompt_tokens, request.num_tokens) for request in requests]


def _tokens(entry: ScheduledRequest) -> list[int]:
    """The tokens an entry computes; those beyond the request's own are its drafts."""
    if entry.source_row is not None:
        return [0]  # until the device puts the right one there
    request, end = entry.request, entry.start + entry.num_new_tokens
    tokens = request.token_ids[entry.start : end]
    missing = entry.num_new_tokens - len(tokens)
    return tokens + request.draft_token_ids[:missing] if missing else tokens


@dataclass(frozen=True, slots=True, eq=False)
class StepArrays:
    """All integers of a step, as `engine.layers.attention.AttentionContext` and the runner need them.

    int64 [num_tokens] each: input_ids, positions, slot_mapping, rope_lengths (empty where no rope depends on the
    length). int64: wanted_rows, the rows whose logits are asked for; sourced_rows and source_rows, see `StepRows`.
    int32: cu_seqlens_q [num_seqs + 1], seq_lens [num_seqs], block_table [num_seqs, table_width]. The lists are what
    the arrays were made of.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    rope_lengths: np.ndarray
    wanted_rows: np.ndarray
    sourced_rows: np.ndarray
    source_rows: np.ndarray
    cu_seqlens_q: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    query_lens: list[int]
    seq_lens_list: list[int]
    block_tables: list[list[int]]

    @classmethod
    def of(
        cls,
        rows: StepRows,
        config: ModelConfig,
        block_size: int,
        shape: StepShape | None = None,
        dummy_block: int = 0,
    ) -> StepArrays:
        """With a shape, the step is padded to it by sequences whose tokens all lie in the dummy block.

        Raises ValueError where a request has more tokens than its blocks hold.
        """
        query_lens = [entry.num_new_tokens for entry in rows.entries]
        seq_lens = [entry.start + entry.num_new_tokens for entry in rows.entries]
        tables = [
            _used_blocks(entry.request.block_table, seq_len, block_size)
            for entry, seq_len in zip(rows.entries, seq_lens)
        ]
        width = _table_width(max(seq_lens, default=1), block_size)
        if shape is not None:
            width = shape.table_width(block_size)
            padding = _padding(shape, len(query_lens), rows.num_tokens)
            query_lens += padding
            seq_lens += padding
            tables += [[dummy_block] * -(-length // block_size) for length in padding]
        num_tokens = rows.num_tokens if shape is None else shape.num_tokens
        lens = np.array(query_lens, dtype=np.int64)
        ends = np.array(seq_lens, dtype=np.int64)
        first_rows = np.zeros(len(lens) + 1, dtype=np.int64)
        np.cumsum(lens, out=first_rows[1:])
        positions = np.arange(num_tokens) + np.repeat(ends - first_rows[1:], lens)
        block_table = np.zeros((len(lens), width), dtype=np.int32)
        for row, table in zip(block_table, tables):
            row[: len(table)] = table
        blocks = block_table[np.repeat(np.arange(len(lens)), lens), positions // block_size].astype(np.int64)
        rope_lengths = _NONE
        if config.depends_on_length:
            floors = np.zeros(len(lens), dtype=np.int64)
            floors[: len(rows.entries)] = rows.length_floors(config)
            rope_lengths = np.maximum(positions + 1, np.repeat(floors, lens))
        input_ids = np.zeros(num_tokens, dtype=np.int64)
        input_ids[: rows.num_tokens] = rows.input_ids
        return cls(
            input_ids,
            positions,
            slot_mapping=blocks * block_size + positions % block_size,
            rope_lengths=rope_lengths,
            wanted_rows=np.array(rows.wanted_rows, dtype=np.int64),
            sourced_rows=np.array(rows.sourced_rows, dtype=np.int64),
            source_rows=np.array(rows.source_rows, dtype=np.int64),
            cu_seqlens_q=first_rows.astype(np.int32),
            seq_lens=ends.astype(np.int32),
            block_table=block_table,
            query_lens=query_lens,
            seq_lens_list=seq_lens,
            block_tables=tables,
        )


_NONE = np.zeros(0, dtype=np.int64)


def _used_blocks(table: list[int], seq_len: int, block_size: int) -> list[int]:
    num_blocks = -(-seq_len // block_size)
    if num_blocks > len(table):
        raise ValueError(f"{seq_len} tokens need {num_blocks} blocks of {block_size}, got {len(table)}")
    return table[:num_blocks]


def _table_width(seq_len: int, block_size: int) -> int:
    num_blocks = -(-seq_len // block_size)
    return -(-num_blocks // _TABLE_WIDTH) * _TABLE_WIDTH


def _padding(shape: StepShape, num_seqs: int, num_tokens: int) -> list[int]:
    """The lengths of the sequences that fill a step up; the last may have no tokens."""
    lengths: list[int] = []
    left = shape.num_tokens - num_tokens
    for _ in range(shape.num_seqs - num_seqs):
        lengths.append(min(left, shape.max_query_len))
        left -= lengths[-1]
    assert left == 0, f"{num_seqs} sequences of {num_tokens} tokens do not fit into {shape}"
    return lengths
