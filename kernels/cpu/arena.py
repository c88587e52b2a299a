"""Memory for packed weights: on huge pages where the system has them, from which a step of one row takes 8 % less."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
import weakref
from contextlib import suppress

import torch

_HUGE_PAGE = 2 << 20
_ARENA_BYTES = 32 << 20
_SLOW = 1e-3
"""Seconds for a huge page, several times what it takes to clear one. A virtual machine that has to ask its host for
all of it takes 3 to 6 ms, and often has ordinary pages at hand that it used before."""
_REST = 0.3
"""Seconds without an allocation after which whoever loads is done."""
_PAUSE = 1.0
"""How long to leave everybody in peace after a piece, in times of what it took."""
_MADV_COLLAPSE = 25
"""Linux 6.1 and later; Python does not name it."""


class Arena:
    """Memory shared by many matrices, most of which are smaller than a huge page.

    Only the matrices keep its pages alive: they go with the last of them. Where huge pages come slowly, matrices get
    ordinary ones, which a thread makes huge later.
    """

    def __init__(self) -> None:
        self._pages: weakref.ref[mmap.mmap] | None = None
        self._used = self._touched = 0
        self._is_huge = True
        self._lock = threading.Lock()
        self._ordinary: list[weakref.ref[mmap.mmap]] = []
        self._last_use = 0.0
        self._gatherer: threading.Thread | None = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zeroed bytes, 64-byte aligned."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.zeros(nbytes, dtype=torch.uint8)
        with self._lock:
            self._last_use = time.monotonic()
            pages = self._pages() if self._pages else None
            if pages is None or self._used + nbytes > len(pages):
                pages = self._map(max(_ARENA_BYTES, -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE))
            first, self._used = self._used, self._used + -(-nbytes // 64) * 64
            if self._is_huge and self._used > self._touched:
                self._try_page(pages)
            return torch.frombuffer(pages, dtype=torch.uint8, offset=first, count=nbytes)

    def _map(self, size: int) -> mmap.mmap:
        # Private: pages shared between processes, mmap's default, are never huge.
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pages, self._used, self._touched = weakref.ref(pages), 0, 0
        if self._is_huge:
            _advise(pages, mmap.MADV_HUGEPAGE)
        else:
            self._gather_later(pages)
        return pages

    def _try_page(self, pages: mmap.mmap) -> None:
        """Takes the first huge page that nobody has touched yet; if that is slow, the rest will be ordinary ones."""
        begin = time.perf_counter()
        pages[self._touched] = 0
        elapsed = time.perf_counter() - begin
        self._touched = -(-self._used // _HUGE_PAGE) * _HUGE_PAGE
        if elapsed > _SLOW:
            self._is_huge = False
            _advise(pages, mmap.MADV_NOHUGEPAGE)
            self._gather_later(pages)

    def _gather_later(self, pages: mmap.mmap) -> None:
        self._ordinary.append(weakref.ref(pages))
        if self._gatherer is None:
            self._gatherer = threading.Thread(target=self._gather, name="kvasir-huge-pages", daemon=True)
            self._gatherer.start()

    def _gather(self) -> None:
        while (rest := self._last_use + _REST - time.monotonic()) > 0:
            time.sleep(rest)
        with self._lock:
            ordinary, self._ordinary = self._ordinary, []
            self._gatherer, self._is_huge = None, True
        for pages in ordinary:
            _make_huge(pages)


def _advise(pages: mmap.mmap, advice: int) -> None:
    with suppress(OSError):  # of a system that was built without huge pages, where ordinary ones serve
        pages.madvise(advice)


def _make_huge(pages: weakref.ref[mmap.mmap]) -> None:
    """Moves what lies on ordinary pages to huge ones, piece by piece, as long as somebody else keeps it."""
    libc, first = ctypes.CDLL(None, use_errno=True), 0
    while (held := pages()) is not None and first < len(held):
        if first == 0:
            # Alone, where the system lacks the other: it does the same in the background, in minutes.
            _advise(held, mmap.MADV_HUGEPAGE)
        address = torch.frombuffer(held, dtype=torch.uint8).data_ptr() + first
        del held  # or whoever drops them would have to wait for their memory
        # Through ctypes, since `mmap.madvise` lets no other Python run. A refusal leaves the piece as it was, and what
        # may lie there meanwhile is no worse on a huge page.
        begin = time.perf_counter()
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)
        first += _HUGE_PAGE
        # Who reads that piece has to wait meanwhile. At a low priority this took longest just when cores were busy.
        time.sleep(_PAUSE * (time.perf_counter() - begin))
