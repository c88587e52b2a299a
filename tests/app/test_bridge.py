"""The bridge: everything arrives, in order, within the frame's budget, the visible chat first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.bridge import Bridge
from engine.protocol import (
    Accepted,
    AnyCommand,
    AnyEvent,
    Delta,
    Finished,
    Generate,
    LoadModel,
    ModelLoaded,
    ModelUnloaded,
    SamplingParams,
    Telemetry,
    WorkerStarted,
)
from tests.app.app_parts import MODEL, wait_until
from tests.fake_engine import fake_client


class ScriptedInbox:
    """A client whose inbox the test fills; the bridge's own work is what is tested."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.sent: list[AnyCommand] = []

    def send(self, command: AnyCommand) -> None:
        self.sent.append(command)

    def take_events(self) -> list[AnyEvent]:
        events, self.events = self.events, []
        return events


def delta(request_id: str, text: str) -> Delta:
    return Delta(request_id=request_id, text=text, token_ids=[len(text)])


def finished(request_id: str) -> Finished:
    return Finished(request_id=request_id, finish_reason="stop")


@pytest.fixture
def inbox() -> ScriptedInbox:
    return ScriptedInbox()


@pytest.fixture
def bridge(qapp: object, inbox: ScriptedInbox) -> Bridge:
    return Bridge(inbox)


def test_the_deltas_of_a_frame_arrive_as_one(bridge: Bridge, inbox: ScriptedInbox) -> None:
    seen: list[Any] = []
    bridge.register_request("a", seen.append)
    accepted = Accepted(request_id="a", prompt_tokens=1, seed=1, max_tokens=1)
    inbox.events = [accepted, delta("a", "x"), delta("a", "yy"), delta("a", "zzz"), finished("a")]
    bridge._drain()
    assert seen == [accepted, Delta(request_id="a", text="xyyzzz", token_ids=[1, 2, 3]), finished("a")]


def test_a_request_is_forgotten_after_its_last_event(bridge: Bridge, inbox: ScriptedInbox) -> None:
    seen: list[Any] = []
    bridge.register_request("a", seen.append)
    inbox.events = [finished("a")]
    bridge._drain()
    inbox.events = [delta("a", "late")]
    bridge._drain()
    assert seen == [finished("a")]


def test_an_unregistered_request_is_not_heard_of_again(bridge: Bridge, inbox: ScriptedInbox) -> None:
    seen: list[Any] = []
    bridge.register_request("a", seen.append)
    bridge.register_request("b", lambda _: bridge.unregister_request("a"), owner="front")
    bridge.set_visible("front")
    inbox.events = [delta("a", "x"), delta("b", "y")]
    bridge._drain()
    assert seen == []


def test_the_visible_owner_is_served_first_and_the_others_in_turn(qapp: object, inbox: ScriptedInbox) -> None:
    bridge = Bridge(inbox, budget_s=0.0)  # every frame is over budget at once
    served: list[str] = []
    for name in "abcd":
        bridge.register_request(name, lambda event: served.append(event.request_id), owner=name)
    bridge.set_visible("c")
    for _ in range(6):
        inbox.events = [delta(name, "x") for name in "abcd"]
        bridge._drain()
    assert served == ["c", "a", "c", "b", "c", "d", "c", "a", "c", "b", "c", "d"]


def test_what_did_not_fit_into_a_frame_comes_in_a_later_one_without_new_events(
    qapp: object, inbox: ScriptedInbox
) -> None:
    bridge = Bridge(inbox, budget_s=0.0)
    texts = dict.fromkeys("abc", "")

    def append(event: Any) -> None:
        texts[event.request_id] += event.text

    for name in "abc":
        bridge.register_request(name, append, owner=name)
    inbox.events = [delta(name, part) for part in ("1", "2") for name in "abc"]
    for _ in range(3):
        bridge._drain()
    assert texts == {"a": "12", "b": "12", "c": "12"}


@settings(max_examples=100, deadline=None)
@given(
    frames=st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.text(max_size=3))), max_size=8),
    visible=st.sampled_from(["a", "b", "none"]),
    budget_s=st.sampled_from([0.0, 1.0]),
)
def test_nothing_is_lost_doubled_or_reordered(
    frames: list[list[tuple[str, str]]], visible: str, budget_s: float
) -> None:
    inbox = ScriptedInbox()
    bridge = Bridge(inbox, budget_s=budget_s)
    bridge.set_visible(visible)
    seen: dict[str, list[Any]] = {name: [] for name in "abc"}
    for name in "abc":
        bridge.register_request(name, seen[name].append, owner=name)
    for frame in frames:
        inbox.events = [delta(name, text) for name, text in frame]
        bridge._drain()
    inbox.events = [finished(name) for name in "abc"]
    for _ in range(4):
        bridge._drain()
    for name in "abc":
        expected = [(name_, text) for frame in frames for name_, text in frame if name_ == name]
        deltas, last = seen[name][:-1], seen[name][-1]
        assert "".join(event.text for event in deltas) == "".join(text for _, text in expected)
        assert [i for event in deltas for i in event.token_ids] == [len(text) for _, text in expected]
        assert last == finished(name)


def test_a_handler_that_fails_does_not_keep_events_from_others(bridge: Bridge, inbox: ScriptedInbox) -> None:
    seen: list[Any] = []

    def fail(event: object) -> None:
        raise RuntimeError("a handler's own fault")

    bridge.subscribe(ModelUnloaded, fail)
    bridge.subscribe(ModelUnloaded, seen.append)
    bridge.register_request("a", fail)
    bridge.register_request("b", seen.append)
    inbox.events = [ModelUnloaded(), delta("a", "x"), delta("b", "y")]
    with pytest.raises(RuntimeError, match="own fault"):
        bridge._drain()
    assert seen == [ModelUnloaded(), delta("b", "y")]


def test_an_idle_bridge_slows_down_and_a_command_wakes_it(
    bridge: Bridge, inbox: ScriptedInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bridge._timer.interval() == 16
    later = time.monotonic() + 10
    monkeypatch.setattr("app.bridge.time.monotonic", lambda: later)
    bridge._drain()
    assert bridge._timer.interval() == 50
    bridge.send(LoadModel(config=MODEL))
    assert bridge._timer.interval() == 16


def test_a_running_request_keeps_the_bridge_at_one_frame(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.register_request("a", lambda _: None)
    later = time.monotonic() + 10
    monkeypatch.setattr("app.bridge.time.monotonic", lambda: later)
    bridge._drain()
    assert bridge._timer.interval() == 16


@pytest.fixture
def running(qapp: object) -> Iterator[Bridge]:
    client = fake_client(tokens_per_second=2000, telemetry_hz=50, repeat=2)
    bridge = Bridge(client)
    loaded: list[object] = []
    bridge.subscribe(ModelLoaded, loaded.append)
    bridge.subscribe(WorkerStarted, lambda _: bridge.send(LoadModel(config=MODEL)))
    client.start()
    bridge.start()
    wait_until(lambda: loaded)
    yield bridge
    bridge.stop()
    client.close(2.0)


def test_eight_streams_of_a_real_worker_arrive_whole_with_telemetry_between(running: Bridge) -> None:
    texts = {f"r{number}": "" for number in range(8)}
    ended: list[str] = []
    telemetry: list[Telemetry] = []
    running.subscribe(Telemetry, telemetry.append)

    def handle(event: Any) -> None:
        if isinstance(event, Delta):
            texts[event.request_id] += event.text
        elif isinstance(event, Finished):
            ended.append(event.request_id)

    for request_id in texts:
        running.register_request(request_id, handle, owner=request_id)
        running.send(Generate(request_id=request_id, owner=request_id, params=SamplingParams(), prompt="tell me"))
    wait_until(lambda: len(ended) == 8)
    assert len(set(texts.values())) == 1
    text = texts["r0"]
    assert text == text[: len(text) // 2] * 2 and "中文" in text
    wait_until(lambda: len(telemetry) >= 3)
