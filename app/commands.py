"""What a person can tell the window to do: each command declared once, feeding menus, shortcuts and palette."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from PySide6.QtCore import QObject, Qt
from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import QMenu, QWidget

MENUS = ("Chat", "View", "Engine", "Help")


@dataclasses.dataclass(frozen=True)
class Command:
    """One thing to do. `shortcuts` are in Qt's portable form, the first is the one shown.

    `menu` is one of `MENUS`, or empty for a command reached by shortcut and palette alone;
    `group` separates neighbours in the menu. A command with `is_checked` is a switch.
    """

    id: str
    title: str
    callback: Callable[[], object]
    shortcuts: tuple[str, ...] = ()
    menu: str = ""
    group: int = 0
    icon: str = ""
    is_enabled: Callable[[], bool] | None = None
    is_checked: Callable[[], bool] | None = None
    in_palette: bool = True
    hint: str = ""
    """Shown like a shortcut, for keys that a part of the window handles itself."""


class CommandSet(QObject):
    """The commands of one window as Qt actions.

    Raises `ValueError` when two commands share an id or a shortcut, or a menu does not exist.
    """

    def __init__(self, window: QWidget, commands: Iterable[Command]) -> None:
        super().__init__(window)
        self.commands: dict[str, Command] = {}
        self.actions: dict[str, QAction] = {}
        taken: dict[str, str] = {}
        for command in commands:
            if command.id in self.commands:
                raise ValueError(f"two commands are called {command.id!r}")
            if command.menu and command.menu not in MENUS:
                raise ValueError(f"command {command.id!r} is in no known menu: {command.menu!r}")
            for shortcut in command.shortcuts:
                sequence = QKeySequence(shortcut).toString()
                if not sequence:
                    raise ValueError(f"command {command.id!r}: {shortcut!r} is no shortcut")
                if sequence in taken:
                    raise ValueError(f"{sequence} belongs to both {taken[sequence]!r} and {command.id!r}")
                taken[sequence] = command.id
            self.commands[command.id] = command
            self.actions[command.id] = self._make_action(window, command)

    def _make_action(self, window: QWidget, command: Command) -> QAction:
        # What stands behind a tab is shown where a shortcut would be.
        action = QAction(f"{command.title}\t{command.hint}" if command.hint else command.title, self)
        action.setShortcuts([QKeySequence(shortcut) for shortcut in command.shortcuts])
        action.setShortcutContext(Qt.ShortcutContext.WindowShortcut)
        action.setCheckable(command.is_checked is not None)
        action.triggered.connect(lambda _checked=False, id=command.id: self.run(id))
        window.addAction(action)
        return action

    def run(self, id: str) -> bool:
        """Runs a command unless it is disabled now; True if it ran. Raises `KeyError` for an unknown id."""
        command = self.commands[id]
        if not self.enabled(id):
            return False
        command.callback()
        self.refresh()
        return True

    def enabled(self, id: str) -> bool:
        is_enabled = self.commands[id].is_enabled
        return is_enabled is None or is_enabled()

    def refresh(self) -> None:
        """Brings the actions' ticks and menu greying up to date.

        Actions with a shortcut stay enabled: `run` decides at the moment the key is pressed.
        """
        for id, command in self.commands.items():
            if command.is_checked is not None:
                self.actions[id].setChecked(command.is_checked())

    def shortcut_text(self, id: str) -> str:
        """The command's first shortcut as the platform writes it, or nothing."""
        command = self.commands[id]
        keys = command.shortcuts[0] if command.shortcuts else command.hint
        return QKeySequence(keys).toString(QKeySequence.SequenceFormat.NativeText)

    def fill_menu(self, menu: QMenu, name: str) -> None:
        """Fills one of `MENUS`; its entries are greyed by what holds whenever it opens."""
        group: int | None = None
        mine = [command for command in self.commands.values() if command.menu == name]
        for command in mine:
            if group is not None and command.group != group:
                menu.addSeparator()
            group = command.group
            menu.addAction(self.actions[command.id])

        def before_show() -> None:
            self.refresh()
            for command in mine:
                self.actions[command.id].setEnabled(self.enabled(command.id))

        def after_hide() -> None:
            for command in mine:
                self.actions[command.id].setEnabled(True)

        menu.aboutToShow.connect(before_show)
        menu.aboutToHide.connect(after_hide)

    def palette_entries(self) -> list[Command]:
        """The commands the palette offers now, in declaration order."""
        return [command for command in self.commands.values() if command.in_palette and self.enabled(command.id)]


def match_score(query: str, title: str) -> int | None:
    """How well a title answers a typed query: None not at all, higher is better.

    Every word of the query must be found; starts of words count more than their middle,
    and letters in order (as "nct" in "New chat") count least.
    """
    title_lower, score = title.lower(), 0
    for word in query.lower().split():
        at = title_lower.find(word)
        if at == 0:
            score += 30
        elif at > 0 and not title_lower[at - 1].isalnum():
            score += 20
        elif at > 0:
            score += 10
        elif _is_subsequence(word, title_lower):
            score += 1
        else:
            return None
    return score


def _is_subsequence(letters: str, text: str) -> bool:
    rest = iter(text)
    return all(letter in rest for letter in letters)
