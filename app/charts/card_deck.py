"""A column of the dashboard: one chart, or several behind a switch."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QColor, QFontMetrics, QPainter, QPaintEvent
from PySide6.QtWidgets import (
    QAbstractButton,
    QButtonGroup,
    QHBoxLayout,
    QSizePolicy,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app.charts.figures import sized_font
from app.charts.page import ChartPage
from app.theme import Theme


class _Note(QWidget):
    """A muted remark at the right of a header: its short form, or elided, where it does not fit."""

    def __init__(self, theme: Theme, parent: QWidget) -> None:
        super().__init__(parent)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self._text = self._short = ""
        self.set_theme(theme)

    def set_theme(self, theme: Theme) -> None:
        self._colour = QColor(theme.text_faint)
        self._font = sized_font(self.font(), theme.font_size_tiny)
        self._metrics = QFontMetrics(self._font)
        self.update()

    def set_text(self, text: str, short: str) -> None:
        if (text, short) != (self._text, self._short):
            self._text, self._short = text, short
            self.setToolTip(text)
            self.update()

    def sizeHint(self) -> QSize:
        return QSize(40, self._metrics.height())

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setFont(self._font)
        painter.setPen(self._colour)
        fits = self._metrics.horizontalAdvance(self._text) <= self.width()
        text = self._text if fits else self._short or self._text
        text = self._metrics.elidedText(text, Qt.TextElideMode.ElideRight, self.width())
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, text)
        painter.end()


class _Tab(QAbstractButton):
    """A page's title; underlined when there are other pages to choose."""

    def __init__(self, title: str, theme: Theme, alone: bool, parent: QWidget) -> None:
        super().__init__(parent)
        self._alone = alone
        self.setText(title)
        self.setCheckable(True)
        self.setAccessibleName(title if alone else f"Show {title}")
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents, alone)
        self.setAttribute(Qt.WidgetAttribute.WA_Hover)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus if alone else Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        if not alone:
            self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.set_theme(theme)

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._font = sized_font(self.font(), theme.font_size_small, bold=True)
        self._metrics = QFontMetrics(self._font)
        self.updateGeometry()
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(self._metrics.horizontalAdvance(self.text()) + 1, self._metrics.height() + 4)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setFont(self._font)
        lit = self.isChecked() or self.underMouse() or self.hasFocus()
        painter.setPen(QColor(self._theme.text if lit else self._theme.text_muted))
        row = self.rect().adjusted(0, 0, 0, -4)
        painter.drawText(row, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, self.text())
        if not self._alone and (self.isChecked() or self.hasFocus()):
            colour = self._theme.text if self.hasFocus() else self._theme.accent
            painter.fillRect(0, self.height() - 2, self.width(), 2, QColor(colour))
        painter.end()


class CardDeck(QWidget):
    """Shows one of its pages. With a single page its switch is a plain title."""

    current_changed = Signal()

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._pages: list[ChartPage] = []
        self._tabs: list[_Tab] = []
        self._theme = theme
        self._switch = QButtonGroup(self)
        self._switch.idClicked.connect(self.show_index)
        self._header = QHBoxLayout()
        self._header.setContentsMargins(0, 0, 0, 0)
        self._header.setSpacing(12)
        self._note = _Note(theme, self)
        self._header.addWidget(self._note, 1)
        self._stack = QStackedWidget(self)
        # Hidden pages must not dictate the width of the column.
        self._stack.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Ignored)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        column.addLayout(self._header)
        column.addWidget(self._stack, 1)

    @property
    def pages(self) -> Sequence[ChartPage]:
        return self._pages

    @property
    def current(self) -> ChartPage | None:
        index = self._stack.currentIndex()
        return self._pages[index] if 0 <= index < len(self._pages) else None

    def set_pages(self, pages: Sequence[ChartPage], current: ChartPage | None = None) -> None:
        """Takes over `pages`, from wherever they were, and shows `current` or the first."""
        for tab in self._tabs:
            self._switch.removeButton(tab)
            self._header.removeWidget(tab)
            tab.deleteLater()
        self._tabs = []
        for page in self._pages:
            page.note_changed.disconnect(self._show_note)
            if page not in pages and page.parent() is self._stack:
                self._stack.removeWidget(page)
        self._pages = list(pages)
        for index, page in enumerate(pages):
            if self._stack.indexOf(page) != index:
                self._stack.insertWidget(index, page)
            page.note_changed.connect(self._show_note)
            self._header.insertWidget(index, self._make_tab(page, index))
        self.show_index(pages.index(current) if current in pages else 0)

    def show_index(self, index: int) -> None:
        self._stack.setCurrentIndex(index)
        button = self._switch.button(index)
        if button is not None:
            button.setChecked(True)
        self._show_note()
        self.current_changed.emit()

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._note.set_theme(theme)
        for tab in self._tabs:
            tab.set_theme(theme)

    def _make_tab(self, page: ChartPage, index: int) -> _Tab:
        tab = _Tab(page.title, self._theme, len(self._pages) == 1, self)
        self._switch.addButton(tab, index)
        self._tabs.append(tab)
        return tab

    def _show_note(self) -> None:
        page = self.current
        self._note.set_text(page.note if page is not None else "", page.short_note if page is not None else "")
