"""Packed weights lie on huge pages, at once or as soon as there is time for that."""

from __future__ import annotations

import gc
import mmap
import sys
import threading
from pathlib import Path

import pytest
import torch

from kernels.cpu import arena
from kernels.cpu.arena import Arena

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux")
MIB = 1 << 20


def huge_bytes(data: torch.Tensor) -> int:
    """Of the mapping in which the data lies."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            begin, end = (int(part, 16) for part in first.split("-"))
            is_it = begin <= data.data_ptr() < end
        elif is_it and first == "AnonHugePages:":
            return int(rest.split()[0]) << 10
    raise AssertionError("the data lies in no mapping")


def huge_pages_exist() -> bool:
    pages = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    pages[2 * MIB] = 1
    return huge_bytes(torch.frombuffer(pages, dtype=torch.uint8)) > 0


def can_collapse() -> bool:
    return tuple(int(part) for part in Path("/proc/sys/kernel/osrelease").read_text().split(".")[:2]) >= (6, 1)


def fill(memory: Arena, sizes: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Matrices in the arena, and copies of them elsewhere."""
    copies = [torch.arange(size).remainder_(251).byte() for size in sizes]
    matrices = [memory.allocate(size) for size in sizes]
    for data, copy in zip(matrices, copies, strict=True):
        assert data[-1] == 0 and data.data_ptr() % 64 == 0
        data.copy_(copy)
    return matrices, copies


def test_huge_from_the_start_where_they_come_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    if not huge_pages_exist():
        pytest.skip("this system has no huge pages")
    monkeypatch.setattr(arena, "_SLOW", float("inf"))
    memory = Arena()
    matrices, _ = fill(memory, [3 * MIB, 5 * MIB])
    assert huge_bytes(matrices[0]) >= 6 * MIB
    assert memory._gatherer is None


def test_ordinary_pages_where_they_come_slowly_become_huge_later(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (huge_pages_exist() and can_collapse()):
        pytest.skip("this system cannot make pages huge")
    monkeypatch.setattr(arena, "_SLOW", -1.0)
    monkeypatch.setattr(arena, "_REST", 0.0)
    gather = Arena._gather
    monkeypatch.setattr(Arena, "_gather", lambda memory: None)
    memory = Arena()
    # The last one has an arena of its own, and all of that is ordinary.
    matrices, copies = fill(memory, [3 * MIB + 100, 5 * MIB, 36 * MIB])
    assert huge_bytes(matrices[0]) <= 2 * MIB, "only the page that was tried"
    assert huge_bytes(matrices[2]) == 0
    gatherer = threading.Thread(target=gather, args=(memory,))
    gatherer.start()
    gatherer.join(60)
    assert huge_bytes(matrices[0]) >= 6 * MIB and huge_bytes(matrices[2]) >= 34 * MIB
    assert all(torch.equal(data, copy) for data, copy in zip(matrices, copies, strict=True))


def test_pages_that_are_dropped_meanwhile_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_SLOW", -1.0)
    monkeypatch.setattr(arena, "_REST", 0.1)
    memory = Arena()
    matrices, _ = fill(memory, [3 * MIB])
    gatherer, pages = memory._gatherer, memory._ordinary[0]
    assert gatherer is not None and pages() is not None
    matrices.clear()
    gc.collect()
    assert pages() is None, "only the matrices keep them"
    gatherer.join(20)
    assert not gatherer.is_alive()
    assert memory._is_huge, "the next load tries again"
    matrices, copies = fill(memory, [2 * MIB])
    assert torch.equal(matrices[0], copies[0])


def test_a_system_without_huge_pages_serves_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, unknown = mmap.mmap(-1, 4 * MIB), 12345
    with pytest.raises(OSError):
        pages.madvise(unknown)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", unknown)
    matrices, copies = fill(Arena(), [3 * MIB, 40 * MIB])
    assert all(torch.equal(data, copy) for data, copy in zip(matrices, copies, strict=True))
