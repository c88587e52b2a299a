"""Where the tokens of one ragged batch lie: what every attention call of a step shares."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch


@dataclass(slots=True, eq=False)
class AttentionMetadata:
    """The sequences of one step, query tokens packed one sequence after another.

    Sequence `s` computes the last `query_lens[s]` of its `seq_lens[s]` tokens; position `p` of it
    lives in block `block_table[s, p // block_size]`, row `p % block_size`.
    The lists are the host's copy of the tensors, so that no backend has to wait for a device. With the bounds
    given, a CUDA graph may be recorded with it and replayed for other sequences in the same tensors: then kernels
    and their grids go by shapes, `max_query_len` and `max_seq_len` alone. A sequence may compute no token.
    """

    query_lens: list[int]
    seq_lens_list: list[int]
    block_tables: list[list[int]]
    block_size: int
    slot_mapping: torch.Tensor
    """int64 [num_tokens]: `block * block_size + row` where each token's key and value are written."""
    block_table: torch.Tensor
    """int32 [num_seqs, max_blocks], padded with 0."""
    cu_seqlens_q: torch.Tensor
    """int32 [num_seqs + 1]: first query row of each sequence."""
    seq_lens: torch.Tensor
    """int32 [num_seqs]: computed tokens including this step's."""
    query_len_bound: int = 0
    """What `max_query_len` says if it is not 0."""
    seq_len_bound: int = 0
    plans: dict[Hashable, Any] = field(default_factory=dict)
    """What a backend prepared from this batch, kept for the other layers of the step."""

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    @property
    def max_query_len(self) -> int:
        return self.query_len_bound or max(self.query_lens, default=0)

    @property
    def max_seq_len(self) -> int:
        return self.seq_len_bound or max(self.seq_lens_list, default=0)

    @classmethod
    def build(
        cls,
        block_tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionMetadata:
        """Makes the tensors from lists with one entry for each sequence.

        Raises ValueError where a sequence has more tokens than its blocks hold, or computes none
        or more than it has.
        """
        slots: list[int] = []
        used_tables: list[list[int]] = []
        for table, query_len, seq_len in zip(block_tables, query_lens, seq_lens, strict=True):
            num_blocks = -(-seq_len // block_size)
            if not 0 < query_len <= seq_len:
                raise ValueError(f"a sequence of {seq_len} tokens cannot compute {query_len} of them")
            if num_blocks > len(table):
                raise ValueError(f"{seq_len} tokens need {num_blocks} blocks of {block_size}, got {len(table)}")
            slots.extend(
                table[position // block_size] * block_size + position % block_size
                for position in range(seq_len - query_len, seq_len)
            )
            used_tables.append(list(table[:num_blocks]))
        width = max(map(len, used_tables), default=0)
        padded = [table + [0] * (width - len(table)) for table in used_tables]
        return cls(
            query_lens=list(query_lens),
            seq_lens_list=list(seq_lens),
            block_tables=used_tables,
            block_size=block_size,
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            block_table=torch.tensor(padded, dtype=torch.int32, device=device).view(len(padded), width),
            cu_seqlens_q=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
            seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
        )
