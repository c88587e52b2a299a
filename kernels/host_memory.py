"""Large buffers in the host's memory."""

from __future__ import annotations

import math
import mmap
import sys

import torch


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU whose pages the system gives only when they are written: torch.zeros writes them all."""
    count = math.prod(shape)
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    pages = mmap.mmap(-1, count * dtype.itemsize, **private)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)
