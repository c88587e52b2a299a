"""The outbox merges without reordering and never lets the engine wait."""

from __future__ import annotations

import threading
import time

import pytest

from engine.outbox import Outbox
from engine.protocol import (
    BLOCK_ACTIVE,
    AnyEvent,
    Delta,
    Distribution,
    Finished,
    LoadFailed,
    MemoryBreakdown,
    StepRecord,
    Telemetry,
    decode_event,
    pack_block_state,
)
from engine.telemetry import MAX_STEP_RECORDS, merge_telemetry, pack_block_update, unpack_block_update


def delta(request_id: str, token: int) -> Delta:
    return Delta(request_id=request_id, text=f"{token} ", token_ids=[token])


def telemetry(changes: dict[int, int], full: bool = False, num_blocks: int = 8, steps: range = range(0)) -> Telemetry:
    nothing = Distribution(count=0)
    return Telemetry(
        timestamp=0.0,
        memory=MemoryBreakdown(kind="RAM", total=7, weights=1, kv_cache=1, workspace=1, runtime=1, other=1, free=2),
        blocks=pack_block_update(num_blocks, full, changes),
        owners={},
        running=len(changes),
        waiting=0,
        prefill_tokens_per_s=0.0,
        decode_tokens_per_s=0.0,
        ttft=nothing,
        tpot=nothing,
        queue=nothing,
        kv_blocks_used=0,
        kv_blocks_cached=0,
        kv_blocks_total=num_blocks,
        prefix_hit_tokens=0,
        prefix_query_tokens=0,
        preemptions=0,
        steps=[StepRecord(index=index, start=0.0, end=0.0, entries=[]) for index in steps],
    )


class SlowPipe:
    """Takes messages only while `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.received: list[AnyEvent] = []

    def send_bytes(self, data: bytes) -> None:
        self.open.wait()
        self.received.append(decode_event(data))


def test_waiting_deltas_merge_per_request_and_finished_comes_after_them() -> None:
    pipe = SlowPipe()
    pipe.open.clear()
    outbox = Outbox(pipe.send_bytes)
    outbox.put(Finished(request_id="blocker", finish_reason="stop"))
    time.sleep(0.05)
    for token in range(100):
        outbox.put(delta("a", token))
        outbox.put(delta("b", token))
    outbox.put(Finished(request_id="a", finish_reason="stop"))
    outbox.put(delta("b", 100))
    pipe.open.set()
    outbox.close(5)
    kinds = [(type(event).__name__, getattr(event, "request_id", "")) for event in pipe.received[1:]]
    assert kinds == [("Delta", "a"), ("Delta", "b"), ("Finished", "a"), ("Delta", "b")]
    tokens = [token for event in pipe.received if isinstance(event, Delta) for token in event.token_ids]
    assert tokens == [*range(100), *range(100), 100]


def test_deltas_leave_within_a_flush_interval() -> None:
    pipe = SlowPipe()
    outbox = Outbox(pipe.send_bytes)
    for token in range(20):
        outbox.put(delta("a", token))
        time.sleep(0.005)
    time.sleep(0.2)
    messages = len(pipe.received)
    outbox.close(5)
    assert 2 <= messages <= 15
    assert sum(len(event.token_ids) for event in pipe.received if isinstance(event, Delta)) == 20


def test_a_client_that_does_not_read_never_holds_up_the_engine() -> None:
    pipe = SlowPipe()
    pipe.open.clear()
    outbox = Outbox(pipe.send_bytes)
    outbox.put(telemetry({0: 1}, full=True, steps=range(1)))
    time.sleep(0.05)
    began = time.monotonic()
    for index in range(1, 500):
        outbox.put(telemetry({index % 8: index % 200}, steps=range(index, index + 1)))
    assert time.monotonic() - began < 2.0
    pipe.open.set()
    outbox.close(5)
    assert len(pipe.received) <= 3
    steps = [step.index for event in pipe.received if isinstance(event, Telemetry) for step in event.steps]
    assert steps == list(range(500))


def test_a_broken_pipe_is_survived() -> None:
    def broken(data: bytes) -> None:
        raise BrokenPipeError

    outbox = Outbox(broken)
    outbox.put(delta("a", 1))
    outbox.close(5)
    outbox.put(delta("a", 2))


def test_text_that_is_no_utf8_is_sent_with_question_marks_and_what_follows_arrives() -> None:
    pipe = SlowPipe()
    outbox = Outbox(pipe.send_bytes)
    outbox.put(LoadFailed(model="\udcff.gguf", message="'\udcff.gguf': no such file"))
    outbox.put(Finished(request_id="a", finish_reason="stop"))
    outbox.close(5)
    failed, finished = pipe.received
    assert failed == LoadFailed(model="?.gguf", message="'?.gguf': no such file")
    assert finished == Finished(request_id="a", finish_reason="stop")


def test_a_sender_that_fails_does_not_fail_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(data: bytes) -> None:
        raise RuntimeError("no way out")

    failed = threading.Event()
    outbox = Outbox(fails, on_failure=failed.set)
    outbox.put(delta("a", 1))
    assert failed.wait(5)
    outbox.put(delta("a", 2))
    outbox.close(5)
    assert "RuntimeError: no way out" in capsys.readouterr().err


def test_merging_keeps_the_last_state_of_each_block_and_full_resets() -> None:
    state = pack_block_state(BLOCK_ACTIVE, 5)
    changes_only = merge_telemetry([telemetry({1: 1, 2: 2}), telemetry({2: state})])
    assert not changes_only.blocks.full
    assert dict(unpack_block_update(changes_only.blocks)) == {1: 1, 2: state}
    reset = merge_telemetry([telemetry({1: 1}), telemetry({0: 9}, full=True), telemetry({3: 3})])
    assert reset.blocks.full and dict(unpack_block_update(reset.blocks)) == {0: 9, 3: 3}


def test_merged_step_records_are_bounded_and_the_newest_stay() -> None:
    merged = merge_telemetry([telemetry({}, steps=range(2000)), telemetry({}, steps=range(2000, 4000))])
    assert [step.index for step in merged.steps] == list(range(4000 - MAX_STEP_RECORDS, 4000))
