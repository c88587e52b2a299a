"""The launches that `kernels.aot` compiles: every operation in the shapes and formats models come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.kv import KVLayer
from kernels.metadata import AttentionMetadata
from kernels.sampling import LogitCells, Penalties, SamplingBatch
from kernels.triton import attention, matmul, moe, norm, rope, routing, sampling
from kernels.triton.launch import Capability, Launch, recording

KV_HEADS = 4
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """`run` calls an operation; `is_decode` where it runs for every token of an answer."""

    run: Callable[[], object]
    is_decode: bool = False
    tensor_core_kernels: tuple[str, ...] = ()


def record(case: Case, capability: Capability, runs_ptx: bool = True) -> list[Launch]:
    """What the case would start on a GPU of that capability."""
    with recording(capability, runs_ptx) as launches:
        case.run()
    return launches


def _attention(
    head_dim: int,
    group: int,
    query_len: int,
    dtype: torch.dtype,
    int8: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> Case:
    def run() -> object:
        seq_len = max(2 * query_len, 2 * attention.LEAST_SPLIT_KEYS)
        num_blocks = seq_len // BLOCK_SIZE
        metadata = AttentionMetadata.build([list(range(num_blocks))], [query_len], [seq_len], BLOCK_SIZE)
        shape = (num_blocks, BLOCK_SIZE, 2, KV_HEADS, head_dim)
        scales = torch.empty(shape[:-1], device="meta") if int8 else None
        layer = KVLayer(torch.empty(shape, dtype=torch.int8 if int8 else dtype, device="meta"), scales)
        q = torch.empty(query_len, KV_HEADS * group, head_dim, dtype=dtype, device="meta")
        head_sinks = torch.empty(KV_HEADS * group, dtype=dtype, device="meta") if sinks else None
        return attention.paged_attention(q, layer, metadata, head_dim**-0.5, window, soft_cap, head_sinks)

    return Case(run, is_decode=query_len <= 16, tensor_core_kernels=("attention_kernel",))


def _matmul(
    bits: int,
    group: int,
    num_rows: int,
    dtype: torch.dtype,
    minimums: bool,
    zero: int = 0,
    is_float: bool = False,
    rows: int = 4096,
) -> Case:
    def run() -> object:
        columns = 4096
        codes = torch.empty(rows, columns, dtype=torch.uint8, device="meta")
        scales = torch.empty(rows, columns // group, device="meta")
        weight = matmul.tile_weight(codes, scales, scales if minimums else None, bits, dtype, zero, is_float)
        return matmul.tiled_linear(torch.empty(num_rows, columns, dtype=dtype, device="meta"), weight)

    return Case(run, is_decode=num_rows <= 16 and rows > 1, tensor_core_kernels=("tiled_matmul_kernel",))


def _experts(bits: int, num_tokens: int, dtype: torch.dtype) -> Case:
    def run() -> object:
        num_experts, rows, columns = 8, 2048, 2048
        if bits == 16:
            weight: torch.Tensor | matmul.TiledWeight = torch.empty(
                num_experts, rows, columns, dtype=dtype, device="meta"
            )
        else:
            codes = torch.empty(rows, columns, dtype=torch.uint8, device="meta")
            scales = torch.empty(rows, columns // 32, device="meta")
            stack = moe.stack_tiled([matmul.tile_weight(codes, scales, scales, bits, dtype)] * num_experts)
            assert stack is not None
            weight = stack
        logits = torch.empty(num_tokens, num_experts, dtype=dtype, device="meta")
        chosen, shares = routing.choose_experts(logits, 2, normalize=True)
        rows_of = routing.sort_by_expert(chosen, num_experts)
        x = torch.empty(num_tokens, columns, dtype=dtype, device="meta")
        return routing.combine(moe.grouped_linear(x, weight, rows_of, gather=True), rows_of, shares)

    return Case(run, is_decode=num_tokens <= 16, tensor_core_kernels=("grouped_matmul_kernel",))


def _rope(head_dim: int, dtype: torch.dtype, int8: bool, normed: bool) -> Case:
    def run() -> object:
        shape = (4, BLOCK_SIZE, 2, KV_HEADS, head_dim)
        scales = torch.empty(shape[:-1], device="meta") if int8 else None
        layer = KVLayer(torch.empty(shape, dtype=torch.int8 if int8 else dtype, device="meta"), scales)
        qkv = torch.empty(16, 6 * KV_HEADS, head_dim, dtype=dtype, device="meta")
        angles = torch.empty(16, head_dim, dtype=dtype, device="meta")
        weight = torch.empty(head_dim, dtype=dtype, device="meta") if normed else None
        slots = torch.empty(16, dtype=torch.int64, device="meta")
        return rope.rope_and_write_kv(qkv, angles, angles, layer, slots, weight, weight, 1e-6)

    return Case(run, is_decode=True)


def _sampling_batch(
    num_rows: int,
    greedy: bool = False,
    filters: bool = False,
    cells: LogitCells | None = None,
    penalties: Penalties | None = None,
) -> SamplingBatch:
    single = torch.empty(num_rows, device="meta")
    return SamplingBatch(
        temperature=single,
        min_p=single,
        top_k=single.int(),
        top_p=single,
        temperature_last=single.bool(),
        uniforms=single.double(),
        all_greedy=greedy,
        any_filter=filters,
        cells=cells,
        penalties=penalties,
    )


def _sampling(num_rows: int, vocab_size: int, greedy: bool = False, filters: bool = False) -> Case:
    logits = torch.empty(num_rows, vocab_size, device="meta")
    return Case(lambda: sampling.sample(logits, _sampling_batch(num_rows, greedy, filters)), is_decode=True)


def _verifying(num_rows: int, vocab_size: int) -> Case:
    def run() -> object:
        logits, batch = torch.empty(num_rows, vocab_size, device="meta"), _sampling_batch(num_rows, filters=True)
        return sampling.verify_drafts(logits, batch, batch.top_k.long(), logits, batch.uniforms)

    return Case(run, is_decode=True)


def _adjusting(num_rows: int, vocab_size: int) -> Case:
    def run() -> object:
        logits = torch.empty(num_rows, vocab_size, device="meta")
        single, counts = logits[:, 0].contiguous(), logits.int()
        deltas = counts[:, :8].contiguous()
        penalties = Penalties(single, single, single, single.int(), counts, counts, deltas, deltas, deltas)
        cells = LogitCells(single.long(), single.long(), single)
        return sampling.adjust_logits(logits, _sampling_batch(num_rows, cells=cells, penalties=penalties))

    return Case(run, is_decode=True)


def _rows(run: Callable[[torch.Tensor], object], columns: int, dtype: torch.dtype) -> Case:
    return Case(lambda: run(torch.empty(16, columns, dtype=dtype, device="meta")), is_decode=True)


def _norm(x: torch.Tensor) -> object:
    return norm.rms_norm(x, x[0], 1e-6, torch.empty_like(x))


def _clamped(x: torch.Tensor) -> object:
    return norm.clamped_swiglu(x, 1.702, 7.0)


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for num_rows, vocab_size in ((1, 262144), (64, 151936)):
        name = f"{num_rows} of {vocab_size}"
        cases[f"sampling greedy {name}"] = _sampling(num_rows, vocab_size, greedy=True)
        cases[f"sampling plain {name}"] = _sampling(num_rows, vocab_size)
        cases[f"sampling filters {name}"] = _sampling(num_rows, vocab_size, filters=True)
        cases[f"sampling drafts {name}"] = _verifying(num_rows, vocab_size)
    cases["sampling adjust"] = _adjusting(64, 151936)
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    kinds = {"decode": 1, "verify": 5, "prefill": 512}
    for dtype, dtype_name in names.items():
        for kind, query_len in kinds.items():
            for head_dim in (64, 80, 96, 112, 128, 192, 256):
                cases[f"attention {kind} d{head_dim} {dtype_name}"] = _attention(head_dim, 4, query_len, dtype)
            for group in (1, 3, 7, 8):
                cases[f"attention {kind} group {group} {dtype_name}"] = _attention(128, group, query_len, dtype)
            cases[f"attention {kind} int8 {dtype_name}"] = _attention(128, 4, query_len, dtype, int8=True)
            cases[f"attention {kind} window sinks {dtype_name}"] = _attention(
                64, 8, query_len, dtype, window=128, sinks=True
            )
            cases[f"attention {kind} soft cap {dtype_name}"] = _attention(
                256, 2, query_len, dtype, window=4096, soft_cap=50.0
            )
        for num_rows in (1, 16, 64, 512):
            for group in (32, 64, 128):
                cases[f"int4 g{group} {num_rows} rows {dtype_name}"] = _matmul(4, group, num_rows, dtype, minimums=True)
            cases[f"int8 g16 {num_rows} rows {dtype_name}"] = _matmul(8, 16, num_rows, dtype, minimums=True)
            cases[f"mxfp4 {num_rows} rows {dtype_name}"] = _matmul(
                4, 32, num_rows, dtype, minimums=False, is_float=True
            )
            cases[f"symmetric int4 {num_rows} rows {dtype_name}"] = _matmul(
                4, 32, num_rows, dtype, minimums=False, zero=8
            )
            for zero in (32, 128):
                cases[f"int8 less {zero} {num_rows} rows {dtype_name}"] = _matmul(
                    8, 16, num_rows, dtype, minimums=False, zero=zero
                )
            cases[f"int8 channel {num_rows} rows {dtype_name}"] = _matmul(8, 4096, num_rows, dtype, minimums=True)
        cases[f"int4 of one output {dtype_name}"] = _matmul(4, 32, 1, dtype, minimums=True, rows=1)
        for num_tokens in (1, 256, 2048):
            for bits in (4, 8, 16):
                cases[f"experts {bits} bits {num_tokens} tokens {dtype_name}"] = _experts(bits, num_tokens, dtype)
        for int8 in (False, True):
            kv_name = "int8" if int8 else dtype_name
            cases[f"rope to {kv_name} from {dtype_name}"] = _rope(128, dtype, int8, normed=False)
            cases[f"rope normed to {kv_name} from {dtype_name}"] = _rope(80, dtype, int8, normed=True)
        cases[f"norm 4096 {dtype_name}"] = _rows(_norm, 4096, dtype)
        cases[f"norm 576 {dtype_name}"] = _rows(_norm, 576, dtype)
        cases[f"silu {dtype_name}"] = _rows(norm.silu_and_mul, 2 * 14336, dtype)
        cases[f"gelu {dtype_name}"] = _rows(norm.gelu_tanh_and_mul, 2 * 9216, dtype)
        cases[f"clamped swiglu {dtype_name}"] = _rows(_clamped, 2 * 2880, dtype)
    return cases


CASES = _cases()
