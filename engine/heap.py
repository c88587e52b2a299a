"""Keeps the C library's heap from holding on to memory that was freed, and Python's collector out of the way."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_SMALLEST_MAPPING = 1 << 20
# What glibc's own threshold grows to as blocks are freed.
_USUAL_SMALLEST_MAPPING = 32 << 20
_USUAL_TOP_PAD = 128 << 10


@contextmanager
def large_blocks_returned() -> Iterator[None]:
    """Inside, a block of a mebibyte or more goes back to the system as soon as it is freed, where glibc is in use.

    Otherwise what a layer's weights were read into can stay between those that are kept, so that a load
    that never holds more than one layer unpacked looks as if it held them all. The price is fresh pages for each.
    The heap grows by as much at a time: each time it does, threads that are given pages meanwhile have to wait.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _SMALLEST_MAPPING)
    mallopt(_M_TOP_PAD, _SMALLEST_MAPPING)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _USUAL_SMALLEST_MAPPING)
        mallopt(_M_TOP_PAD, _USUAL_TOP_PAD)


def trim_heap() -> None:
    """Has the C library give back the pages it keeps for later, where it has a call for that."""
    try:
        if sys.platform == "win32":
            ctypes.CDLL("ucrtbase")._heapmin()
        elif sys.platform == "darwin":
            relieve = ctypes.CDLL(None).malloc_zone_pressure_relief
            relieve.argtypes, relieve.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_size_t
            relieve(None, 0)  # all zones, as much as there is
        else:
            ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass  # another C library, such as musl's, which keeps little


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without the collector of cyclic garbage, which looks at every object again and again while many are made.

    Reference counts go on freeing what is not in a cycle.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
