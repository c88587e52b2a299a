"""Random inputs of the kernels, made on their device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.quantization.affine import AffineMatrix
from kernels.kv import KVLayer, quantize_int8
from kernels.metadata import AttentionMetadata
from kernels.sampling import LogitCells, Penalties, SamplingBatch

BLOCK_SIZE = 16


class Numbers:
    """Normal random numbers from one seed, of one dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device = device
        self.dtype = dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(self.dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def below(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def angles(self, num_tokens: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin as `kernels.ops.rope_and_write_kv` takes them."""
        angles = self.normal(num_tokens, rotary_dim // 2).float() * 3
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} heads of {self.dim}"


@dataclass(frozen=True, slots=True)
class PagedBatch:
    q: torch.Tensor
    kv_cache: KVLayer
    metadata: AttentionMetadata

    def widened(self) -> PagedBatch:
        """The same numbers in float32."""
        return replace(self, q=self.q.float(), kv_cache=widened(self.kv_cache))


def paged_batch(
    numbers: Numbers, heads: Heads, query_lens: Sequence[int], seq_lens: Sequence[int], int8: bool = False
) -> PagedBatch:
    """Sequences in blocks in no order; plain rows that no sequence owns hold NaN, which shows where one is read."""
    needed = [-(-seq_len // BLOCK_SIZE) for seq_len in seq_lens]
    spare = 3
    num_blocks = sum(needed) + spare
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    shape = (num_blocks, BLOCK_SIZE, 2, heads.kv, heads.dim)
    data = torch.randn(shape, generator=numbers.generator, device=numbers.device, dtype=torch.float32)
    data[order[:spare]] = float("nan")
    tables, first = [], spare
    for count, seq_len in zip(needed, seq_lens, strict=True):
        tables.append(order[first : first + count])
        first += count
        if seq_len % BLOCK_SIZE:
            data[tables[-1][-1], seq_len % BLOCK_SIZE :] = float("nan")
    kv_cache = KVLayer(*quantize_int8(data.nan_to_num_())) if int8 else KVLayer(data.to(numbers.dtype))
    q = numbers.normal(sum(query_lens), heads.query, heads.dim)
    metadata = AttentionMetadata.build(tables, list(query_lens), list(seq_lens), BLOCK_SIZE, numbers.device)
    return PagedBatch(q, kv_cache, metadata)


def widened(layer: KVLayer) -> KVLayer:
    """The same in float32; integer codes stay."""
    return layer if layer.scales is not None else KVLayer(layer.data.float())


def empty_layer(numbers: Numbers, heads: Heads, num_blocks: int, int8: bool, dtype: torch.dtype) -> KVLayer:
    shape = (num_blocks, BLOCK_SIZE, 2, heads.kv, heads.dim)
    data = torch.zeros(shape, dtype=torch.int8 if int8 else dtype, device=numbers.device)
    return KVLayer(data, torch.zeros(shape[:-1], device=numbers.device) if int8 else None)


def random_codes(numbers: Numbers, rows: int, columns: int, bits: int, group: int) -> AffineMatrix:
    """Integer weights [rows, columns] in the form that rounding gives: int8 symmetric, int4 with zero points."""
    codes = numbers.below(256, rows, columns * bits // 8, dtype=torch.uint8)
    scales = numbers.uniform(rows, columns // group) * columns**-0.5 / (73.0 if bits == 8 else 4.6)
    zeros = torch.full_like(scales, 128.0) if bits == 8 else numbers.uniform(rows, columns // group) + 7
    return AffineMatrix(codes, scales, zeros, bits, group)


def sampling_batch(
    numbers: Numbers, num_rows: int, vocab_size: int, filters: bool, greedy: bool = False
) -> SamplingBatch:
    """Every fourth row is greedy, or all; with `filters` the others have some or all on. Most rows have penalties."""
    device, rows = numbers.device, torch.arange(num_rows, device=numbers.device)

    def in_some(every: int, value: float, otherwise: float) -> torch.Tensor:
        is_chosen = rows % every != 0 if filters else torch.zeros_like(rows, dtype=torch.bool)
        return torch.where(is_chosen, value, otherwise).float()

    ones = torch.ones(num_rows, device=device)
    counts = numbers.below(40, num_rows, vocab_size, dtype=torch.int32) - 36
    output = counts.clamp_min(0)
    delta_ids = numbers.below(vocab_size, num_rows, 3, dtype=torch.int32)
    delta_ids[rows % 3 == 0, 1:] = -1
    deltas = torch.ones_like(delta_ids)
    num_cells = min(num_rows, 8)
    return SamplingBatch(
        temperature=torch.where((rows % 4 == 0) | greedy, 0.0, 0.8).float(),
        min_p=in_some(5, 0.01, 0.0),
        top_k=in_some(3, 50.0, 0.0).int(),
        top_p=in_some(7, 0.9, 1.0),
        temperature_last=rows % 2 == 1,
        uniforms=numbers.uniform(num_rows).double(),
        all_greedy=greedy,
        any_filter=filters and not greedy,
        cells=LogitCells(rows[:num_cells], numbers.below(vocab_size, num_cells), ones[:num_cells] * 2.5),
        penalties=Penalties(
            repetition=ones * 1.1,
            presence=ones * 0.2,
            frequency=ones * 0.1,
            slots=torch.where(rows % 6 == 5, -1, rows).int(),
            sequence=output + (counts.roll(1, 1) > 0).int(),
            output=output,
            delta_ids=delta_ids,
            delta_sequence=deltas,
            delta_output=deltas,
        ),
    )
