"""What the window does when told to: one short method for each command that is not another part's own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QWidget

from app.panels.command_palette import PaletteEntry
from app.paths import log_folder
from app.state.session import ChatSession
from app.theme import DEFAULT_FONT_SIZE
from app.version import version
from engine.catalog import CatalogEntry

if TYPE_CHECKING:
    from app.panels.benchmark import BenchmarkDialog
    from app.panels.load_dialog import LoadDialog
    from app.window import MainWindow


class WindowActions:
    """Acts on the parts of one window. Dialogs are imported when one is asked for, not before the window shows."""

    def __init__(self, window: MainWindow) -> None:
        self._window = window
        self._load_dialog: LoadDialog | None = None
        self._benchmark: BenchmarkDialog | None = None

    @property
    def _session(self) -> ChatSession | None:
        return self._window.workspace.current

    def new_chat(self) -> None:
        self._window.workspace.new_session()

    def close_chat(self) -> None:
        if self._session is not None:
            self._window.workspace.close(self._session.conversation_id)

    def search_chats(self) -> None:
        self._window.sidebar.setVisible(True)
        self._window.sidebar.focus_search()

    def find_in_chat(self) -> None:
        if self._window.pages.current_page is not None:
            self._window.pages.current_page.open_find()

    def focus_composer(self) -> None:
        if self._window.pages.current_page is not None:
            self._window.pages.current_page.focus_composer()

    def rename_chat(self) -> None:
        if self._session is not None:
            self.rename(self._session.conversation_id)

    def rename(self, conversation_id: str) -> None:
        """Asks for another title of a chat."""
        from app.panels.dialogs import ask_text

        title = ask_text(self._window, "Rename chat", "Title", self._window.workspace.title(conversation_id))
        if title:
            self._window.workspace.rename(conversation_id, title)

    def delete_chat(self) -> None:
        if self._session is not None:
            self._window.workspace.delete(self._session.conversation_id)

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()

    def stop_all(self) -> None:
        for session in self._window.workspace.sessions:
            session.stop()

    def regenerate(self) -> None:
        if self._session is not None and len(self._session.messages):
            self._session.regenerate(self._session.messages[-1].id)

    def export(self, kind: str) -> None:
        if self._session is not None:
            self._window.files.export(self._session.conversation_id, kind)

    def keep_defaults(self) -> None:
        if self._session is not None:
            self._window.workspace.set_default_params(self._session.params)
            self._window.toast.say("New chats will start with this chat's sampling settings.", kind="success")

    def choose_model(self) -> None:
        self._window.services.library.refresh()
        self._window.header.model_button.showMenu()

    def show_load_dialog(self, entry: CatalogEntry | None = None) -> None:
        """Shows the load dialog, or gives the one that is open another model to show."""
        dialog = self._load_dialog
        if dialog is None:
            from app.panels.load_dialog import LoadDialog

            services = self._window.services
            dialog = LoadDialog(
                services.engine, services.library, services.themes, services.file.settings.load_options, self._window
            )
            dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
            dialog.load_requested.connect(self._window.models.load)
            dialog.cancel_requested.connect(self._window.models.unload)
            dialog.open_file_requested.connect(self._window.models.open_file)
            dialog.finished.connect(self._load_dialog_closed)
            self._load_dialog = dialog
            services.library.refresh()
            dialog.open()
        if entry is not None:
            dialog.choose(entry)

    def _load_dialog_closed(self) -> None:
        self._load_dialog = None

    def show_benchmark(self) -> None:
        """Shows the benchmark's page, or brings it to the front; its last figures are still there."""
        if self._benchmark is None:
            from app.panels.benchmark import BenchmarkDialog

            services = self._window.services
            self._benchmark = BenchmarkDialog(services.benchmark, services.themes, self._window)
        self._benchmark.show()
        self._benchmark.raise_()
        self._benchmark.activateWindow()

    def show_page(self, name: str) -> None:
        """Shows "sampling" or "model" in the right panel."""
        self._window.inspector.setVisible(True)
        self._window.inspector.show_page(name)

    def scale_text(self, step: int) -> None:
        self._window.themes.set_font_size(self._window.themes.theme.font_size + step if step else DEFAULT_FONT_SIZE)

    def is_part_visible(self, part: str) -> bool:
        return not getattr(self._window, part).isHidden()

    def toggle_part(self, part: str) -> None:
        """Shows or hides "sidebar", "inspector" or "dashboard"."""
        widget: QWidget = getattr(self._window, part)
        widget.setVisible(widget.isHidden())

    def toggle_full_screen(self) -> None:
        self._window.setWindowState(self._window.windowState() ^ Qt.WindowState.WindowFullScreen)

    def show_settings(self) -> None:
        from app.panels.settings import SettingsDialog

        dialog = SettingsDialog(self._window.file, self._window.workspace, self._window.themes, self._window)
        dialog.folders_changed.connect(self._window.services.library.refresh)
        dialog.engine_changed.connect(
            lambda: self._window.toast.say("The engine's Python is used from the next start of Kvasir.")
        )
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.open()

    def show_about(self) -> None:
        from app.panels.dialogs import AboutDialog

        worker = self._window.engine.worker
        facts = [("Version", version())]
        if worker is not None:
            facts += [("Kernels", f"{worker.kernels} on {worker.device_name}")]
            facts += [(name, number) for name, number in worker.versions.items() if name in ("torch", "python")]
        dialog = AboutDialog(self._window, facts)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.open()

    def open_logs(self) -> None:
        QDesktopServices.openUrl(QUrl.fromLocalFile(str(log_folder())))

    def command_entries(self) -> list[PaletteEntry]:
        commands = self._window.commands
        return [
            PaletteEntry(command.title, commands.shortcut_text(command.id), functools.partial(commands.run, command.id))
            for command in commands.palette_entries()
        ]

    def chat_entries(self) -> list[PaletteEntry]:
        return [
            PaletteEntry(chat.title, "chat", lambda id=chat.id: self._window.workspace.open(id))
            for chat in self._window.workspace.conversations[:200]
        ]
