"""The sidebar on a real workspace."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt

from app.panels.sidebar import Sidebar
from app.panels.sidebar_list import ChatRow, HeaderRow, ResultRow
from app.theme import ThemeManager
from tests.app.app_parts import AppParts, wait_until


@pytest.fixture
def parts(make_parts):
    return make_parts(tokens_per_second=2000)


@pytest.fixture
def sidebar(qtbot, parts) -> Sidebar:
    sidebar = Sidebar(parts.workspace, ThemeManager("light"), lambda _: "#ff0000")
    qtbot.addWidget(sidebar)
    sidebar.resize(240, 600)
    sidebar.show()
    return sidebar


def chats(sidebar: Sidebar) -> list[ChatRow]:
    return [row for row in sidebar.list.rows if isinstance(row, ChatRow)]


def test_chats_appear_with_their_first_question_newest_on_top(sidebar: Sidebar, parts) -> None:
    assert sidebar.list.rows == []
    assert sidebar.empty.isVisible()
    parts.ask(parts.workspace.new_session(), "Where is Norway?")
    parts.ask(parts.workspace.new_session(), "Who was Kvasir?")
    assert isinstance(sidebar.list.rows[0], HeaderRow)
    assert [row.title for row in chats(sidebar)] == ["Who was Kvasir?", "Where is Norway?"]
    assert [row.is_current for row in chats(sidebar)] == [True, False]
    assert not sidebar.empty.isVisible()


def test_nothing_is_said_of_chats_before_the_database_has_answered(qtbot, tmp_path) -> None:
    parts = AppParts(tmp_path / "kvasir.db")
    sidebar = Sidebar(parts.workspace, ThemeManager("light"), lambda _: "#ff0000")
    qtbot.addWidget(sidebar)
    assert (sidebar.count.text(), sidebar.empty.text()) == ("", "")
    parts.start()
    assert (sidebar.count.text(), sidebar.empty.text()) == ("0 chats", "Your chats will be listed here.")
    parts.close()


def test_a_chat_is_opened_by_click_and_by_enter(qtbot, sidebar: Sidebar, parts) -> None:
    first = parts.workspace.new_session()
    parts.ask(first, "One")
    second = parts.workspace.new_session()
    parts.ask(second, "Two")
    model = sidebar.list.model()
    place = sidebar.list.visualRect(model.index(2, 0)).center()
    qtbot.mouseClick(sidebar.list.viewport(), Qt.MouseButton.LeftButton, pos=place)
    assert parts.workspace.current is first
    sidebar.list.setCurrentIndex(model.index(1, 0))
    qtbot.keyClick(sidebar.list, Qt.Key.Key_Return)
    assert parts.workspace.current.title == "Two"


def test_searching_shows_places_and_clearing_brings_the_chats_back(qtbot, sidebar: Sidebar, parts) -> None:
    session = parts.workspace.new_session()
    parts.ask(session, "Tell me of the mead of poetry")
    other = parts.workspace.new_session()
    parts.ask(other, "Something else")
    qtbot.keyClicks(sidebar.search, "poetry")
    wait_until(lambda: any(isinstance(row, ResultRow) for row in sidebar.list.rows))
    results = [row.result for row in sidebar.list.rows if isinstance(row, ResultRow)]
    assert {result.conversation_id for result in results} == {session.conversation_id}
    opened: list[tuple[str, int]] = []
    sidebar.result_opened.connect(lambda conversation, message: opened.append((conversation, message)))
    message = next(result for result in results if result.message_id is not None)
    sidebar.list.result_activated.emit(message)
    assert parts.workspace.current is session
    assert opened == [(session.conversation_id, message.message_id)]
    qtbot.keyClick(sidebar.search, Qt.Key.Key_Escape)
    assert len(chats(sidebar)) == 2


def test_a_search_without_a_hit_says_so(qtbot, sidebar: Sidebar, parts) -> None:
    parts.ask(parts.workspace.new_session(), "Hello")
    qtbot.keyClicks(sidebar.search, "zebra")
    wait_until(lambda: sidebar.empty.isVisible())
    assert "Nothing found" in sidebar.empty.text()


def test_delete_on_the_keyboard_deletes_and_can_be_undone(qtbot, sidebar: Sidebar, parts) -> None:
    parts.ask(parts.workspace.new_session(), "One")
    sidebar.list.setCurrentIndex(sidebar.list.model().index(1, 0))
    qtbot.keyClick(sidebar.list, Qt.Key.Key_Delete)
    assert chats(sidebar) == []
    parts.workspace.undo_delete()
    assert [row.title for row in chats(sidebar)] == ["One"]


def test_the_list_is_named_for_a_screen_reader(sidebar: Sidebar, parts) -> None:
    parts.ask(parts.workspace.new_session(), "One")
    assert sidebar.list.accessibleName() == "Chats"
    assert sidebar.list.model().index(1, 0).data() == "One"
    assert sidebar.search.accessibleName()


def test_painting_rows_of_every_kind_in_both_themes_works(qtbot, parts) -> None:
    themes = ThemeManager("light")
    sidebar = Sidebar(parts.workspace, themes, lambda _: "#ff0000")
    qtbot.addWidget(sidebar)
    sidebar.resize(240, 400)
    parts.ask(parts.workspace.new_session(), "A question of many words that cannot fit into the width of the sidebar")
    sidebar.show()
    light = sidebar.grab().toImage()
    themes.toggle()
    assert sidebar.grab().toImage() != light
    qtbot.keyClicks(sidebar.search, "words")
    wait_until(lambda: any(isinstance(row, ResultRow) for row in sidebar.list.rows))
    assert sidebar.grab().toImage() != light
