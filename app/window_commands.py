"""Every command of the window, declared once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.commands import Command

if TYPE_CHECKING:
    from app.window import MainWindow
    from app.window_actions import WindowActions


def window_commands(w: MainWindow, do: WindowActions) -> list[Command]:
    """The commands of a window; menus show them in this order."""
    return [
        *_chat_commands(w, do),
        *_tab_commands(w),
        *_view_commands(w, do),
        *_engine_commands(w, do),
        *_help_commands(do),
    ]


def _chat_commands(w: MainWindow, do: WindowActions) -> list[Command]:
    def has_chat() -> bool:
        return w.workspace.current is not None

    def has_messages() -> bool:
        return w.workspace.current is not None and len(w.workspace.current.messages) > 0

    def is_generating() -> bool:
        return w.workspace.current is not None and w.workspace.current.is_generating

    def any_generating() -> bool:
        return any(session.is_generating for session in w.workspace.sessions)

    return [
        Command("chat.new", "New chat", do.new_chat, ("Ctrl+T", "Ctrl+N"), "Chat", 0),
        Command("chat.close", "Close chat", do.close_chat, ("Ctrl+W",), "Chat", 0, is_enabled=has_chat),
        Command("chat.search", "Search all chats", do.search_chats, ("Ctrl+Shift+F",), "Chat", 1),
        Command("chat.find", "Find in this chat", do.find_in_chat, menu="Chat", group=1, hint="Ctrl+F"),
        Command("chat.rename", "Rename chat…", do.rename_chat, ("F2",), "Chat", 2, is_enabled=has_chat),
        Command(
            "chat.delete", "Delete chat", do.delete_chat, ("Ctrl+Shift+Backspace",), "Chat", 2, is_enabled=has_chat
        ),
        Command("chat.undo_delete", "Undo the last delete", w.workspace.undo_delete, ("Ctrl+Shift+Z",), "Chat", 2),
        Command("chat.stop", "Stop this answer", do.stop, ("Ctrl+.",), "Chat", 3, is_enabled=is_generating),
        Command(
            "chat.stop_all", "Stop all answers", do.stop_all, ("Ctrl+Shift+.",), "Chat", 3, is_enabled=any_generating
        ),
        Command(
            "chat.regenerate", "Regenerate the answer", do.regenerate, ("Ctrl+R",), "Chat", 3, is_enabled=has_messages
        ),
        Command(
            "chat.export_markdown",
            "Export as Markdown…",
            lambda: do.export("markdown"),
            ("Ctrl+E",),
            "Chat",
            4,
            is_enabled=has_messages,
        ),
        Command(
            "chat.export_json", "Export as JSON…", lambda: do.export("json"), (), "Chat", 4, is_enabled=has_messages
        ),
        Command("chat.export_all", "Export all chats…", w.files.export_all, (), "Chat", 4),
        Command("chat.import", "Import chats…", w.files.import_chats, ("Ctrl+I",), "Chat", 4),
        Command("app.quit", "Quit", w.close, ("Ctrl+Q",), "Chat", 5),
    ]


def _tab_commands(w: MainWindow) -> list[Command]:
    step, go_to = w.pages.step, w.pages.go_to
    places = [
        Command(f"tab.go_{n}", f"Go to chat {n}", lambda n=n: go_to(n - 1), (f"Alt+{n}",), in_palette=False)
        for n in range(1, 9)
    ]
    return [
        Command("tab.next", "Next chat", lambda: step(1), ("Ctrl+Tab", "Ctrl+PgDown"), "View", 0),
        Command("tab.previous", "Previous chat", lambda: step(-1), ("Ctrl+Shift+Tab", "Ctrl+PgUp"), "View", 0),
        *places,
        Command("tab.last", "Go to the last chat", lambda: go_to(-1), ("Alt+9",), in_palette=False),
    ]


def _view_commands(w: MainWindow, do: WindowActions) -> list[Command]:
    def visible(part: str) -> bool:
        return do.is_part_visible(part)

    return [
        Command(
            "view.palette",
            "Command palette",
            w.command_palette.open,
            ("Ctrl+K", "Ctrl+Shift+P"),
            "View",
            1,
            in_palette=False,
        ),
        Command("view.composer", "Write a message", do.focus_composer, ("Ctrl+L",), "View", 1),
        Command(
            "view.sidebar",
            "List of chats",
            lambda: do.toggle_part("sidebar"),
            ("Ctrl+B",),
            "View",
            2,
            is_checked=lambda: visible("sidebar"),
        ),
        Command(
            "view.inspector",
            "Sampling and model",
            lambda: do.toggle_part("inspector"),
            ("Ctrl+Shift+B",),
            "View",
            2,
            is_checked=lambda: visible("inspector"),
        ),
        Command(
            "view.dashboard",
            "Engine dashboard",
            lambda: do.toggle_part("dashboard"),
            ("Ctrl+J",),
            "View",
            2,
            is_checked=lambda: visible("dashboard"),
        ),
        Command("view.theme", "Switch between light and dark", w.themes.toggle, ("Ctrl+Shift+L",), "View", 3),
        Command("view.theme_system", "Follow the system's theme", lambda: w.themes.set_mode("system"), (), "View", 3),
        Command("view.larger", "Larger text", lambda: do.scale_text(1), ("Ctrl+=", "Ctrl++"), "View", 4),
        Command("view.smaller", "Smaller text", lambda: do.scale_text(-1), ("Ctrl+-",), "View", 4),
        Command("view.normal", "Normal text size", lambda: do.scale_text(0), ("Ctrl+0",), "View", 4),
        Command(
            "view.full_screen", "Full screen", do.toggle_full_screen, ("F11",), "View", 5, is_checked=w.isFullScreen
        ),
    ]


def _engine_commands(w: MainWindow, do: WindowActions) -> list[Command]:
    def has_model() -> bool:
        return w.engine.status in ("ready", "loading")

    return [
        Command(
            "engine.sampling", "Sampling settings", lambda: do.show_page("sampling"), ("Ctrl+Shift+S",), "Engine", 0
        ),
        Command("engine.model", "Model settings", lambda: do.show_page("model"), ("Ctrl+Shift+M",), "Engine", 0),
        Command("engine.choose", "Choose a model", do.choose_model, ("Ctrl+M",), "Engine", 1),
        Command("engine.load", "Load model…", do.show_load_dialog, ("Ctrl+Shift+O",), "Engine", 1),
        Command("engine.open", "Open a model file…", w.models.open_file, ("Ctrl+O",), "Engine", 1),
        Command("engine.unload", "Unload the model", w.models.unload, (), "Engine", 1, is_enabled=has_model),
        Command("engine.benchmark", "Benchmark…", do.show_benchmark, ("Ctrl+Shift+K",), "Engine", 2),
        Command("engine.defaults", "Use this chat's sampling for new chats", do.keep_defaults, (), "Engine", 3),
        Command("engine.restart", "Restart the engine", w.engine.restart, ("Ctrl+Shift+R",), "Engine", 4),
    ]


def _help_commands(do: WindowActions) -> list[Command]:
    return [
        Command("app.settings", "Settings", do.show_settings, ("Ctrl+,",), "Help", 0),
        Command("app.logs", "Open the log folder", do.open_logs, (), "Help", 1),
        Command("app.about", "About Kvasir", do.show_about, (), "Help", 1),
    ]
