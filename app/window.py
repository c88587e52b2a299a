"""The main window: puts the parts together and passes what one says on to the others."""

from __future__ import annotations

import dataclasses

from PySide6.QtCore import QEvent, QRect, Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QPaintEvent
from PySide6.QtWidgets import QMainWindow, QMenu, QSplitter, QVBoxLayout, QWidget

from app.benchmark.run import OWNER as BENCHMARK
from app.commands import MENUS, CommandSet
from app.panels.banner import EngineBanner
from app.panels.chat_files import ChatFiles
from app.panels.chat_pages import ChatPages
from app.panels.command_palette import CommandPalette
from app.panels.context_meter import ContextMeter
from app.panels.dashboard_host import DashboardHost
from app.panels.header import HeaderBar
from app.panels.inspector import Inspector
from app.panels.library import ModelLibrary
from app.panels.model import ModelPanel
from app.panels.model_actions import ModelActions
from app.panels.owner_colours import OwnerColours
from app.panels.sampling import SamplingPanel
from app.panels.sidebar import Sidebar
from app.panels.toast import Toast
from app.settings import SettingsFile
from app.state.benchmark import BenchmarkState
from app.state.context_usage import ContextUsage
from app.state.engine_state import EngineState
from app.state.session import ChatSession
from app.state.telemetry import TelemetryState
from app.state.workspace import Workspace
from app.theme import ThemeManager
from app.window_actions import WindowActions
from app.window_commands import window_commands
from app.window_geometry import MINIMUM_SIZE, start_rect
from engine.catalog import starter_model


@dataclasses.dataclass(frozen=True)
class WindowServices:
    """What the window shows and acts on; made by the application, outlives the window."""

    file: SettingsFile
    themes: ThemeManager
    engine: EngineState
    telemetry: TelemetryState
    workspace: Workspace
    library: ModelLibrary
    benchmark: BenchmarkState


class MainWindow(QMainWindow):
    """The window. `close_requested` asks the application to quit; it decides when the window really closes."""

    close_requested = Signal()
    first_painted = Signal()

    def __init__(self, services: WindowServices) -> None:
        super().__init__()
        self.setObjectName("window")
        self.setWindowTitle("Kvasir")
        self.setMinimumSize(MINIMUM_SIZE)
        self.services, self.file, self.themes = services, services.file, services.themes
        self.engine, self.workspace = services.engine, services.workspace
        self.may_close = False
        self._was_painted = False
        self.colours = OwnerColours(services.telemetry, self.themes, self)

        self.models = ModelActions(self.engine, services.library, self.file, self)
        self.menu = QMenu(self)
        self.header = HeaderBar(self.engine, self.themes, self.menu)
        self.sidebar = Sidebar(self.workspace, self.themes, self.colours.colour)
        banner = EngineBanner(self.engine, self.themes, has_starter=starter_model() is not None)
        self.usage = ContextUsage(self.engine, self)
        self.pages = ChatPages(self.workspace, self.engine, self.usage, self.themes, banner, self.colours.colour)
        self.inspector = Inspector(
            SamplingPanel(self.workspace, self.themes),
            ModelPanel(self.engine, services.library, services.telemetry, self.themes),
            ContextMeter(self.usage),
        )
        self.dashboard = DashboardHost(services.telemetry, self.themes, self._owner_title)
        self._lay_out()
        self.toast = Toast(self.pages, self.themes)
        self.files = ChatFiles(self.workspace, self.toast, self)
        self.command_palette = CommandPalette(self, self.themes)
        self.actions_ = WindowActions(self)
        self.commands = CommandSet(self, window_commands(self, self.actions_))
        self.command_palette.set_sources(self.actions_.command_entries, self.actions_.chat_entries)
        self._fill_menus()
        self._connect(banner)
        self._restore_state()
        self._session_changed(self.workspace.current)

    # ------------------------------------------------------------ putting together

    def _lay_out(self) -> None:
        self._columns = QSplitter(Qt.Orientation.Horizontal)
        self._rows = QSplitter(Qt.Orientation.Vertical)
        for part in (self.sidebar, self.pages, self.inspector):
            self._columns.addWidget(part)
        for part in (self._columns, self.dashboard):
            self._rows.addWidget(part)
        for splitter in (self._columns, self._rows):
            splitter.setHandleWidth(1)
            splitter.setChildrenCollapsible(False)
        self._columns.setStretchFactor(1, 1)
        self._rows.setStretchFactor(0, 1)
        central = QWidget()
        column = QVBoxLayout(central)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.header)
        column.addWidget(self._rows, 1)
        self.setCentralWidget(central)

    def _fill_menus(self) -> None:
        for name in MENUS:
            self.commands.fill_menu(self.menu.addMenu(name), name)
        self.header.set_palette_shortcut(self.commands.shortcut_text("view.palette"))

    def _connect(self, banner: EngineBanner) -> None:
        workspace, model_panel = self.workspace, self.inspector.model
        self.header.palette_requested.connect(self.command_palette.open)
        self.header.theme_toggled.connect(self.themes.toggle)
        self.header.model_menu.aboutToShow.connect(lambda: self.models.fill_menu(self.header.model_menu))
        self.sidebar.new_requested.connect(self.actions_.new_chat)
        self.sidebar.import_requested.connect(self.files.import_chats)
        self.sidebar.export_requested.connect(self.files.export)
        self.sidebar.settings_requested.connect(self.actions_.show_settings)
        self.sidebar.result_opened.connect(self._show_message)
        self.pages.rename_requested.connect(self.actions_.rename)
        banner.restart_requested.connect(self.engine.restart)
        banner.choose_model_requested.connect(self.actions_.choose_model)
        banner.load_starter_requested.connect(self.models.load_starter)
        model_panel.dialog_requested.connect(self.actions_.show_load_dialog)
        model_panel.open_file_requested.connect(self.models.open_file)
        model_panel.unload_requested.connect(self.models.unload)
        self.models.dialog_wanted.connect(self.actions_.show_load_dialog)
        self.models.problem.connect(self._say_problem)
        workspace.current_changed.connect(self._session_changed)
        workspace.conversations_changed.connect(self._show_title)
        workspace.session_closed.connect(self._session_closed)
        workspace.undo_available.connect(self._offer_undo)
        workspace.error_occurred.connect(self._say_problem)
        workspace.storage_trouble.connect(self._storage_trouble)
        self.colours.changed.connect(self._colours_changed)
        self.themes.changed.connect(self._theme_changed)

    # ------------------------------------------------------------ what is in front

    @property
    def session(self) -> ChatSession | None:
        return self.workspace.current

    def _session_changed(self, session: ChatSession | None) -> None:
        self.inspector.set_session(session)
        self.usage.set_session(session)
        self._show_title()

    def _owner_title(self, owner: str) -> str:
        return "Benchmark" if owner == BENCHMARK else self.workspace.title(owner)

    def _show_title(self) -> None:
        session = self.workspace.current
        self.setWindowTitle(f"{session.title} – Kvasir" if session is not None else "Kvasir")

    def _session_closed(self, _: str) -> None:
        if not self.workspace.sessions:
            self.workspace.new_session()

    def _show_message(self, conversation_id: str, message_id: int) -> None:
        page = self.pages.page(conversation_id)
        if page is not None:
            page.show_message(message_id)

    def _colours_changed(self) -> None:
        self.pages.refresh_dots()
        self.sidebar.refresh()

    def _theme_changed(self, *_: object) -> None:
        self.file.settings.theme = self.themes.mode
        self.file.settings.font_size = self.themes.theme.font_size
        self.sidebar.refresh()

    # ------------------------------------------------------------ what to tell

    def _offer_undo(self, description: str) -> None:
        if description:
            self.toast.say(description, "Undo", self.workspace.undo_delete)
        else:
            self.toast.withdraw(self.workspace.undo_delete)

    def _say_problem(self, message: str) -> None:
        self.toast.say(message, kind="danger", milliseconds=12_000)

    def _storage_trouble(self, message: str) -> None:
        if message:
            self.toast.say(message, kind="danger", milliseconds=0)
        else:
            self.toast.say("Everything is saved again.", kind="success")

    # ------------------------------------------------------------ coming and going

    def bring_to_front(self) -> None:
        if self.isMinimized():
            self.showNormal()
        self.show()
        self.raise_()
        self.activateWindow()

    def _restore_state(self) -> None:
        state = self.file.settings.window
        rect = start_rect(state.rect)
        self.setGeometry(rect)
        narrow = state.rect is None and rect.width() < 1280
        sidebar, inspector = (200, 280) if narrow else (state.sidebar_width, state.inspector_width)
        self._columns.setSizes([sidebar, max(360, rect.width() - sidebar - inspector), inspector])
        dashboard = state.dashboard_height
        self._rows.setSizes([max(300, rect.height() - self.header.height() - dashboard), dashboard])
        self.sidebar.setVisible(state.sidebar_visible)
        self.inspector.setVisible(state.inspector_visible)
        self.dashboard.setVisible(state.dashboard_visible)
        self.inspector.show_page(state.inspector_tab)
        if state.maximized:
            self.setWindowState(self.windowState() | Qt.WindowState.WindowMaximized)

    def save_state(self) -> None:
        """Puts the window's place and its parts' sizes into the settings; the caller saves the file."""
        state = self.file.settings.window
        normal: QRect = self.normalGeometry() if self.isMaximized() or self.isFullScreen() else self.geometry()
        if normal.isValid():
            state.rect = (normal.x(), normal.y(), normal.width(), normal.height())
        state.maximized = self.isMaximized()
        state.sidebar_visible = self.actions_.is_part_visible("sidebar")
        state.inspector_visible = self.actions_.is_part_visible("inspector")
        state.dashboard_visible = self.actions_.is_part_visible("dashboard")
        if state.sidebar_visible:
            state.sidebar_width = self.sidebar.width()
        if state.inspector_visible:
            state.inspector_width = self.inspector.width()
        if state.dashboard_visible:
            state.dashboard_height = self.dashboard.height()
        state.inspector_tab = "model" if self.inspector.page == "model" else "sampling"

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if not self._was_painted:
            self._was_painted = True
            QTimer.singleShot(0, self.first_painted.emit)  # once the children are painted too

    def closeEvent(self, event: QCloseEvent) -> None:
        if self.may_close:
            super().closeEvent(event)
            return
        event.ignore()
        self.close_requested.emit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.WindowStateChange:
            self.commands.refresh()
