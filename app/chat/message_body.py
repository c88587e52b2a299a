"""The blocks of one message as a column of text, code and table widgets."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtGui import QColor, QTextCursor
from PySide6.QtWidgets import QPlainTextEdit, QTextEdit, QWidget

from app.chat.code_block import CodeView
from app.chat.markdown import Block, CodeBlock, ProseBlock, TableBlock
from app.chat.prose_view import ProseView
from app.chat.table_view import TableView
from app.chat.text_style import INDENT, TextStyle
from app.theme import mix

BLOCK_GAP = 12
MAX_MARKS = 1000
MAX_RUN = 8000  # characters
BlockView = ProseView | CodeView | TableView
Segment = list[ProseBlock] | CodeBlock | TableBlock


def segments(blocks: Sequence[Block]) -> list[Segment]:
    """Joins neighbouring prose blocks, which share one text widget.

    A very long run is split between two plain paragraphs, because Qt's layout of a
    growing document gets slower with its length.
    """
    result: list[Segment] = []
    size = 0
    for block in blocks:
        if not isinstance(block, ProseBlock):
            result.append(block)
            continue
        last = result[-1] if result else None
        if isinstance(last, list) and not (size > MAX_RUN and _is_plain(last[-1]) and _is_plain(block)):
            last.append(block)
        else:
            result.append([block])
            size = 0
        size += sum(len(span.text) for span in block.spans)
    return result


def _is_plain(block: ProseBlock) -> bool:
    return not (block.heading or block.indent or block.quote or block.rule)


def _occurrences(edit: QTextEdit | QPlainTextEdit, text: str, colour: QColor) -> list[QTextEdit.ExtraSelection]:
    result: list[QTextEdit.ExtraSelection] = []
    cursor = edit.document().find(text, QTextCursor(edit.document()))
    while not cursor.isNull() and len(result) < MAX_MARKS:
        mark = QTextEdit.ExtraSelection()
        mark.cursor = cursor  # pyright: ignore[reportAttributeAccessIssue]
        mark.format.setBackground(colour)  # pyright: ignore[reportAttributeAccessIssue]
        result.append(mark)
        cursor = edit.document().find(text, cursor)
    return result


class MessageBody(QWidget):
    """Shows blocks with as few changes as possible; widgets that are not needed are kept for later."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._views: list[BlockView] = []
        self._indents: list[int] = []
        self._spare: dict[type, list[BlockView]] = {ProseView: [], CodeView: [], TableView: []}

    @property
    def views(self) -> Sequence[BlockView]:
        return self._views

    def set_blocks(self, blocks: Sequence[Block], style: TextStyle, width: int, shows_caret: bool) -> None:
        parts = segments(blocks)
        for index, part in enumerate(parts):
            view = self._view_at(index, part, width)
            if isinstance(part, list):
                assert isinstance(view, ProseView)
                view.set_blocks(part, style)
                view.set_caret(shows_caret and index == len(parts) - 1)
            elif isinstance(part, CodeBlock):
                assert isinstance(view, CodeView)
                view.set_block(part, style)
            else:
                assert isinstance(view, TableView)
                view.set_block(part, style)
        for view in self._views[len(parts) :]:
            self._put_away(view)
        del self._views[len(parts) :]
        self._indents = [0 if isinstance(part, list) else part.indent * INDENT for part in parts]

    def _view_at(self, index: int, part: Segment, width: int) -> BlockView:
        kind = ProseView if isinstance(part, list) else CodeView if isinstance(part, CodeBlock) else TableView
        if index < len(self._views):
            if type(self._views[index]) is kind:
                return self._views[index]
            self._put_away(self._views[index])
        spare = self._spare[kind]
        view = spare.pop() if spare else kind(self)
        if view.width() != width and kind is ProseView:
            view.resize(width, view.height())  # before it gets a text, so that this is laid out once
        view.show()
        self._views[index : index + 1] = [view]
        return view

    def _put_away(self, view: BlockView) -> None:
        view.hide()
        self._spare[type(view)].append(view)

    def ideal_width(self, limit: int) -> int:
        return max((view.ideal_width(limit) for view in self._views), default=0)

    def layout_for(self, width: int) -> int:
        """Places the blocks in a column of `width` pixels and returns its height."""
        y = 0
        for view, indent in zip(self._views, self._indents):
            room = max(160, width - indent)
            if y:
                y += BLOCK_GAP
            height = view.height_for(room)
            shown = view.width() if isinstance(view, TableView) else room
            view.setGeometry(indent, y, shown, height)
            y += height
        return y

    def highlight(self, text: str, style: TextStyle) -> None:
        """Marks every occurrence of `text`, whatever its case."""
        colour = QColor(mix(style.theme.surface, style.theme.warning, 0.4))
        for view in self._views:
            edit = view.text_edit if isinstance(view, CodeView) else view
            if text or edit.extraSelections():
                edit.setExtraSelections(_occurrences(edit, text, colour) if text else [])

    def selected_text(self) -> str:
        for view in self._views:
            cursor = (view.text_edit if isinstance(view, CodeView) else view).textCursor()
            if cursor.hasSelection():
                return cursor.selectedText().replace("\u2029", "\n").replace("\u2028", "\n")
        return ""
