"""The message list: few widgets for many messages, and a content that stays where the reader looks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtWidgets import QApplication, QLineEdit, QWidget
from pytestqt.qtbot import QtBot

from app.chat.height_index import HeightIndex
from app.chat.message_view import MAX_COLUMN, MessageListView
from app.chat.message_widget import MessageWidget
from app.chat.prose_view import ProseView
from app.state.session import ChatSession
from app.theme import load_theme
from tests.app.chat_scene import ChatScene

LONG = "A paragraph that is long enough to need several lines in any column. " * 12


@pytest.fixture
def scene(qapp: object, tmp_path: Path) -> Iterator[ChatScene]:
    result = ChatScene(tmp_path)
    yield result
    result.close()


def chat(num_pairs: int) -> list[tuple[str, str]]:
    """Questions and answers whose heights are badly estimated."""
    pairs = []
    for number in range(num_pairs):
        body = "\n\n".join(["x"] * (number % 7)) + "\n\n```\n" + "c\n" * (number % 5) + "```\n\n" + LONG * (number % 3)
        pairs += [("user", f"Question {number}"), ("assistant", f"Answer {number}\n\n{body}")]
    return pairs


def open_view(qtbot: QtBot, session: ChatSession, width: int = 900, height: int = 600) -> MessageListView:
    view = MessageListView(session, load_theme("light"))
    qtbot.addWidget(view)
    view.resize(width, height)
    view.show()
    qtbot.waitExposed(view)
    return view


def bottom_gap(view: MessageListView) -> int:
    """Pixels between the last message's end and the lower edge of the view."""
    last = view.widgets[-1]
    return view.viewport().height() - last.geometry().bottom()


def text_of(widget: MessageWidget | None) -> str:
    views = widget.body.views if widget is not None else []
    return "\n".join(view.toPlainText() for view in views if isinstance(view, ProseView))


def top_of(view: MessageListView, message_id: int) -> int:
    widget = view.widget_of(message_id)
    assert widget is not None
    return widget.y()


def test_a_long_chat_opens_at_its_end_with_a_handful_of_widgets(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session(chat(500))
    view = open_view(qtbot, session)
    assert view.widget_of(session.messages[-1].id) is not None
    assert 0 <= bottom_gap(view) <= 40
    assert len(view.widgets) <= 12
    assert view.is_at_bottom


def test_messages_follow_each_other_without_gaps_or_overlaps(scene: ChatScene, qtbot: QtBot) -> None:
    view = open_view(qtbot, scene.session(chat(50)))
    for _ in range(300):
        if view.verticalScrollBar().value() == 0:
            break
        view.scroll_by_pages(-0.7)
        shown = view.widgets
        for above, below in itertools.pairwise(shown):
            assert above.geometry().bottom() + 1 == below.y()
        assert shown[0].y() <= 24
    assert view.verticalScrollBar().value() == 0
    assert view.widgets[0].y() == 24


def test_scrolling_over_unmeasured_messages_moves_the_text_by_just_that_much(scene: ChatScene, qtbot: QtBot) -> None:
    """Heights above the reader turn out wrong all the way up; what is in view must not jump."""
    view = open_view(qtbot, scene.session(chat(60)))
    bar = view.verticalScrollBar()
    for _ in range(80):
        before = {widget.message_id: widget.y() for widget in view.widgets if 0 <= widget.y() < 600}
        if bar.value() < 120:
            break
        bar.setValue(bar.value() - 100)
        moved = {
            view.widgets[i].y() - before[w.message_id] for i, w in enumerate(view.widgets) if w.message_id in before
        }
        assert moved <= {100}


def test_widgets_are_recycled_not_made_anew(scene: ChatScene, qtbot: QtBot) -> None:
    view = open_view(qtbot, scene.session(chat(300)))
    seen = {id(widget) for widget in view.widgets}
    for _ in range(40):
        view.scroll_by_pages(-1)
        seen |= {id(widget) for widget in view.widgets}
    assert len(seen) <= 24


def test_an_answer_grows_at_the_bottom_and_the_reader_follows(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session(chat(10))
    view = open_view(qtbot, session)
    session.send("More")
    request = scene.request_of(session)
    scene.accept(request)
    for number in range(30):
        scene.stream(request, f"Line {number} of an answer.\n\n")
    qtbot.waitUntil(lambda: "Line 29" in text_of(view.widgets[-1]))
    assert view.is_at_bottom
    assert 0 <= bottom_gap(view) <= 40
    scene.finish(request)
    qtbot.waitUntil(lambda: bool(view.widgets[-1].footer.figures_text))
    assert "12.4 tok/s" in view.widgets[-1].footer.figures_text
    assert 0 <= bottom_gap(view) <= 40


def test_a_reader_who_scrolled_up_is_left_in_peace(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session(chat(10))
    view = open_view(qtbot, session)
    session.send("More")
    request = scene.request_of(session)
    scene.accept(request)
    scene.stream(request, LONG)
    qtbot.wait(80)
    view.scroll_by_pages(-1.5)
    assert not view.is_at_bottom
    assert view.jump_button.isVisible()
    reading = next(widget for widget in view.widgets if widget.y() >= 0)
    message_id, top = reading.message_id, reading.y()
    for _ in range(10):
        scene.stream(request, LONG + "\n\n")
    qtbot.wait(120)
    assert top_of(view, message_id) == top
    view.jump_button.click()
    assert view.is_at_bottom
    assert not view.jump_button.isVisible()
    assert 0 <= bottom_gap(view) <= 40


def test_sending_brings_the_reader_to_the_end(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session(chat(20))
    view = open_view(qtbot, session)
    view.scroll_to_start()
    session.send("A new question")
    qtbot.waitUntil(lambda: view.is_at_bottom and view.widget_of(session.messages[-1].id) is not None)


def test_a_hidden_view_lays_out_nothing_and_catches_up_when_shown(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session(chat(3))
    view = open_view(qtbot, session)
    view.hide()
    renders = view.num_renders
    session.send("More")
    request = scene.request_of(session)
    scene.accept(request)
    for number in range(50):
        scene.stream(request, f"word{number} ")
    qtbot.wait(100)
    assert view.num_renders == renders
    assert view.widget_of(session.messages[-1].id) is None
    view.show()
    widget = view.widget_of(session.messages[-1].id)
    assert widget is not None
    assert "word49" in text_of(widget)


def test_many_deltas_make_few_layouts(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session(chat(3))
    view = open_view(qtbot, session)
    session.send("More")
    request = scene.request_of(session)
    scene.accept(request)
    qtbot.wait(80)
    renders = view.num_renders
    for number in range(300):
        scene.stream(request, f"word{number} ")
    qtbot.waitUntil(lambda: "word299" in text_of(view.widget_of(session.messages[-1].id)))
    assert view.num_renders - renders < 100


def test_the_column_is_centred_and_never_wider_than_comfortable(scene: ChatScene, qtbot: QtBot) -> None:
    view = open_view(qtbot, scene.session(chat(3)), width=1400)
    widget = view.widgets[0]
    assert widget.width() == MAX_COLUMN
    assert widget.x() == (1400 - MAX_COLUMN) // 2
    view.resize(420, 600)
    QApplication.processEvents()
    assert view.widgets[0].width() == 420 - 2 * 24
    for shown in view.widgets:
        assert all(part.geometry().right() <= shown.body.width() for part in shown.body.views)


def test_narrowing_the_window_keeps_the_message_at_the_top_edge(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session(chat(40))
    view = open_view(qtbot, session)
    view.scroll_to_message(session.messages[31].id)
    at_top = next(widget for widget in view.widgets if widget.geometry().bottom() > 24).message_id
    view.resize(500, 600)
    QApplication.processEvents()
    assert next(widget for widget in view.widgets if widget.geometry().bottom() > 24).message_id == at_top


def test_switching_to_a_sibling_and_back_shows_each_text(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session([("user", "q"), ("assistant", "first answer")])
    view = open_view(qtbot, session)
    view.widgets[1].footer.regenerate.click()
    request = scene.request_of(session)
    scene.accept(request)
    scene.stream(request, "second answer")
    scene.finish(request)
    qtbot.waitUntil(lambda: text_of(view.widgets[1]) == "second answer")
    assert view.widgets[1].footer.sibling_text == "2/2"
    view.widgets[1].footer.previous.click()
    assert view.widgets[1].footer.sibling_text == "1/2"
    assert text_of(view.widgets[1]) == "first answer"
    assert not view.widgets[1].footer.previous.isEnabled()


def test_editing_a_question_keeps_the_old_one_as_a_sibling(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session([("user", "old"), ("assistant", "a")])
    view = open_view(qtbot, session)
    question = view.widgets[0]
    question.begin_edit()
    assert question.editor is not None
    question.editor.text_edit.setPlainText("new")
    question.editor.send_button.click()
    assert [message.text for message in session.messages] == ["new", ""]
    qtbot.waitUntil(lambda: view.widgets[0].footer.sibling_text == "2/2")
    assert not view.widgets[0].is_editing
    session.switch_sibling(session.messages[0].id, -1)
    assert not view.widgets[0].is_editing, "the old question is no editor any more"


def test_the_focus_leaves_an_editor_whose_question_was_sent(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session([("user", "old"), ("assistant", "a"), ("user", "more"), ("assistant", "b")])
    page = QWidget()
    qtbot.addWidget(page)
    view, composer = MessageListView(session, load_theme("light"), page), QLineEdit(page)
    view.set_tab_successor(composer)
    view.resize(900, 600)
    page.resize(900, 700)
    page.show()
    page.activateWindow()
    qtbot.waitUntil(page.isActiveWindow)
    question = view.widgets[0]
    question.begin_edit()
    assert question.editor is not None
    qtbot.waitUntil(question.editor.text_edit.hasFocus)
    question.editor.text_edit.setPlainText("new")
    qtbot.keyClick(question.editor.text_edit, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: [widget.message_id for widget in view.widgets] == [m.id for m in session.messages])
    assert composer.hasFocus()


def test_the_focus_stays_on_the_sibling_switcher(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session([("user", "old"), ("assistant", "a")])
    for text in ("new", "newer"):
        assert session.edit_and_resend(session.messages[0].id, text)
        session.stop()
    view = open_view(qtbot, session)
    view.activateWindow()
    qtbot.waitUntil(view.isActiveWindow)
    previous = view.widgets[0].footer.previous
    previous.setFocus()
    qtbot.waitUntil(previous.hasFocus)
    qtbot.keyClick(previous, Qt.Key.Key_Space)
    assert session.messages[0].text == "new"
    assert view.widgets[0].footer.sibling_text == "2/3"
    assert view.widgets[0].footer.previous.hasFocus()


def test_an_edited_question_that_is_refused_stays_in_its_editor(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session([("user", "old"), ("assistant", "a")])
    view = open_view(qtbot, session)
    question = view.widgets[0]
    question.begin_edit()
    assert question.editor is not None
    question.editor.text_edit.setPlainText("written with care")
    reasons: list[str] = []
    session.error_occurred.connect(reasons.append)
    scene.engine.status = "dead"
    question.editor.send_button.click()
    assert reasons and [message.text for message in session.messages] == ["old", "a"]
    assert question.is_editing
    assert question.editor.text_edit.toPlainText() == "written with care"
    scene.engine.status = "ready"
    question.editor.send_button.click()
    assert [message.text for message in session.messages] == ["written with care", ""]
    assert not any(widget.is_editing for widget in view.widgets)


def test_an_edit_in_progress_survives_scrolling_away(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session(chat(40))
    view = open_view(qtbot, session)
    view.scroll_to_message(session.messages[40].id)
    widget = view.widget_of(session.messages[40].id)
    assert widget is not None
    widget.begin_edit()
    assert widget.editor is not None
    widget.editor.text_edit.setPlainText("half written")
    view.scroll_to_start()
    view.scroll_to_message(session.messages[40].id)
    assert view.widget_of(session.messages[40].id) is widget
    assert widget.editor.text_edit.toPlainText() == "half written"


def test_deleting_takes_the_messages_away(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session(chat(5))
    view = open_view(qtbot, session)
    last = view.widget_of(session.messages[-1].id)
    assert last is not None
    last.footer.delete.click()
    assert len(session.messages) == 9
    assert {widget.message_id for widget in view.widgets} <= {message.id for message in session.messages}


def test_tab_walks_messages_in_reading_order_and_ends_behind_them(scene: ChatScene, qtbot: QtBot) -> None:
    view = open_view(qtbot, scene.session([("user", "q"), ("assistant", "a\n\n```py\nx = 1\n```")]))
    behind = QLineEdit(view)
    behind.show()
    view.set_tab_successor(behind)
    view.activateWindow()
    view.setFocus()
    qtbot.waitUntil(view.hasFocus)
    places = []
    for _ in range(30):
        view.focusNextPrevChild(True)
        focus = QApplication.focusWidget()
        if focus is None or not view.viewport().isAncestorOf(focus):
            break
        places.append((focus.mapTo(view.viewport(), QPoint(0, 0)).y(), focus.accessibleName()))
    assert [y for y, _ in places] == sorted(y for y, _ in places)
    assert {"Python code", "Copy the Python code", "Answer again", "Edit and send again"} <= {
        name for _, name in places
    }


def test_home_end_and_page_keys_scroll(scene: ChatScene, qtbot: QtBot) -> None:
    view = open_view(qtbot, scene.session(chat(20)))
    qtbot.keyClick(view, Qt.Key.Key_Home)
    assert view.verticalScrollBar().value() == 0
    qtbot.keyClick(view, Qt.Key.Key_PageDown)
    assert view.verticalScrollBar().value() > 300
    qtbot.keyClick(view, Qt.Key.Key_End)
    assert view.is_at_bottom


def test_a_theme_change_redraws_what_is_shown_and_keeps_the_place(scene: ChatScene, qtbot: QtBot) -> None:
    session = scene.session(chat(20))
    view = open_view(qtbot, session)
    view.scroll_to_message(session.messages[20].id)
    before = view.grab().toImage()
    view.set_theme(load_theme("dark"))
    assert top_of(view, session.messages[20].id) == 24
    assert view.grab().toImage() != before


def test_heights_are_found_by_place() -> None:
    heights = HeightIndex()
    heights.reset(["a", "b" * 5000, "c\nc\nc"], 700)
    for index, height in enumerate((100, 300, 50)):
        heights.set(index, height)
    assert [heights.at(y) for y in (-5, 0, 99, 100, 399, 400, 9999)] == [0, 0, 0, 1, 1, 2, 2]
    assert (heights.start(2), heights.total) == (400, 450)
    heights.append("d")
    assert not heights.is_measured(3)
    assert heights.total > 450
    heights.set_width(500)
    assert not heights.is_measured(0)
