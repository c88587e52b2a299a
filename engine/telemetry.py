"""Merging telemetry: the latest figures win, but no block change and no step record is lost."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from engine.protocol import BlockMapUpdate, Telemetry

# About 20 s of engine steps at 100 steps a second.
MAX_STEP_RECORDS = 2048


def pack_block_update(num_blocks: int, full: bool, changes: Mapping[int, int]) -> BlockMapUpdate:
    """Packs block id -> state byte."""
    ids = array("I", changes.keys())
    if sys.byteorder == "big":
        ids.byteswap()
    return BlockMapUpdate(num_blocks=num_blocks, full=full, block_ids=ids.tobytes(), states=bytes(changes.values()))


def unpack_block_update(update: BlockMapUpdate) -> Iterator[tuple[int, int]]:
    """Yields (block id, state byte)."""
    ids = array("I")
    ids.frombytes(update.block_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return zip(ids, update.states, strict=True)


def merge_telemetry(records: Iterable[Telemetry]) -> Telemetry:
    """Folds telemetry records, oldest first, into one that says the same as all of them.

    Step records beyond `MAX_STEP_RECORDS` are dropped, oldest first. Raises `ValueError` for
    an empty iterable.
    """
    records = list(records)
    if not records:
        raise ValueError("no telemetry to merge")
    latest = records[-1]
    if len(records) == 1:
        return latest
    changes: dict[int, int] = {}
    full = False
    num_blocks = None
    for record in records:
        blocks = record.blocks
        if blocks.full or blocks.num_blocks != num_blocks:
            changes.clear()
            full = full or blocks.full
        num_blocks = blocks.num_blocks
        changes.update(unpack_block_update(blocks))
    steps = [step for record in records for step in record.steps][-MAX_STEP_RECORDS:]
    return msgspec.structs.replace(
        latest, blocks=pack_block_update(latest.blocks.num_blocks, full, changes), steps=steps
    )
