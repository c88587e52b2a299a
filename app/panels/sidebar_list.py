"""The sidebar's list: conversations under their day, or places found by a search, painted by hand."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence

from PySide6.QtCore import QEvent, QModelIndex, QObject, QPersistentModelIndex, QPoint, QRectF, QSize, Qt, Signal
from PySide6.QtGui import (
    QBrush,
    QColor,
    QContextMenuEvent,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QStandardItem,
    QStandardItemModel,
)
from PySide6.QtWidgets import QListView, QStyle, QStyledItemDelegate, QStyleOptionViewItem

from app.state.records import ConversationSummary, SearchResult
from app.theme import SPACE_M, SPACE_S, ThemeManager, mix, ui_font

_ROW = Qt.ItemDataRole.UserRole + 1


@dataclasses.dataclass(frozen=True)
class HeaderRow:
    title: str


@dataclasses.dataclass(frozen=True)
class ChatRow:
    """`colour` is the chat's colour in the block map while it is open, else empty."""

    id: str
    title: str
    is_open: bool = False
    is_current: bool = False
    is_generating: bool = False
    colour: str = ""


@dataclasses.dataclass(frozen=True)
class ResultRow:
    result: SearchResult


Row = HeaderRow | ChatRow | ResultRow


def day_group(updated_at: float, now: datetime.datetime) -> str:
    """The heading a conversation belongs under: by calendar days of the local time."""
    days = (now.date() - datetime.datetime.fromtimestamp(updated_at).date()).days
    if days <= 0:
        return "Today"
    if days == 1:
        return "Yesterday"
    return "Previous 7 days" if days <= 7 else "Older"


def grouped_rows(
    conversations: Sequence[ConversationSummary],
    now: datetime.datetime,
    make_row: Callable[[ConversationSummary], ChatRow],
) -> list[Row]:
    """Conversations, newest first, with a heading before each new group of days."""
    rows: list[Row] = []
    group = ""
    for conversation in conversations:
        mine = day_group(conversation.updated_at, now)
        if mine != group:
            group = mine
            rows.append(HeaderRow(mine))
        rows.append(make_row(conversation))
    return rows


class SidebarList(QListView):
    """Rows of one kind or the other; headings cannot be selected."""

    chat_activated = Signal(str)
    result_activated = Signal(object)
    menu_requested = Signal(str, QPoint)
    delete_requested = Signal(str)
    rename_requested = Signal(str)

    def __init__(self, themes: ThemeManager) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self._model = QStandardItemModel(self)
        self.setModel(self._model)
        self.setItemDelegate(_RowDelegate(themes, self))
        self.setEditTriggers(QListView.EditTrigger.NoEditTriggers)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setVerticalScrollMode(QListView.ScrollMode.ScrollPerPixel)
        self.verticalScrollBar().setSingleStep(20)
        self.setMouseTracking(True)
        self.setResizeMode(QListView.ResizeMode.Adjust)
        self.setUniformItemSizes(False)
        self.setAccessibleName("Chats")
        themes.changed.connect(self._theme_changed)

    def set_rows(self, rows: list[Row]) -> None:
        """Shows these rows. The scroll position and the keyboard's place stay where the rows allow it."""
        if rows == self.rows:
            return
        place, current = self.verticalScrollBar().value(), self.current_id()
        same_shape = [type(row) for row in rows] == [type(row) for row in self.rows]
        self.rows = rows
        if same_shape:
            for number, row in enumerate(rows):
                self._fill(self._model.item(number), row)
        else:
            self._model.clear()
            for row in rows:
                item = QStandardItem()
                self._fill(item, row)
                self._model.appendRow(item)
        for number, row in enumerate(rows):
            if current and isinstance(row, ChatRow) and row.id == current:
                self.setCurrentIndex(self._model.index(number, 0))
        self.verticalScrollBar().setValue(place)

    def _fill(self, item: QStandardItem, row: Row) -> None:
        if item.data(_ROW) == row:
            return
        item.setData(row, _ROW)
        if isinstance(row, HeaderRow):
            item.setFlags(Qt.ItemFlag.NoItemFlags)
            item.setText(row.title)
        elif isinstance(row, ChatRow):
            item.setText(row.title + (", answering" if row.is_generating else ""))
            item.setToolTip(row.title)
        else:
            item.setText(f"{row.result.title}: {row.result.snippet}")
            item.setToolTip(row.result.title)

    def current_id(self) -> str:
        row = self.currentIndex().data(_ROW)
        return row.id if isinstance(row, ChatRow) else ""

    def _activate(self, index: QModelIndex) -> None:
        row = index.data(_ROW)
        if isinstance(row, ChatRow):
            self.chat_activated.emit(row.id)
        elif isinstance(row, ResultRow):
            self.result_activated.emit(row.result)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        super().mouseReleaseEvent(event)
        if event.button() == Qt.MouseButton.LeftButton:
            self._activate(self.indexAt(event.position().toPoint()))

    def event(self, event: QEvent) -> bool:
        # These keys mean the chat in this list, not the one in front, while the list has the focus.
        if isinstance(event, QKeyEvent) and event.type() == QEvent.Type.ShortcutOverride:
            mine = event.key() in (Qt.Key.Key_F2, Qt.Key.Key_Delete) and bool(self.current_id())
            event.setAccepted(mine)
            return mine or super().event(event)
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        chat = self.current_id()
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self._activate(self.currentIndex())
        elif event.key() == Qt.Key.Key_Delete and chat:
            self.delete_requested.emit(chat)
        elif event.key() == Qt.Key.Key_F2 and chat:
            self.rename_requested.emit(chat)
        else:
            super().keyPressEvent(event)

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        by_keyboard = event.reason() == QContextMenuEvent.Reason.Keyboard
        index = self.currentIndex() if by_keyboard else self.indexAt(event.pos())
        row = index.data(_ROW)
        if isinstance(row, ChatRow):
            place = self.visualRect(index).bottomLeft() if by_keyboard else event.pos()
            self.menu_requested.emit(row.id, self.viewport().mapToGlobal(place))

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange:
            self.scheduleDelayedItemsLayout()

    def _theme_changed(self, *_: object) -> None:
        self.scheduleDelayedItemsLayout()
        self.viewport().update()


class _RowDelegate(QStyledItemDelegate):
    def __init__(self, themes: ThemeManager, parent: QObject) -> None:
        super().__init__(parent)
        self._themes = themes

    def sizeHint(self, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex) -> QSize:
        row, size = index.data(_ROW), self._themes.theme.font_size
        if isinstance(row, HeaderRow):
            return QSize(10, size + (SPACE_M + 6 if index.row() else SPACE_S + 4))
        return QSize(10, size + 20 if isinstance(row, ChatRow) else 3 * size + 26)

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        theme, row = self._themes.theme, index.data(_ROW)
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        rect = QRectF(option.rect).adjusted(SPACE_S, 1, -SPACE_S, -1)  # type: ignore[attr-defined]
        if isinstance(row, HeaderRow):
            painter.setFont(ui_font(theme.font_size_tiny, bold=True))
            painter.setPen(QColor(theme.text_faint))
            painter.drawText(
                rect.adjusted(SPACE_S, 0, 0, -3),
                int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignBottom),
                row.title,
            )
        else:
            self._paint_ground(painter, rect, option, row)
            if isinstance(row, ChatRow):
                self._paint_chat(painter, rect, row)
            else:
                self._paint_result(painter, rect, row.result)
        painter.restore()

    def _paint_ground(self, painter: QPainter, rect: QRectF, option: QStyleOptionViewItem, row: Row) -> None:
        theme, state = self._themes.theme, option.state  # type: ignore[attr-defined]
        chosen = isinstance(row, ChatRow) and row.is_current
        focused = bool(state & QStyle.StateFlag.State_HasFocus)
        if chosen:
            painter.setBrush(QBrush(QColor(mix(theme.window, theme.accent, 0.16))))
        elif state & QStyle.StateFlag.State_MouseOver:
            painter.setBrush(QBrush(QColor(mix(theme.window, theme.text, 0.06))))
        else:
            painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.setPen(QColor(theme.accent) if focused else Qt.PenStyle.NoPen)
        painter.drawRoundedRect(rect.adjusted(0.5, 0.5, -0.5, -0.5), 6, 6)

    def _paint_chat(self, painter: QPainter, rect: QRectF, row: ChatRow) -> None:
        theme = self._themes.theme
        painter.setFont(ui_font(theme.font_size, bold=row.is_current))
        painter.setPen(QColor(theme.text if row.is_current or row.is_open else theme.text_muted))
        text = rect.adjusted(SPACE_S, 0, -SPACE_S - (12 if row.is_open else 0), 0)
        title = painter.fontMetrics().elidedText(row.title, Qt.TextElideMode.ElideRight, int(text.width()))
        painter.drawText(text, int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter), title)
        if row.is_open:
            dot = QRectF(rect.right() - SPACE_S - 6, rect.center().y() - 3, 6, 6)
            colour = QColor(row.colour or theme.text_faint)
            painter.setPen(Qt.PenStyle.NoPen)
            if row.is_generating:
                halo = QColor(colour)
                halo.setAlphaF(0.3)
                painter.setBrush(halo)
                painter.drawEllipse(dot.adjusted(-3, -3, 3, 3))
            painter.setBrush(colour)
            painter.drawEllipse(dot)

    def _paint_result(self, painter: QPainter, rect: QRectF, result: SearchResult) -> None:
        theme = self._themes.theme
        inner = rect.adjusted(SPACE_S, 5, -SPACE_S, -5)
        painter.setFont(ui_font(theme.font_size, bold=True))
        metrics = painter.fontMetrics()
        painter.setPen(QColor(theme.text))
        title = metrics.elidedText(result.title, Qt.TextElideMode.ElideRight, int(inner.width()))
        painter.drawText(inner, int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop), title)
        painter.setFont(ui_font(theme.font_size_small))
        snippet = inner.adjusted(0, metrics.height() + 1, 0, 0)
        self._paint_snippet(painter, snippet, result)

    def _paint_snippet(self, painter: QPainter, rect: QRectF, result: SearchResult) -> None:
        """Up to two lines, word by word, the matched words in the accent colour."""
        theme, metrics = self._themes.theme, painter.fontMetrics()
        found = {i for start, end in result.matches for i in range(start, end)}
        x, y, line, at = rect.left(), rect.top() + metrics.ascent(), 0, 0
        space = metrics.horizontalAdvance(" ")
        for word in result.snippet.split():
            at = result.snippet.index(word, at)
            width = metrics.horizontalAdvance(word)
            if x + width > rect.right() and x > rect.left():
                line += 1
                if line == 2:
                    painter.setPen(QColor(theme.text_muted))
                    return
                x, y = rect.left(), y + metrics.lineSpacing()
            hit = any(i in found for i in range(at, at + len(word)))
            painter.setPen(QColor(theme.accent if hit else theme.text_muted))
            shown = metrics.elidedText(word, Qt.TextElideMode.ElideRight, int(rect.right() - x))
            painter.drawText(int(x), int(y), shown)
            x, at = x + width + space, at + len(word)
