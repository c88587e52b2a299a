"""How long each kernel takes, and its share of what limits it: the bytes it has to move, or its operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from engine.quantization.triton_tiles import triton_affine
from kernels import ops
from tests.gpu.backends import using
from tests.gpu.clock import Clock
from tests.gpu.inputs import (
    BLOCK_SIZE,
    Heads,
    Numbers,
    PagedBatch,
    empty_layer,
    paged_batch,
    random_codes,
    sampling_batch,
)
from tests.gpu.limits import Limits
from tests.gpu.report import Report


@dataclass(frozen=True, slots=True)
class Work:
    """One launch or a few that belong together. `nbytes` have to be moved; with `operations` those are the limit."""

    name: str
    run: Callable[[], object]
    nbytes: float = 0.0
    operations: float = 0.0
    goal: float | None = None


@dataclass(frozen=True, slots=True)
class Shapes:
    """Those of an 8B model; the tests have smaller ones."""

    heads: Heads = field(default=Heads(32, 8, 128))
    context: int = 32768
    chunk: int = 4096
    batch: int = 32
    batch_context: int = 4096
    hidden: int = 4096
    inner: int = 14336
    vocab: int = 128256
    many_rows: int = 4096
    few_rows: tuple[int, ...] = (1, 8, 16, 32, 64)
    sampled_rows: int = 64


def measure(
    report: Report,
    limits: Limits,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    shapes: Shapes | None = None,
    repeats: int = 20,
) -> None:
    """Each kernel with nothing in the L2 cache; inputs are made for one at a time."""
    shapes = Shapes() if shapes is None else shapes
    numbers = Numbers(torch.device(device), dtype)
    clock = Clock(numbers.device, repeats)
    with torch.inference_mode(), using("triton"):
        for works in (attention, rows, products, sampling):
            try:
                for work in works(numbers, shapes):
                    _measure(report, limits, clock, work)
            except Exception as error:  # the others can do without
                report.failed(f"inputs of {works.__name__}", error)


def _measure(report: Report, limits: Limits, clock: Clock, work: Work) -> None:
    try:
        seconds = clock.seconds(work.run)
    except Exception as error:
        report.failed(f"{work.name} runs", error)
        return
    if work.operations:
        share, note = limits.share_of_matmul(work.operations, seconds), "of the matmul rate"
    else:
        share, note = limits.share_of_bandwidth(work.nbytes, seconds), "of the bandwidth"
    report.figure(work.name, seconds * 1e6, "us", share, work.goal, goal_is_share=True, note=note)


def attention(numbers: Numbers, shapes: Shapes) -> Iterator[Work]:
    """Decode reads the cache once; a chunk computes half of the square of its scores, and the values' product."""
    heads = shapes.heads
    for name, query, batch, context, int8, goal in (
        ("decode", 1, 1, shapes.context, False, 0.85),
        ("decode, int8 cache", 1, 1, shapes.context, True, None),
        ("decode", 1, shapes.batch, shapes.batch_context, False, None),
        ("verification of 4 drafts", 5, 1, shapes.context, False, None),
    ):
        paged = paged_batch(numbers, heads, [query] * batch, [context] * batch, int8)
        per_token = 2 * heads.kv * (heads.dim * paged.kv_cache.data.element_size() + (4 if int8 else 0))
        title = f"attention {name}, {batch} x {context}"
        yield Work(title, _attend(paged, heads), batch * context * per_token, goal=goal)
    chunk = shapes.chunk
    paged = paged_batch(numbers, heads, [chunk], [chunk])
    operations = 4 * heads.query * heads.dim * chunk * chunk / 2
    yield Work(f"attention prefill, {chunk}", _attend(paged, heads), operations=operations)


def _attend(batch: PagedBatch, heads: Heads) -> Callable[[], object]:
    return lambda: ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, heads.dim**-0.5)


def rows(numbers: Numbers, shapes: Shapes) -> Iterator[Work]:
    """What streams rows through: norm, gate, rope with the write into the cache."""
    for count in (1, shapes.many_rows):
        size = numbers.normal(1).element_size()
        x, residual = numbers.normal(2, count, shapes.hidden)
        weight = numbers.normal(shapes.hidden)
        yield Work(
            f"norm with residual, {count} rows of {shapes.hidden}",
            lambda x=x, residual=residual, weight=weight: ops.rms_norm(x, weight, 1e-5, residual),
            4 * x.numel() * size,
        )
        gate_up = numbers.normal(count, 2 * shapes.inner)
        yield Work(
            f"SwiGLU, {count} rows of {shapes.inner}",
            lambda gate_up=gate_up: ops.silu_and_mul(gate_up),
            1.5 * gate_up.numel() * size,
        )
        heads = shapes.heads
        qkv = numbers.normal(count, heads.query + 2 * heads.kv, heads.dim)
        cos, sin = numbers.angles(count, heads.dim)
        layer = empty_layer(numbers, heads, -(-count // BLOCK_SIZE), False, numbers.dtype)
        slots = torch.arange(count, device=numbers.device)
        yield Work(
            f"rope and write, {count} rows",
            lambda qkv=qkv, cos=cos, sin=sin, layer=layer, slots=slots: ops.rope_and_write_kv(
                qkv, cos, sin, layer, slots
            ),
            2 * (qkv.numel() + cos.numel()) * size,
        )


def products(numbers: Numbers, shapes: Shapes) -> Iterator[Work]:
    """Few rows are bound by reading the weights, many by their operations."""
    out, inner = 2 * shapes.inner, shapes.hidden
    dense = numbers.normal(out, inner) * inner**-0.5
    for count in (*shapes.few_rows, shapes.many_rows):
        x = numbers.normal(count, inner)
        yield _product(
            "bf16", count, lambda x=x, dense=dense: ops.linear(x, dense), dense.nbytes, dense.numel(), shapes
        )
    del dense, x
    for bits, group in ((8, inner), (4, 32), (4, 128)):
        tiled = triton_affine(random_codes(numbers, out, inner, bits, group), numbers.dtype)
        assert tiled is not None
        name = f"int{bits}" + ("" if group == inner else f" g{group}")
        for count in (*shapes.few_rows, shapes.many_rows):
            x = numbers.normal(count, inner)
            run = lambda x=x, tiled=tiled: tiled.matmul(x)  # noqa: E731
            yield _product(name, count, run, tiled.nbytes, out * inner, shapes)


def _product(name: str, count: int, run: Callable[[], object], nbytes: int, weights: int, shapes: Shapes) -> Work:
    title = f"{name} product, {count} rows, [{2 * shapes.inner}, {shapes.hidden}]"
    if count == shapes.many_rows:
        return Work(title, run, operations=2.0 * count * weights)
    return Work(title, run, nbytes)


def sampling(numbers: Numbers, shapes: Shapes) -> Iterator[Work]:
    """The logits have to be read once; whatever more a way of sampling reads shows in its share."""
    for count in (1, shapes.sampled_rows):
        logits = numbers.normal(count, shapes.vocab).float() * 3
        for name, filters, greedy in (("greedy", False, True), ("no filters", False, False), ("filters", True, False)):
            batch = sampling_batch(numbers, count, shapes.vocab, filters, greedy)
            yield Work(
                f"sampling, {name}, {count} rows of {shapes.vocab}",
                lambda logits=logits, batch=batch: ops.sample(logits, batch),
                logits.nbytes,
            )
        batch = sampling_batch(numbers, count, shapes.vocab, False)
        assert batch.penalties is not None
        yield Work(
            f"penalties, {count} rows of {shapes.vocab}",
            lambda logits=logits, batch=batch: ops.adjust_logits(logits, batch),
            2 * logits.nbytes + batch.penalties.sequence.nbytes + batch.penalties.output.nbytes,
        )
