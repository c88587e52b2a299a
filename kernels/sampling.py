"""What sampling needs to know of a batch: one row for each row of logits, as tensors on their device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Penalties on tokens that occurred in the text of their row, and how often each did.

    A count is that of the row's tables plus its deltas.
    """

    repetition: torch.Tensor
    """float32 [num_rows]; 1: off. Covers prompt and output."""
    presence: torch.Tensor
    """float32 [num_rows]; 0: off. Covers the output only, as does `frequency`."""
    frequency: torch.Tensor
    """float32 [num_rows]; 0: off."""
    slots: torch.Tensor
    """int32 [num_rows], the row of the tables that counts this row's text; -1: none, the row has no penalties."""
    sequence: torch.Tensor
    """int32 [num_slots, vocab_size], how often each token occurs in prompt and output."""
    output: torch.Tensor
    """int32 [num_slots, vocab_size], how often each token occurs in the output."""
    delta_ids: torch.Tensor
    """int32 [num_rows, width], tokens to be counted besides the tables; -1: none. One may occur several times.

    Width may be 0.
    """
    delta_sequence: torch.Tensor
    """int32 [num_rows, width], by how much each changes the count in prompt and output."""
    delta_output: torch.Tensor
    """int32 [num_rows, width], by how much each changes the count in the output."""


@dataclass(frozen=True, slots=True, eq=False)
class LogitCells:
    """Single logits to which values are added; none occurs twice."""

    rows: torch.Tensor
    """int64 [num_cells]"""
    token_ids: torch.Tensor
    """int64 [num_cells], all within the vocabulary."""
    values: torch.Tensor
    """float32 [num_cells]; minus infinity forbids."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """How each row of logits [num_rows, vocab_size] is to be sampled."""

    temperature: torch.Tensor
    """float32 [num_rows]; 0: the likeliest token, no filter is looked at."""
    min_p: torch.Tensor
    """float32 [num_rows]; 0: off."""
    top_k: torch.Tensor
    """int32 [num_rows]; 0: off."""
    top_p: torch.Tensor
    """float32 [num_rows]; 1: off."""
    temperature_last: torch.Tensor
    """bool [num_rows]: the filters see the untempered distribution."""
    uniforms: torch.Tensor
    """float64 [num_rows] in [0, 1), which decide the draws."""
    all_greedy: bool
    """Whether every temperature is 0; known to the host."""
    any_filter: bool
    """Whether a row that is not greedy has min_p, top_k or top_p on."""
    cells: LogitCells | None = None
    penalties: Penalties | None = None
