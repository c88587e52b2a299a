"""Native norm, rope, cache write and paged attention against torch."""

from __future__ import annotations

from functools import partial
from typing import Literal

import pytest
import torch

from kernels.cpu import library
from kernels.cpu.library import AttentionSpec, CacheKind, WeightFormat
from kernels.cpu.packing import pack
from kernels.cpu.program import Program, StepBatch
from kernels.kv import quantize_int8

CACHE_KINDS = {torch.float32: CacheKind.F32, torch.float16: CacheKind.F16, torch.int8: CacheKind.INT8}


def i32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a cache of that type gives back."""
    if dtype != torch.int8:
        return x.to(dtype)
    values, scales = quantize_int8(x)
    return values * scales[..., None]


class Ragged:
    """Sequences (cached, new) in scattered blocks, and the exact answer for their new tokens."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        num_heads: int = 9,
        num_kv_heads: int = 3,
        head_dim: int = 64,
        rotary_dim: int | None = None,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        window: int = 0,
        soft_cap: float = 0.0,
        qk_norm: Literal["none", "per_head", "full_width"] = "none",
        sinks: bool = False,
        rope_by_row: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths) + head_dim)
        random = partial(torch.randn, generator=generator)
        self.lengths, self.block_size = lengths, block_size
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.window, self.soft_cap, self.dtype = window, soft_cap, dtype
        longest = max(cached + new for cached, new in lengths)
        self.blocks_each = -(-longest // block_size)
        num_blocks = len(lengths) * self.blocks_each
        self.tables = torch.randperm(num_blocks, generator=generator).view(len(lengths), -1).int().contiguous()
        # Blocks never written hold NaN, or have it for a scale: reading one shows.
        unwritten = 77 if dtype == torch.int8 else float("nan")
        self.keys = torch.full((num_blocks, num_kv_heads, head_dim, block_size), unwritten, dtype=dtype)
        self.values = torch.full((num_blocks, num_kv_heads, block_size, head_dim), unwritten, dtype=dtype)
        self.key_scales = torch.full((num_blocks, num_kv_heads, block_size), float("nan"))
        self.value_scales = self.key_scales.clone()
        angles = torch.rand(longest, self.rotary_dim // 2, generator=generator) * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        self.full_width, self.rope_by_row = qk_norm == "full_width", rope_by_row
        widths = (head_dim * num_heads, head_dim * num_kv_heads) if self.full_width else (head_dim, head_dim)
        self.q_norm, self.k_norm = (None if qk_norm == "none" else random(width) + 1 for width in widths)
        self.sinks = 2 * random(num_heads) if sinks else None
        width = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = [torch.randn(cached + new, width, generator=generator) for cached, new in lengths]

    def spec(self, rows: torch.Tensor | None) -> AttentionSpec:
        def at(tensor: torch.Tensor | None) -> int | None:
            return None if tensor is None else tensor.data_ptr()

        cos, sin = (table if rows is None else table[rows].contiguous() for table in (self.cos, self.sin))
        self.angles = cos, sin  # kept alive
        return AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            rotary_dim=self.rotary_dim, block_size=self.block_size, cache_kind=CACHE_KINDS[self.dtype],
            window=self.window, rope_by_row=self.rope_by_row, full_width_norm=self.full_width,
            scale=self.head_dim**-0.5, soft_cap=self.soft_cap, norm_eps=1e-6,
            cos=at(cos), sin=at(sin), q_norm=at(self.q_norm), k_norm=at(self.k_norm), sinks=at(self.sinks),
            keys=at(self.keys), values=at(self.values),
            key_scales=at(self.key_scales), value_scales=at(self.value_scales),
        )  # fmt: skip

    def step(self, ranges: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Computes positions begin..end of each sequence in one ragged step."""
        rows = [qkv[begin:end] for qkv, (begin, end) in zip(self.qkv, ranges, strict=True)]
        positions = [torch.arange(begin, end) for begin, end in ranges]
        slots = [
            table[p // self.block_size].long() * self.block_size + p % self.block_size
            for table, p in zip(self.tables, positions, strict=True)
        ]
        sizes = [end - begin for begin, end in ranges]
        program = Program(max_rows=sum(sizes))
        qkv = program.floats(self.qkv[0].shape[1])
        qkv.copy_(torch.cat(rows))
        out = program.floats(self.num_heads * self.head_dim)
        flat = torch.cat(positions).int()
        spec = self.spec(flat if self.rope_by_row else None)
        program.rope_kv(qkv, spec)
        program.attention(qkv, spec, out)
        cu_seqlens = i32([0, *torch.tensor(sizes).cumsum(0).tolist()])
        ends = i32([end for _, end in ranges])
        parts = (flat, flat, torch.cat(slots), cu_seqlens, ends, self.tables, flat[:0])
        program.run(StepBatch(*(part.tolist() for part in parts)))
        return list(out.view(-1, self.num_heads, self.head_dim).split(sizes))

    def rotated(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is not None:
            shape = x.shape
            x = torch.nn.functional.rms_norm(x.reshape(shape[0], -1, norm.numel()), norm.shape, norm, 1e-6).view(shape)
        half = self.rotary_dim // 2
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        cos, sin = self.cos[: x.shape[0], None], self.sin[: x.shape[0], None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    def exact(self, sequence: int) -> torch.Tensor:
        """Every position's attention in float64."""
        length = self.qkv[sequence].shape[0]
        heads = self.qkv[sequence].view(length, -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = self.rotated(q, self.q_norm), self.rotated(k, self.k_norm)
        group = self.num_heads // self.num_kv_heads
        k, v = (stored(x, self.dtype).double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * self.head_dim**-0.5
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | ((distance >= self.window) if self.window else torch.zeros_like(distance) > 0)
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, length, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        return torch.einsum("hqk,khd->qhd", weights, v).float()

    def run_and_compare(self, tolerance: float = 2e-4) -> None:
        cached = [(0, cached) for cached, _ in self.lengths]
        if any(end for _, end in cached):
            self.step(cached)
        outputs = self.step([(cached, cached + new) for cached, new in self.lengths])
        for sequence, ((begin, new), out) in enumerate(zip(self.lengths, outputs, strict=True)):
            expected = self.exact(sequence)[begin : begin + new]
            torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def tolerance_of(dtype: torch.dtype) -> float:
    """A rotated key that rounding puts just beside a half lands on the next of its 255 steps."""
    return 5e-3 if dtype == torch.int8 else 2e-4


MIXED = [(0, 1), (0, 15), (16, 1), (15, 2), (40, 17), (300, 1)]


@pytest.mark.parametrize("dtype", list(CACHE_KINDS), ids=["fp32", "fp16", "int8"])
def test_prefill_chunks_and_decodes_share_one_step(instruction_set: str, dtype: torch.dtype) -> None:
    Ragged(MIXED, dtype=dtype).run_and_compare(tolerance_of(dtype))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (7, 1), (15, 5), (32, 1)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_any_head_size_and_group(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    Ragged([(20, 5), (3, 1)], num_heads, num_kv_heads, head_dim).run_and_compare()


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_any_block_size(block_size: int) -> None:
    Ragged([(70, 3), (0, 9)], block_size=block_size).run_and_compare()


@pytest.mark.parametrize("window", [1, 7, 64, 100])
def test_a_sliding_window_hides_older_keys(instruction_set: str, window: int) -> None:
    Ragged([(300, 5), (0, 90)], window=window).run_and_compare()
    Ragged([(300, 5), (0, 40)], window=window, dtype=torch.int8).run_and_compare(tolerance_of(torch.int8))


def test_soft_cap_qk_norm_and_partial_rotary(instruction_set: str) -> None:
    Ragged([(30, 4), (0, 3)], soft_cap=2.0).run_and_compare()
    Ragged([(30, 4), (0, 3)], qk_norm="per_head").run_and_compare()
    Ragged([(30, 4), (0, 3)], qk_norm="full_width").run_and_compare()
    Ragged([(30, 4), (0, 3)], head_dim=96, rotary_dim=24).run_and_compare()
    Ragged([(30, 4), (0, 3)], soft_cap=2.0, dtype=torch.int8).run_and_compare(tolerance_of(torch.int8))


def test_a_layer_without_positions_is_not_rotated(instruction_set: str) -> None:
    Ragged([(30, 4), (0, 3)], rotary_dim=0).run_and_compare()


def test_angles_may_belong_to_the_rows_of_a_step_instead_of_positions(instruction_set: str) -> None:
    Ragged([(30, 4), (0, 3)], head_dim=96, rotary_dim=48, rope_by_row=True).run_and_compare()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=["fp32", "int8"])
def test_sinks_take_their_share_and_give_nothing(instruction_set: str, dtype: torch.dtype) -> None:
    # Windows of which only the last of several splits sees anything, and splits without a window.
    Ragged([(30, 4), (0, 3), (700, 2)], sinks=True, dtype=dtype).run_and_compare(tolerance_of(dtype))
    Ragged([(700, 2), (0, 90)], sinks=True, window=20, dtype=dtype).run_and_compare(tolerance_of(dtype))


def test_a_sink_far_above_every_score_leaves_nothing_and_no_nan() -> None:
    ragged = Ragged([(0, 5)], sinks=True)
    assert ragged.sinks is not None
    ragged.sinks.fill_(1e4)
    (out,) = ragged.step([(0, 5)])
    assert not out.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=["fp32", "int8"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_long_contexts_are_split_without_a_trace(num_threads: int, dtype: torch.dtype) -> None:
    library.set_num_threads(num_threads)
    try:
        ragged = Ragged([(1500, 1), (255, 2), (256, 1), (0, 600)], dtype=dtype)
        ragged.run_and_compare(tolerance_of(dtype))
        again = ragged.step([(1500, 1501), (255, 257), (256, 257), (0, 600)])
        one_by_one = ragged.step([(1500, 1501), (256, 257), (256, 257), (599, 600)])
    finally:
        library.set_num_threads(1)
    assert torch.equal(one_by_one[0], again[0])
    assert torch.equal(one_by_one[1][0], again[1][1])
    assert torch.equal(one_by_one[3][0], again[3][-1])


def test_embedding_and_select_and_norm_pick_the_right_rows(instruction_set: str) -> None:
    table = torch.randn(50, 64)
    weight, gain = pack([table], WeightFormat.F32, 64), torch.rand(64)
    program = Program(max_rows=6)
    embedded, selected = program.floats(64), program.floats(64)
    normed = program.activation(weight.activation(), 64)
    program.embed(weight, embedded, factor=2.0)
    program.select(embedded, selected)
    program.norm(selected, gain, 1e-5, normed, selected=True)
    ids = i32([3, 49, 0, 7, 7, 20])
    rows = i32([4, 1])
    program.run(StepBatch(ids.tolist(), ids.tolist(), ids.tolist(), [0, 6], [6], [[0]], rows.tolist()))
    torch.testing.assert_close(embedded, 2 * table[ids])
    expected = torch.nn.functional.rms_norm(2 * table[ids[rows]], (64,), gain, 1e-5)
    torch.testing.assert_close(normed.tensors[0][:2], expected, rtol=1e-5, atol=1e-5)
