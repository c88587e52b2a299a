"""Computes with one kernel backend or another in the same process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kernels import ops


@contextmanager
def using(backend: str) -> Iterator[None]:
    """Inside, `kernels.ops` sends every operation to the backend named."""
    before = os.environ.get(ops.BACKEND_VARIABLE)
    os.environ[ops.BACKEND_VARIABLE] = backend
    ops._backend.cache_clear()  # the choice is made once in a process
    try:
        assert ops.kernel_backend() == backend
        yield
    finally:
        if before is None:
            del os.environ[ops.BACKEND_VARIABLE]
        else:
            os.environ[ops.BACKEND_VARIABLE] = before
        ops._backend.cache_clear()
