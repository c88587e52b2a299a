"""The engine's state as the window sees it, followed through a real (fake-engine) process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.bridge import Bridge
from app.state.engine_state import EngineState
from engine.protocol import ChatMessage, EngineConfig
from tests.app.app_parts import MODEL, wait_until
from tests.fake_engine import fake_client

QUESTION = [ChatMessage(role="user", content="How long is this?")]


@pytest.fixture
def make_state(qapp: object) -> Iterator[Callable[..., EngineState]]:
    made = []

    def make(**script: Any) -> EngineState:
        client = fake_client(**script)
        bridge = Bridge(client)
        made.append((client, bridge))
        return EngineState(client, bridge)

    yield make
    for client, bridge in made:
        bridge.stop()
        client.close(2.0)


def kill_worker(state: EngineState) -> None:
    assert state.worker is not None
    os.kill(state.worker.pid, signal.SIGKILL)


def watch(state: EngineState) -> list[str]:
    statuses: list[str] = []
    state.changed.connect(lambda: statuses.append(state.status) if statuses[-1:] != [state.status] else None)
    return statuses


def test_starting_with_a_model_ends_ready(make_state: Callable[..., EngineState]) -> None:
    state = make_state()
    statuses = watch(state)
    progress = []
    state.changed.connect(lambda: progress.append(state.progress))
    state.start(MODEL)
    wait_until(lambda: state.is_ready)
    assert statuses == ["starting", "loading", "ready"]
    assert state.model is not None and state.model.name == "fake-135M"
    assert state.worker is not None and state.worker.kernels
    assert any(progress), "loading showed its progress"
    assert state.progress is None and state.failure == "" and state.unready_reason == ""


def test_starting_without_a_model_waits_for_one(make_state: Callable[..., EngineState]) -> None:
    state = make_state()
    state.start()
    wait_until(lambda: state.status == "no_model")
    assert "Choose one" in state.unready_reason
    state.load(MODEL)
    wait_until(lambda: state.is_ready)
    state.unload()
    wait_until(lambda: state.status == "no_model")
    assert state.model is None and state.failure == ""


def test_loading_can_be_asked_for_while_the_engine_starts(make_state: Callable[..., EngineState]) -> None:
    state = make_state(start_delay=0.2)
    state.start()
    state.load(MODEL)
    assert state.status == "starting"
    wait_until(lambda: state.is_ready)


def test_another_model_takes_the_place_of_the_present_one(make_state: Callable[..., EngineState]) -> None:
    state = make_state()
    state.start(MODEL)
    wait_until(lambda: state.is_ready)
    statuses = watch(state)
    state.load(EngineConfig(model="other", max_context=512))
    wait_until(lambda: state.is_ready)
    assert statuses == ["loading", "ready"]
    assert state.config is not None and state.config.max_context == 512


def test_a_model_that_cannot_be_loaded_says_why_and_is_not_tried_again(
    make_state: Callable[..., EngineState],
) -> None:
    state = make_state(load_error="The file is cut off after 12 bytes.")
    state.start(MODEL)
    wait_until(lambda: state.status == "no_model")
    assert state.failure == "The file is cut off after 12 bytes."
    state.restart()
    wait_until(lambda: state.status == "no_model")
    assert state.config is None


def test_loading_can_be_cancelled(make_state: Callable[..., EngineState]) -> None:
    state = make_state(load_seconds=5.0)
    state.start(MODEL)
    wait_until(lambda: state.status == "loading")
    state.unload()
    wait_until(lambda: state.status == "no_model", 3.0)
    assert state.failure == "", "a person who cancels need not be told"


def test_the_model_chosen_last_is_the_one_that_is_loaded(make_state: Callable[..., EngineState]) -> None:
    state = make_state(load_seconds=1.0)
    statuses = watch(state)
    state.start(MODEL)
    wait_until(lambda: state.status == "loading")
    state.load(EngineConfig(model="second"))
    state.load(EngineConfig(model="third"))
    wait_until(lambda: state.is_ready)
    assert statuses == ["starting", "loading", "ready"]
    assert state.model is not None and state.model.path == "third"


def test_a_dead_engine_says_why_and_a_restart_loads_the_model_again(make_state: Callable[..., EngineState]) -> None:
    state = make_state()
    state.start(MODEL)
    wait_until(lambda: state.is_ready)
    kill_worker(state)
    wait_until(lambda: state.status == "dead")
    assert state.death is not None and state.failure == state.death.reason
    assert state.model is None
    state.restart()
    wait_until(lambda: state.is_ready)
    assert state.death is None


def test_choosing_a_model_brings_a_dead_engine_back(make_state: Callable[..., EngineState]) -> None:
    state = make_state()
    state.start(MODEL)
    wait_until(lambda: state.is_ready)
    kill_worker(state)
    wait_until(lambda: state.status == "dead")
    state.load(EngineConfig(model="other"))
    wait_until(lambda: state.is_ready)
    assert state.config == EngineConfig(model="other")


def test_an_engine_that_dies_at_the_start_is_dead_with_a_reason(make_state: Callable[..., EngineState]) -> None:
    state = make_state(start_crash="exit")
    state.start(MODEL)
    wait_until(lambda: state.status == "dead")
    assert state.failure


def test_a_model_that_kills_the_engine_is_not_loaded_again_unasked(make_state: Callable[..., EngineState]) -> None:
    state = make_state(load_seconds=5.0)
    state.start(MODEL)
    wait_until(lambda: state.status == "loading")
    kill_worker(state)
    wait_until(lambda: state.status == "dead")
    state.restart()
    wait_until(lambda: state.status == "no_model")


def test_an_engine_of_another_release_is_refused(make_state: Callable[..., EngineState]) -> None:
    state = make_state(protocol_version=999)
    state.start(MODEL)
    wait_until(lambda: state.status == "dead")
    assert "999" in state.failure


def test_tokens_are_counted_by_the_engine(make_state: Callable[..., EngineState]) -> None:
    state = make_state()
    answers: list[tuple[int | None, str | None]] = []
    state.count_tokens(QUESTION, lambda count, error: answers.append((count, error)))
    assert answers == [(None, state.unready_reason)], "no engine, no count, but an answer"
    state.start(MODEL)
    wait_until(lambda: state.is_ready)
    state.count_tokens(QUESTION, lambda count, error: answers.append((count, error)))
    wait_until(lambda: len(answers) == 2)
    assert answers[1][1] is None and (answers[1][0] or 0) > 0


def test_what_cannot_be_sent_is_answered_with_the_reason(
    make_state: Callable[..., EngineState], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state()
    state.start(MODEL)
    wait_until(lambda: state.is_ready)

    def refuse(command: object) -> None:
        raise ValueError("no such letter")

    monkeypatch.setattr(state._bridge, "send", refuse)
    answers: list[tuple[int | None, str | None]] = []
    state.count_tokens(QUESTION, lambda count, error: answers.append((count, error)))
    assert answers == [(None, "no such letter")]
    state.load(EngineConfig(model="model\udcff"))
    assert state.status == "no_model"
    assert "no such letter" in state.failure
    monkeypatch.undo()
    state.load(MODEL)
    wait_until(lambda: state.is_ready)
