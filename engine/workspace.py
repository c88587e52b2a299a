"""What a step takes at its largest besides weights and cache, found out by running it once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.parameters import SamplingParams
from engine.protocol import EngineConfig
from engine.request import Request
from engine.runner import Runner
from engine.sampling.counts import CountTables
from engine.sampling.rows import RequestSampling, SamplingRow
from engine.sampling.verify import Drafts, verify
from engine.scheduler import ScheduledRequest, StepPlan

NUM_BLOCKS = 1
"""Blocks that the dummy steps need, for all their sequences together: what they compute is never looked at."""

# Everything that a request can ask of sampling at once.
_PARAMS = SamplingParams(
    temperature=1.0, top_p=0.9, min_p=0.01, top_k=50, repetition_penalty=1.1, presence_penalty=0.1,
    frequency_penalty=0.1, logit_bias={0: 1.0}, logprobs=20,
)  # fmt: skip


def dummy_plans(config: EngineConfig, budget: int, max_context: int) -> list[StepPlan]:
    """The largest steps there can be: the whole token budget with as many sequences and rows of logits as it has
    room for, and every sequence decoding, one of them at the end of the context."""
    num_seqs, num_drafts = config.max_num_seqs, config.most_drafts
    share, more = divmod(budget, num_seqs)
    prefills = [min(share + (index < more), max_context) for index in range(num_seqs)]
    decode = min(1 + num_drafts, *prefills)
    ends = [max_context] + [decode] * (num_seqs - 1)
    return [
        StepPlan([_entry(config, 0, size, num_drafts) for size in prefills], []),
        StepPlan([_entry(config, end - decode, decode, num_drafts) for end in ends], []),
    ]


def _entry(config: EngineConfig, start: int, size: int, num_drafts: int) -> ScheduledRequest:
    """A sequence whose tokens are all 0, in as many blocks as it needs, all of them the same one."""
    num_drafts = min(num_drafts, size - 1)
    end = start + size
    request = Request(
        "dummy",
        [0] * (end - num_drafts),
        _PARAMS,
        num_prompt_tokens=1,
        draft_token_ids=[0] * num_drafts,
        block_table=[0] * -(-end // config.block_size),
    )
    return ScheduledRequest(request, start, size, samples=True)


@torch.inference_mode()
def run_dummy_steps(
    runner: Runner, config: EngineConfig, budget: int, max_context: int, vocab_size: int, device: torch.device
) -> None:
    """Computes `dummy_plans` and samples from their logits, with everything a request can ask for.

    The runner needs `NUM_BLOCKS` blocks, whose contents are lost.
    """
    tables = CountTables()
    for plan in dummy_plans(config, budget, max_context):
        rows: list[SamplingRow] = []
        drafts: list[Drafts] = []
        for entry in plan.scheduled:
            token_ids = entry.request.draft_token_ids
            probs = None
            if config.speculation == "draft" and token_ids:
                probs = torch.full((len(token_ids), vocab_size), 1.0 / vocab_size, device=device)
            rows += RequestSampling(entry.request, tables).rows(token_ids)
            drafts.append(Drafts(token_ids, probs))
        logits = runner.execute(plan)
        verify(logits, rows, drafts, vocab_size).result()


def peak_bytes(device: torch.device, compute: Callable[[], None]) -> int:
    """Bytes of GPU memory that torch's allocator takes at most while `compute` runs, beyond what it held before.

    Counts whole segments, as the driver does. What the allocator kept unused is given back before and after.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    compute()
    torch.cuda.synchronize(device)
    peak = max(
        torch.cuda.max_memory_reserved(device) - reserved,
        # More where activations found room in segments that weights had left half empty, as the cache may do later.
        torch.cuda.max_memory_allocated(device) - allocated,
    )
    torch.cuda.empty_cache()
    return peak
