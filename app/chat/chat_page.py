"""A chat tab: messages or a welcome, and the composer under them."""

from __future__ import annotations

from PySide6.QtCore import QRect, Qt
from PySide6.QtGui import QKeyEvent, QKeySequence, QResizeEvent, QShortcut
from PySide6.QtWidgets import QHBoxLayout, QLabel, QSizePolicy, QVBoxLayout, QWidget

from app.chat.composer import Composer
from app.chat.find_bar import FindBar, find_messages
from app.chat.message_footer import ActionButton
from app.chat.message_view import MAX_COLUMN, MIN_SIDE, MessageListView
from app.chat.style import chat_style_sheet
from app.chat.welcome import Welcome
from app.state.context_usage import ContextUsage
from app.state.engine_state import EngineState
from app.state.session import ChatSession
from app.theme import Theme, ThemeManager

COMPOSER_OVERHANG = 8  # the composer is a little wider than the text column
_FIND_WIDTH = 340


class ChatPage(QWidget):
    """Shows one session and passes on what is done to it.

    With an `engine` it also says why nothing can be sent, with a `usage` how much of the context is taken.
    """

    def __init__(
        self,
        session: ChatSession,
        themes: ThemeManager,
        engine: EngineState | None = None,
        usage: ContextUsage | None = None,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self.session = session
        self._engine = engine
        self._usage = usage
        self._wanted_message: int | None = None
        self.setObjectName("chatPage")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setStyleSheet(chat_style_sheet(themes.theme))
        self.message_list = MessageListView(session, themes.theme, self)
        self.welcome = Welcome(themes.theme, self)
        self.notice = Notice(self)
        self.composer = Composer(themes.theme, self)
        self.find_bar = FindBar(self)
        self.find_bar.hide()
        self._found: list[int] = []
        self._found_index = 0
        self._bottom = QWidget(self)
        bottom = QVBoxLayout(self._bottom)
        bottom.setContentsMargins(0, 0, 0, 12)
        bottom.setSpacing(8)
        bottom.addWidget(self.notice)
        bottom.addWidget(self.composer)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(0)
        layout.addWidget(self.message_list, 1)
        layout.addWidget(self.welcome, 1)
        layout.addWidget(self._bottom)
        self._connect(themes)
        self.set_theme(themes.theme)
        self.composer.set_text(session.draft)
        self._on_generating_changed(session.is_generating)
        self._show_welcome_or_messages()
        self._on_engine_changed()
        self._show_usage()
        self.setFocusProxy(self.composer.text_edit)

    def _connect(self, themes: ThemeManager) -> None:
        session, composer = self.session, self.composer
        composer.submitted.connect(self._send)
        composer.stop_requested.connect(session.stop)
        composer.text_changed.connect(self._on_text_changed)
        composer.page_requested.connect(self.message_list.scroll_by_pages)
        self.message_list.set_tab_successor(composer.text_edit)
        self.welcome.prompt_chosen.connect(self._take_prompt)
        self.find_bar.text_changed.connect(self._find)
        self.find_bar.step_requested.connect(self._step_found)
        self.find_bar.closed.connect(self.close_find)
        session.path_changed.connect(self._on_path_changed)
        session.message_appended.connect(self._show_welcome_or_messages)
        session.generating_changed.connect(self._on_generating_changed)
        session.error_occurred.connect(self._on_error)
        themes.changed.connect(self.set_theme)
        if self._engine is not None:
            self._engine.changed.connect(self._on_engine_changed)
        if self._usage is not None:
            self._usage.changed.connect(self._show_usage)
        find = QShortcut(QKeySequence(QKeySequence.StandardKey.Find), self, self.open_find)
        find.setContext(Qt.ShortcutContext.WidgetWithChildrenShortcut)

    # ---------------------------------------------------------------- for the window

    def set_theme(self, theme: Theme) -> None:
        if (sheet := chat_style_sheet(theme)) != self.styleSheet():
            self.setStyleSheet(sheet)
        self.message_list.set_theme(theme)
        self.composer.set_theme(theme)
        self.notice.set_theme(theme)
        self.welcome.set_theme(theme)
        self.find_bar.set_theme(theme)

    def focus_composer(self) -> None:
        self.composer.text_edit.setFocus(Qt.FocusReason.OtherFocusReason)

    def show_message(self, message_id: int) -> bool:
        """Scrolls to a message, on another branch if need be; returns False if there is none.

        In a chat that is still being opened it does so as soon as the messages are there.
        """
        if not self.session.show_message(message_id):
            return False
        if not self.session.is_loaded:
            self._wanted_message = message_id
            return True
        return self.message_list.scroll_to_message(message_id)

    def open_find(self) -> None:
        """Opens the find bar, or goes back to its field."""
        self._place_find_bar()
        self.find_bar.show()
        self.find_bar.raise_()
        self.find_bar.field.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.find_bar.field.selectAll()
        self._find(self.find_bar.field.text())

    def close_find(self) -> None:
        self.find_bar.hide()
        self.message_list.set_find_text("")
        self.focus_composer()

    # ---------------------------------------------------------------- asking

    def _send(self, text: str) -> None:
        self.notice.hide()
        if self.session.send(text):
            self.composer.clear()

    def _take_prompt(self, prompt: str) -> None:
        self.composer.set_text(prompt)
        self.focus_composer()

    def _on_text_changed(self, text: str) -> None:
        self.session.set_draft(text)
        if self._usage is not None and self._usage.session is self.session:
            self._usage.schedule()

    def _on_error(self, message: str) -> None:
        # What ended an answer stands under that answer.
        last = self.session.messages[-1] if len(self.session.messages) else None
        if last is None or last.run is None or last.run.error != message:
            self.notice.show_text(message)

    def _on_generating_changed(self, generating: bool) -> None:
        self.composer.set_generating(generating)
        if generating:
            self.notice.hide()

    def _on_path_changed(self) -> None:
        self._show_welcome_or_messages()
        if self.session.draft != self.composer.text and not self.composer.text:
            self.composer.set_text(self.session.draft)
        # The branch of a wanted message may only come into view after the messages themselves.
        if self._wanted_message is not None and self.message_list.scroll_to_message(self._wanted_message):
            self._wanted_message = None
        if self.find_bar.isVisible():
            self._find(self.find_bar.field.text())

    def _show_welcome_or_messages(self, *_: object) -> None:
        is_empty = self.session.is_loaded and not len(self.session.messages)
        self.welcome.setVisible(is_empty)
        self.message_list.setVisible(not is_empty)

    # ---------------------------------------------------------------- the engine

    def _on_engine_changed(self) -> None:
        if self._engine is None:
            return
        self.composer.set_unready(self._engine.unready_reason)
        model = self._engine.model
        self.welcome.set_model_name(model.name if model is not None else "")

    def _show_usage(self) -> None:
        usage = self._usage
        if usage is None or usage.session is not self.session:
            return
        is_counting = usage.used is None and usage.limit is not None and not usage.error
        if not is_counting:  # until then the last figure stays
            self.composer.set_context_usage(usage.used, usage.limit)

    # ---------------------------------------------------------------- find

    def _find(self, text: str) -> None:
        self._found = find_messages(self.session.messages, text)
        self._found_index = len(self._found) - 1
        self.message_list.set_find_text(text)
        self._show_found()

    def _step_found(self, step: int) -> None:
        if self._found:
            self._found_index = (self._found_index + step) % len(self._found)
            self._show_found()

    def _show_found(self) -> None:
        self.find_bar.set_position(self._found_index, len(self._found))
        if self._found:
            self.message_list.scroll_to_message(self._found[self._found_index])

    # ---------------------------------------------------------------- layout

    def resizeEvent(self, event: QResizeEvent) -> None:
        side = max(MIN_SIDE, (self.width() - MAX_COLUMN) // 2) - COMPOSER_OVERHANG
        layout = self._bottom.layout()
        assert layout is not None
        layout.setContentsMargins(side, 0, side, 12)
        self._place_find_bar()

    def _place_find_bar(self) -> None:
        width = min(_FIND_WIDTH, self.width() - 32)
        self.find_bar.setGeometry(QRect(self.width() - width - 16, 8, width, 38))

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape and self.session.is_generating:
            self.session.stop()
        else:
            super().keyPressEvent(event)


class Notice(QWidget):
    """One sentence about what went wrong, until it is closed or something is sent."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setObjectName("notice")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.label = QLabel(self)
        self.label.setObjectName("noticeText")
        self.label.setTextFormat(Qt.TextFormat.PlainText)
        self.label.setWordWrap(True)
        self.label.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        self._close = ActionButton("close", "Close this message", self)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(14, 8, 8, 8)
        layout.addWidget(self.label, 1)
        layout.addWidget(self._close, 0, Qt.AlignmentFlag.AlignTop)
        self._close.clicked.connect(self.hide)
        self.hide()

    def show_text(self, text: str) -> None:
        self.label.setText(text)
        self.setAccessibleName(text)
        self.show()

    def set_theme(self, theme: Theme) -> None:
        self._close.set_theme(theme)
