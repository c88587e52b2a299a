"""The whole window on the fake engine: what a person does with it, from start to quit."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QSize, Qt
from PySide6.QtWidgets import QAbstractButton, QLineEdit, QPlainTextEdit, QSlider

from app.application import Application
from app.settings import SettingsFile
from app.state.records import RunRecord
from app.state.session import ChatSession
from app.window_geometry import available_screens
from tests.app.app_parts import wait_until
from tests.app.window_parts import open_application

SMALL_SCREEN = QSize(860, 720)  # fits the offscreen platform's screen as far as the smallest window can
CTRL, SHIFT, ALT = (
    Qt.KeyboardModifier.ControlModifier,
    Qt.KeyboardModifier.ShiftModifier,
    Qt.KeyboardModifier.AltModifier,
)


def current(application: Application) -> ChatSession:
    session = application.workspace.current
    assert session is not None
    return session


def press(qtbot, application, key: Qt.Key, modifiers: Qt.KeyboardModifier = Qt.KeyboardModifier.NoModifier) -> None:
    window = application.window
    window.activateWindow()
    qtbot.waitUntil(window.isActiveWindow)
    qtbot.keyClick(window.focusWidget() or window, key, modifiers)


def test_the_first_start_shows_an_empty_chat_and_a_loaded_model(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path) as application:
        window = application.window
        assert window.isVisible()
        assert len(application.workspace.sessions) == 1
        assert "fake-135M" in window.header.model_button.accessibleName()
        assert "ready" in window.header.model_button.accessibleName()
        assert "cpu" in window.header.kernels.text()
        assert window.pages.banner.isHidden()


def test_tabs_are_opened_walked_and_closed_from_the_keyboard(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path) as application:
        workspace, strip = application.workspace, application.window.pages.strip
        first = current(application)
        press(qtbot, application, Qt.Key.Key_T, CTRL)
        press(qtbot, application, Qt.Key.Key_T, CTRL)
        assert len(workspace.sessions) == len(strip.ids) == 3
        press(qtbot, application, Qt.Key.Key_1, ALT)
        assert current(application) is first
        press(qtbot, application, Qt.Key.Key_Tab, CTRL | SHIFT)
        assert current(application) is workspace.sessions[2]
        press(qtbot, application, Qt.Key.Key_W, CTRL)
        press(qtbot, application, Qt.Key.Key_W, CTRL)
        assert strip.ids == [first.conversation_id]
        press(qtbot, application, Qt.Key.Key_W, CTRL)
        assert len(workspace.sessions) == 1, "there is always a chat to type into"
        assert current(application) is not first


def test_several_chats_answer_at_once_and_show_the_colour_of_their_blocks(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path, tokens_per_second=30, repeat=3) as application:
        window, workspace = application.window, application.workspace
        sessions = [current(application), workspace.new_session(), workspace.new_session()]
        for session in sessions:
            assert session.send("Tell me something")
        wait_until(lambda: all(len(session.messages[-1].text) > 20 for session in sessions))
        colours = {window.colours.colour(session.conversation_id) for session in sessions}
        wait_until(lambda: len({window.colours.colour(s.conversation_id) for s in sessions}) == 3)
        assert window.themes.theme.text_faint not in {window.colours.colour(s.conversation_id) for s in sessions}, (
            colours
        )
        window.actions_.stop_all()
        wait_until(lambda: not any(session.is_generating for session in sessions))
        assert all(session.messages[-1].text for session in sessions), "what was there stays"


def test_a_dead_worker_is_explained_and_restarted_and_chatting_goes_on(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path, crash_on={"die": "segfault"}, tokens_per_second=2000) as application:
        window, session = application.window, current(application)
        session.send("please die")
        wait_until(lambda: application.engine.status == "dead")
        banner = window.pages.banner
        assert banner.isVisible()
        assert banner.title.text() == "The engine stopped"
        assert application.engine.death is not None
        assert banner.text.text() == application.engine.death.reason
        assert banner.details_button.isVisibleTo(banner) == bool(application.engine.death.detail.strip())
        banner.details_button.click()
        assert banner.details.toPlainText() == application.engine.death.detail.strip()
        banner.restart_button.click()
        wait_until(lambda: application.engine.status == "ready", 20)
        assert banner.isHidden()
        other = application.workspace.new_session()
        assert other.send("and now?")
        wait_until(lambda: not other.is_generating)
        assert other.messages[-1].text
        assert session.messages[-1].run is not None
        assert session.messages[-1].run.status == "failed", "what killed the worker is not sent again"


def test_a_model_that_cannot_be_loaded_is_explained_where_one_looks(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path, ready=False, load_error="The file is truncated.") as application:
        wait_until(lambda: application.engine.status == "no_model")
        window = application.window
        assert window.pages.banner.isVisible()
        assert window.pages.banner.text.text() == "The file is truncated."
        assert not window.pages.banner.starter_button.isVisibleTo(window)
        window.actions_.show_page("model")
        assert "truncated" in window.inspector.model._error.text
        assert application.file.settings.last_model is not None


def test_quitting_in_mid_answer_loses_nothing_and_everything_is_back(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path, tokens_per_second=40, repeat=5) as application:
        window, workspace = application.window, application.workspace
        current(application).send("First question")
        second = workspace.new_session()
        second.send("Second question")
        second.set_draft("half a tho")
        wait_until(lambda: all(len(session.messages[-1].text) > 10 for session in workspace.sessions))
        texts = [session.messages[-1].text for session in workspace.sessions]
        window.resize(SMALL_SCREEN)
        window.actions_.toggle_part("dashboard")
        window.inspector.show_page("model")
        window.themes.set_mode("dark")
        press(qtbot, application, Qt.Key.Key_Q, CTRL)
        assert not window.isVisible()
        assert not application.client.is_alive
    with open_application(tmp_path) as application:
        window, workspace = application.window, application.workspace
        assert [session.title for session in workspace.sessions] == ["First question", "Second question"]
        assert current(application).title == "Second question"
        assert current(application).draft == "half a tho"
        page = window.pages.current_page
        assert page is not None
        assert page.composer.text == "half a tho"
        for session, text in zip(workspace.sessions, texts, strict=True):
            assert session.messages[-1].text.startswith(text)
            run = session.messages[-1].run
            assert isinstance(run, RunRecord)
            assert run.status == "interrupted"
        assert window.size() == SMALL_SCREEN
        assert window.dashboard.isHidden()
        assert window.inspector.page == "model"
        assert window.themes.theme.is_dark
        assert window.windowTitle().startswith("Second question")


def test_a_place_off_the_screen_is_not_where_the_window_opens(qtbot, tmp_path: Path) -> None:
    file = SettingsFile(tmp_path / "settings.json")
    file.settings.window.rect = (-4000, 9000, 1000, 700)
    file.save()
    with open_application(tmp_path, ready=False) as application:
        assert available_screens()[0].intersects(application.window.geometry())


def test_the_palette_reaches_commands_and_chats(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path, tokens_per_second=2000) as application:
        window, workspace = application.window, application.workspace
        first = current(application)
        first.send("Where do the ravens fly?")
        wait_until(lambda: not first.is_generating)
        workspace.new_session()
        press(qtbot, application, Qt.Key.Key_K, CTRL)
        palette = window.command_palette
        assert palette.isVisible()
        qtbot.keyClicks(palette.field, "ravens")
        qtbot.keyClick(palette.field, Qt.Key.Key_Return)
        assert current(application) is first
        dark = window.themes.theme.is_dark
        window.command_palette.open()
        qtbot.keyClicks(palette.field, "light and dark")
        qtbot.keyClick(palette.field, Qt.Key.Key_Return)
        assert window.themes.theme.is_dark is not dark


def test_a_deleted_chat_comes_back_from_the_toast(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path, tokens_per_second=2000) as application:
        window, workspace = application.window, application.workspace
        session = current(application)
        session.send("Keep me")
        wait_until(lambda: not session.is_generating)
        window.actions_.delete_chat()
        assert session.conversation_id not in [chat.id for chat in workspace.conversations]
        assert window.toast.isVisible()
        window.toast.action_button.click()
        assert [chat.title for chat in workspace.conversations] == ["Keep me"]
        assert "Keep me" in [open_session.title for open_session in workspace.sessions]


def test_a_damaged_settings_file_is_told_and_the_window_opens(qtbot, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("not json")
    with open_application(tmp_path, ready=False) as application:
        wait_until(lambda: application.window.toast.isVisible())
        assert "damaged" in application.window.toast.text.text()


def test_every_command_has_a_title_of_its_own_and_the_documented_keys(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path, ready=False) as application:
        commands = application.window.commands.commands
        titles = [command.title for command in commands.values()]
        assert len(titles) == len(set(titles))
        keys = {shortcut for command in commands.values() for shortcut in command.shortcuts}
        assert {"Ctrl+T", "Ctrl+W", "Ctrl+Tab", "Ctrl+K", "Ctrl+Q"} <= keys


def test_every_control_has_a_name_for_a_screen_reader(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path) as application:
        application.window.dashboard.build()
        kinds = (QAbstractButton, QLineEdit, QPlainTextEdit, QSlider)
        nameless = [
            f"{type(widget).__name__} {widget.objectName()} in {type(widget.parentWidget()).__name__}"
            for kind in kinds
            for widget in application.window.findChildren(kind)
            if not widget.accessibleName() and not (isinstance(widget, QAbstractButton) and widget.text())
        ]
        inner = [name for name in nameless if "qt_spinbox" not in name and "qt_toolbar" not in name]
        assert [name for name in inner if not name.endswith("in ChatTabBar")] == []


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("size", [(1440, 900), (1024, 640), (860, 560)])
def test_nothing_is_clipped_or_pushed_out_at_any_size(qtbot, tmp_path: Path, mode, size: tuple[int, int]) -> None:
    with open_application(tmp_path, tokens_per_second=2000) as application:
        window = application.window
        window.themes.set_mode(mode)
        window.resize(*size)
        qtbot.wait(50)
        assert window.size().toTuple() == size
        whole = window.centralWidget()
        assert whole is not None
        for part in (window.header, window.sidebar, window.pages, window.inspector, window.dashboard):
            top_left = part.mapTo(whole, part.rect().topLeft())
            assert whole.rect().contains(part.rect().translated(top_left)), type(part).__name__
        assert window.pages.width() >= 360
