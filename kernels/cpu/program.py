"""A model step as a list of native operations, made once and run with any batch."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from dataclasses import dataclass, field, replace

import torch

from kernels.cpu.library import (
    GROUP,
    ActivationBuffer,
    ActivationKind,
    AttentionSpec,
    Batch,
    Epilogue,
    NativeLibraryError,
    Op,
    OpKind,
    load,
)
from kernels.cpu.packing import PackedWeight


@dataclass(frozen=True)
class StepBatch:
    """The ragged rows of one step; all tensors on the CPU and contiguous.

    input_ids, positions int32 [num_rows]; slot_mapping int64 [num_rows], negative where
    nothing is written; cu_seqlens_q int32 [num_sequences + 1]; seq_lens int32
    [num_sequences]; block_tables int32 [num_sequences, max_blocks]; selected int32
    [num_selected], the rows whose logits are wanted.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    selected: torch.Tensor

    @classmethod
    def of_rows(cls, num_rows: int, input_ids: torch.Tensor | None = None) -> StepBatch:
        """A batch for programs without attention; every row is selected."""
        rows = torch.arange(num_rows, dtype=torch.int32)
        nothing = rows[:0]
        return cls(
            input_ids=rows if input_ids is None else input_ids.contiguous(),
            positions=rows,
            slot_mapping=nothing.long(),
            cu_seqlens_q=nothing,
            seq_lens=nothing,
            block_tables=nothing.view(0, 0),
            selected=rows,
        )

    @classmethod
    def selecting(cls, rows: list[int]) -> StepBatch:
        """A batch for programs that only read rows of an earlier one's buffer."""
        batch = cls.of_rows(0)
        return replace(batch, selected=torch.tensor(rows, dtype=torch.int32))

    def struct(self) -> Batch:
        return Batch(
            self.input_ids.numel(),
            self.seq_lens.numel(),
            self.selected.numel(),
            self.block_tables.shape[1],
            *(
                tensor.data_ptr()
                for tensor in (
                    self.input_ids,
                    self.positions,
                    self.slot_mapping,
                    self.cu_seqlens_q,
                    self.seq_lens,
                    self.block_tables,
                    self.selected,
                )
            ),
        )


@dataclass(frozen=True)
class Activation:
    """A matrix product's input: float, or quantised by group of 32 (see src/kvasir_cpu.h)."""

    struct: ActivationBuffer
    tensors: tuple[torch.Tensor, ...]


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

    def floats(self, columns: int) -> torch.Tensor:
        """A float32 buffer [max_rows, columns]."""
        buffer = torch.zeros(self.max_rows, columns, dtype=torch.float32)
        self.buffer_bytes += buffer.nbytes
        return buffer

    def activation(self, kind: ActivationKind, columns: int) -> Activation:
        dtype = {
            ActivationKind.F32: torch.float32,
            ActivationKind.INT8: torch.int8,
            ActivationKind.INT16: torch.int16,
            ActivationKind.BYTE_PAIR: torch.int16,
        }
        values = torch.zeros(self.max_rows, columns, dtype=dtype[kind])
        scales = torch.zeros(self.max_rows, columns // GROUP) if kind != ActivationKind.F32 else None
        sums = torch.zeros(self.max_rows, columns // GROUP) if kind != ActivationKind.F32 else None
        tensors = tuple(tensor for tensor in (values, scales, sums) if tensor is not None)
        self.buffer_bytes += sum(tensor.nbytes for tensor in tensors)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in (values, scales, sums)]
        return Activation(ActivationBuffer(kind, columns, *pointers), tensors)

    def embed(self, table: PackedWeight, output: torch.Tensor, factor: float = 1.0) -> None:
        self._add(OpKind.EMBED, table, output=output, weight=table, factor=factor)

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, into: Activation, selected: bool = False
    ) -> None:
        """RMSNorm of each row, quantised into the activation."""
        self._add(
            OpKind.NORM, input=x, norm=weight, factor=epsilon, activation=into, columns=x.shape[1], selected=selected
        )

    def quantize(self, x: torch.Tensor, into: Activation) -> None:
        self._add(OpKind.QUANTIZE, input=x, activation=into, columns=x.shape[1])

    def matmul(
        self,
        x: Activation,
        weight: PackedWeight,
        output: torch.Tensor,
        epilogue: Epilogue = Epilogue.STORE,
        bias: torch.Tensor | None = None,
        selected: bool = False,
    ) -> None:
        """output = x @ weight.T + bias, or what the epilogue says. A column slice may be written."""
        self._add(
            OpKind.MATMUL, output=output, weight=weight, activation=x, epilogue=epilogue, bias=bias, selected=selected
        )

    def rope_kv(self, qkv: torch.Tensor, spec: AttentionSpec) -> None:
        """Rotates q and k within [rows, (heads + 2 kv_heads) * head_dim] and writes k and v to the cache."""
        self._add(OpKind.ROPE_KV, output=qkv, attention=spec)

    def attention(self, qkv: torch.Tensor, spec: AttentionSpec, output: torch.Tensor) -> None:
        self._add(OpKind.ATTENTION, input=qkv, output=output, attention=spec)

    def select(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """Copies the batch's selected rows."""
        self._add(OpKind.SELECT, input=x, output=output, columns=x.shape[1])

    def run(self, batch: StepBatch) -> None:
        """Raises `NativeLibraryError` naming the operation that the library refuses."""
        self._check(batch)
        struct = batch.struct()
        self._raise_for(load().kv_run(self._compiled(), len(self.ops), ctypes.byref(struct)))

    def profile(self, batch: StepBatch) -> dict[str, float]:
        """Runs once; seconds by kind of operation."""
        self._check(batch)
        struct = batch.struct()
        nanoseconds = torch.zeros(len(self.ops), dtype=torch.int64)
        code = load().kv_run_profiled(self._compiled(), len(self.ops), ctypes.byref(struct), nanoseconds.data_ptr())
        self._raise_for(code)
        seconds: defaultdict[str, float] = defaultdict(float)
        for op, spent in zip(self.ops, nanoseconds.tolist(), strict=True):
            seconds[OpKind(op.kind).name.lower()] += spent * 1e-9
        return dict(seconds)

    def _check(self, batch: StepBatch) -> None:
        num_rows = batch.input_ids.numel()
        if num_rows > self.max_rows:
            raise NativeLibraryError(f"a step of {num_rows} rows exceeds the program's {self.max_rows}")

    def _raise_for(self, code: int) -> None:
        if code != 0:
            kind = OpKind(self.ops[-1 - code].kind).name.lower()
            raise NativeLibraryError(f"the native kernels refuse operation {-1 - code} ({kind}): shape not supported")

    def _compiled(self) -> ctypes.Array[Op]:
        if self._array is None:
            self._array = (Op * len(self.ops))(*self.ops)
        return self._array

    def _add(
        self,
        kind: OpKind,
        *keep: object,
        input: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        weight: PackedWeight | None = None,
        activation: Activation | None = None,
        attention: AttentionSpec | None = None,
        epilogue: Epilogue = Epilogue.STORE,
        columns: int = 0,
        factor: float = 0.0,
        selected: bool = False,
    ) -> None:
        def pointer(tensor: torch.Tensor | None) -> int | None:
            if tensor is None:
                return None
            assert tensor.dtype == torch.float32 and tensor.stride(-1) == 1 and tensor.device.type == "cpu"
            return tensor.data_ptr()

        assert output is None or output.is_contiguous() or kind == OpKind.MATMUL
        assert input is None or input.is_contiguous()

        def reference(struct: ctypes.Structure | None) -> object:
            return None if struct is None else ctypes.pointer(struct)

        self._keep.append((keep, input, output, norm, bias, weight, activation, attention))
        self._array = None
        self.ops.append(
            Op(
                kind,
                epilogue,
                columns,
                int(selected),
                factor,
                0 if output is None else output.stride(0),
                pointer(input),
                pointer(output),
                pointer(norm),
                pointer(bias),
                reference(weight.struct if weight else None),
                reference(activation.struct if activation else None),
                reference(attention),
            )
        )
