"""One message: its author, its blocks, what has to be said about it and what can be done with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PySide6.QtCore import QPoint, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QGuiApplication, QPainter, QPaintEvent
from PySide6.QtWidgets import QLabel, QScrollBar, QWidget

from app.chat.figures import status_note
from app.chat.markdown import Block, IncrementalMarkdown, parse_plain
from app.chat.message_body import MessageBody
from app.chat.message_editor import MessageEditor
from app.chat.message_footer import FOOTER_HEIGHT, MessageFooter
from app.chat.text_style import TextStyle
from app.state.records import MessageView

BUBBLE_PADDING_X = 16
BUBBLE_PADDING_Y = 10
BUBBLE_RADIUS = 16
BUBBLE_SHARE = 0.85
GAP_AFTER_QUESTION = 8
GAP_AFTER_ANSWER = 24
_AUTHOR_HEIGHT = 26


class MessageWidget(QWidget):
    """Shows one message and is reused for others. `layout_for` gives its height at a width."""

    edit_submitted = Signal(int, str)
    """An edited question was sent. The editor stays until `end_edit`, so that one that is refused is not lost."""
    regenerate_requested = Signal(int)
    delete_requested = Signal(int)
    sibling_requested = Signal(int, int)
    height_changed = Signal(int)
    """The message with this id has another height than it was last laid out with."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._message: MessageView | None = None
        self._style: TextStyle | None = None
        self._parser = IncrementalMarkdown()
        self._can_generate = True
        self._width = 0
        self._bubble = QRectF()
        self._author = QLabel(self)
        self._author.setObjectName("authorLabel")
        self._author.setTextFormat(Qt.TextFormat.PlainText)
        self.body = MessageBody(self)
        self._note = QLabel(self)
        self._note.setObjectName("statusNote")
        self._note.setTextFormat(Qt.TextFormat.PlainText)
        self._note.setWordWrap(True)
        self._note.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._note.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.footer = MessageFooter(self)
        self.editor: MessageEditor | None = None
        self._is_editing = False
        self.footer.copy_requested.connect(self.copy)
        self.footer.edit_requested.connect(self.begin_edit)
        self.footer.regenerate_requested.connect(lambda: self.regenerate_requested.emit(self.message_id))
        self.footer.delete_requested.connect(lambda: self.delete_requested.emit(self.message_id))
        self.footer.sibling_requested.connect(lambda delta: self.sibling_requested.emit(self.message_id, delta))

    @property
    def message_id(self) -> int:
        return self._message.id if self._message is not None else 0

    @property
    def message(self) -> MessageView | None:
        return self._message

    @property
    def note_text(self) -> str:
        return self._note.text() if not self._note.isHidden() else ""

    @property
    def is_editing(self) -> bool:
        return self._is_editing

    def set_message(
        self,
        message: MessageView,
        style: TextStyle,
        width: int,
        can_generate: bool,
        blocks: Sequence[Block] | None = None,
    ) -> Sequence[Block]:
        """Shows `message`; returns its blocks, which may be given back later to save parsing."""
        if self._message is None or message.id != self._message.id:
            self.end_edit()
            self._parser = IncrementalMarkdown()
            self.setAccessibleName("Your message" if message.role == "user" else "Answer")
        self._message, self._style, self._can_generate = message, style, can_generate
        is_answer = message.role == "assistant"
        if blocks is None:
            complete = not message.is_streaming
            blocks = self._parser.update(message.text, complete) if is_answer else parse_plain(message.text)
        self.body.set_blocks(blocks, style, self._body_width(width), message.is_streaming)
        self._author.setVisible(is_answer)
        if is_answer:
            self._author.setText(message.run.model if message.run is not None and message.run.model else "Answer")
        self._set_note(*status_note(message))
        self.footer.set_theme(style.theme)
        self.footer.set_message(message, can_generate)
        return blocks

    def set_can_generate(self, can_generate: bool) -> None:
        if can_generate != self._can_generate and self._message is not None:
            self._can_generate = can_generate
            self.footer.set_message(self._message, can_generate)

    def _set_note(self, text: str, tone: str) -> None:
        self._note.setVisible(bool(text))
        if self._note.property("tone") != tone:
            self._note.setProperty("tone", tone)
            self._note.style().unpolish(self._note)
            self._note.style().polish(self._note)
        self._note.setText(text)

    # ---------------------------------------------------------------- layout

    def _body_width(self, width: int) -> int:
        if self._message is not None and self._message.role == "user":
            return math.floor(width * BUBBLE_SHARE) - 2 * BUBBLE_PADDING_X
        return width

    def layout_for(self, width: int) -> int:
        """Places everything in a column of `width` pixels; returns the height, the gap below included."""
        self._width = width
        if self._is_editing and self.editor is not None:
            height = self.editor.layout_for(width)
            self.editor.setGeometry(0, 0, width, height)
            return height + GAP_AFTER_ANSWER
        is_question = self._message is not None and self._message.role == "user"
        if is_question:
            y = self._place_bubble(width)
        else:
            self._author.setGeometry(0, 0, width, _AUTHOR_HEIGHT - 6)
            y = _AUTHOR_HEIGHT
            body_height = self.body.layout_for(width)
            self.body.setGeometry(0, y, width, body_height)
            y += body_height
        if not self._note.isHidden():
            y += 8 if y > _AUTHOR_HEIGHT else 0
            note_height = self._note.heightForWidth(width)
            self._note.setGeometry(0, y, width, note_height)
            y += note_height
        y += 4
        self.footer.setGeometry(0, y, width, FOOTER_HEIGHT)
        return y + FOOTER_HEIGHT + (GAP_AFTER_QUESTION if is_question else GAP_AFTER_ANSWER)

    def _place_bubble(self, width: int) -> int:
        limit = self._body_width(width)
        text_width = min(limit, max(8, self.body.ideal_width(limit)))
        height = self.body.layout_for(text_width)
        left = width - text_width - BUBBLE_PADDING_X
        self.body.setGeometry(left, BUBBLE_PADDING_Y, text_width, height)
        bubble = QRectF(left - BUBBLE_PADDING_X, 0, text_width + 2 * BUBBLE_PADDING_X, height + 2 * BUBBLE_PADDING_Y)
        if bubble != self._bubble:
            self._bubble = bubble
            self.update()
        return math.ceil(bubble.height())

    def paintEvent(self, event: QPaintEvent) -> None:
        is_question = self._message is not None and self._message.role == "user"
        if not is_question or self._is_editing or self._style is None:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(self._style.theme.user_bubble))
        painter.drawRoundedRect(self._bubble, BUBBLE_RADIUS, BUBBLE_RADIUS)

    # ---------------------------------------------------------------- actions

    def focus_stops(self) -> list[QWidget]:
        """Everything in it that takes the keyboard, in reading order."""
        stops = [
            child
            for child in self.findChildren(QWidget)
            if child.focusPolicy() & Qt.FocusPolicy.TabFocus and child.isVisible() and child.isEnabled()
        ]
        stops = [stop for stop in stops if not (stop.focusProxy() or isinstance(stop, QScrollBar))]

        def place(stop: QWidget) -> tuple[int, int]:
            position = stop.mapTo(self, QPoint(0, 0))
            return position.y(), position.x()

        return sorted(stops, key=place)

    def copy(self) -> None:
        """Puts the message as it was written, Markdown included, on the clipboard."""
        if self._message is not None:
            QGuiApplication.clipboard().setText(self._message.text)
            self.footer.show_copied()

    def begin_edit(self) -> None:
        if self._message is None or self._style is None or self._message.role != "user":
            return
        if self.editor is None:
            self.editor = MessageEditor(self)
            self.editor.submitted.connect(self._submit_edit)
            self.editor.cancelled.connect(self._cancel_edit)
            self.editor.height_changed.connect(lambda: self.height_changed.emit(self.message_id))
        self._is_editing = True
        self.editor.begin(self._message.text, self._style.theme)
        self._show_parts()
        self.editor.text_edit.setFocus(Qt.FocusReason.OtherFocusReason)
        self.height_changed.emit(self.message_id)

    def end_edit(self) -> None:
        if self._is_editing:
            self._is_editing = False
            self._show_parts()

    def _show_parts(self) -> None:
        assert self.editor is not None
        self.editor.setVisible(self._is_editing)
        self.body.setVisible(not self._is_editing)
        self.footer.setVisible(not self._is_editing)
        self.update()

    def _cancel_edit(self) -> None:
        self.end_edit()
        self.footer.edit.setFocus(Qt.FocusReason.OtherFocusReason)
        self.height_changed.emit(self.message_id)

    def _submit_edit(self, text: str) -> None:
        self.edit_submitted.emit(self.message_id, text)
