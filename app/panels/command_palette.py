"""Type a few letters, press Enter: every command, chat and model within reach of the keyboard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from PySide6.QtCore import QEvent, QModelIndex, QObject, QPersistentModelIndex, QRect, QSize, Qt
from PySide6.QtGui import QColor, QKeyEvent, QPainter, QStandardItem, QStandardItemModel
from PySide6.QtWidgets import (
    QFrame,
    QGraphicsDropShadowEffect,
    QLineEdit,
    QListView,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QVBoxLayout,
    QWidget,
)

from app.commands import match_score
from app.theme import SPACE_M, SPACE_S, SPACE_XL, ThemeManager, mix

WIDTH = 560
ROW_HEIGHT = 36
MAX_ROWS = 10
_ENTRY = Qt.ItemDataRole.UserRole + 1


@dataclasses.dataclass(frozen=True)
class PaletteEntry:
    """One line of the palette: what it says, what it says at the right, what it does."""

    title: str
    hint: str
    run: Callable[[], object]


class CommandPalette(QFrame):
    """An overlay over the window."""

    def __init__(self, host: QWidget, themes: ThemeManager) -> None:
        super().__init__(host)
        self._host = host
        self._sources: tuple[Callable[[], list[PaletteEntry]], ...] = ()
        self._entries: list[PaletteEntry] = []
        self._came_from: QWidget | None = None
        self.setObjectName("palette")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setAccessibleName("Command palette")
        column = QVBoxLayout(self)
        column.setContentsMargins(1, 1, 1, SPACE_S)
        column.setSpacing(SPACE_S)
        self.field = QLineEdit()
        self.field.setObjectName("paletteField")
        self.field.setPlaceholderText("Type a command or the name of a chat")
        self.field.setAccessibleName("Find a command")
        self.field.textChanged.connect(self._filter)
        self.field.installEventFilter(self)
        self.model = QStandardItemModel(self)
        self.list = QListView()
        self.list.setModel(self.model)
        self.list.setItemDelegate(_EntryDelegate(themes, self))
        self.list.setEditTriggers(QListView.EditTrigger.NoEditTriggers)
        self.list.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.list.setMouseTracking(True)
        self.list.setAccessibleName("Matching commands")
        self.list.entered.connect(self.list.setCurrentIndex)
        self.list.clicked.connect(lambda _: self._run_current())
        column.addWidget(self.field)
        column.addWidget(self.list)
        shadow = QGraphicsDropShadowEffect(self)
        shadow.setBlurRadius(48)
        shadow.setOffset(0, 12)
        shadow.setColor(QColor(0, 0, 0, 90))
        self.setGraphicsEffect(shadow)
        host.installEventFilter(self)
        self.hide()

    def set_sources(self, *sources: Callable[[], list[PaletteEntry]]) -> None:
        """What gives the entries, anew each time the palette opens; most wanted first."""
        self._sources = sources

    def open(self) -> None:
        """Shows the palette, or hides it if it is open."""
        if self.isVisible():
            self.dismiss()
            return
        self._came_from = self.window().focusWidget()
        self._entries = [entry for source in self._sources for entry in source()]
        self.field.clear()
        self._filter("")
        self.show()
        self.raise_()
        self.field.setFocus()

    def dismiss(self) -> None:
        self.hide()
        if self._came_from is not None:
            self._came_from.setFocus()
            self._came_from = None

    def _filter(self, query: str) -> None:
        scored = [(match_score(query, entry.title), entry) for entry in self._entries]
        found = [(score, entry) for score, entry in scored if score is not None]
        found.sort(key=lambda pair: -pair[0])  # stable: equal scores keep the order of the sources
        self.model.clear()
        for _, entry in found[:200]:
            item = QStandardItem(entry.title)
            item.setData(entry, _ENTRY)
            item.setAccessibleText(f"{entry.title} {entry.hint}".strip())
            self.model.appendRow(item)
        self.list.setCurrentIndex(self.model.index(0, 0))
        self.list.scrollToTop()
        self._place()

    def _run_current(self) -> None:
        entry = self.list.currentIndex().data(_ENTRY)
        if entry is None:
            return
        self.dismiss()
        entry.run()

    def _move(self, step: int) -> None:
        count = self.model.rowCount()
        if count:
            row = (self.list.currentIndex().row() + step) % count
            self.list.setCurrentIndex(self.model.index(row, 0))

    def _place(self) -> None:
        host = self._host
        width = min(WIDTH, host.width() - 2 * SPACE_XL)
        rows = max(1, min(MAX_ROWS, self.model.rowCount()))
        self.list.setFixedHeight(rows * ROW_HEIGHT + 4)
        self.setFixedSize(width, self.field.sizeHint().height() + rows * ROW_HEIGHT + 2 * SPACE_S + 6)
        self.move((host.width() - width) // 2, min(96, host.height() // 8))

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self.field and isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
            steps = {Qt.Key.Key_Down: 1, Qt.Key.Key_Up: -1, Qt.Key.Key_PageDown: MAX_ROWS, Qt.Key.Key_PageUp: -MAX_ROWS}
            if event.key() in steps:
                self._move(steps[Qt.Key(event.key())])
                return True
            if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
                self._run_current()
                return True
            if event.key() == Qt.Key.Key_Escape:
                self.dismiss()
                return True
        if watched is self.field and event.type() == QEvent.Type.FocusOut and self.isVisible():
            self.hide()
        if watched is self._host and event.type() == QEvent.Type.Resize and self.isVisible():
            self._place()
        return super().eventFilter(watched, event)


class _EntryDelegate(QStyledItemDelegate):
    def __init__(self, themes: ThemeManager, parent: QObject) -> None:
        super().__init__(parent)
        self._themes = themes

    def sizeHint(self, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex) -> QSize:
        return QSize(100, ROW_HEIGHT)

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        theme = self._themes.theme
        entry: PaletteEntry = index.data(_ENTRY)
        rect: QRect = option.rect.adjusted(SPACE_S, 1, -SPACE_S, -1)  # type: ignore[attr-defined]
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if option.state & QStyle.StateFlag.State_Selected:  # type: ignore[attr-defined]
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(QColor(mix(theme.surface, theme.accent, 0.16)))
            painter.drawRoundedRect(rect, 6, 6)
        text = rect.adjusted(SPACE_M - SPACE_S + 4, 0, -SPACE_S - 4, 0)
        metrics = painter.fontMetrics()
        hint_width = metrics.horizontalAdvance(entry.hint)
        painter.setPen(QColor(theme.text_muted))
        painter.drawText(text, int(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter), entry.hint)
        painter.setPen(QColor(theme.text))
        title_rect = text.adjusted(0, 0, -hint_width - SPACE_M, 0)
        title = metrics.elidedText(entry.title, Qt.TextElideMode.ElideRight, title_rect.width())
        painter.drawText(title_rect, int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter), title)
        painter.restore()
