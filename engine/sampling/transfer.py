"""Small arrays on their way to a device in one copy, and small tensors on their way back, without waiting."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_ALIGNMENT = 16


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """The arrays as tensors on a device; on the CPU they share their memory."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    return _unpacked(_packed(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def _packed(arrays: Mapping[str, np.ndarray], pinned: bool) -> torch.Tensor:
    """All arrays one after another in one uint8 tensor on the CPU."""
    buffer = torch.empty(sum(_padded(array.nbytes) for array in arrays.values()), dtype=torch.uint8, pin_memory=pinned)
    target, start = buffer.numpy(), 0
    for array in arrays.values():
        target[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        start += _padded(array.nbytes)
    return buffer


def _unpacked(buffer: torch.Tensor, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Views of a packed buffer, wherever it lies now, one for each array."""
    views: dict[str, torch.Tensor] = {}
    start = 0
    for name, array in arrays.items():
        own = buffer[start : start + array.nbytes]
        views[name] = own.view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        start += _padded(array.nbytes)
    return views


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class Download:
    """Tensors that the host reads later. On CUDA their copies are queued at once and `wait` waits for them."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = tensors
        if tensors[0].is_cuda:
            self._tensors = tuple(
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            )
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
