from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QKeySequence
from PySide6.QtWidgets import QMenu, QWidget

from app.commands import Command, CommandSet, match_score


def nothing() -> None: ...


def test_a_command_runs_from_its_shortcut_and_its_menu(qtbot) -> None:
    ran: list[str] = []
    window = QWidget()
    qtbot.addWidget(window)
    commands = CommandSet(window, [Command("a", "Do it", lambda: ran.append("a"), ("Ctrl+D",), "Chat")])
    menu = QMenu(window)
    commands.fill_menu(menu, "Chat")
    window.show()
    window.activateWindow()
    qtbot.waitUntil(window.isActiveWindow)
    qtbot.keyClick(window, Qt.Key.Key_D, Qt.KeyboardModifier.ControlModifier)
    menu.actions()[0].trigger()
    assert ran == ["a", "a"]


def test_a_disabled_command_neither_runs_nor_shows_in_the_palette(qtbot) -> None:
    ran: list[str] = []
    on = [False]
    window = QWidget()
    qtbot.addWidget(window)
    commands = CommandSet(window, [Command("a", "Do it", lambda: ran.append("a"), is_enabled=lambda: on[0])])
    assert not commands.run("a")
    assert commands.palette_entries() == []
    on[0] = True
    assert commands.run("a")
    assert [command.id for command in commands.palette_entries()] == ["a"]
    assert ran == ["a"]


def test_a_menu_greys_what_cannot_be_done_while_it_is_open(qtbot) -> None:
    on = [False]
    window = QWidget()
    qtbot.addWidget(window)
    commands = CommandSet(window, [Command("a", "Do it", nothing, ("Ctrl+D",), "Chat", is_enabled=lambda: on[0])])
    menu = QMenu(window)
    commands.fill_menu(menu, "Chat")
    menu.aboutToShow.emit()
    assert not commands.actions["a"].isEnabled()
    menu.aboutToHide.emit()
    assert commands.actions["a"].isEnabled(), "or its shortcut would stay dead when it becomes possible"


def test_a_switch_shows_its_state(qtbot) -> None:
    on = [True]
    window = QWidget()
    qtbot.addWidget(window)
    commands = CommandSet(
        window, [Command("a", "Panel", lambda: on.__setitem__(0, not on[0]), is_checked=lambda: on[0])]
    )
    commands.refresh()
    assert commands.actions["a"].isChecked()
    commands.run("a")
    assert not commands.actions["a"].isChecked()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (Command("a", "Other", nothing), "two commands are called 'a'"),
        (Command("b", "Other", nothing, ("ctrl+d",)), "belongs to both 'a' and 'b'"),
        (Command("b", "Other", nothing, menu="Tools"), "no known menu: 'Tools'"),
        (Command("b", "Other", nothing, ("Ctrl+Nonsense+",)), "is no shortcut"),
    ],
)
def test_commands_that_contradict_each_other_are_refused(qtbot, second: Command, message: str) -> None:
    window = QWidget()
    qtbot.addWidget(window)
    with pytest.raises(ValueError, match=message):
        CommandSet(window, [Command("a", "Do it", nothing, ("Ctrl+D",), "Chat"), second])


def test_shortcuts_are_written_as_the_platform_writes_them(qtbot) -> None:
    window = QWidget()
    qtbot.addWidget(window)
    commands = CommandSet(window, [Command("a", "A", nothing, ("Ctrl+D", "F5")), Command("b", "B", nothing, hint="F3")])
    native = QKeySequence.SequenceFormat.NativeText
    assert commands.shortcut_text("a") == QKeySequence("Ctrl+D").toString(native)
    assert commands.shortcut_text("b") == "F3"


def test_typed_words_find_titles_and_better_ones_score_higher() -> None:
    assert match_score("new chat", "New chat") is not None
    assert match_score("chat new", "New chat") is not None
    assert match_score("nct", "New chat") is not None
    assert match_score("xyz", "New chat") is None
    assert match_score("new xyz", "New chat") is None
    assert match_score("", "New chat") == 0
    start, word, middle, letters = (match_score("set", t) for t in ("Settings", "Model settings", "Reset", "Select it"))
    assert start and word and middle and letters
    assert start > word > middle > letters
