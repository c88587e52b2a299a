"""Hugging Face transformers in float32 on the same GGUF: the slow peer, and the exact one."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from tests.benchmarks.measurement import Workload, peak_memory, rss


def _load(model: Path, threads: int):
    import torch

    from tests.engine.hugging_face import hugging_face_llama

    torch.set_num_threads(threads)
    return hugging_face_llama(model)


def measure(model: Path, threads: int, work: Workload) -> dict[str, float]:
    """Figures as `tests.benchmarks.peers` names them; transformers cannot prefill beside other decodes."""
    import torch
    import transformers  # noqa: F401  the import is weighed apart

    import_memory = rss()
    start = time.perf_counter()
    loaded = _load(model, threads)

    @torch.inference_mode()
    def generate(token_ids: list[list[int]], new_tokens: int) -> float:
        begin = time.perf_counter()
        ids = torch.tensor(token_ids)
        loaded.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new_tokens,
            max_new_tokens=new_tokens, pad_token_id=0,
        )  # fmt: skip
        return time.perf_counter() - begin

    generate([work.prompt[:1]], 1)
    figures = {"load_to_first_token_s": time.perf_counter() - start, "import_memory": float(import_memory)}
    if work.only_load:
        return figures
    figures["prefill_tok_s"] = len(work.prompt) / min(generate([work.prompt], 1) for _ in range(2))
    for sequences in work.concurrency:
        starts = work.starts[:sequences]
        decode = min(generate(starts, work.decode_tokens + 1) - generate(starts, 1) for _ in range(2))
        figures[f"decode_{sequences}_tok_s"] = sequences * work.decode_tokens / decode
    figures["peak_memory"] = float(peak_memory())
    return figures


def logits(model: Path, threads: int, token_ids: list[int]) -> np.ndarray:
    """Float32 logits [len(token_ids), vocabulary] of a teacher-forced text."""
    import torch

    with torch.inference_mode():
        return _load(model, threads)(torch.tensor([token_ids])).logits[0].numpy()
