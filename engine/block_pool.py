"""The KV blocks of one model: who holds them, what they contain, which may be taken next."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.protocol import BLOCK_ACTIVE, BLOCK_CACHED, BLOCK_FREE, BLOCK_SHARED, pack_block_state
from engine.request import Request

ROOT_CONTENT_ID = 0

BlockHash = Callable[[bytes, Sequence[int]], bytes]


def hash_block(parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
    """128-bit hash of a full block: its tokens, chained over everything before it."""
    return hashlib.blake2b(parent_hash + array("q", token_ids).tobytes(), digest_size=16).digest()


@dataclass(slots=True, eq=False)
class Block:
    """One block of KV slots.

    `content_id` names what the block and all before it contain: two full blocks have the same id
    only if their tokens, their whole prefixes and their requests' `length_floor` are equal. A block
    with a `block_hash` can be found by others; `token_ids` and `parent_content_id` are what a hit is
    verified against.
    """

    block_id: int
    holders: list[int] = field(default_factory=list)
    """Owner slot of each running request that holds the block."""
    last_owner_slot: int = 0
    content_id: int | None = None
    block_hash: bytes | None = None
    token_ids: tuple[int, ...] = ()
    parent_content_id: int = ROOT_CONTENT_ID

    @property
    def ref_count(self) -> int:
        return len(self.holders)

    @property
    def state(self) -> int:
        """The byte that the block map shows, see `protocol.pack_block_state`."""
        if len(self.holders) > 1:
            return pack_block_state(BLOCK_SHARED, self.holders[0])
        if self.holders:
            return pack_block_state(BLOCK_ACTIVE, self.holders[0])
        if self.block_hash is not None:
            return pack_block_state(BLOCK_CACHED, self.last_owner_slot)
        return pack_block_state(BLOCK_FREE, 0)


class BlockPool:
    """Free list, reference counts and prefix index of `num_blocks` blocks of `block_size` tokens.

    `cache_key` is what else than tokens changes KV (model, KV dtype, adapter). A block that nobody
    holds stays findable until it is taken; the least recently used is taken first, blocks that
    cannot be found before all others.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache_key: str = "",
        prefix_caching: bool = True,
        block_hash: BlockHash = hash_block,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.num_evictions = 0
        self._block_hash = block_hash
        self._root_hash = hashlib.blake2b(cache_key.encode(), digest_size=16).digest()
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        # Ordered as a queue: the first is taken next.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[bytes, int] = {}
        self._num_cached = 0
        self._next_content_id = ROOT_CONTENT_ID + 1
        self._shown_states = bytearray(num_blocks)
        self._touched: set[int] = set()

    # ------------------------------------------------------------ counts

    @property
    def num_free(self) -> int:
        """Blocks that may be taken, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be found."""
        return self._num_cached

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def ref_count(self, block_id: int) -> int:
        return self._blocks[block_id].ref_count

    # ------------------------------------------------------------ taking and giving back

    def allocate(self, count: int, owner_slot: int = 0) -> list[int]:
        """Takes `count` blocks with undefined content. Raises `RuntimeError` if fewer are free."""
        if count > len(self._free):
            raise RuntimeError(f"{count} KV blocks asked for, {len(self._free)} are free")
        taken = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            block = self._blocks[block_id]
            if block.block_hash is not None:
                self._num_cached -= 1
                self.num_evictions += 1
                self._make_unfindable(block)
            block.content_id = None
            self._hold(block, owner_slot)
            taken.append(block_id)
        return taken

    def acquire(self, block_ids: Iterable[int], owner_slot: int = 0) -> None:
        """Adds a holder to blocks that were found by prefix, taking free ones off the free list."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if not block.holders:
                del self._free[block_id]
                self._num_cached -= 1
            self._hold(block, owner_slot)

    def release(self, block_ids: Sequence[int], owner_slot: int = 0) -> None:
        """Removes one holder from each block, last block first so that a tail is evicted before its prefix."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            block.holders.remove(owner_slot)
            self._touched.add(block_id)
            if not block.holders:
                self._enqueue_free(block)

    def _hold(self, block: Block, owner_slot: int) -> None:
        block.holders.append(owner_slot)
        block.last_owner_slot = owner_slot
        self._touched.add(block.block_id)

    def _enqueue_free(self, block: Block) -> None:
        self._free[block.block_id] = None
        if block.block_hash is None:
            self._free.move_to_end(block.block_id, last=False)
        else:
            self._num_cached += 1

    # ------------------------------------------------------------ prefix cache

    def match_prefix(self, request: Request) -> list[int]:
        """The longest chain of findable blocks that starts the request's tokens, verified token by token.

        At least one token is left to compute, because its logits are needed. The blocks are not
        held yet: call `acquire` before anything else is allocated.
        """
        if not self.prefix_caching:
            return []
        found: list[int] = []
        parent_content_id = self._root_content_id(request)
        for index in range((request.num_tokens - 1) // self.block_size):
            block_id = self._by_hash.get(self._hash_of(request, index))
            if block_id is None:
                break
            block = self._blocks[block_id]
            if block.parent_content_id != parent_content_id or block.token_ids != self._tokens_of(request, index):
                break
            found.append(block_id)
            assert block.content_id is not None
            parent_content_id = block.content_id
        return found

    def register(self, request: Request, first_block: int, end_block: int) -> None:
        """Makes the request's blocks `[first_block, end_block)` findable; all their tokens must be computed.

        A block whose content is findable already in another block stays private to its holder.
        """
        if not self.prefix_caching:
            return
        for index in range(first_block, end_block):
            block = self._blocks[request.block_table[index]]
            parent_content_id = self._root_content_id(request)
            if index > 0:
                content_id = self._blocks[request.block_table[index - 1]].content_id
                assert content_id is not None, "blocks are registered in order"
                parent_content_id = content_id
            key = self._hash_of(request, index)
            token_ids = self._tokens_of(request, index)
            present = self._by_hash.get(key)
            if present is not None:
                other = self._blocks[present]
                if other.parent_content_id == parent_content_id and other.token_ids == token_ids:
                    block.content_id = other.content_id
                    continue
                # Either a collision or a child of a prefix that was evicted since: nobody can
                # find the older one any more, so the newer takes its place.
                self._forget(other)
            block.content_id = self._next_content_id
            self._next_content_id += 1
            block.block_hash = key
            block.token_ids = token_ids
            block.parent_content_id = parent_content_id
            self._by_hash[key] = block.block_id
            self._touched.add(block.block_id)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Makes blocks unfindable, because their content is not to be trusted."""
        for block_id in block_ids:
            self._forget(self._blocks[block_id])

    def _forget(self, block: Block) -> None:
        if block.block_hash is None:
            return
        self._make_unfindable(block)
        self._touched.add(block.block_id)
        if not block.holders:
            self._num_cached -= 1
            self._free.move_to_end(block.block_id, last=False)

    def _make_unfindable(self, block: Block) -> None:
        assert block.block_hash is not None
        del self._by_hash[block.block_hash]
        block.block_hash = None
        block.token_ids = ()

    def _tokens_of(self, request: Request, index: int) -> tuple[int, ...]:
        start = index * self.block_size
        return tuple(request.token_ids[start : start + self.block_size])

    def _hash_of(self, request: Request, index: int) -> bytes:
        hashes = request.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else self._root_hash_of(request)
            hashes.append(self._block_hash(parent, self._tokens_of(request, len(hashes))))
        return hashes[index]

    def _root_content_id(self, request: Request) -> int:
        """What stands in the parent's place for a first block: none that a block has."""
        return ROOT_CONTENT_ID - request.length_floor

    def _root_hash_of(self, request: Request) -> bytes:
        if request.length_floor == 0:
            return self._root_hash
        return self._block_hash(self._root_hash, (request.length_floor,))

    # ------------------------------------------------------------ block map

    def forget_owner(self, owner_slot: int) -> None:
        """Lets cached blocks of an owner that is gone show no owner, so that its slot can be given anew."""
        for block in self._blocks:
            if block.last_owner_slot == owner_slot:
                block.last_owner_slot = 0
                self._touched.add(block.block_id)

    def take_changes(self) -> tuple[list[int], bytes]:
        """Ids and new state bytes of the blocks that look different since the last call."""
        block_ids: list[int] = []
        states = bytearray()
        for block_id in sorted(self._touched):
            state = self._blocks[block_id].state
            if state != self._shown_states[block_id]:
                self._shown_states[block_id] = state
                block_ids.append(block_id)
                states.append(state)
        self._touched.clear()
        return block_ids, bytes(states)

    def all_states(self) -> bytes:
        """The state byte of every block."""
        return bytes(block.state for block in self._blocks)

    # ------------------------------------------------------------ invariants

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Asserts that every block is either free or held by exactly the given tables."""
        expected: Counter[int] = Counter()
        for table in block_tables:
            assert len(set(table)) == len(table), f"a block occurs twice in one table: {table}"
            expected.update(table)
        cached = 0
        for block in self._blocks:
            block_id = block.block_id
            assert block.ref_count == expected[block_id], (
                f"block {block_id} counts {block.ref_count} holders, {expected[block_id]} tables contain it"
            )
            assert (block.ref_count == 0) == (block_id in self._free), f"block {block_id} is lost or owned twice"
            if block.block_hash is not None:
                assert self._by_hash.get(block.block_hash) == block_id, f"block {block_id} is hashed but not indexed"
                assert len(block.token_ids) == self.block_size and block.content_id is not None
                cached += block.ref_count == 0
        assert len(self._by_hash) == sum(block.block_hash is not None for block in self._blocks)
        assert cached == self._num_cached, f"{self._num_cached} cached blocks counted, {cached} found"
        found_cached = False
        for block_id in self._free:
            findable = self._blocks[block_id].block_hash is not None
            assert findable or not found_cached, "a block without content waits behind a cached one"
            found_cached = findable
