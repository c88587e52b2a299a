"""Sampling rows for tests, and what becomes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.parameters import SamplingParams
from engine.request import Request
from engine.sampling.batch import make_batch
from engine.sampling.counts import CountTables
from engine.sampling.logprobs import RawLogprobs
from engine.sampling.noise import Stream
from engine.sampling.rows import RequestSampling, RowSettings, SamplingRow
from engine.sampling.verify import Drafts, verify
from kernels import ops
from kernels.sampling import Penalties

PLAIN: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}


def sampling_row(seed: int = 0, position: int = 0, **params) -> SamplingRow:
    """A row without filters but for those given, and without a text."""
    return SamplingRow(RowSettings(SamplingParams(**{**PLAIN, **params})), seed, position)


def penalised_row(prompt: Sequence[int], output: Sequence[int], counts: CountTables, **params) -> SamplingRow:
    """The row of the token that follows a text."""
    own = SamplingParams(**{**PLAIN, **params})
    request = Request("r", [*prompt, *output], own, num_prompt_tokens=len(prompt))
    return RequestSampling(request, counts).row()


def with_params(row: SamplingRow, **changed) -> SamplingRow:
    """The row with other parameters."""
    values = {name: getattr(row.settings.params, name) for name in row.settings.params.__struct_fields__}
    return replace(row, settings=RowSettings(SamplingParams(**{**values, **changed})))


@dataclass(frozen=True)
class Sampled:
    """A token for each row, None where the row's logits were no numbers to sample from."""

    token_ids: list[int | None]
    logprobs: list[RawLogprobs | None]


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], vocab_size: int | None = None) -> Sampled:
    """A token for each row of logits, as a step without drafts draws it."""
    results = verify(logits, rows, [Drafts()] * len(rows), vocab_size).result()
    return Sampled(
        [None if each.token_ids is None else each.token_ids[0] for each in results],
        [None if each.token_ids is None else each.logprobs[0] for each in results],
    )


@torch.inference_mode()
def logits_to_probs(logits: torch.Tensor, rows: Sequence[SamplingRow], vocab_size: int | None = None) -> torch.Tensor:
    """The distributions [num_rows, vocab_size] that `sample` draws from. Changes `logits`."""
    logits = logits[:, :vocab_size]
    batch = make_batch(logits, rows, [Stream.DRAW] * len(rows))
    ops.adjust_logits(logits, batch)
    probs = torch.empty(logits.shape)
    ops.sample(logits, batch, probs)
    return probs


def row_counts(penalties: Penalties, row: int) -> tuple[Counter[int], Counter[int]]:
    """How often each token counts in prompt and output, and in the output, by tables and deltas."""
    result = []
    for table, deltas in (
        (penalties.sequence, penalties.delta_sequence),
        (penalties.output, penalties.delta_output),
    ):
        counts = Counter(dict(enumerate(table[penalties.slots[row]].tolist())))
        for token_id, change in zip(penalties.delta_ids[row].tolist(), deltas[row].tolist()):
            if token_id >= 0:
                counts[token_id] += change
        assert min(counts.values()) >= 0
        result.append(+counts)
    return result[0], result[1]
