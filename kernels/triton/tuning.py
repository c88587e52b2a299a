"""Tile shapes for each kind of GPU: a table, because trying them out at every start would take minutes.

Figures that were not measured on a GPU follow from its shared memory and registers; `python -m kernels.aot`
shows that each fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.triton.launch import Capability

CAPABILITIES: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
"""What the table is checked for: A100, RTX 30, RTX 40, H100, B200, RTX 50."""

SHARED_MEMORY_LIMIT: dict[Capability, int] = {
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (12, 0): 99 << 10,
}
"""Bytes one program may use. https://docs.nvidia.com/cuda/cuda-c-programming-guide, compute capabilities"""


def shared_memory_limit(capability: Capability) -> int:
    """Bytes of shared memory; of a GPU that is not in the table, the least of its generation and all before it."""
    known = [limit for row, limit in SHARED_MEMORY_LIMIT.items() if row == capability]
    return known[0] if known else min(SHARED_MEMORY_LIMIT.values())


def padded(size: int, least: int = 1) -> int:
    """The next power of two: what an axis of a tile must be."""
    return max(least, 1 << (size - 1).bit_length())


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """`block_m` rows (query heads of one group, token by token) against `block_n` keys at a time.

    Batches whose sequences compute at most `most_split_queries` tokens share the keys of each out among programs.
    """

    block_m: int
    block_n: int
    group_padded: int
    head_dim_padded: int
    num_warps: int
    num_stages: int
    most_split_queries: int = 16


def attention_tiles(capability: Capability, head_dim: int, group: int, max_query_len: int) -> AttentionTiles:
    """Tiles for `group` query heads to a KV head. `max_query_len` is that of the longest chunk in the batch."""
    head_dim_padded = padded(head_dim, least=16)
    group_padded = padded(group)
    roomy = shared_memory_limit(capability) > 128 << 10
    wide = head_dim_padded > 128
    if max_query_len <= 16:
        # Bound by reading the keys: few rows, and enough loads in flight.
        block_m = max(16, group_padded * (1 if max_query_len == 1 else padded(min(max_query_len, 4))))
        stages = 2 if wide and not roomy else 3
        return AttentionTiles(block_m, 32 if wide else 64, group_padded, head_dim_padded, 4, stages)
    if not wide:
        return AttentionTiles(max(group_padded, 128), 64, group_padded, head_dim_padded, 8, 2)
    # Wide heads spill registers in larger tiles; Hopper's and Blackwell's wide instructions need 64 rows.
    rows, keys, warps = (64, 64, 8) if capability[0] in (9, 10) else (32, 32, 4)
    return AttentionTiles(max(group_padded, rows), keys, group_padded, head_dim_padded, warps, 2)


@dataclass(frozen=True, slots=True)
class MatmulTiles:
    """`scale_weights`: whether weights are scaled before the product (many rows) or sums after it (few)."""

    block_m: int
    block_n: int
    scale_weights: bool
    num_warps: int
    num_stages: int


def matmul_tiles(capability: Capability, num_rows: int, bits: int) -> MatmulTiles:
    """Tiles for a product of `num_rows` rows with weights of `bits` bits."""
    roomy = shared_memory_limit(capability) > 128 << 10
    if num_rows <= 16:
        return MatmulTiles(16, 32, scale_weights=False, num_warps=4, num_stages=4 if roomy else 3)
    if num_rows <= 64:
        return MatmulTiles(64, 64, scale_weights=True, num_warps=4, num_stages=3)
    block_n = 128 if roomy else 64
    return MatmulTiles(128, block_n, scale_weights=True, num_warps=8, num_stages=3)
