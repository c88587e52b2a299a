"""Which palette slot of the block map belongs to which owner (a chat tab)."""

from __future__ import annotations

from collections import Counter, OrderedDict

from engine.protocol import NUM_OWNER_SLOTS

NO_OWNER_SLOT = 0


class OwnerSlots:
    """Hands out slots 1 to 63. Slot 0 is nobody's: requests without an owner, and owners that find no slot.

    An owner keeps its slot until all slots are taken and it is the one that has gone longest
    without a request.
    """

    def __init__(self) -> None:
        # The least recently used owner comes first.
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._num_requests: Counter[str] = Counter()

    @property
    def owners(self) -> dict[int, str]:
        return {slot: owner for owner, slot in self._slots.items()}

    def enter(self, owner: str) -> tuple[int, int | None]:
        """Counts one more request of an owner. Returns its slot, and that slot again if another owner lost it."""
        if not owner:
            return NO_OWNER_SLOT, None
        vacated = None
        if owner in self._slots:
            self._slots.move_to_end(owner)
        elif len(self._slots) < NUM_OWNER_SLOTS - 1:
            self._slots[owner] = len(self._slots) + 1
        else:
            idle = next((each for each in self._slots if not self._num_requests[each]), None)
            if idle is None:
                return NO_OWNER_SLOT, None
            vacated = self._slots.pop(idle)
            self._slots[owner] = vacated
        self._num_requests[owner] += 1
        return self._slots[owner], vacated

    def leave(self, owner: str) -> None:
        """Counts one request of an owner less."""
        if self._num_requests[owner] > 0:
            self._num_requests[owner] -= 1
