"""A chat tab as a person uses it, on a real session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.chat.chat_page import ChatPage
from app.chat.welcome import EXAMPLES
from app.state.context_usage import ContextUsage
from app.state.session import ChatSession
from app.theme import ThemeManager
from tests.app.chat_scene import ChatScene


@pytest.fixture
def scene(qapp: object, tmp_path: Path) -> Iterator[ChatScene]:
    result = ChatScene(tmp_path)
    yield result
    result.close()


def open_page(qtbot: QtBot, scene: ChatScene, session: ChatSession) -> ChatPage:
    usage = ContextUsage(scene.engine)
    page = ChatPage(session, ThemeManager("light"), scene.engine, usage)
    usage.setParent(page)
    usage.set_session(session)
    qtbot.addWidget(page)
    page.resize(900, 700)
    page.show()
    qtbot.waitExposed(page)
    return page


def ask(qtbot: QtBot, page: ChatPage, text: str) -> None:
    page.composer.set_text(text)
    qtbot.keyClick(page.composer.text_edit, Qt.Key.Key_Return)


def test_a_question_is_answered_and_figures_appear(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session()
    page = open_page(qtbot, scene, session)
    ask(qtbot, page, "What is **Kvasir**?")
    assert page.composer.text == ""
    request = scene.request_of(session)
    scene.accept(request)
    qtbot.waitUntil(lambda: len(page.message_list.widgets) == 2)
    answer = page.message_list.widgets[1]
    assert answer.note_text == "Waiting for the first token…"
    scene.stream(request, "A *workstation*.")
    qtbot.waitUntil(lambda: answer.note_text == "")
    assert answer.body.views[0].toPlainText() == "A workstation."  # type: ignore[union-attr]
    assert page.message_list.widgets[0].body.views[0].toPlainText() == "What is **Kvasir**?"  # type: ignore[union-attr]
    scene.finish(request)
    qtbot.waitUntil(lambda: "TTFT 84 ms" in answer.footer.figures_text)


def test_an_empty_chat_offers_examples_that_fill_the_composer(scene: ChatScene, qtbot: QtBot) -> None:
    page = open_page(qtbot, scene, scene.session())
    assert page.welcome.isVisible()
    assert not page.message_list.isVisible()
    qtbot.keyClick(page.welcome.buttons[1], Qt.Key.Key_Return)
    assert page.composer.text == EXAMPLES[1][1]
    assert not page.session.is_generating
    ask(qtbot, page, page.composer.text)
    assert not page.welcome.isVisible()
    assert page.message_list.isVisible()


def test_a_refused_question_stays_in_the_composer_and_the_reason_is_shown(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session([("user", "q"), ("assistant", "a")])
    page = open_page(qtbot, scene, session)
    scene.engine.unload()
    scene.settle()
    scene.engine._set("no_model")
    ask(qtbot, page, "Are you there?")
    assert page.composer.text == "Are you there?"
    assert page.notice.isVisible()
    assert "No model" in page.notice.label.text()
    assert not page.composer.send_button.isEnabled()


def test_escape_stops_and_the_partial_answer_stays(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session()
    page = open_page(qtbot, scene, session)
    ask(qtbot, page, "Count")
    request = scene.request_of(session)
    scene.accept(request)
    scene.stream(request, "one two")
    qtbot.keyClick(page.composer.text_edit, Qt.Key.Key_Escape)
    scene.finish(request, "cancelled")
    answer = page.message_list
    qtbot.waitUntil(lambda: "stopped by you" in answer.widgets[1].footer.figures_text)
    assert session.messages[1].text == "one two"
    assert page.composer.send_button.accessibleName() == "Send"


def test_a_failed_answer_says_why_under_itself_and_not_twice(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session()
    page = open_page(qtbot, scene, session)
    ask(qtbot, page, "Fail")
    request = scene.request_of(session)
    scene.accept(request)
    scene.finish(request, "error", "The KV cache is full.")
    qtbot.waitUntil(lambda: page.message_list.widgets[1].note_text == "The KV cache is full.")
    assert not page.notice.isVisible()


def test_the_draft_is_kept_by_the_session_and_comes_back(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session([("user", "q"), ("assistant", "a")])
    page = open_page(qtbot, scene, session)
    page.composer.set_text("half a thought")
    assert session.draft == "half a thought"
    again = open_page(qtbot, scene, session)
    assert again.composer.text == "half a thought"


def test_the_counter_shows_what_the_prompt_would_take(scene: ChatScene, qtbot: QtBot) -> None:
    page = open_page(qtbot, scene, scene.session([("user", "q" * 400), ("assistant", "a" * 4000)]))
    scene.bridge.start()
    qtbot.waitUntil(lambda: page.composer.counter.text() == "1.1k / 8.2k", timeout=3000)
    page.composer.set_text("x" * 4000)
    qtbot.waitUntil(lambda: page.composer.counter.text() == "2.1k / 8.2k", timeout=3000)


def test_find_goes_through_the_messages_and_marks_the_words(scene: ChatScene, qtbot: QtBot) -> None:
    messages = [("user", f"question {n}") if n % 2 == 0 else ("assistant", f"Answer {n} " * 20) for n in range(60)]
    messages[7] = ("assistant", "Here is a Needle and a needle.")
    page = open_page(qtbot, scene, scene.session(messages))
    page.open_find()
    qtbot.keyClicks(page.find_bar.field, "needle")
    assert page.find_bar.count.text() == "1 of 1"
    found = page.message_list.widget_of(page.session.messages[7].id)
    assert found is not None
    assert len(found.body.views[0].extraSelections()) == 2  # type: ignore[union-attr]
    assert 0 <= found.y() < 100
    page.find_bar.field.setText("question 1")
    first = page.find_bar.count.text()
    qtbot.keyClick(page.find_bar.field, Qt.Key.Key_Return)
    assert (first, page.find_bar.count.text()) == ("5 of 5", "1 of 5")
    page.find_bar.field.setText("no such words")
    assert page.find_bar.count.text() == "Not found"
    qtbot.keyClick(page.find_bar.field, Qt.Key.Key_Escape)
    assert not page.find_bar.isVisible()
    assert not any(view.extraSelections() for w in page.message_list.widgets for view in w.body.views)  # type: ignore[union-attr]


def test_a_message_on_another_branch_can_be_shown(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session([("user", "q"), ("assistant", "first")])
    page = open_page(qtbot, scene, session)
    first = session.messages[1].id
    session.regenerate(first)
    assert session.messages[1].id != first
    assert page.show_message(first)
    assert session.messages[1].id == first
    assert not page.show_message(999_999)


def test_the_theme_reaches_everything(scene: ChatScene, qtbot: QtBot) -> None:
    themes = ThemeManager("light")
    page = ChatPage(scene.session([("user", "q"), ("assistant", "a `b`\n\n```py\nx = 1\n```")]), themes, scene.engine)
    qtbot.addWidget(page)
    page.resize(700, 600)
    page.show()
    themes.set_mode("dark")
    image = page.grab().toImage()
    dark = [image.pixelColor(x, y).lightness() for x in range(4, 700, 23) for y in range(4, 600, 23)]
    assert sum(value < 90 for value in dark) > 0.9 * len(dark)


def test_every_control_of_the_page_has_a_name(scene: ChatScene, qtbot: QtBot) -> None:
    page = open_page(qtbot, scene, scene.session([("user", "q"), ("assistant", "a")]))
    page.open_find()
    page.notice.show_text("Something")
    unnamed = [
        widget
        for widget in page.findChildren(QWidget)
        if widget.isVisible() and widget.focusPolicy() & Qt.FocusPolicy.TabFocus and not widget.accessibleName()
    ]
    assert not unnamed
