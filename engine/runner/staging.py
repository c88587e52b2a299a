"""How a step's integers get to the device: all in one buffer and one copy that nobody waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.layers.attention import AttentionContext
from engine.runner.rows import StepArrays
from kernels.kv import KVLayer
from kernels.metadata import AttentionMetadata

_FIELDS = (
    ("input_ids", "positions", "slot_mapping", "rope_lengths", "cu_seqlens_q", "seq_lens", "block_table")
    # Last, because they may have any size where that of the others is fixed.
    + ("wanted_rows", "sourced_rows", "source_rows")
)
_ALIGNMENT = 8
"""Words of 8 bytes: an array starts at a multiple of 64 bytes, as Triton compiles a kernel anew where it does not."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """The arrays of `StepArrays` on a device: views of one int64 buffer."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    rope_lengths: torch.Tensor
    wanted_rows: torch.Tensor
    sourced_rows: torch.Tensor
    source_rows: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor

    @classmethod
    def views(cls, buffer: torch.Tensor, arrays: StepArrays) -> StepTensors:
        """Where `pack` puts the arrays in the buffer."""
        first, found = 0, {}
        of_dtype = {np.dtype(np.int64): buffer, np.dtype(np.int32): buffer.view(torch.int32)}
        for name in _FIELDS:
            array: np.ndarray = getattr(arrays, name)
            strides = (1,) if array.ndim == 1 else (array.shape[1], 1)
            found[name] = of_dtype[array.dtype].as_strided(array.shape, strides, first * 8 // array.itemsize)
            first += _aligned(_words(array))
        return cls(**found)

    def take_tokens(self, token_ids: torch.Tensor | None) -> None:
        """Puts the tokens that the step before chose, int64 [num_rows] on the device, into their rows."""
        if self.sourced_rows.numel():
            assert token_ids is not None, "a step with a source_row needs the tokens of the one before"
            self.input_ids.index_copy_(0, self.sourced_rows, token_ids.index_select(0, self.source_rows))

    def context(
        self, arrays: StepArrays, block_size: int, kv_layers: list[KVLayer], bounds: tuple[int, int] = (0, 0)
    ) -> AttentionContext:
        """What attention needs. `bounds` are those of `AttentionMetadata.query_len_bound` and `seq_len_bound`."""
        metadata = AttentionMetadata(
            arrays.query_lens,
            arrays.seq_lens_list,
            arrays.block_tables,
            block_size,
            self.slot_mapping,
            self.block_table,
            self.cu_seqlens_q,
            self.seq_lens,
            *bounds,
        )
        return AttentionContext(metadata, kv_layers, self.rope_lengths if self.rope_lengths.numel() else None)


def packed_words(arrays: StepArrays) -> int:
    """Words of 8 bytes that `pack` fills."""
    return sum(_aligned(_words(getattr(arrays, name))) for name in _FIELDS)


def pack(arrays: StepArrays, words: np.ndarray) -> None:
    """Puts all arrays into int64 [packed_words(arrays)]."""
    first = 0
    for name in _FIELDS:
        array: np.ndarray = getattr(arrays, name)
        place = words[first : first + _words(array)]
        place.view(array.dtype)[: array.size] = array.ravel()
        first += _aligned(len(place))


def _words(array: np.ndarray) -> int:
    return -(-array.nbytes // 8)


def _aligned(words: int) -> int:
    return -(-words // _ALIGNMENT) * _ALIGNMENT


class Staging:
    """Copies steps to a device. Two host buffers take turns, so that a step may be packed while the copy of the one
    before has not been made yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._pinned = [torch.empty(0, dtype=torch.int64) for _ in range(2)]
            self._copied = [torch.cuda.Event() for _ in range(2)]

    def upload(self, arrays: StepArrays, into: torch.Tensor | None = None) -> StepTensors:
        """Views of a new buffer, or of the start of `into`, int64 [num_words] on the device."""
        num_words = packed_words(arrays)
        host = self._host_buffer(num_words)
        pack(arrays, host.numpy())
        if into is None:
            device_buffer = host.to(self._device, non_blocking=True)
        else:
            device_buffer = into[:num_words].copy_(host, non_blocking=True)
        if self._copied:
            self._copied[0].record()
        return StepTensors.views(device_buffer, arrays)

    def _host_buffer(self, num_words: int) -> torch.Tensor:
        """int64 [num_words] that no copy reads any more; on a CPU a new one, which the step itself may use."""
        if not self._pinned:
            return torch.empty(num_words, dtype=torch.int64)
        self._pinned.reverse()
        self._copied.reverse()
        self._copied[0].synchronize()
        if self._pinned[0].numel() < num_words:
            self._pinned[0] = torch.empty(2 * num_words, dtype=torch.int64, pin_memory=True)
        return self._pinned[0][:num_words]
