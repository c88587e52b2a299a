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


NUM_PROCESSORS: dict[Capability, int] = {
    (8, 0): 108,
    (8, 6): 82,
    (8, 9): 128,
    (9, 0): 132,
    (10, 0): 148,
    (12, 0): 170,
}
"""Streaming multiprocessors of the largest GPU of each kind in the shops."""


def shared_memory_limit(capability: Capability) -> int:
    """Bytes of shared memory; of a GPU that is not in the table, the least of its generation and all before it."""
    known = [limit for row, limit in SHARED_MEMORY_LIMIT.items() if row == capability]
    return known[0] if known else min(SHARED_MEMORY_LIMIT.values())


def padded(size: int, least: int = 1) -> int:
    """The next power of two: what an axis of a tile must be."""
    return max(least, 1 << (size - 1).bit_length())


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """`block_m` rows (query heads of one group, token by token) against `block_n` keys at a time."""

    block_m: int
    block_n: int
    group_padded: int
    head_dim_padded: int
    num_warps: int
    num_stages: int


def attention_tiles(
    capability: Capability, head_dim: int, group: int, least_queries: int, int8: bool = False
) -> AttentionTiles:
    """Tiles for `group` query heads to a KV head, in sequences that compute at least `least_queries` tokens.

    `int8`: whether keys and values have 8 bits.

    They are shared by the sequences of 1 token, of 2 to 16, and of more.
    """
    head_dim_padded = padded(head_dim, least=16)
    group_padded = padded(group)
    roomy = shared_memory_limit(capability) > 128 << 10
    wide = head_dim_padded > 128
    if least_queries <= 16:
        # Bound by reading the keys: few rows, and enough loads in flight.
        block_m = max(16, group_padded if least_queries == 1 else min(4 * group_padded, 64), group_padded)
        # The block table is read a stage before the keys: of 5 stages, two tiles of keys are on their way.
        stages = 5 if roomy else 2 if wide else 3
        # Whichever number of warps makes the assembler spill no register on Blackwell.
        warps = 8 if capability[0] >= 10 and not int8 else 4
        return AttentionTiles(block_m, 32 if wide else 64, group_padded, head_dim_padded, warps, stages)
    if not wide:
        return AttentionTiles(max(group_padded, 128), 64, group_padded, head_dim_padded, 8, 2)
    # Wide heads spill registers in larger tiles; Hopper's and Blackwell's wide instructions need 64 rows.
    rows, keys, warps = (64, 64, 8) if capability[0] in (9, 10) else (32, 32, 4)
    return AttentionTiles(max(group_padded, rows), keys, group_padded, head_dim_padded, warps, 2)


@dataclass(frozen=True, slots=True)
class MatmulTiles:
    """`scale_weights`: whether weights are scaled before the product (many rows) or sums after it (few).

    most_splits: into how many parts the inputs may be cut, so that all of the GPU has something to read.
    """

    block_m: int
    block_n: int
    scale_weights: bool
    num_warps: int
    num_stages: int
    most_splits: int = 1


def matmul_tiles(capability: Capability, num_rows: int, bits: int, out_features: int) -> MatmulTiles:
    """Tiles for a product of `num_rows` rows with weights of `bits` bits."""
    roomy = shared_memory_limit(capability) > 128 << 10
    if num_rows <= 16:
        processors = NUM_PROCESSORS.get(capability, min(NUM_PROCESSORS.values()))
        block_n = 64 if out_features >= 64 * processors else 32
        # Some programs to a processor, since each waits for its own loads.
        splits = max(1, 4 * processors // -(-out_features // block_n))
        # Whichever number of warps makes the assembler spill no register on the RTX 50.
        warps = 8 if capability[0] == 12 and bits == 4 else 4
        return MatmulTiles(16, block_n, False, num_warps=warps, num_stages=5 if roomy else 4, most_splits=splits)
    if num_rows <= 64:
        return MatmulTiles(64, 64, scale_weights=True, num_warps=4, num_stages=3)
    block_n = 128 if roomy else 64
    return MatmulTiles(128, block_n, scale_weights=True, num_warps=8, num_stages=3)


@dataclass(frozen=True, slots=True)
class SamplingTiles:
    """A program takes `split` tokens of the vocabulary, `block` at a time.

    One that ends a row has `row_warps` warps, and as many registers a thread as all of them can have.
    """

    split: int
    block: int
    num_warps: int
    row_warps: int
    row_registers: int


def sampling_tiles(num_rows: int, vocab_size: int) -> SamplingTiles:
    """Tiles for rows of logits: few rows are cut fine enough to keep a whole GPU busy, many no finer than needed."""
    split = min(2048 if num_rows <= 8 else 8192, padded(vocab_size, least=128))
    return SamplingTiles(split, min(512, split), num_warps=4, row_warps=8, row_registers=255)
