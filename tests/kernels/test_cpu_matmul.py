"""Native matrix products against the exact product of what they were given."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from kernels.cpu import library
from kernels.cpu.library import ActivationKind, Epilogue, WeightFormat
from kernels.cpu.packing import PackedWeight, Packer, pack
from kernels.cpu.program import Program, StepBatch
from kernels.ggml import FORMATS as FORMATS_OF_ROWS
from tests.kernels.ggml_blocks import dequantize, random_blocks

FORMATS = list(WeightFormat)
# Where a block's codes lie, apart from its scales.
CODE_BYTES = {
    "Q4_0": slice(2, None),
    "Q4_1": slice(4, None),
    "Q5_0": slice(2, None),
    "Q5_1": slice(4, None),
    "Q8_0": slice(2, None),
    "Q2_K": slice(16, 80),
    "Q3_K": slice(0, 96),
    "Q4_K": slice(16, None),
    "Q5_K": slice(16, None),
    "Q6_K": slice(0, 192),
    "IQ4_NL": slice(2, None),
    "IQ4_XS": slice(8, None),
    "MXFP4": slice(1, None),
}


def random_weight(source_format: WeightFormat, rows: int, groups: int) -> tuple[PackedWeight, torch.Tensor]:
    """A packed weight of `groups` blocks a row, at least 32 columns each, and what gguf says it stands for."""
    columns = groups * max(library.GROUP, FORMATS_OF_ROWS[source_format.name].block_elements)
    packed = random_blocks(source_format.name, rows, columns, seed=rows + columns)
    exact = dequantize(packed, source_format.name)
    return pack([torch.from_numpy(packed)], source_format, columns), torch.from_numpy(exact)


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
    if activation.struct.kind == ActivationKind.F32:
        return out, activation.tensors[0]
    values, scales = rows_of_panels(activation.tensors[0]), rows_of_panels(activation.tensors[1])
    if activation.struct.kind == ActivationKind.BYTE_PAIR:
        high, low = values.view(torch.int8).view(values.shape[0], -1, 2, 4).int().unbind(2)
        values = (256 * high + low).view(values.shape)
    return out, (values * scales.repeat_interleave(library.GROUP, dim=1))[: x.shape[0]]


def rows_of_panels(panels: torch.Tensor) -> torch.Tensor:
    """An activation's values or scales row by row: in its buffer 4 bytes of each row of a panel lie side by side."""
    units = panels.view(torch.int32).view(panels.shape[0] // library.PANEL, -1, library.PANEL)
    return units.transpose(1, 2).contiguous().view(panels.shape[0], -1).view(panels.dtype)


def assert_equals_product(out: torch.Tensor, seen: torch.Tensor, exact: torch.Tensor) -> None:
    """Up to what float32 rounds a sum of that many products of that size by."""
    difference = out.double() - seen.double() @ exact.double().T
    assert (difference.abs() <= 3e-6 * (seen.abs() @ exact.abs().T)).all()


@pytest.mark.parametrize("source_format", FORMATS, ids=lambda f: f.name)
def test_a_packed_weight_holds_the_very_numbers_of_the_file(instruction_set: str, source_format: WeightFormat) -> None:
    weight, exact = random_weight(source_format, 27, 3)
    assert torch.equal(weight.dequantize(), exact)
    assert torch.equal(weight.dequantize(9, 5), exact[9:14])


@pytest.mark.parametrize("source_format", FORMATS, ids=lambda f: f.name)
def test_a_packed_weight_takes_hardly_more_bytes_than_in_the_file(source_format: WeightFormat) -> None:
    weight, exact = random_weight(source_format, 32, 8)
    in_file = 32 * FORMATS_OF_ROWS[source_format.name].row_bytes(exact.shape[1])
    assert in_file <= weight.nbytes <= 1.06 * in_file


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
@pytest.mark.parametrize("source_format", FORMATS, ids=lambda f: f.name)
def test_any_bytes_of_a_file_are_held_exactly(instruction_set: str, source_format: WeightFormat) -> None:
    """Scales of every size among them: infinite, subnormal, negative, none at all."""
    block = FORMATS_OF_ROWS[source_format.name]
    columns = max(library.GROUP, block.block_elements)
    rows = np.random.default_rng(0).integers(0, 256, (200, block.row_bytes(columns)), dtype=np.uint8)
    if source_format == WeightFormat.MXFP4:
        rows[:, 0] %= 250  # beyond, 24 steps above the least code are out of float32's range
    exact = dequantize(rows, source_format.name)
    parts = [torch.from_numpy(part) for part in np.split(rows, [83, 150])]  # which end within a tile
    held = pack(parts, source_format, columns).dequantize().numpy()
    finite = np.isfinite(exact)
    assert finite.any()
    np.testing.assert_array_equal(held[finite], exact[finite])
    assert not np.isfinite(held[~finite]).any()


@pytest.mark.parametrize("source_format", FORMATS, ids=lambda f: f.name)
def test_a_product_equals_the_exact_one_of_its_quantised_input(
    instruction_set: str, source_format: WeightFormat
) -> None:
    weight, exact = random_weight(source_format, 36, 3)  # 5 tiles, which are multiplied two at a time
    for num_rows in (1, 2, 5, 7, 18, 131):  # 1 to 6 at a time, more than fit a block of 128
        x = torch.randn(num_rows, weight.columns, generator=torch.Generator().manual_seed(num_rows))
        for precise in (True, False):
            out, seen = product(weight, x, precise=precise)
            assert_equals_product(out, seen, exact)


def test_quantised_activations_are_within_half_a_step_of_the_input(instruction_set: str) -> None:
    x = torch.randn(9, 576) * torch.logspace(-3, 3, 9).view(9, 1)
    x[4] = 0.0
    weight, _ = random_weight(WeightFormat.Q4_1, 8, 18)
    for precise, steps in ((False, 127), (True, 32639)):
        _, seen = product(weight, x, precise=precise)
        largest = x.view(9, -1, library.GROUP).abs().amax(-1).repeat_interleave(library.GROUP, dim=1)
        # Float32 itself rounds by up to 2^-23 of the largest value: a hundredth of an int16 step.
        assert ((seen - x).abs() <= largest / steps * 0.51).all()


@pytest.mark.parametrize("source_format", FORMATS, ids=lambda f: f.name)
def test_the_largest_codes_and_activations_do_not_overflow(instruction_set: str, source_format: WeightFormat) -> None:
    """Every code of every row at the end of its range where sums in 16 bits are largest."""
    name = source_format.name
    random = random_blocks(name, 16, 512)
    blocks = random.reshape(16, -1, FORMATS_OF_ROWS[name].block_bytes)
    exact = dequantize(random, name).reshape(16, 512)
    for row, code in ((slice(0, 8), 0), (slice(8, 16), 255)):
        if name in CODE_BYTES:
            blocks[row][:, :, CODE_BYTES[name]] = code
    exact = torch.from_numpy(dequantize(blocks, name))
    weight = pack([torch.from_numpy(blocks.reshape(16, -1).copy())], source_format, 512)
    # 0.9961 in steps of 1 / 32639 is 127 * 256 - 128: both its bytes are as large as they can be, -128 among them.
    for value in (3.0, -3.0, -2.9882):
        x = torch.full((9, 512), value)
        x[:, ::32] = 3.0
        for precise in (True, False):
            out, seen = product(weight, x, precise=precise)
            assert_equals_product(out, seen, exact)


@pytest.mark.parametrize(
    "source_format",
    [WeightFormat.Q4_1, WeightFormat.Q8_0, WeightFormat.F32, WeightFormat.Q6_K],
    ids=lambda f: f.name,
)
def test_epilogues_add_to_the_residual_and_gate(instruction_set: str, source_format: WeightFormat) -> None:
    weight, exact = random_weight(source_format, 48, 2)
    x = torch.randn(6, weight.columns, generator=torch.Generator().manual_seed(1))
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
def test_a_row_gives_the_same_bits_alone_and_in_company(instruction_set: str, source_format: WeightFormat) -> None:
    weight, _ = random_weight(source_format, 200, 1)
    x = torch.randn(70, weight.columns)
    for precise in (True, False):
        alone = {row: product(weight, x[row : row + 1], precise=precise)[0][0] for row in (*range(9), 34, 69)}
        for num_rows in (*range(2, 10), 70):
            together, _ = product(weight, x[:num_rows], precise=precise)
            for row, values in alone.items():
                assert row >= num_rows or torch.equal(values, together[row])


def test_matrices_packed_together_are_what_their_parts_are_and_need_nobody_to_hold_them_until_then() -> None:
    packer, rows = Packer(), torch.randn(150, 64)
    weights = [
        packer.pack(
            [part.clone() for part in rows[: 150 - first].split((first, 0, 150 - 2 * first))], WeightFormat.F32, 64
        )
        for first in (3, 64, 70)
    ]
    kept = weakref.ref(weights.pop().data)
    assert kept() is not None, "native threads are going to write there"
    packer.finish()
    assert kept() is None
    for weight, first in zip(weights, (3, 64)):
        assert torch.equal(weight.dequantize(), rows[: 150 - first])


def test_shapes_that_cannot_be_packed_are_refused_with_the_shape() -> None:
    with pytest.raises(library.NativeLibraryError, match="8 x 40"):
        pack([torch.zeros(8, 40)], WeightFormat.F32, 40)
    with pytest.raises(library.NativeLibraryError, match="8 x 96 cannot be packed as Q4_K"):
        pack([torch.zeros(8, 54, dtype=torch.uint8)], WeightFormat.Q4_K, 96)


def test_a_program_refuses_what_the_library_cannot_do() -> None:
    program = Program(max_rows=2)
    weight, _ = random_weight(WeightFormat.Q4_1, 8, 2)
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
    weight, exact = random_weight(WeightFormat.F32, 20, 2)
    program = Program(max_rows=5)
    x, activation, wide = program.floats(64), program.activation(ActivationKind.F32, 64), program.floats(50)
    x.normal_()
    wide.fill_(7.0)
    program.quantize(x, activation)
    program.matmul(activation, weight, wide[:, 10:30])
    program.run(StepBatch.of_rows(5))
    torch.testing.assert_close(wide[:, 10:30], x @ exact.T, rtol=1e-4, atol=1e-4)
    assert (wide[:, :10] == 7).all() and (wide[:, 30:] == 7).all()


@pytest.mark.parametrize("num_rows", [1, 4, 6])
@pytest.mark.parametrize("out_features", [8, 24, 200, 1000])
def test_threads_share_a_matrix_without_gaps_or_doubles(out_features: int, num_rows: int) -> None:
    """Adding to the output shows a tile that is computed twice."""
    weight, exact = random_weight(WeightFormat.F32, out_features, 1)
    program = Program(max_rows=num_rows)
    x, activation, out = (
        program.floats(32),
        program.activation(ActivationKind.F32, 32),
        program.floats(out_features),
    )
    program.quantize(x.normal_(), activation)
    program.matmul(activation, weight, out, Epilogue.ADD)
    try:
        for num_threads in (1, 2, 3, 7, 16):
            library.set_num_threads(num_threads)
            out.zero_()
            program.run(StepBatch.of_rows(num_rows))
            torch.testing.assert_close(out, x @ exact.T, rtol=1e-4, atol=1e-4)
    finally:
        library.set_num_threads(1)


def test_no_operation_begins_before_the_one_in_front_of_it_is_over() -> None:
    """A long chain in which each product reads what the one before wrote, with more threads than there are cores."""
    weight, _ = random_weight(WeightFormat.Q4_1, 64, 2)
    program = Program(max_rows=3)
    values, activation = program.floats(64), program.activation(weight.activation(), 64)
    for _ in range(40):
        program.quantize(values, activation)
        program.matmul(activation, weight, values, factor=0.05)  # so that they neither grow nor vanish
    start = torch.randn(3, 64)
    results = []
    try:
        for num_threads in (1, 5, 5, 5, 5, 5):
            library.set_num_threads(num_threads)
            for _ in range(4):
                values.copy_(start)
                program.run(StepBatch.of_rows(3))
                results.append(values.clone())
    finally:
        library.set_num_threads(1)
    assert all(torch.equal(result, results[0]) for result in results)
    assert results[0].isfinite().all() and results[0].std() > 0


def test_threads_that_come_late_find_their_own_run_only() -> None:
    """Short runs of changing programs, with more threads than there are cores."""
    chains = []
    for out_features, length in ((16, 1), (200, 6)):
        weight, _ = random_weight(WeightFormat.Q8_0, out_features, 2)
        program = Program(max_rows=2)
        x, out = program.floats(64), program.floats(out_features)
        activation = program.activation(weight.activation(), 64)
        x.normal_()
        for _ in range(length):
            program.quantize(x, activation)
            program.matmul(activation, weight, out, Epilogue.ADD)
        chains.append((program, out))
    batch = StepBatch.of_rows(2)
    expected = []
    for program, out in chains:
        out.zero_()
        program.run(batch)
        expected.append(out.clone())
    try:
        library.set_num_threads(7)
        for _ in range(150):
            for (program, out), right in zip(chains, expected):
                out.zero_()
                program.run(batch)
                assert torch.equal(out, right)
    finally:
        library.set_num_threads(1)
