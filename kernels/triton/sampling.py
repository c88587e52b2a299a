"""Sampling on the GPU: nothing here makes the host wait, and every grid follows from shapes alone.

The vocabulary of a row is cut into splits, a program for each; a kernel that needs all splits of the one before is
started after it. What a step costs, in reads of all logits and in kernels:

- greedy: 1 read, 2 kernels: the maximum of each split, then that of the row;
- without filters: 2 reads, 3 kernels: the maximum, the sums, then the draw from the split in which it falls;
- with filters: 5 reads, 7 kernels: the maximum, three passes that narrow the threshold down, and one that gathers
  the tokens which reach what was found. They are few as a rule, and only they are read from then on: by one program
  for each row that finds the exact threshold, and by one that draws.

Sums are exact, so a row's token depends neither on the rest of the batch nor on the tiles.
"""

from __future__ import annotations

import torch

from kernels.sampling import SamplingBatch
from kernels.triton.launch import launch
from kernels.triton.sampling_adjust import cells_kernel, penalties_kernel
from kernels.triton.sampling_drafts import residual_kernel, verify_kernel
from kernels.triton.sampling_draws import draw_kernel, probabilities_kernel
from kernels.triton.sampling_filters import MOST_CANDIDATES, MOST_TALLIED, gather_kernel, maximum_kernel, tally_kernel
from kernels.triton.sampling_search import search_kernel
from kernels.triton.tuning import padded, sampling_tiles

PASSES = 3
"""Digits of a threshold found by the whole GPU: weights that share them are within 1/16 of each other."""

CELLS_BLOCK = 128
PENALTIES_BLOCK = 1024


def adjust_logits(logits: torch.Tensor, batch: SamplingBatch) -> None:
    assert logits.stride(1) == 1
    num_rows, vocab_size = logits.shape
    if (cells := batch.cells) is not None:
        num_cells = cells.rows.shape[0]
        launch(
            cells_kernel,
            (-(-num_cells // CELLS_BLOCK),),
            logits,
            cells.rows,
            cells.token_ids,
            cells.values,
            num_cells,
            logits.stride(0),
            BLOCK=CELLS_BLOCK,
            num_warps=4,
        )
    if (penalties := batch.penalties) is not None:
        assert penalties.sequence.stride() == penalties.output.stride()
        launch(
            penalties_kernel,
            (num_rows, -(-vocab_size // PENALTIES_BLOCK)),
            logits,
            penalties.repetition,
            penalties.presence,
            penalties.frequency,
            penalties.slots,
            penalties.sequence,
            penalties.output,
            penalties.delta_ids,
            penalties.delta_sequence,
            penalties.delta_output,
            vocab_size,
            logits.stride(0),
            penalties.sequence.stride(0),
            penalties.delta_ids.shape[1],
            BLOCK=PENALTIES_BLOCK,
            num_warps=4,
        )


def sample(
    logits: torch.Tensor, batch: SamplingBatch, probs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    num_rows, vocab_size = logits.shape
    tiles = sampling_tiles(num_rows, vocab_size)
    assert tiles.block <= MOST_TALLIED
    num_splits = -(-vocab_size // tiles.split)
    by_split = (num_rows, num_splits)
    draws, filters = not batch.all_greedy, batch.any_filter and not batch.all_greedy
    passes = PASSES if filters else 1

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    token_ids, healthy = empty(torch.int64), empty(torch.bool)
    maxima, likeliest = empty(torch.float32, num_splits), empty(torch.int32, num_splits)
    counts, masses = (empty(dtype, passes, num_splits, MOST_CANDIDATES.value) for dtype in (torch.int32, torch.int64))
    prefixes, thresholds, drawn_masses = empty(torch.int32, passes + 1), empty(torch.int32), empty(torch.int64)
    lengths, survivors = empty(torch.int32), empty(torch.int32, vocab_size if filters else 0)
    params = (batch.temperature, batch.min_p, batch.top_k, batch.top_p, batch.temperature_last)
    shape = (vocab_size, logits.stride(0), num_splits)
    splits = padded(num_splits)

    launch(maximum_kernel, by_split, maxima, likeliest, logits, *shape, SPLIT=tiles.split, num_warps=tiles.num_warps)
    for place in range(passes if draws else 0):
        launch(
            tally_kernel,
            by_split,
            counts,
            masses,
            prefixes,
            maxima,
            logits,
            *params,
            *shape,
            PLACE=place,
            PASSES=passes,
            FILTERS=filters,
            SPLITS=splits,
            SPLIT=tiles.split,
            BLOCK=tiles.block,
            num_warps=tiles.num_warps,
        )
    if filters:
        launch(
            gather_kernel,
            by_split,
            survivors,
            lengths,
            prefixes,
            counts,
            masses,
            maxima,
            logits,
            *params,
            *shape,
            PASSES=passes,
            SPLITS=splits,
            SPLIT=tiles.split,
            BLOCK=tiles.block,
            num_warps=tiles.num_warps,
        )
        launch(
            search_kernel,
            (num_rows,),
            thresholds,
            drawn_masses,
            survivors,
            lengths,
            prefixes,
            masses,
            maxima,
            logits,
            *params,
            *shape,
            PASSES=passes,
            SPLITS=splits,
            BLOCK=tiles.block,
            num_warps=tiles.row_warps,
            max_registers=tiles.row_registers,
        )
    launch(
        draw_kernel,
        (num_rows,),
        token_ids,
        healthy,
        thresholds,
        drawn_masses,
        survivors,
        lengths,
        masses,
        maxima,
        likeliest,
        logits,
        *params,
        batch.uniforms,
        *shape,
        DRAWS=draws or probs is not None,
        FILTERS=filters,
        PASSES=passes,
        SPLITS=splits,
        SPLIT=tiles.split,
        BLOCK=tiles.block,
        num_warps=tiles.row_warps,
        max_registers=tiles.row_registers,
    )
    if probs is not None:
        assert probs.stride(1) == 1
        launch(
            probabilities_kernel,
            by_split,
            probs,
            token_ids,
            thresholds,
            drawn_masses,
            maxima,
            logits,
            *params,
            vocab_size,
            logits.stride(0),
            probs.stride(0),
            num_splits,
            FILTERS=filters,
            SPLITS=splits,
            SPLIT=tiles.split,
            num_warps=tiles.num_warps,
        )
    return token_ids, healthy


def verify_drafts(
    logits: torch.Tensor,
    batch: SamplingBatch,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, vocab_size = logits.shape
    assert draft_probs.stride(1) == 1
    probs = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    token_ids, healthy = sample(logits, batch, probs)
    tiles = sampling_tiles(num_rows, vocab_size)
    num_splits = -(-vocab_size // tiles.split)
    accepted = torch.empty_like(healthy)
    masses = torch.empty(num_rows, num_splits, dtype=torch.int64, device=logits.device)
    shape = (vocab_size, probs.stride(0), draft_probs.stride(0), num_splits)
    launch(
        residual_kernel,
        (num_rows, num_splits),
        masses,
        probs,
        draft_ids,
        draft_probs,
        *shape,
        SPLIT=tiles.split,
        num_warps=tiles.num_warps,
    )
    launch(
        verify_kernel,
        (num_rows,),
        accepted,
        token_ids,
        healthy,
        masses,
        probs,
        draft_ids,
        draft_probs,
        batch.uniforms,
        accept_uniforms,
        *shape,
        SPLITS=padded(num_splits),
        SPLIT=tiles.split,
        num_warps=tiles.num_warps,
    )
    return accepted, token_ids, healthy
