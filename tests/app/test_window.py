"""The whole window on the fake engine: what a person does with it, from start to quit."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest
from PySide6.QtCore import QCoreApplication, QEvent, QSize, Qt
from PySide6.QtWidgets import QAbstractButton, QDialog, QLineEdit, QPlainTextEdit, QSlider

from app.application import Application
from app.panels.sidebar_list import ChatRow
from app.settings import SettingsFile
from app.state.records import ConversationSummary, RunRecord, SearchResult
from app.state.session import ChatSession
from app.state.workspace import Workspace
from app.window_geometry import available_screens
from engine.protocol import CountTokens
from tests.app.app_parts import wait_until
from tests.app.store_samples import add_chat
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


def test_the_load_dialog_opens_from_palette_menu_and_page_and_loads(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path) as application:
        window, engine = application.window, application.engine
        wait_until(lambda: application.library.entries)
        entry = application.library.entries[0]
        assert window.commands.run("engine.load")
        dialog = window.actions_._load_dialog
        assert dialog is not None and dialog.isVisible()
        window.models.dialog_wanted.emit(entry)
        window.inspector.model.rows[0].click()
        assert window.actions_._load_dialog is dialog, "one dialog, whoever asks"
        dialog.form.speculation.chosen.emit("ngram")
        dialog.load_button.click()
        wait_until(lambda: engine.is_ready and engine.model is not None and engine.model.speculation == "ngram")
        assert window.actions_._load_dialog is None
        remembered = application.file.settings.load_options[str(entry.path)]
        assert remembered.speculation == "ngram" and application.file.settings.last_model == remembered


def test_dialogs_stay_within_a_small_window(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path) as application:
        window = application.window
        window.resize(900, 600)
        for command in ("app.settings", "engine.load", "engine.benchmark"):
            assert window.commands.run(command)
            (dialog,) = (child for child in window.findChildren(QDialog) if child.isVisible())
            assert dialog.width() < window.width() and dialog.height() < window.height() - 40, command
            for button in dialog.findChildren(QAbstractButton):
                if button.text() in ("Close", "Load", "Start"):
                    corner = button.mapTo(dialog, button.rect().bottomRight())
                    assert dialog.rect().contains(corner), button.text()
            dialog.close()


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
        assert window.windowTitle() == "Keep me – Kvasir"
        wait_until(lambda: not session.is_generating)
        window.actions_.delete_chat()
        assert session.conversation_id not in [chat.id for chat in workspace.conversations]
        assert window.toast.isVisible()
        window.toast.action_button.click()
        assert [chat.title for chat in workspace.conversations] == ["Keep me"]
        assert "Keep me" in [open_session.title for open_session in workspace.sessions]
        window.actions_.delete_chat()
        workspace.undo_delete()
        assert not window.toast.isVisible(), "there is nothing left to undo"


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


def test_an_exception_in_another_thread_is_told_on_the_windows_own(qtbot, tmp_path: Path, monkeypatch) -> None:
    with open_application(tmp_path, ready=False) as application:
        toast = application.window.toast
        threads: list[threading.Thread] = []
        say = toast.say
        monkeypatch.setattr(toast, "say", lambda *a, **k: (threads.append(threading.current_thread()), say(*a, **k)))
        worker = threading.Thread(target=application.say_internal_error, args=("OSError: odd",))
        worker.start()
        worker.join()
        assert threads == []
        wait_until(lambda: threads)
        assert threads == [threading.main_thread()]
        assert "OSError: odd" in toast.text.text()


def add_long_chat(application: Application, title: str) -> tuple[str, list[int]]:
    """A stored chat that is not open, far longer than the view; returns its id and those of its messages."""
    first_id = application.store.new_id()
    for _ in range(99):
        application.store.new_id()
    texts = [f"message {number} " * 30 for number in range(100)]
    id_ = application.store.write(add_chat(title, texts, first_id)).result(10)
    application.workspace._summaries[id_] = ConversationSummary(id_, title, 1.0, 100)
    return id_, list(range(first_id, first_id + 100))


def is_in_view(application: Application, message_id: int) -> bool:
    page = application.window.pages.current_page
    assert page is not None
    widget = page.message_list.widget_of(message_id)
    return widget is not None and 0 <= widget.y() < page.message_list.viewport().height()


def test_a_search_result_in_a_chat_that_is_not_open_is_scrolled_to(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path, ready=False) as application:
        id_, message_ids = add_long_chat(application, "Long")
        sidebar = application.window.sidebar
        for wanted in (message_ids[10], message_ids[50]):  # not open, then open
            sidebar._open_result(SearchResult(id_, wanted, "Long", "", (), 1.0))
            wait_until(lambda: current(application).is_loaded)
            wait_until(lambda wanted=wanted: is_in_view(application, wanted), 3)
            qtbot.wait(50)
            assert is_in_view(application, wanted), "and it stays there"


def test_a_search_result_on_a_hidden_branch_of_a_closed_chat_is_scrolled_to(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path, tokens_per_second=2000) as application:
        id_, message_ids = add_long_chat(application, "Long")
        workspace = application.workspace
        session = workspace.open(id_)
        wait_until(lambda: session.is_loaded)
        assert session.edit_and_resend(message_ids[2], "Another way")
        wait_until(lambda: not session.is_generating)
        workspace.close(id_)
        wait_until(lambda: not workspace._parked)
        application.window.sidebar._open_result(SearchResult(id_, message_ids[40], "Long", "", (), 1.0))
        wait_until(lambda: current(application).is_loaded)
        wait_until(lambda: is_in_view(application, message_ids[40]), 3)


def test_a_closed_chat_is_not_kept_in_memory_by_the_window(qtbot, tmp_path: Path) -> None:
    def use_a_chat(workspace: Workspace) -> weakref.ref[ChatSession]:
        session = workspace.new_session()
        session.send("Question")
        wait_until(lambda: not session.is_generating)
        workspace.close(session.conversation_id)
        workspace.open(session.conversation_id)
        qtbot.wait(400)  # the context's tokens are counted for it
        workspace.close(session.conversation_id)
        return weakref.ref(session)

    with open_application(tmp_path, tokens_per_second=2000) as application:
        workspace = application.workspace
        gone = use_a_chat(workspace)
        wait_until(lambda: not workspace._parked)
        QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)  # its page
        gc.collect()
        assert gone() is None


def test_tabs_and_list_follow_a_chats_title_after_it_was_closed_and_opened(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path, tokens_per_second=50, repeat=3) as application:
        workspace, window = application.workspace, application.window
        session = workspace.new_session()
        session.send("Question")
        id_ = session.conversation_id
        for _ in range(3):  # its answer is still being written: the same session comes back
            workspace.close(id_)
            assert workspace.open(id_) is session
        session.rename("Better")
        strip = window.pages.strip
        assert strip.bar.tabText(strip.index_of(id_)) == "Better"
        rows = [row for row in window.sidebar.list.rows if isinstance(row, ChatRow)]
        assert "Better" in [row.title for row in rows]


def test_composer_and_meter_show_the_same_count_of_the_context(qtbot, tmp_path: Path) -> None:
    with open_application(tmp_path, tokens_per_second=200) as application:
        window, session = application.window, current(application)
        page = window.pages.current_page
        assert page is not None
        commands: list[object] = []
        send = application.client.send
        application.client.send = lambda command: (commands.append(command), send(command))[1]  # type: ignore[method-assign]

        def shown() -> tuple[str, str]:
            return page.composer.counter.toolTip().split(" of ")[0], window.inspector.meter.figure.text().split(" /")[0]

        page.composer.set_text("some words that are typed")
        wait_until(lambda: shown()[0] == shown()[1] != "")
        typed = int(shown()[0])
        assert sum(isinstance(command, CountTokens) for command in commands) == 1, "one count for both"
        assert session.send("some words that are typed and sent")
        page.composer.clear()
        wait_until(lambda: session.messages[-1].text)
        counts = sum(isinstance(command, CountTokens) for command in commands)
        wait_until(lambda: not session.is_generating)
        assert sum(isinstance(command, CountTokens) for command in commands) == counts, "none while it is written"
        wait_until(lambda: shown()[0] == shown()[1] and int(shown()[0]) > typed)
        wait_until(lambda: sum(isinstance(command, CountTokens) for command in commands) == counts + 1)
