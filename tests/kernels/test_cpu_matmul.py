"""Native matrix products against the exact product of what they were given."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kernels.cpu import library
from kernels.cpu.library import ActivationKind, Epilogue, SourceFormat
from kernels.cpu.packing import PackedWeight, pack
from kernels.cpu.program import Program, StepBatch

FORMATS = {
    SourceFormat.Q4_0: gguf.GGMLQuantizationType.Q4_0,
    SourceFormat.Q4_1: gguf.GGMLQuantizationType.Q4_1,
    SourceFormat.Q8_0: gguf.GGMLQuantizationType.Q8_0,
    SourceFormat.F32: gguf.GGMLQuantizationType.F32,
    SourceFormat.F16: gguf.GGMLQuantizationType.F16,
    SourceFormat.BF16: gguf.GGMLQuantizationType.BF16,
}


@pytest.fixture(params=library.instruction_sets())
def instruction_set(request: pytest.FixtureRequest):
    before = library.instruction_set()
    library.use_instruction_set(request.param)
    yield request.param
    library.use_instruction_set(before)


def random_weight(source_format: SourceFormat, rows: int, columns: int) -> tuple[PackedWeight, torch.Tensor]:
    """A packed weight, and what `gguf.quants` says it stands for."""
    generator = np.random.default_rng(rows * 1000 + columns)
    values = generator.standard_normal((rows, columns)).astype(np.float32)
    quantized = gguf.quants.quantize(values, FORMATS[source_format])
    exact = gguf.quants.dequantize(quantized, FORMATS[source_format])
    return pack(torch.from_numpy(quantized.copy()), source_format, columns), torch.from_numpy(exact.copy())


def product(
    weight: PackedWeight,
    x: torch.Tensor,
    epilogue: Epilogue = Epilogue.STORE,
    bias: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    precise: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The native product, and the input as the kernel saw it after quantisation."""
    program = Program(max_rows=x.shape[0])
    source = program.floats(x.shape[1])
    source.copy_(x)
    width = weight.rows // 2 if epilogue in (Epilogue.SWIGLU, Epilogue.GEGLU) else weight.rows
    out = program.floats(width)
    if start is not None:
        out.copy_(start)
    activation = program.activation(weight.activation(precise), weight.columns)
    program.quantize(source, activation)
    program.matmul(activation, weight, out, epilogue, bias)
    program.run(StepBatch.of_rows(x.shape[0]))
    values = activation.tensors[0]
    if activation.struct.kind == ActivationKind.BYTE_PAIR:
        high, low = values.view(torch.int8).view(x.shape[0], -1, 2, 4).int().unbind(2)
        values = (256 * high + low).reshape(x.shape)
    values = values.float()
    if activation.struct.kind != ActivationKind.F32:
        values = values * activation.tensors[1].repeat_interleave(library.GROUP, dim=1)
    return out, values


@pytest.mark.parametrize("source_format", FORMATS, ids=lambda f: f.name)
def test_a_packed_weight_dequantises_to_what_gguf_says(source_format: SourceFormat) -> None:
    weight, exact = random_weight(source_format, 27, 96)
    torch.testing.assert_close(weight.dequantize(), exact, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(weight.dequantize(9, 5), exact[9:14], rtol=2e-6, atol=2e-6)


def test_q4_0_scales_at_the_edge_of_half_precision_keep_their_minimum() -> None:
    rows = np.zeros((8, 18), dtype=np.uint8)
    scales = [0x0001, 0x0080, 0x03FF, 0x0400, 0x6BFF, 0x8001, 0x83FF, 0xEBFF]
    rows[:, 0:2] = np.array(scales, dtype="<u2").view(np.uint8).reshape(8, 2)
    rows[:, 2:] = np.random.default_rng(0).integers(0, 256, (8, 16))
    exact = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q4_0)
    weight = pack(torch.from_numpy(rows), SourceFormat.Q4_0, 32)
    torch.testing.assert_close(weight.dequantize(), torch.from_numpy(exact.copy()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 17, 130])
@pytest.mark.parametrize("source_format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("precise", [True, False], ids=["int16", "int8"])
def test_a_product_equals_the_exact_one_of_its_quantised_input(
    instruction_set: str, source_format: SourceFormat, num_rows: int, precise: bool
) -> None:
    weight, exact = random_weight(source_format, 44, 160)
    x = torch.randn(num_rows, 160, generator=torch.Generator().manual_seed(num_rows))
    out, seen = product(weight, x, precise=precise)
    torch.testing.assert_close(out.double(), seen.double() @ exact.double().T, rtol=1e-4, atol=1e-4)


def test_quantised_activations_are_within_half_a_step_of_the_input(instruction_set: str) -> None:
    x = torch.randn(9, 576) * torch.logspace(-3, 3, 9).view(9, 1)
    x[4] = 0.0
    weight, _ = random_weight(SourceFormat.Q4_1, 8, 576)
    for precise, steps in ((False, 127), (True, 32639)):
        _, seen = product(weight, x, precise=precise)
        largest = x.view(9, -1, library.GROUP).abs().amax(-1).repeat_interleave(library.GROUP, dim=1)
        # Float32 itself rounds by up to 2^-23 of the largest value: a hundredth of an int16 step.
        assert ((seen - x).abs() <= largest / steps * 0.51).all()


def test_the_largest_nibbles_and_activations_do_not_overflow(instruction_set: str) -> None:
    block = np.concatenate([np.array([0x00, 0x3C, 0x00, 0x00], np.uint8), np.full(16, 0xFF, np.uint8)])
    weight = pack(torch.from_numpy(np.tile(block, (8, 2))), SourceFormat.Q4_1, 64)
    for sign, precise in ((1.0, True), (-1.0, True), (1.0, False), (-1.0, False)):
        out, _ = product(weight, torch.full((4, 64), sign * 3.0), precise=precise)
        torch.testing.assert_close(out, torch.full((4, 8), sign * 64 * 15 * 3.0))


@pytest.mark.parametrize(
    "source_format", [SourceFormat.Q4_1, SourceFormat.Q8_0, SourceFormat.F32], ids=lambda f: f.name
)
def test_epilogues_add_to_the_residual_and_gate(instruction_set: str, source_format: SourceFormat) -> None:
    weight, exact = random_weight(source_format, 48, 64)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    residual, bias = torch.randn(6, 48), torch.randn(48)
    out, seen = product(weight, x, Epilogue.ADD, bias, residual)
    plain = seen @ exact.T
    torch.testing.assert_close(out, residual + plain + bias, rtol=1e-4, atol=1e-4)

    gate, up = plain.split(24, dim=1)
    swiglu, _ = product(weight, x, Epilogue.SWIGLU)
    torch.testing.assert_close(swiglu, torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)
    geglu, _ = product(weight, x, Epilogue.GEGLU)
    torch.testing.assert_close(geglu, torch.nn.functional.gelu(gate, approximate="tanh") * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source_format", FORMATS, ids=lambda f: f.name)
def test_a_row_gives_the_same_bits_alone_and_in_company(instruction_set: str, source_format: SourceFormat) -> None:
    weight, _ = random_weight(source_format, 200, 96)
    x = torch.randn(70, 96)
    for precise in (True, False):
        together, _ = product(weight, x, precise=precise)
        for row in (0, 1, 34, 69):
            alone, _ = product(weight, x[row : row + 1], precise=precise)
            assert torch.equal(alone[0], together[row])


def test_shapes_that_cannot_be_packed_are_refused_with_the_shape() -> None:
    with pytest.raises(library.NativeLibraryError, match="8 x 40"):
        pack(torch.zeros(8, 40), SourceFormat.F32, 40)


def test_a_program_refuses_what_the_library_cannot_do() -> None:
    program = Program(max_rows=2)
    weight, _ = random_weight(SourceFormat.Q4_1, 8, 64)
    wrong_kind = program.activation(ActivationKind.F32, 64)
    program.matmul(wrong_kind, weight, program.floats(8))
    with pytest.raises(library.NativeLibraryError, match=r"operation 0 \(matmul\)"):
        program.run(StepBatch.of_rows(1))
    with pytest.raises(library.NativeLibraryError, match="3 rows"):
        program.run(StepBatch.of_rows(3))


def test_an_unknown_instruction_set_is_refused_and_the_usable_ones_named() -> None:
    with pytest.raises(library.NativeLibraryError, match="portable"):
        library.use_instruction_set("sse9")


def test_a_product_can_write_a_column_slice(instruction_set: str) -> None:
    weight, exact = random_weight(SourceFormat.F32, 20, 64)
    program = Program(max_rows=5)
    x, activation, wide = program.floats(64), program.activation(ActivationKind.F32, 64), program.floats(50)
    x.normal_()
    wide.fill_(7.0)
    program.quantize(x, activation)
    program.matmul(activation, weight, wide[:, 10:30])
    program.run(StepBatch.of_rows(5))
    torch.testing.assert_close(wide[:, 10:30], x @ exact.T, rtol=1e-4, atol=1e-4)
    assert (wide[:, :10] == 7).all() and (wide[:, 30:] == 7).all()
