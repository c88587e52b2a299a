"""Blocks are shared, kept, evicted and shown as they should be."""

from __future__ import annotations

import pytest

from engine.block_pool import BlockPool, hash_block
from engine.protocol import BLOCK_ACTIVE, BLOCK_CACHED, BLOCK_FREE, BLOCK_SHARED, unpack_block_state
from engine.request import Request


def filled(pool: BlockPool, token_ids: list[int], owner_slot: int = 0) -> Request:
    """A request all of whose tokens are computed, without the help of the cache."""
    request = Request("r", list(token_ids), owner_slot=owner_slot)
    request.block_table = pool.allocate(pool.blocks_for(len(token_ids)), owner_slot)
    pool.register(request, 0, len(token_ids) // pool.block_size)
    return request


def let_go(pool: BlockPool, request: Request) -> None:
    pool.release(request.block_table, request.owner_slot)
    request.block_table = []


def test_a_released_prefix_is_found_again():
    pool = BlockPool(8, 4)
    first = filled(pool, list(range(10)))
    table = list(first.block_table)
    let_go(pool, first)
    hits = pool.match_prefix(Request("again", [*range(8), 99, 99]))
    assert hits == table[:2]
    pool.acquire(hits)
    pool.check_integrity([hits])


def test_the_last_token_is_never_a_hit():
    pool = BlockPool(8, 4)
    let_go(pool, filled(pool, list(range(8))))
    assert len(pool.match_prefix(Request("same", list(range(8))))) == 1
    assert len(pool.match_prefix(Request("longer", list(range(9))))) == 2


def test_equal_tokens_after_another_prefix_are_no_hit():
    pool = BlockPool(8, 4)
    let_go(pool, filled(pool, [1, 1, 1, 1, 5, 5, 5, 5]))
    assert pool.match_prefix(Request("other", [2, 2, 2, 2, 5, 5, 5, 5, 0])) == []


def test_a_hash_collision_is_no_hit():
    pool = BlockPool(8, 2, block_hash=lambda parent, tokens: b"always the same")
    let_go(pool, filled(pool, [1, 2]))
    assert pool.match_prefix(Request("other", [3, 4, 5])) == []
    assert len(pool.match_prefix(Request("same", [1, 2, 5]))) == 1


def test_a_child_is_not_found_behind_a_colliding_parent():
    """Both parents hash alike and their children hold the same tokens: only the true chain may be found."""
    pool = BlockPool(8, 2, block_hash=lambda parent, tokens: hash_block(b"", tokens[1:]))
    let_go(pool, filled(pool, [1, 7, 5, 5]))
    let_go(pool, filled(pool, [2, 7]))  # takes the place of [1, 7] in the index
    assert len(pool.match_prefix(Request("second", [2, 7, 5, 5, 0]))) == 1


def test_models_do_not_share_blocks():
    assert BlockPool(4, 4, "model a")._root_hash != BlockPool(4, 4, "model b")._root_hash


def test_prefix_caching_can_be_switched_off():
    pool = BlockPool(8, 4, prefix_caching=False)
    let_go(pool, filled(pool, list(range(10))))
    assert pool.num_cached == 0
    assert pool.match_prefix(Request("again", list(range(10)))) == []


def test_the_tail_of_a_freed_request_is_evicted_before_its_prefix():
    pool = BlockPool(4, 4)
    request = filled(pool, list(range(16)))
    table = list(request.block_table)
    let_go(pool, request)
    assert pool.allocate(1) == [table[3]]
    assert pool.allocate(1) == [table[2]]
    assert pool.match_prefix(Request("again", list(range(16)))) == table[:2]


def test_the_least_recently_used_prefix_is_evicted_first():
    pool = BlockPool(2, 4)
    let_go(pool, filled(pool, [1] * 4))
    let_go(pool, filled(pool, [2] * 4))
    hits = pool.match_prefix(Request("touch", [1] * 5))
    pool.acquire(hits)
    pool.release(hits)
    pool.allocate(1)
    assert len(pool.match_prefix(Request("touched", [1] * 5))) == 1
    assert pool.match_prefix(Request("older", [2] * 5)) == []


def test_blocks_without_content_are_taken_before_cached_ones():
    pool = BlockPool(3, 4)
    let_go(pool, filled(pool, [1] * 4))
    let_go(pool, filled(pool, [2] * 2))
    pool.allocate(2)
    assert pool.num_evictions == 0
    assert len(pool.match_prefix(Request("kept", [1] * 5))) == 1


def test_a_touched_cached_block_leaves_the_free_list():
    pool = BlockPool(2, 4)
    let_go(pool, filled(pool, [1] * 4))
    hits = pool.match_prefix(Request("hit", [1] * 5))
    pool.acquire(hits)
    assert pool.num_free == 1 and pool.num_cached == 0
    assert pool.allocate(1) != hits
    with pytest.raises(RuntimeError, match="1 KV blocks asked for, 0 are free"):
        pool.allocate(1)


def test_the_same_content_computed_twice_is_indexed_once_and_chains_on():
    pool = BlockPool(8, 2)
    first = filled(pool, [1, 2])
    second = filled(pool, [1, 2, 3, 4])
    pool.check_integrity([first.block_table, second.block_table])
    assert pool.match_prefix(Request("third", [1, 2, 3, 4, 5])) == [first.block_table[0], second.block_table[1]]


def test_forgotten_blocks_are_not_found_and_are_taken_first():
    pool = BlockPool(4, 4)
    request = filled(pool, [1] * 8)
    table = list(request.block_table)
    pool.forget(table)
    let_go(pool, request)
    pool.check_integrity([])
    assert pool.match_prefix(Request("again", [1] * 9)) == []
    assert pool.num_cached == 0


def test_the_block_map_follows_a_block_through_its_life():
    pool = BlockPool(2, 4)
    assert pool.take_changes() == ([], b"")
    first = filled(pool, [1] * 4, owner_slot=3)
    (block_id,) = first.block_table
    ids, states = pool.take_changes()
    assert ids == [block_id] and unpack_block_state(states[0]) == (BLOCK_ACTIVE, 3)

    hits = pool.match_prefix(Request("other", [1] * 5))
    pool.acquire(hits, owner_slot=5)
    assert unpack_block_state(pool.take_changes()[1][0]) == (BLOCK_SHARED, 3)

    let_go(pool, first)
    assert unpack_block_state(pool.take_changes()[1][0]) == (BLOCK_ACTIVE, 5)

    pool.release(hits, owner_slot=5)
    assert unpack_block_state(pool.take_changes()[1][0]) == (BLOCK_CACHED, 5)

    pool.forget_owner(5)
    assert unpack_block_state(pool.take_changes()[1][0]) == (BLOCK_CACHED, 0)

    pool.forget([block_id])
    assert pool.take_changes() == ([block_id], bytes([BLOCK_FREE]))
    assert pool.take_changes() == ([], b"")


def test_a_block_that_changed_and_changed_back_is_not_reported():
    pool = BlockPool(2, 4)
    pool.release(pool.allocate(1, owner_slot=2), owner_slot=2)
    assert pool.take_changes() == ([], b"")


def test_check_integrity_notices_a_lost_and_a_doubly_owned_block():
    pool = BlockPool(4, 4)
    table = pool.allocate(2)
    pool.check_integrity([table])
    with pytest.raises(AssertionError):
        pool.check_integrity([table[:1]])
    with pytest.raises(AssertionError):
        pool.check_integrity([table, table[:1]])
