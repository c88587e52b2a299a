"""The engine's figures for the window, gathered from everything that counts."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.metrics import Metrics
from engine.owners import OwnerSlots
from engine.protocol import BlockMapUpdate, Distribution, MemoryBreakdown, StepRecord, Telemetry
from engine.scheduler import Scheduler
from engine.telemetry import pack_block_update


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Everything in `protocol.Telemetry` that the engine knows; fields are named and meant as there."""

    blocks: BlockMapUpdate
    owners: dict[int, str]
    running: int
    waiting: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ttft: Distribution
    tpot: Distribution
    queue: Distribution
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks_total: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    preemptions: int
    steps: list[StepRecord]
    request_rates: dict[str, float]

    def to_telemetry(self, memory: MemoryBreakdown) -> Telemetry:
        """The event to send, stamped with the time of now."""
        figures = {name: getattr(self, name) for name in self.__slots__}
        return Telemetry(timestamp=time.time(), memory=memory, **figures)


def collect_figures(scheduler: Scheduler, metrics: Metrics, owners: OwnerSlots, full_map: bool) -> EngineFigures:
    """Takes changes and step records since the last call; with `full_map` the block map starts anew."""
    now = time.monotonic()
    pool = scheduler.pool
    block_ids, states = pool.take_changes()
    changes = dict(zip(block_ids, states))
    if full_map:
        changes = {block_id: state for block_id, state in enumerate(pool.all_states()) if state}
    prefill_rate, decode_rate = metrics.rates(now)
    return EngineFigures(
        blocks=pack_block_update(pool.num_blocks, full_map, changes),
        owners=owners.owners,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        prefill_tokens_per_s=prefill_rate,
        decode_tokens_per_s=decode_rate,
        ttft=metrics.ttft.distribution(now),
        tpot=metrics.tpot.distribution(now),
        queue=metrics.queue.distribution(now),
        kv_blocks_used=pool.num_used,
        kv_blocks_cached=pool.num_cached,
        kv_blocks_total=pool.num_blocks,
        prefix_hit_tokens=scheduler.prefix_hit_tokens,
        prefix_query_tokens=scheduler.prefix_query_tokens,
        preemptions=scheduler.num_preemptions,
        steps=metrics.take_step_records(),
        request_rates=metrics.request_rates(scheduler.running, now),
    )
