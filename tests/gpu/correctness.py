"""Each Triton kernel on the device against `kernels.reference` there, which gets the same numbers in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP, MixtureOfExperts
from engine.quantization import DenseWeight, QuantWeight
from engine.quantization.affine import AffineMatrix
from engine.quantization.int4 import quantize_int4
from engine.quantization.int8 import quantize_int8
from engine.quantization.triton_tiles import triton_affine
from kernels import ops
from tests.gpu.backends import using
from tests.gpu.inputs import BLOCK_SIZE, Heads, Numbers, empty_layer, paged_batch, random_codes, sampling_batch, widened
from tests.gpu.report import Report

TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
"""Largest difference, as a part of the largest number that is expected in a row. Halves round what comes out, and on
the way attention's weights and the scaled weights of integer products."""
_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
MOST_FLOAT32_ROWS = 16
"""No model is served in float32 on a GPU; there it proves the arithmetic of kernels that compile in seconds."""

Outputs = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """`run(numbers, exact)` computes with `kernels.ops`; `exact` asks for float32 copies of the same numbers.

    `excused_rows` of each output may be further off.
    """

    name: str
    dtype: torch.dtype
    run: Callable[[Numbers, bool], Outputs]
    tolerance: float | None = None
    excused_rows: int = 0

    @property
    def title(self) -> str:
        return f"{self.name} {_NAMES[self.dtype]}"


Part = tuple[int, int]
"""Which of how many parts of the cases: compiling takes longest, so that processes share them out."""
WHOLE: Part = (1, 1)


def check(report: Report, cases: Sequence[Case], device: str, part: Part = WHOLE) -> None:
    """Runs all cases; one that raises fails alone. A lost CUDA context fails those after it, and says so."""
    number, count = part
    for case in cases[len(cases) * (number - 1) // count : len(cases) * number // count]:
        allowed = TOLERANCES[case.dtype] if case.tolerance is None else case.tolerance
        try:
            error = largest_error(case, torch.device(device))
        except Exception as failure:
            report.failed(case.title, failure)
        else:
            report.check(case.title, error <= allowed, error, allowed)


def largest_error(case: Case, device: torch.device) -> float:
    """The largest difference between the backends, as a part of its row's largest number; infinite where one is NaN."""
    with torch.inference_mode():
        with using("reference"):
            expected = case.run(Numbers(device, case.dtype), True)
        with using("triton"):
            found = case.run(Numbers(device, case.dtype), False)
    errors = []
    for own, exact in zip(found, expected, strict=True):
        assert own.shape == exact.shape
        # Row by row: what a long context adds up to is small beside what a short one does.
        rows, difference = exact.double().flatten(1), (own.double() - exact.double()).flatten(1)
        error = difference.abs().amax(1) / rows.abs().amax(1).clamp_min(1e-30)
        errors.append(float(error.nan_to_num(float("inf")).sort(descending=True)[0][case.excused_rows]))
    return max(errors)


# ---------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True)
class Lengths:
    """Query and whole lengths of a batch's sequences."""

    name: str
    query: tuple[int, ...]
    whole: tuple[int, ...]


DECODE = Lengths("decode", (1,) * 6, (1, 16, 17, 513, 3000, 9001))
VERIFY = Lengths("verify", (5, 5, 2, 5), (5, 600, 33, 5000))
PREFILL = Lengths("prefill", (300, 1, 64, 1, 17), (300, 700, 2000, 16, 17))
LENGTHS = (DECODE, VERIFY, PREFILL)
LLAMA = Heads(32, 8, 128)


def attention(
    report: Report,
    device: str = "cuda",
    dtypes: Sequence[torch.dtype] = DTYPES,
    lengths: Sequence[Lengths] = LENGTHS,
    heads: Heads = LLAMA,
    part: Part = WHOLE,
) -> None:
    """The heads of common models in every dtype."""
    chosen = [
        _attention(heads, each, dtype)
        for each in lengths
        for dtype in dtypes
        if dtype != torch.float32 or max(each.query) <= MOST_FLOAT32_ROWS
    ]
    check(report, chosen, device, part)


@dataclass(frozen=True, slots=True)
class OptionHeads:
    """Those of Llama 3, of gpt-oss and of Gemma 2."""

    int8: Heads = field(default=LLAMA)
    windowed: Heads = field(default=Heads(64, 8, 64))
    capped: Heads = field(default=Heads(8, 4, 256))


def attention_options(
    report: Report,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    lengths: Sequence[Lengths] = LENGTHS,
    heads: OptionHeads = OptionHeads(),
    part: Part = WHOLE,
) -> None:
    """All that changes the scores or the cache."""
    cases: list[Case] = []
    for each in lengths:
        cases += [
            _attention(heads.int8, each, dtype, int8=True),
            _attention(heads.windowed, each, dtype, window=100, sinks=True),
            _attention(heads.capped, each, dtype, window=40, soft_cap=5.0),
        ]
    check(report, cases, device, part)


def wide_attention(
    report: Report,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    lengths: Sequence[Lengths] = (DECODE, PREFILL),
    heads: Sequence[Heads] = (
        Heads(9, 3, 64),
        Heads(15, 5, 80),
        Heads(8, 2, 96),
        Heads(7, 1, 112),
        Heads(16, 8, 128),
        Heads(4, 4, 192),
    ),
    part: Part = WHOLE,
) -> None:
    """Head sizes and groups that are no powers of two."""
    check(report, [_attention(each, lens, dtype) for each in heads for lens in lengths], device, part)


def _attention(
    heads: Heads,
    lengths: Lengths,
    dtype: torch.dtype,
    int8: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> Case:
    def run(numbers: Numbers, exact: bool) -> Outputs:
        batch = paged_batch(numbers, heads, lengths.query, lengths.whole, int8)
        head_sinks = numbers.normal(heads.query).float() if sinks else None
        batch = batch.widened() if exact else batch
        scale = heads.dim**-0.5
        return [ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, scale, window, soft_cap, head_sinks)]

    options = {"int8": int8, "window": window, "soft cap": soft_cap, "sinks": sinks}
    name = " ".join(["attention", lengths.name, str(heads), *(option for option, given in options.items() if given)])
    return Case(name, dtype, run)


# ---------------------------------------------------------------- products


@dataclass(frozen=True, slots=True)
class Product:
    """An integer matrix [rows, columns] and how many tokens meet it."""

    bits: int
    group: int
    rows: int
    columns: int
    tokens: tuple[int, ...] = (1, 7, 16, 17, 64, 300)


PRODUCTS = (
    Product(4, 32, 6144, 4096),
    Product(4, 128, 4096, 14336),
    Product(8, 4096, 6144, 4096),
    Product(8, 32, 2049, 1024),
    Product(4, 64, 576, 1536),
)


def products(
    report: Report,
    device: str = "cuda",
    dtypes: Sequence[torch.dtype] = DTYPES,
    shapes: Sequence[Product] = PRODUCTS,
    part: Part = WHOLE,
) -> None:
    """Tiles of integer weights against the numbers those tiles stand for."""
    cases = []
    for index, shape in enumerate(shapes):
        for dtype in dtypes[: 1 if index else None]:
            most = MOST_FLOAT32_ROWS if dtype == torch.float32 else max(shape.tokens)
            cases += [_product(shape, tokens, dtype) for tokens in shape.tokens if tokens <= most]
    check(report, cases, device, part)


def _product(shape: Product, tokens: int, dtype: torch.dtype) -> Case:
    def run(numbers: Numbers, exact: bool) -> Outputs:
        tiled = triton_affine(_rounded(numbers, shape), dtype)
        assert tiled is not None
        x = numbers.normal(tokens, shape.columns)
        return [x.float() @ tiled.dequantize().T if exact else tiled.matmul(x)]

    return Case(f"int{shape.bits} g{shape.group} [{shape.rows}, {shape.columns}], {tokens} rows", dtype, run)


def _rounded(numbers: Numbers, shape: Product) -> AffineMatrix:
    weight = numbers.normal(shape.rows, shape.columns) * shape.columns**-0.5
    if shape.bits == 4:
        return quantize_int4(weight, shape.group)
    return quantize_int8(weight, None if shape.group == shape.columns else shape.group)


# ---------------------------------------------------------------- experts


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture's shape; `bits` 16 are plain numbers. With `clamped`, gpt-oss' activation and biases."""

    bits: int
    count: int
    chosen: int
    hidden: int
    inner: int
    clamped: bool = False
    tokens: tuple[int, ...] = (1, 7, 64, 600)


EXPERTS = (
    Experts(16, 32, 4, 2880, 2880, clamped=True, tokens=(1, 64)),
    Experts(16, 64, 8, 2048, 768),
    Experts(4, 64, 8, 2048, 768),
    Experts(8, 8, 2, 1024, 2048),
)


def experts(
    report: Report,
    device: str = "cuda",
    dtypes: Sequence[torch.dtype] = HALVES,
    shapes: Sequence[Experts] = EXPERTS,
) -> None:
    """Layers of experts, whose tokens are sorted and multiplied together."""
    cases = []
    for index, shape in enumerate(shapes):
        for dtype in dtypes[: 1 if index != 1 else None]:
            cases += [_experts(shape, tokens, dtype) for tokens in shape.tokens]
    check(report, cases, device)


def _experts(shape: Experts, tokens: int, dtype: torch.dtype) -> Case:
    def run(numbers: Numbers, exact: bool) -> Outputs:
        def linear(rows: int, columns: int) -> Linear:
            bias = numbers.normal(rows) if shape.clamped else None
            if shape.bits == 16:
                plain = numbers.normal(rows, columns) * columns**-0.5
                weight: QuantWeight = DenseWeight(plain.float() if exact else plain)
            else:
                group = 32 if shape.bits == 4 else columns
                tiled = triton_affine(random_codes(numbers, rows, columns, shape.bits, group), dtype)
                assert tiled is not None
                weight = DenseWeight(tiled.dequantize()) if exact else tiled
            return Linear(weight, bias.float() if exact and bias is not None else bias)

        gated = functools.partial(ops.clamped_swiglu, alpha=1.702, limit=7.0) if shape.clamped else ops.silu_and_mul
        mlps = [
            GatedMLP(linear(2 * shape.inner, shape.hidden), linear(shape.hidden, shape.inner), gated)
            for _ in range(shape.count)
        ]
        x = numbers.normal(tokens, shape.hidden)
        # The router's logits are columns of x, no two of them alike: every dtype has to choose the same experts.
        order = numbers.uniform(tokens, shape.count).argsort(1)
        x[:, : shape.count] = ((order - shape.count // 2) * 4.0 / shape.count).to(x.dtype)
        x = x.float() if exact else x
        router = Linear(DenseWeight(torch.eye(shape.count, shape.hidden, dtype=x.dtype, device=x.device)))
        return [MixtureOfExperts(router, mlps, shape.chosen, normalize=not shape.clamped)(x)]

    kind = f"{shape.count} experts of int{shape.bits}" if shape.bits < 16 else f"{shape.count} plain experts"
    return Case(f"{kind} [{shape.inner}, {shape.hidden}], {shape.chosen} of them, {tokens} rows", dtype, run)


# ---------------------------------------------------------------- element by element


@dataclass(frozen=True, slots=True)
class Rope:
    heads: Heads
    rotary_dim: int
    normed: bool = False
    int8: bool = False


ROPES = (
    Rope(Heads(32, 8, 128), 128),
    Rope(Heads(16, 8, 128), 128, normed=True, int8=True),
    Rope(Heads(9, 3, 64), 64, int8=True),
    Rope(Heads(8, 2, 96), 72),
)


def elementwise(
    report: Report,
    device: str = "cuda",
    dtypes: Sequence[torch.dtype] = DTYPES,
    rows: int = 70,
    widths: Sequence[int] = (4096, 576, 14336),
    ropes: Sequence[Rope] = ROPES,
) -> None:
    """Norms, activations, rope with the write into the cache."""
    cases: list[Case] = []
    for dtype in dtypes:
        for width in widths:
            cases += [_norm(rows, width, dtype, residual) for residual in (False, True)]
            cases += [_gated(name, rows, width, dtype) for name in _GATES]
        cases += [_rope(rope, rows, dtype) for rope in ropes]
    check(report, cases, device)


_GATES = ("silu_and_mul", "gelu_tanh_and_mul", "clamped_swiglu")


def _norm(rows: int, width: int, dtype: torch.dtype, with_residual: bool) -> Case:
    def run(numbers: Numbers, exact: bool) -> Outputs:
        x, weight = numbers.normal(rows, width), numbers.normal(width)
        residual = numbers.normal(rows, width) if with_residual else None
        if exact:
            x, weight, residual = x.float(), weight.float(), None if residual is None else residual.float()
        normed = ops.rms_norm(x, weight, 1e-5, residual)
        return [normed] if residual is None else [normed, residual]

    return Case(f"norm of {width}{' with residual' if with_residual else ''}", dtype, run)


def _gated(name: str, rows: int, width: int, dtype: torch.dtype) -> Case:
    def run(numbers: Numbers, exact: bool) -> Outputs:
        gate_up = numbers.normal(rows, 2 * width) * 3
        gate_up = gate_up.float() if exact else gate_up
        extra = (1.702, 7.0) if name == "clamped_swiglu" else ()
        return [getattr(ops, name)(gate_up, *extra)]

    return Case(f"{name} of {width}", dtype, run)


def _rope(rope: Rope, rows: int, dtype: torch.dtype) -> Case:
    heads, rotary_dim, normed, int8 = rope.heads, rope.rotary_dim, rope.normed, rope.int8

    def run(numbers: Numbers, exact: bool) -> Outputs:
        qkv = numbers.normal(rows, heads.query + 2 * heads.kv, heads.dim)
        cos, sin = numbers.angles(rows, rotary_dim)
        norms = [numbers.normal(heads.dim) for _ in range(2)] if normed else []
        num_blocks = -(-rows // BLOCK_SIZE) + 1
        # No token's slot is that of another.
        slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(1))[:rows]
        slots = slots.to(numbers.device)
        layer = empty_layer(numbers, heads, num_blocks, int8, torch.float32 if exact else dtype)
        if exact:
            qkv, cos, sin, norms = qkv.float(), cos.float(), sin.float(), [norm.float() for norm in norms]
        arguments: list[Any] = [*norms, 1e-6] if normed else []
        q = ops.rope_and_write_kv(qkv, cos, sin, layer, slots, *arguments)
        written = widened(layer).read(slots, torch.float32)
        return [q, written[:, 0], written[:, 1]]

    kind = f"{heads}, {rotary_dim} rotated{', normed' if normed else ''}{', int8' if int8 else ''}"
    # A number halfway between two codes may become either: the step between them is 1/127 of the largest.
    return Case(f"rope and write, {kind}", dtype, run, max(TOLERANCES[dtype], 1 / 120) if int8 else None)


# ---------------------------------------------------------------- sampling


def sampling(
    report: Report, device: str = "cuda", rows: int = 48, vocab_sizes: Sequence[int] = (128256, 151936)
) -> None:
    """Penalties, filters, draws and the verification of drafts, in float32: the reference's own tokens."""
    cases: list[Case] = []
    for vocab_size in vocab_sizes:
        cases.append(_adjust(rows, vocab_size))
        cases += [_sample(rows, vocab_size, *kind) for kind in ((False, True), (False, False), (True, False))]
        cases += [_verify(rows, vocab_size, filters) for filters in (False, True)]
    check(report, cases, device)


def _logits(numbers: Numbers, rows: int, vocab_size: int) -> torch.Tensor:
    """As a head gives them: a view of wider rows."""
    return (numbers.normal(rows, vocab_size + 64) * 3)[:, :vocab_size]


def _adjust(rows: int, vocab_size: int) -> Case:
    def run(numbers: Numbers, exact: bool) -> Outputs:
        logits = _logits(numbers, rows, vocab_size)
        ops.adjust_logits(logits, sampling_batch(numbers, rows, vocab_size, filters=False))
        return [logits]

    return Case(f"penalties and biases, {rows} rows of {vocab_size}", torch.float32, run)


def _sample(rows: int, vocab_size: int, filters: bool, greedy: bool) -> Case:
    def run(numbers: Numbers, exact: bool) -> Outputs:
        logits = _logits(numbers, rows, vocab_size)
        logits[1, 5] = float("nan")
        batch = sampling_batch(numbers, rows, vocab_size, filters, greedy)
        probs = torch.zeros(rows, vocab_size, device=numbers.device)
        token_ids, healthy = ops.sample(logits, batch, probs)
        without, _ = ops.sample(logits, batch)
        return [_digits(token_ids), _digits(without), _digits(healthy), probs.masked_fill_(~healthy[:, None], 0.0)]

    kind = "greedy" if greedy else "all filters" if filters else "no filters"
    return Case(f"sampling, {kind}, {rows} rows of {vocab_size}", torch.float32, run, _PROBABILITIES, rows // 40)


def _verify(rows: int, vocab_size: int, filters: bool) -> Case:
    def run(numbers: Numbers, exact: bool) -> Outputs:
        logits = _logits(numbers, rows, vocab_size)
        batch = sampling_batch(numbers, rows, vocab_size, filters)
        q = (logits + numbers.normal(rows, vocab_size)).softmax(-1)
        drafts = torch.multinomial(q, 1, generator=numbers.generator).squeeze(1)
        drafts[::3] = -1
        uniforms = numbers.uniform(rows).double()
        accepted, token_ids, healthy = ops.verify_drafts(logits, batch, drafts, q, uniforms)
        return [_digits(accepted), _digits(token_ids), _digits(healthy)]

    kind = "all filters" if filters else "no filters"
    return Case(f"verified drafts, {kind}, {rows} rows of {vocab_size}", torch.float32, run, _PROBABILITIES, rows // 40)


_PROBABILITIES = 1e-4
"""Exponentials and the sums of a hundred thousand of them. Tokens have to be the same ones, but for a row in forty:
where a threshold falls between two sums that differ in their last bits, a token more or less is kept."""


def _digits(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers bit by bit [num_rows, 20]: another number is an error of 1, however near."""
    return (values.long().unsqueeze(1) >> torch.arange(20, device=values.device)) & 1
