"""transformers' `generate` on the same tensors: what the engine is compared with."""

from __future__ import annotations

from typing import Any

import torch

from engine.models.loader import LoadedModel
from tests.gpu.bench import Bench
from tests.gpu.random_model import RandomModel
from tests.gpu.report import Report


def beside_hugging_face(
    report: Report,
    name: str,
    model: RandomModel,
    loaded: LoadedModel,
    bench: Bench,
    decoded: dict[int, float],
    prefilled: dict[int, float],
) -> None:
    """`generate` of transformers with its own defaults (SDPA attention, a cache that grows) on the same tensors."""
    work, clock = bench.work, bench.clock
    peer = model.hugging_face(loaded)
    prompt = model.prompt(work.prompt_tokens)
    own = bench.llm.logits(prompt)
    with torch.inference_mode():
        theirs = peer(torch.tensor([prompt], device=model.device), use_cache=False).logits[0].float()
    error = float((own - theirs).square().mean().sqrt() / theirs.std())
    same = float((own.argmax(-1) == theirs.argmax(-1)).float().mean())
    # Both round to bf16 in every layer, at different places.
    tolerance = 0.1 if loaded.dtype == torch.bfloat16 else 1e-4
    report.check(
        f"{name} logits are those of Hugging Face", error <= tolerance, error, tolerance, f"{same:.0%} the same tokens"
    )
    for batch in work.peer_batches:
        prompts = [model.prompt(work.prompt_tokens, seed) for seed in range(batch)]
        _generate(peer, prompts, 2)
        one = clock.wall_seconds(lambda prompts=prompts: _generate(peer, prompts, 1))
        many = clock.wall_seconds(lambda prompts=prompts: _generate(peer, prompts, 1 + work.peer_steps))
        rate = batch * work.peer_steps / max(many - one, 1e-9)
        note = f"Kvasir: {decoded[batch] / rate:.2f} times" if batch in decoded else ""
        report.figure(f"{name} decode, batch {batch}, Hugging Face", rate, "tok/s", note=note)
    prompts = [model.prompt(work.peer_prefill)]
    _generate(peer, prompts, 1)
    rate = work.peer_prefill / clock.wall_seconds(lambda: _generate(peer, prompts, 1))
    note = f"Kvasir: {prefilled[work.peer_prefill] / rate:.2f} times" if work.peer_prefill in prefilled else ""
    report.figure(f"{name} prefill, {work.peer_prefill} tokens, Hugging Face", rate, "tok/s", note=note)


@torch.inference_mode()
def _generate(model: Any, prompts: list[list[int]], new_tokens: int) -> None:
    ids = torch.tensor(prompts, device=model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
    )
