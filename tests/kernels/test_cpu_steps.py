"""Native steps in a row against the same steps one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cpu import sampling
from kernels.cpu.library import NativeLibraryError, WeightFormat
from kernels.cpu.packing import pack
from kernels.cpu.program import Program, StepBatch
from kernels.sampling import SamplingBatch

BLOCK_SIZE = 4
VOCAB_SIZE = 90


def bigrams(max_rows: int) -> tuple[Program, torch.Tensor]:
    """A program whose logits [max_rows, 96] depend on the row's token alone; all of it is kept alive by the program."""
    generator = torch.Generator().manual_seed(5)
    table, head = (
        pack([torch.randn(96, 64, generator=generator)], WeightFormat.F32, 64) for _ in ("embedding", "head")
    )
    program = Program(max_rows)
    hidden, logits = program.floats(64), program.floats(96)
    read = program.activation(head.activation(), 64)
    program.embed(table, hidden)
    program.quantize(hidden, read)
    program.matmul(read, head, logits, factor=0.3)
    return program, logits


def step_batch(token_ids: list[int], positions: list[int], num_blocks: int) -> StepBatch:
    rows = range(len(token_ids))
    tables = [[7 * row + block for block in range(num_blocks)] for row in rows]
    slots = [
        table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for table, at in zip(tables, positions, strict=True)
    ]
    ends = [at + 1 for at in positions]
    return StepBatch(token_ids, positions, slots, [*rows, len(token_ids)], ends, tables, rows)


def sampled(temperatures: list[float], num_steps: int) -> SamplingBatch:
    num_rows = len(temperatures)
    generator = torch.Generator().manual_seed(9)
    return SamplingBatch(
        torch.tensor(temperatures),
        torch.zeros(num_rows),
        torch.full((num_rows,), 20, dtype=torch.int32),
        torch.full((num_rows,), 0.95),
        torch.zeros(num_rows, dtype=torch.bool),
        torch.rand(num_steps * num_rows, dtype=torch.float64, generator=generator),
        all_greedy=not any(temperatures),
        any_filter=any(temperatures),
    )


@pytest.mark.parametrize("temperatures", [[0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 2.0, 0.7]], ids=["one", "greedy", "mixed"])
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_tokens_are_those_of_single_steps(instruction_set, temperatures, num_steps):
    num_rows = len(temperatures)
    program, logits = bigrams(max_rows=4)
    logits = logits[:num_rows, :VOCAB_SIZE]
    token_ids, positions = [11, 3, 89, 40][:num_rows], [2, 9, 0, 4][:num_rows]
    batch = sampled(temperatures, num_steps)
    expected = []
    for step in range(num_steps):
        program.run(step_batch(token_ids, positions, 5))
        own = replace(batch, uniforms=batch.uniforms[step * num_rows : (step + 1) * num_rows])
        drawn, healthy = sampling.sample(logits, own)
        assert healthy.all()
        token_ids = drawn.tolist()
        expected += token_ids

    in_a_row = step_batch([11, 3, 89, 40][:num_rows], positions, 5)
    described, drawn, healthy = sampling.describe(logits, batch, num_steps)
    nanoseconds = torch.zeros(len(program.ops) + 1, dtype=torch.int64)
    program.run_steps(in_a_row, described, num_steps, BLOCK_SIZE, nanoseconds)
    assert drawn.tolist() == expected and healthy.all()
    assert (nanoseconds > 0).all()
    # The batch is that of the last step now: what it read, and where its keys would have been written.
    last = [at + num_steps - 1 for at in positions]
    before = [11, 3, 89, 40][:num_rows] if num_steps == 1 else expected[-2 * num_rows : -num_rows]
    there = step_batch(before, last, 5)
    assert (in_a_row._int32, in_a_row._int64) == (there._int32, there._int64)


@pytest.mark.parametrize(
    ("batch", "num_steps", "num_sampled"),
    [
        (step_batch([1, 2], [0, 6], 2), 3, 2),  # the second one's third place lies beyond its blocks
        (step_batch([1, 2], [0, 0], 2), 2, 1),
        (step_batch([1, 2], [0, 0], 2), 0, 2),
        (StepBatch([1, 2], [0, 1], [0, 1], [0, 2], [2], [[0, 1]], [0, 1]), 2, 2),  # two rows of one sequence
        (StepBatch([1, 2], [0, 0], [0, 28], [0, 1, 2], [1, 1], [[0], [7]], [1]), 2, 2),
        (StepBatch([1, 2], [0, 0], [0, 28], [0, 1, 2], [1, 1], [[0], [7]], [1, 0]), 2, 2),
    ],
    ids=["short tables", "rows without sampling", "no step", "two rows", "unselected", "out of order"],
)
def test_what_is_no_decoding_is_refused(batch, num_steps, num_sampled):
    program, logits = bigrams(max_rows=2)
    described, _, _ = sampling.describe(logits[:num_sampled], sampled([0.0] * num_sampled, 3), 3)
    with pytest.raises(NativeLibraryError, match="in a row"):
        program.run_steps(batch, described, num_steps, BLOCK_SIZE)
