"""Which experts compute which tokens, and the sum of what they give, without asking the host how many each has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.launch import launch
from kernels.triton.tuning import padded

_SORTED_AT_ONCE = 512
"""Pairs of a token and its expert that one program sorts; a step of so few is bound by starting kernels."""
_COMBINED_BLOCK = 512


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRows:
    """Which rows belong to which expert, sorted by expert; everything stays on the device.

    order int64 [num_rows]: sorted row r is pair order[r] of the router's [num_tokens, num_chosen] choices.
    places int64 [num_rows]: the other way round, the sorted row of each pair.
    first_rows int32 [num_experts + 1]: where each expert's rows begin.
    first_blocks int32 [num_experts + 1]: the same in blocks of `block_m` rows, each expert's last one part empty.
    """

    order: torch.Tensor
    places: torch.Tensor
    first_rows: torch.Tensor
    first_blocks: torch.Tensor
    num_chosen: int
    block_m: int

    @property
    def most_blocks(self) -> int:
        """Enough for every way the rows can be shared out."""
        num_experts = self.first_rows.shape[0] - 1
        return min(self.order.shape[0], self.order.shape[0] // self.block_m + num_experts)


@triton.jit
def choose_kernel(
    chosen,
    shares,
    logits,
    stride_logits,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOSEN_PADDED: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Grid (tokens)."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS_PADDED)
    left = tl.load(logits + token * stride_logits + experts, mask=experts < NUM_EXPERTS, other=float("-inf"))
    left = left.to(tl.float32)
    highest = tl.max(left, 0)
    total = tl.sum(tl.exp(left - highest), 0)
    places = tl.arange(0, CHOSEN_PADDED)
    weights = tl.zeros([CHOSEN_PADDED], dtype=tl.float32)
    for place in tl.static_range(NUM_CHOSEN):
        best = tl.max(left, 0)
        # A row of no numbers must not name an expert that is none.
        expert = tl.minimum(tl.argmax(left, 0), NUM_EXPERTS - 1)
        tl.store(chosen + token * NUM_CHOSEN + place, expert.to(tl.int64))
        weights = tl.where(places == place, tl.exp(best - highest), weights)
        left = tl.where(experts == expert, float("-inf"), left)
    if NORMALIZE:
        total = tl.sum(weights, 0)
    tl.store(shares + token * NUM_CHOSEN + places, weights / total, mask=places < NUM_CHOSEN)


def choose_experts(logits: torch.Tensor, num_chosen: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest experts of each token, best first: int64 and float32 [num_tokens, num_chosen].

    logits [num_tokens, num_experts]. The shares are a softmax over all experts, or with `normalize` over the chosen.
    """
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1
    chosen = torch.empty(num_tokens, num_chosen, dtype=torch.int64, device=logits.device)
    shares = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=logits.device)
    launch(
        choose_kernel,
        (num_tokens,),
        chosen,
        shares,
        logits,
        logits.stride(0),
        NUM_EXPERTS=num_experts,
        EXPERTS_PADDED=padded(num_experts),
        NUM_CHOSEN=num_chosen,
        CHOSEN_PADDED=padded(num_chosen),
        NORMALIZE=normalize,
        num_warps=1,
    )
    return chosen, shares


@triton.jit(do_not_specialize=["num_pairs"])
def sort_kernel(
    order,
    places,
    first_rows,
    first_blocks,
    chosen,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program: a pair's place is the number of pairs of experts before its own, and of its own before it."""
    pairs = tl.arange(0, PAIRS)
    own = tl.load(chosen + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)
    experts = tl.arange(0, EXPERTS_PADDED)
    place = tl.zeros([PAIRS], dtype=tl.int32)
    counts = tl.zeros([EXPERTS_PADDED], dtype=tl.int32)
    for start in range(0, num_pairs, AT_ONCE):
        others = start + tl.arange(0, AT_ONCE)
        theirs = tl.load(chosen + others, mask=others < num_pairs, other=NUM_EXPERTS)
        is_before = (theirs[None, :] < own[:, None]) | (
            (theirs[None, :] == own[:, None]) & (others[None, :] < pairs[:, None])
        )
        place += tl.sum(is_before.to(tl.int32), 1)
        counts += tl.sum((theirs[None, :] == experts[:, None]).to(tl.int32), 1)
    is_pair = pairs < num_pairs
    tl.store(places + pairs, place.to(tl.int64), mask=is_pair)
    tl.store(order + place, pairs.to(tl.int64), mask=is_pair)
    is_expert = experts < NUM_EXPERTS
    counts = tl.where(is_expert, counts, 0)
    tl.store(first_rows, 0)
    tl.store(first_blocks, 0)
    tl.store(first_rows + 1 + experts, tl.cumsum(counts, 0), mask=is_expert)
    tl.store(first_blocks + 1 + experts, tl.cumsum((counts + BLOCK_M - 1) // BLOCK_M, 0), mask=is_expert)


def sort_by_expert(chosen: torch.Tensor, num_experts: int) -> ExpertRows:
    """chosen int64 [num_tokens, num_chosen], the experts of each token."""
    flat = chosen.flatten()
    num_pairs, device = flat.shape[0], flat.device
    rows_each = num_pairs // num_experts
    block_m = 16 if rows_each <= 16 else 64 if rows_each <= 128 else 128
    if num_pairs <= _SORTED_AT_ONCE:
        order, places = torch.empty(2, num_pairs, dtype=torch.int64, device=device)
        first_rows, first_blocks = torch.empty(2, num_experts + 1, dtype=torch.int32, device=device)
        launch(
            sort_kernel,
            (min(1, num_pairs),),
            order,
            places,
            first_rows,
            first_blocks,
            flat,
            num_pairs,
            NUM_EXPERTS=num_experts,
            EXPERTS_PADDED=padded(num_experts),
            PAIRS=padded(num_pairs, least=16),
            AT_ONCE=16,
            BLOCK_M=block_m,
            num_warps=4 if num_pairs <= 128 else 8,
        )
        return ExpertRows(order, places, first_rows, first_blocks, chosen.shape[1], block_m)
    order = flat.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(num_pairs, device=device))
    counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    blocks = (counts + (block_m - 1)) // block_m
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    first_rows = torch.cat((zero, counts.cumsum(0, dtype=torch.int32)))
    first_blocks = torch.cat((zero, blocks.cumsum(0, dtype=torch.int32)))
    return ExpertRows(order, places, first_rows, first_blocks, chosen.shape[1], block_m)


@triton.jit
def combine_experts_kernel(out, outputs, places, shares, num_columns, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (tokens, blocks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(NUM_CHOSEN):
        row = tl.load(places + token * NUM_CHOSEN + place)
        share = tl.load(shares + token * NUM_CHOSEN + place)
        total += share * tl.load(outputs + row * num_columns + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + token * num_columns + columns, total.to(out.dtype.element_ty), mask=is_column)


def combine(outputs: torch.Tensor, rows: ExpertRows, shares: torch.Tensor) -> torch.Tensor:
    """Sorted rows [num_rows, n] -> each token's sum by its shares [num_tokens, num_chosen]: [num_tokens, n]."""
    num_tokens, num_columns = shares.shape[0], outputs.shape[1]
    out = torch.empty(num_tokens, num_columns, dtype=outputs.dtype, device=outputs.device)
    launch(
        combine_experts_kernel,
        (num_tokens, -(-num_columns // _COMBINED_BLOCK)),
        out,
        outputs,
        rows.places,
        shares,
        num_columns,
        NUM_CHOSEN=rows.num_chosen,
        BLOCK=_COMBINED_BLOCK,
        num_warps=4,
    )
    return out
