"""One count of the context for everything that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.state.context_usage import ContextUsage
from engine.protocol import CountTokens
from tests.app.chat_scene import ChatScene


@pytest.fixture
def scene(qapp: object, tmp_path: Path) -> Iterator[ChatScene]:
    result = ChatScene(tmp_path)
    yield result
    result.close()


def counts(scene: ChatScene) -> int:
    return sum(isinstance(command, CountTokens) for command in scene.client.sent)


def test_many_changes_in_a_row_are_counted_once_with_the_draft(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session([("user", "q" * 40), ("assistant", "a" * 40)])
    usage = ContextUsage(scene.engine)
    usage.set_session(session)
    for length in range(1, 21):
        session.set_draft("d" * length)
        usage.schedule()
    qtbot.waitUntil(lambda: usage.used is not None)
    assert (usage.used, usage.limit, counts(scene)) == (25, 8192, 1)


def test_a_second_count_waits_for_the_first(scene: ChatScene, qtbot: QtBot) -> None:
    scene.bridge.stop()
    session = scene.session([("user", "q" * 40), ("assistant", "a" * 40)])
    usage = ContextUsage(scene.engine)
    usage.set_session(session)
    qtbot.waitUntil(lambda: counts(scene) == 1)
    session.set_draft("d" * 80)
    usage.schedule()
    qtbot.wait(450)
    assert counts(scene) == 1, "the answer to the first has not been taken yet"
    scene.bridge.start()
    qtbot.waitUntil(lambda: usage.used == 40)
    assert counts(scene) == 2


def test_while_an_answer_is_written_its_own_figures_are_shown_and_nothing_is_counted(
    scene: ChatScene, qtbot: QtBot
) -> None:
    session = scene.session()
    usage = ContextUsage(scene.engine)
    usage.set_session(session)
    assert session.send("Tell me")
    request = scene.request_of(session)
    scene.accept(request)
    before = counts(scene)
    scene.stream(request, "one two", num_tokens=2)
    qtbot.waitUntil(lambda: usage.used == 122)
    scene.stream(request, " three", num_tokens=1)
    qtbot.waitUntil(lambda: usage.used == 123)
    assert counts(scene) == before
    scene.finish(request)
    qtbot.waitUntil(lambda: counts(scene) == before + 1)


def test_the_count_of_a_chat_that_is_not_in_front_any_more_is_not_shown(scene: ChatScene, qtbot: QtBot) -> None:
    first = scene.session([("user", "q" * 400), ("assistant", "a" * 400)])
    second = scene.session([("user", "q" * 40), ("assistant", "a" * 40)])
    scene.bridge.stop()
    usage = ContextUsage(scene.engine)
    usage.set_session(first)
    qtbot.waitUntil(lambda: counts(scene) == 1)
    usage.set_session(second)
    seen: list[int | None] = []
    usage.changed.connect(lambda: seen.append(usage.used))
    scene.bridge.start()
    qtbot.waitUntil(lambda: usage.used == 20)
    assert set(seen) <= {None, 20}


def test_without_a_model_there_is_neither_count_nor_limit(qapp: object, tmp_path: Path) -> None:
    scene = ChatScene(tmp_path, with_model=False)
    usage = ContextUsage(scene.engine)
    usage.set_session(scene.session([("user", "q"), ("assistant", "a")]))
    assert (usage.used, usage.limit, counts(scene)) == (None, None, 0)
    scene.close()
