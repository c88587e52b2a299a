"""A model step as a list of native operations, made once and run with any batch."""

from __future__ import annotations

import ctypes
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from kernels.cpu.library import (
    GROUP,
    PANEL,
    ActivationBuffer,
    ActivationKind,
    AttentionSpec,
    Batch,
    Epilogue,
    NativeLibraryError,
    Op,
    OpKind,
    Routing,
    Sampling,
    Weight,
    load,
)
from kernels.cpu.packing import PackedWeight
from kernels.host_memory import lazy_zeros


class StepBatch:
    """The ragged rows of one step, in memory that native operations read.

    input_ids, positions, slot_mapping (negative where nothing is written): one for each row; cu_seqlens_q: where
    each sequence begins, and the end; seq_lens; block_tables: as many blocks for each sequence; selected: the rows
    whose logits are wanted. Made of lists, one after another in two arrays, since beside streaming a model's weights
    every object that is touched comes from memory, and one chat's step takes a few milliseconds.
    """

    __slots__ = ("_int32", "_int64", "num_rows", "num_selected", "positions", "struct")

    def __init__(
        self,
        input_ids: Sequence[int],
        positions: Sequence[int],
        slot_mapping: Sequence[int],
        cu_seqlens_q: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        selected: Sequence[int],
    ) -> None:
        self.num_rows, self.num_selected, self.positions = len(input_ids), len(selected), positions
        numbers = [*input_ids, *positions, *cu_seqlens_q, *seq_lens, *selected, *chain.from_iterable(block_tables)]
        self._int32, self._int64 = array("i", numbers), array("q", slot_mapping)
        size = self._int32.itemsize
        at_ids, _ = self._int32.buffer_info()
        at_positions = at_ids + size * self.num_rows
        at_starts = at_positions + size * len(positions)
        at_lens = at_starts + size * len(cu_seqlens_q)
        at_selected = at_lens + size * len(seq_lens)
        self.struct = Batch(
            self.num_rows,
            len(seq_lens),
            self.num_selected,
            len(block_tables[0]) if block_tables else 0,
            at_ids,
            at_positions,
            self._int64.buffer_info()[0],
            at_starts,
            at_lens,
            at_selected + size * self.num_selected,
            at_selected,
        )

    @classmethod
    def of_rows(cls, num_rows: int, input_ids: Sequence[int] | None = None) -> StepBatch:
        """A batch for programs without attention; every row is selected."""
        rows = range(num_rows)
        return cls(rows if input_ids is None else input_ids, rows, (), (), (), (), rows)

    @classmethod
    def selecting(cls, rows: Sequence[int]) -> StepBatch:
        """A batch for operations that only read rows of an earlier one's buffer."""
        return cls((), (), (), (), (), (), rows)


@dataclass(frozen=True)
class Activation:
    """A matrix product's input: float, or quantised by group of 32 (see src/kvasir_cpu.h)."""

    struct: ActivationBuffer
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class ExpertRouting:
    """Which experts compute which rows of a step, and with what weight (see src/kvasir_cpu.h).

    `max_shares` is the most expert computations of a step: `num_chosen` for each row.
    """

    struct: Routing
    tensors: tuple[torch.Tensor, ...]
    max_shares: int


@dataclass
class Program:
    """Collects operations over buffers of at most `max_rows` rows; `run` executes them in order.

    Buffers are handed out by `floats` and `activation`; the caller reuses them where
    lifetimes allow. Everything an operation points to is kept alive here.
    """

    max_rows: int
    ops: list[Op] = field(default_factory=list)
    buffer_bytes: int = 0
    _keep: list[object] = field(default_factory=list)
    _array: ctypes.Array[Op] | None = None

    def floats(self, columns: int, rows: int | None = None) -> torch.Tensor:
        """A float32 buffer [rows, columns]; None is max_rows."""
        buffer = lazy_zeros((rows or self.max_rows, columns), torch.float32)
        self.buffer_bytes += buffer.nbytes
        return buffer

    def activation(self, kind: ActivationKind, columns: int, rows: int | None = None) -> Activation:
        """Rows of whole panels, where quantised."""
        rows = rows or self.max_rows
        if kind != ActivationKind.F32:
            rows = -(-rows // PANEL) * PANEL
        dtype = {
            ActivationKind.F32: torch.float32,
            ActivationKind.INT8: torch.int8,
            ActivationKind.INT16: torch.int16,
            ActivationKind.BYTE_PAIR: torch.int16,
        }
        values = lazy_zeros((rows, columns), dtype[kind])
        scales = lazy_zeros((rows, columns // GROUP), torch.float32) if kind != ActivationKind.F32 else None
        sums = lazy_zeros((rows, 2 * columns // GROUP), torch.float32) if kind != ActivationKind.F32 else None
        tensors = tuple(tensor for tensor in (values, scales, sums) if tensor is not None)
        self.buffer_bytes += sum(tensor.nbytes for tensor in tensors)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in (values, scales, sums)]
        return Activation(ActivationBuffer(kind, columns, *pointers), tensors)

    def routing(self, num_experts: int, num_chosen: int, normalize: bool) -> ExpertRouting:
        max_shares = self.max_rows * num_chosen
        sizes = (num_experts + 1, max_shares, max_shares)
        tensors = (*(torch.zeros(size, dtype=torch.int32) for size in sizes), torch.zeros(max_shares))
        self.buffer_bytes += sum(tensor.nbytes for tensor in tensors)
        struct = Routing(num_experts, num_chosen, normalize, 0, *(tensor.data_ptr() for tensor in tensors))
        return ExpertRouting(struct, tensors, max_shares)

    def embed(self, table: PackedWeight, output: torch.Tensor, factor: float = 1.0) -> None:
        self._add(OpKind.EMBED, output=output, weight=table, factor=factor)

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, into: Activation, selected: bool = False
    ) -> None:
        """RMSNorm of each row, quantised into the activation."""
        self._add(
            OpKind.NORM, input=x, norm=weight, factor=epsilon, activation=into, columns=x.shape[1], selected=selected
        )

    def plain_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, output: torch.Tensor, add: bool = False
    ) -> None:
        """RMSNorm of each row as floats, stored or added."""
        epilogue = Epilogue.ADD if add else Epilogue.STORE
        self._add(
            OpKind.NORM, input=x, norm=weight, factor=epsilon, output=output, columns=x.shape[1], epilogue=epilogue
        )

    def quantize(self, x: torch.Tensor, into: Activation, routing: ExpertRouting | None = None) -> None:
        """Every row of the step, or with a routing every share."""
        self._add(OpKind.QUANTIZE, input=x, activation=into, routing=routing, columns=x.shape[1])

    def matmul(
        self,
        x: Activation,
        weight: PackedWeight,
        output: torch.Tensor,
        epilogue: Epilogue = Epilogue.STORE,
        bias: torch.Tensor | None = None,
        factor: float = 1.0,
        soft_cap: float | None = None,
        selected: bool = False,
    ) -> None:
        """output = (x @ weight.T + bias) * factor, soft-capped, or what the epilogue says.

        A column slice may be written. Of the paired epilogues, CLAMPED_SWIGLU takes alpha for `factor` and the
        limit for `soft_cap`; the others have neither.
        """
        self._add(
            OpKind.MATMUL,
            output=output,
            weight=weight,
            activation=x,
            epilogue=epilogue,
            bias=bias,
            factor=factor,
            soft_cap=soft_cap,
            selected=selected,
        )

    def route(self, logits: torch.Tensor, into: ExpertRouting) -> None:
        """Chooses each row's experts by the highest of [rows, num_experts]."""
        self._add(OpKind.ROUTE, input=logits, routing=into)

    def gather(self, x: torch.Tensor, routing: ExpertRouting, into: Activation) -> None:
        """Each share's row, quantised; shares are sorted by expert."""
        self._add(OpKind.GATHER, input=x, activation=into, routing=routing, columns=x.shape[1])

    def expert_matmul(
        self,
        x: Activation,
        weights: Sequence[PackedWeight],
        routing: ExpertRouting,
        output: torch.Tensor,
        epilogue: Epilogue = Epilogue.STORE,
        bias: torch.Tensor | None = None,
        factor: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        """As `matmul`, each share with the weight and the row of `bias` [num_experts, out] of its expert."""
        self._add(
            OpKind.EXPERT_MATMUL,
            output=output,
            experts=weights,
            activation=x,
            routing=routing,
            epilogue=epilogue,
            bias=bias,
            factor=factor,
            soft_cap=soft_cap,
        )

    def combine(self, x: torch.Tensor, routing: ExpertRouting, output: torch.Tensor, factor: float = 1.0) -> None:
        """output += factor * the weighted sum of each row's shares."""
        self._add(OpKind.COMBINE, input=x, output=output, routing=routing, columns=x.shape[1], factor=factor)

    def rope_kv(self, qkv: torch.Tensor, spec: AttentionSpec) -> None:
        """Rotates q and k within [rows, (heads + 2 kv_heads) * head_dim] and writes k and v to the cache."""
        self._add(OpKind.ROPE_KV, output=qkv, attention=spec)

    def attention(self, qkv: torch.Tensor, spec: AttentionSpec, output: torch.Tensor) -> None:
        self._add(OpKind.ATTENTION, input=qkv, output=output, attention=spec)

    def select(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """Copies the batch's selected rows."""
        self._add(OpKind.SELECT, input=x, output=output, columns=x.shape[1])

    def run(self, batch: StepBatch, first: int = 0, end: int | None = None) -> None:
        """Runs the operations [first, end), by default all.

        Raises `NativeLibraryError` naming the operation that the library refuses.
        """
        ops, count = self._part(batch, first, end)
        load().kv_run(ops, count, ctypes.byref(batch.struct))

    def run_profiled(self, batch: StepBatch, first: int = 0, end: int | None = None) -> torch.Tensor:
        """As `run`; returns nanoseconds of each of these operations, int64."""
        ops, count = self._part(batch, first, end)
        nanoseconds = torch.zeros(count, dtype=torch.int64)
        load().kv_run_profiled(ops, count, ctypes.byref(batch.struct), nanoseconds.data_ptr())
        return nanoseconds

    def run_steps(
        self,
        batch: StepBatch,
        sampling: Sampling,
        num_steps: int,
        block_size: int,
        nanoseconds: torch.Tensor | None = None,
    ) -> None:
        """Runs all operations `num_steps` times, each time with the tokens that the time before drew.

        The batch has one row of each sequence, which is selected, and block tables that reach to the last step; its
        numbers move on. `sampling` is for all steps (see src/kvasir_cpu.h). nanoseconds int64 [num_ops + 1], if given,
        has what each operation took added, and sampling. Raises `NativeLibraryError` for any other batch.
        """
        ops, count = self._part(batch, 0, None)
        address = None if nanoseconds is None else nanoseconds.data_ptr()
        if load().kv_run_steps(ops, count, ctypes.byref(batch.struct), sampling, num_steps, block_size, address) != 0:
            raise NativeLibraryError(f"{num_steps} steps of {batch.num_rows} rows cannot be run in a row")

    def seconds_by_kind(self, nanoseconds: torch.Tensor, first: int = 0) -> dict[str, float]:
        """What `run_profiled` returned for operations from `first` on, added up by kind of operation."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for op, spent in zip(self.ops[first:], nanoseconds.tolist()):
            seconds[OpKind(op.kind).name.lower()] += spent * 1e-9
        return dict(seconds)

    def _part(self, batch: StepBatch, first: int, end: int | None) -> tuple[Any, int]:
        """Where operation `first` lies, and how many there are up to `end`."""
        if batch.num_rows > self.max_rows:
            raise NativeLibraryError(f"a step of {batch.num_rows} rows exceeds the program's {self.max_rows}")
        count = (len(self.ops) if end is None else end) - first
        return ctypes.byref(self._compiled()[first]), count

    def _compiled(self) -> ctypes.Array[Op]:
        if self._array is None:
            array = (Op * len(self.ops))(*self.ops)
            code = load().kv_check(array, len(array))
            if code != 0:
                kind = OpKind(self.ops[-1 - code].kind).name.lower()
                raise NativeLibraryError(
                    f"the native kernels refuse operation {-1 - code} ({kind}): shape not supported"
                )
            self._array = array
        return self._array

    def _add(
        self,
        kind: OpKind,
        *,
        input: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        weight: PackedWeight | None = None,
        experts: Sequence[PackedWeight] = (),
        activation: Activation | None = None,
        attention: AttentionSpec | None = None,
        routing: ExpertRouting | None = None,
        epilogue: Epilogue = Epilogue.STORE,
        columns: int = 0,
        factor: float = 0.0,
        soft_cap: float | None = None,
        selected: bool = False,
    ) -> None:
        def pointer(tensor: torch.Tensor | None) -> int | None:
            if tensor is None:
                return None
            assert tensor.dtype == torch.float32 and tensor.stride(-1) == 1 and tensor.device.type == "cpu"
            return tensor.data_ptr()

        assert output is None or output.is_contiguous() or kind == OpKind.MATMUL
        assert input is None or input.is_contiguous()
        weights = (Weight * len(experts))(*(expert.struct for expert in experts)) if experts else None

        def reference(struct: ctypes.Structure | None) -> object:
            return None if struct is None else ctypes.pointer(struct)

        self._keep.append((input, output, norm, bias, weight, experts, weights, activation, attention, routing))
        self._array = None
        self.ops.append(
            Op(
                kind,
                epilogue,
                columns,
                int(selected),
                factor,
                soft_cap or 0.0,
                0 if output is None else output.stride(0),
                pointer(input),
                pointer(output),
                pointer(norm),
                pointer(bias),
                reference(weight.struct if weight else None) if weights is None else weights,
                reference(activation.struct if activation else None),
                reference(attention),
                reference(routing.struct if routing else None),
            )
        )
