"""Kvasir's own engine, measured like its peers."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from tests.benchmarks.measurement import Workload, peak_memory, rss


def _engine(model: Path, threads: int):
    import torch

    from engine.engine import Engine
    from engine.protocol import EngineConfig
    from kernels import ops

    torch.set_num_threads(threads)
    ops.set_num_threads(threads)
    config = EngineConfig(
        model=str(model), max_context=1024, max_num_seqs=8, max_batched_tokens=1024, prefix_caching=False
    )
    return Engine.load(config)


def measure(model: Path, threads: int, work: Workload) -> dict[str, float]:
    """Figures as `tests.benchmarks.peers` names them."""
    from engine.engine import Engine  # noqa: F401  the import is weighed apart
    from engine.protocol import SamplingParams

    import_memory = rss()
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=900, overflow="stop_at_limit")
    start = time.perf_counter()
    engine = _engine(model, threads)
    counter = iter(range(1_000_000))

    def add(token_ids: list[int]) -> str:
        request_id = str(next(counter))
        engine.add_request(request_id, token_ids, greedy)
        return request_id

    def run_until_first_token(request_id: str) -> None:
        while not any(output.request_id == request_id and output.token_ids for output in engine.step()):
            pass

    def cancel_all(request_ids: list[str]) -> None:
        for request_id in request_ids:
            engine.cancel(request_id)
        while engine.has_work:
            engine.step()

    first = add(work.prompt[:1])
    run_until_first_token(first)
    figures = {"load_to_first_token_s": time.perf_counter() - start, "import_memory": float(import_memory)}
    if work.only_load:
        return figures
    cancel_all([first])

    def prefill() -> float:
        begin = time.perf_counter()
        request_id = add(work.prompt)
        run_until_first_token(request_id)
        elapsed = time.perf_counter() - begin
        cancel_all([request_id])
        return elapsed

    prefill()
    figures["prefill_tok_s"] = len(work.prompt) / min(prefill() for _ in range(2))

    def decode(sequences: int) -> float:
        request_ids = [add(ids) for ids in work.starts[:sequences]]
        engine.step()
        begin, made = time.perf_counter(), 0
        while made < work.decode_tokens * sequences:  # a step gives one token each, several in a row give more
            made += sum(len(output.token_ids) for output in engine.step())
        rate = made / (time.perf_counter() - begin)
        cancel_all(request_ids)
        return rate

    for sequences in work.concurrency:
        figures[f"decode_{sequences}_tok_s"] = max(decode(sequences) for _ in range(4))

    figures["verify_steps"] = _verify_steps(engine, work)

    others = [add(ids) for ids in work.starts[:7]]
    engine.step()
    begin = time.perf_counter()
    late = add(work.prompt)
    run_until_first_token(late)
    figures["busy_ttft_s"] = time.perf_counter() - begin
    cancel_all([*others, late])
    figures["peak_memory"] = float(peak_memory())
    return figures


def _verify_steps(engine, work: Workload) -> float:
    """The native steps alone, after half the prompt; what they leave in the KV cache belongs to no request."""
    from kernels.cpu.program import StepBatch

    program, begin = engine._runner.decoder.program, len(work.prompt) // 2
    blocks = list(range(len(work.prompt) // 16))

    def step(num_rows: int) -> float:
        positions = list(range(begin, begin + num_rows))
        token_ids = work.prompt[begin : begin + num_rows]
        batch = StepBatch(
            token_ids, positions, positions, [0, num_rows], [begin + num_rows], [blocks], list(range(num_rows))
        )
        start = time.perf_counter()
        program.run(batch)
        return time.perf_counter() - start

    return work.ratio_of_steps(step)


def logits(model: Path, threads: int, token_ids: list[int]) -> np.ndarray:
    """Float32 logits [len(token_ids), vocabulary] of a teacher-forced text."""
    return _engine(model, threads).logits(token_ids).numpy()
