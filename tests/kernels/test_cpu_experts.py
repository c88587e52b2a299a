"""Native mixture of experts against the same in torch, and against itself in other company."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.cpu import library
from kernels.cpu.library import Epilogue, WeightFormat
from kernels.cpu.packing import pack
from kernels.cpu.program import Program, StepBatch

HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN = 64, 32, 7, 3


class Experts:
    """Random experts; `run` is the whole layer, added to what `hidden` starts with."""

    def __init__(self, epilogue: Epilogue = Epilogue.SWIGLU, normalize: bool = True, biases: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.epilogue, self.normalize, self.biases = epilogue, normalize, biases
        self.gate_up, self.down = normal(NUM_EXPERTS, 2 * INNER, HIDDEN) / 4, normal(NUM_EXPERTS, HIDDEN, INNER) / 4
        self.gate_up_bias, self.down_bias = normal(NUM_EXPERTS, 2 * INNER), normal(NUM_EXPERTS, HIDDEN)
        self.x, self.logits, self.residual = normal(37, HIDDEN), 2 * normal(37, NUM_EXPERTS), normal(37, HIDDEN)
        self.packed = [[pack([weight], WeightFormat.F32, weight.shape[1]) for weight in part] for part in
                       (self.gate_up, self.down)]  # fmt: skip

    def run(self, rows: list[int]) -> torch.Tensor:
        program = Program(max_rows=40)
        x, logits, hidden = (program.floats(part.shape[1]) for part in (self.x, self.logits, self.residual))
        for buffer, values in ((x, self.x), (logits, self.logits), (hidden, self.residual)):
            buffer[: len(rows)] = values[rows]
        routing = program.routing(NUM_EXPERTS, NUM_CHOSEN, self.normalize)
        (gate_up, down), shares = self.packed, routing.max_shares
        read, quantized = (program.activation(part[0].activation(), part[0].columns, shares) for part in self.packed)
        gated, out = program.floats(INNER, shares), program.floats(HIDDEN, shares)
        clamp = {"factor": 1.702, "soft_cap": 0.5} if self.epilogue == Epilogue.CLAMPED_SWIGLU else {}
        program.route(logits, routing)
        program.gather(x, routing, read)
        bias = self.gate_up_bias if self.biases else None
        program.expert_matmul(read, gate_up, routing, gated, self.epilogue, bias, **clamp)
        program.quantize(gated, quantized, routing)
        program.expert_matmul(quantized, down, routing, out, bias=self.down_bias if self.biases else None)
        program.combine(out, routing, hidden, factor=0.5)
        program.run(StepBatch.of_rows(len(rows)))
        return hidden[: len(rows)].clone()

    def exact(self) -> torch.Tensor:
        gated = {
            Epilogue.SWIGLU: reference.silu_and_mul,
            Epilogue.GEGLU: reference.gelu_tanh_and_mul,
            Epilogue.CLAMPED_SWIGLU: lambda both: reference.clamped_swiglu(both, 1.702, 0.5),
        }[self.epilogue]
        best, chosen = self.logits.topk(NUM_CHOSEN)
        weights = best.softmax(-1) if self.normalize else self.logits.softmax(-1).gather(-1, chosen)
        out = self.residual.clone()
        for row in range(out.shape[0]):
            for expert, weight in zip(chosen[row].tolist(), weights[row]):
                both = self.gate_up[expert] @ self.x[row] + self.biases * self.gate_up_bias[expert]
                down = self.down[expert] @ gated(both[None])[0] + self.biases * self.down_bias[expert]
                out[row] += 0.5 * weight * down
        return out


@pytest.mark.parametrize("instruction_set", library.instruction_sets())
@pytest.mark.parametrize("epilogue", [Epilogue.SWIGLU, Epilogue.GEGLU, Epilogue.CLAMPED_SWIGLU])
def test_each_row_gets_the_weighted_sum_of_its_best_experts(instruction_set, epilogue):
    before = library.instruction_set()
    library.use_instruction_set(instruction_set)
    try:
        for normalize, biases in ((True, False), (False, True)):
            experts = Experts(epilogue, normalize, biases)
            torch.testing.assert_close(experts.run(list(range(37))), experts.exact(), atol=1e-4, rtol=1e-4)
    finally:
        library.use_instruction_set(before)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_is_the_same_bits_alone_and_among_others(num_threads):
    experts = Experts()
    library.set_num_threads(num_threads)
    try:
        together = experts.run(list(range(37)))
        for rows in ([5], [30, 5, 6], [36, 0]):
            assert torch.equal(experts.run(rows), together[rows])
    finally:
        library.set_num_threads(1)


def test_experts_that_nobody_chose_and_equal_logits_are_no_trouble():
    experts = Experts()
    experts.logits[:] = 0.0
    experts.logits[:, 4] = 9.0
    result = experts.run(list(range(37)))
    assert torch.isfinite(result).all()
    # Of equals the first are taken: experts 4, 0, 1.
    experts.logits[:, 0], experts.logits[:, 1] = 1e-6, 1e-6
    torch.testing.assert_close(result, experts.exact(), atol=1e-4, rtol=1e-4)


def test_a_row_of_nan_logits_harms_no_other():
    experts = Experts()
    expected = experts.run([1, 2, 3])
    experts.logits[2] = float("nan")
    harmed = experts.run([1, 2, 3])
    assert torch.equal(harmed[[0, 2]], expected[[0, 2]])
