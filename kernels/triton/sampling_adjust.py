"""What changes single logits before they are sampled: cells and penalties, in place."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_cells"])
def cells_kernel(logits, rows, token_ids, values, num_cells, stride, BLOCK: tl.constexpr):
    """Grid (blocks of cells); no cell occurs twice."""
    cells = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_cell = cells < num_cells
    row = tl.load(rows + cells, mask=is_cell, other=0)
    at = logits + row * stride + tl.load(token_ids + cells, mask=is_cell, other=0)
    tl.store(at, tl.load(at, mask=is_cell) + tl.load(values + cells, mask=is_cell), mask=is_cell)


@triton.jit(do_not_specialize=["width"])
def penalties_kernel(
    logits,
    repetition,
    presence,
    frequency,
    slots,
    sequence,
    output,
    delta_ids,
    delta_sequence,
    delta_output,
    vocab_size,
    stride,
    stride_table,
    width,
    BLOCK: tl.constexpr,
):
    """Grid (rows, blocks of the vocabulary). Counts are the slot's tables plus the row's deltas."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab_size
    in_sequence = tl.load(sequence + slot * stride_table + ids, mask=is_token, other=0)
    in_output = tl.load(output + slot * stride_table + ids, mask=is_token, other=0)
    for place in range(width):
        at = row * width + place
        is_changed = ids == tl.load(delta_ids + at)
        in_sequence += tl.where(is_changed, tl.load(delta_sequence + at), 0)
        in_output += tl.where(is_changed, tl.load(delta_output + at), 0)
    has_changed = is_token & ((in_sequence > 0) | (in_output > 0))
    at_logits = logits + row * stride + ids
    values = tl.load(at_logits, mask=has_changed, other=0.0)
    factor = tl.load(repetition + row)
    repeated = tl.where(values > 0, values / factor, values * factor)
    values = tl.where(in_sequence > 0, repeated, values)
    loss = tl.load(presence + row) + tl.load(frequency + row) * in_output.to(tl.float32)
    tl.store(at_logits, tl.where(in_output > 0, values - loss, values), mask=has_changed)
