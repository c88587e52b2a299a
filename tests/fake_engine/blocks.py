"""A plausible KV block map for the fake engine: blocks fill, are shared, stay cached, are evicted."""

from __future__ import annotations

from collections import deque

from engine.protocol import (
    BLOCK_ACTIVE,
    BLOCK_CACHED,
    BLOCK_FREE,
    BLOCK_SHARED,
    NUM_OWNER_SLOTS,
    BlockMapUpdate,
    pack_block_state,
)
from engine.telemetry import pack_block_update

BLOCK_SIZE = 16


class FakeBlocks:
    """Blocks by owner slot. The first two blocks of all running requests are the same, as with a
    common system prompt."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.owners: dict[str, int] = {}
        self._free = deque(range(2, num_blocks))
        self._cached: deque[int] = deque()
        self._states = [BLOCK_FREE] * num_blocks
        self._changed: dict[int, int] = {}
        self._tables: dict[str, list[int]] = {}
        self._full = True

    def slot(self, owner: str) -> int:
        return self.owners.setdefault(owner, len(self.owners) % NUM_OWNER_SLOTS)

    def grow(self, request_id: str, owner: str, num_tokens: int) -> None:
        table = self._tables.setdefault(request_id, [])
        while len(table) * BLOCK_SIZE < num_tokens - 2 * BLOCK_SIZE:
            if self._free:
                block = self._free.popleft()
            elif self._cached:
                block = self._cached.popleft()
            else:
                break
            table.append(block)
            self._set(block, pack_block_state(BLOCK_ACTIVE, self.slot(owner)))
        self._set_shared()

    def release(self, request_id: str) -> None:
        for block in reversed(self._tables.pop(request_id, [])):
            self._cached.append(block)
            self._set(block, pack_block_state(BLOCK_CACHED, self._states[block] & 63))
        self._set_shared()

    def clear(self) -> None:
        self.__init__(self.num_blocks)

    @property
    def used(self) -> int:
        return sum(map(len, self._tables.values())) + (2 if self._tables else 0)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def take_update(self) -> BlockMapUpdate:
        """What has changed since the last call; the first is the full map."""
        full, self._full = self._full, False
        changed, self._changed = self._changed, {}
        changes = dict(enumerate(self._states)) if full else changed
        return pack_block_update(self.num_blocks, full, changes)

    def _set_shared(self) -> None:
        kind = BLOCK_FREE if not self._tables else BLOCK_ACTIVE if len(self._tables) == 1 else BLOCK_SHARED
        for block in (0, 1):
            self._set(block, pack_block_state(kind, 0))

    def _set(self, block: int, state: int) -> None:
        if self._states[block] != state:
            self._states[block] = self._changed[block] = state
