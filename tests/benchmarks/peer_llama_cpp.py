"""llama.cpp through llama-cpp-python's low-level interface, measured on its own terms."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import llama_cpp
import numpy as np

from tests.benchmarks.measurement import Workload, peak_memory, rss


class LlamaCpp:
    """One model and context; every sequence lives in the context's own KV cache."""

    def __init__(self, model: Path, threads: int, context: int, max_sequences: int) -> None:
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        self.model = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context * max_sequences
        params.n_batch = params.n_ubatch = 1024
        params.n_seq_max = max_sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(1024, 0, 1)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Computes rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def logits(self, row: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(pointer, shape=(self.vocab_size,))

    def forget(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)

    def forget_from(self, position: int) -> None:
        """Of sequence 0."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, position, -1)


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, user_data: object) -> None:
    pass


def measure(model: Path, threads: int, work: Workload) -> dict[str, float]:
    """Figures as `tests.benchmarks.peers` names them."""
    before_load = rss()
    start = time.perf_counter()
    llama = LlamaCpp(model, threads, context=1024, max_sequences=8)
    llama.decode([(work.prompt[0], 0, 0, True)])
    int(llama.logits(0).argmax())
    figures = {"load_to_first_token_s": time.perf_counter() - start, "import_memory": float(before_load)}
    if work.only_load:
        return figures

    def prefill() -> float:
        llama.forget()
        begin = time.perf_counter()
        last = len(work.prompt) - 1
        llama.decode([(token, i, 0, i == last) for i, token in enumerate(work.prompt)])
        int(llama.logits(last).argmax())
        return time.perf_counter() - begin

    prefill()
    figures["prefill_tok_s"] = len(work.prompt) / min(prefill() for _ in range(2))

    def decode(sequences: int) -> float:
        llama.forget()
        tokens = list(work.starts[:sequences])
        for s, start_ids in enumerate(tokens):
            llama.decode([(token, i, s, i == len(start_ids) - 1) for i, token in enumerate(start_ids)])
        current = [ids[-1] for ids in tokens]
        position = len(tokens[0])
        begin = time.perf_counter()
        for step in range(work.decode_tokens):
            llama.decode([(token, position + step, s, True) for s, token in enumerate(current)])
            current = [int(llama.logits(s).argmax()) for s in range(sequences)]
        return sequences * work.decode_tokens / (time.perf_counter() - begin)

    for sequences in work.concurrency:
        figures[f"decode_{sequences}_tok_s"] = max(decode(sequences) for _ in range(4))

    llama.forget()
    middle = len(work.prompt) // 2
    llama.decode([(token, i, 0, False) for i, token in enumerate(work.prompt[:middle])])

    def step(num_rows: int) -> float:
        begin = time.perf_counter()
        llama.decode([(token, middle + i, 0, True) for i, token in enumerate(work.prompt[middle : middle + num_rows])])
        llama.logits(num_rows - 1)  # which waits for it
        elapsed = time.perf_counter() - begin
        llama.forget_from(middle)
        return elapsed

    figures["verify_steps"] = work.ratio_of_steps(step)

    llama.forget()
    others = work.starts[:7]
    for s, ids in enumerate(others):
        llama.decode([(token, i, s, False) for i, token in enumerate(ids)])
    begin = time.perf_counter()
    position = len(others[0])
    rows = [(ids[-1], position, s, True) for s, ids in enumerate(others)]
    rows += [(token, i, 7, i == len(work.prompt) - 1) for i, token in enumerate(work.prompt)]
    llama.decode(rows)
    int(llama.logits(len(rows) - 1).argmax())
    figures["busy_ttft_s"] = time.perf_counter() - begin
    figures["peak_memory"] = float(peak_memory())
    return figures


def logits(model: Path, threads: int, token_ids: list[int]) -> np.ndarray:
    """Float32 logits [len(token_ids), vocabulary] of a teacher-forced text."""
    llama = LlamaCpp(model, threads, context=1024, max_sequences=1)
    llama.decode([(token, i, 0, True) for i, token in enumerate(token_ids)])
    return np.stack([llama.logits(i).copy() for i in range(len(token_ids))])
