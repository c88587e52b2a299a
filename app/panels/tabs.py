"""The row of open chats: colour dot, title, close button, new-tab button."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QColor, QIcon, QMouseEvent, QPainter, QPixmap, QResizeEvent, QWheelEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QSizePolicy, QTabBar

from app.panels.widgets import IconButton
from app.theme import SPACE_S, SPACE_XS, ThemeManager

_DOT = 10
# Of a tab: its padding and dot.
_BESIDE_TITLE = 38
_CLOSE = 20
# Letters that fit at least, before tabs get narrow and before any is hidden.
_FIRST_WORDS, _FIRST_LETTERS = 7, 5
_CLOSE_SIDE = QTabBar.ButtonPosition.RightSide


def dot_icon(colour: str, *, pulsing: bool) -> QIcon:
    """A dot in a chat's colour, with a ring around it while an answer is being written."""
    result = QIcon()
    for scale in (1.0, 2.0):
        image = QPixmap(QSize(round(_DOT * scale), round(_DOT * scale)))
        image.setDevicePixelRatio(scale)
        image.fill(Qt.GlobalColor.transparent)
        painter = QPainter(image)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        ring = QColor(colour)
        if pulsing:
            ring.setAlphaF(0.35)
            painter.setBrush(ring)
            painter.drawEllipse(0, 0, _DOT, _DOT)
        painter.setBrush(QColor(colour))
        painter.drawEllipse(2, 2, _DOT - 4, _DOT - 4)
        painter.end()
        result.addPixmap(image)
    return result


class ChatTabBar(QTabBar):
    """Tabs that can be reordered, and closed with the middle button. Each tab's data is its conversation id."""

    def __init__(self) -> None:
        super().__init__()
        self.setMovable(True)
        self.setExpanding(False)
        self.setUsesScrollButtons(True)
        self.setElideMode(Qt.TextElideMode.ElideRight)
        self.setDrawBase(False)
        self.setDocumentMode(True)
        self.setIconSize(QSize(_DOT, _DOT))
        self.setAccessibleName("Open chats")
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)

    def tabSizeHint(self, index: int) -> QSize:
        hint = super().tabSizeHint(index)
        return QSize(max(hint.width(), self.comfortable_width), hint.height())

    def minimumTabSizeHint(self, index: int) -> QSize:
        has_close = self.tabButton(index, _CLOSE_SIDE) is not None
        return QSize(self._width_of(_FIRST_LETTERS, has_close), super().minimumTabSizeHint(index).height())

    @property
    def comfortable_width(self) -> int:
        """That of a tab with a word or two of its title and its close button, in pixels."""
        return self._width_of(_FIRST_WORDS, True)

    def _width_of(self, num_letters: int, has_close: bool) -> int:
        beside = _BESIDE_TITLE + (_CLOSE + SPACE_XS if has_close else 0)
        return beside + num_letters * self.fontMetrics().averageCharWidth()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.MiddleButton:
            index = self.tabAt(event.position().toPoint())
            if index >= 0:
                self.tabCloseRequested.emit(index)
                return
        super().mouseReleaseEvent(event)

    def wheelEvent(self, event: QWheelEvent) -> None:
        step = -1 if event.angleDelta().y() > 0 else 1
        self.setCurrentIndex(max(0, min(self.count() - 1, self.currentIndex() + step)))


class TabStrip(QFrame):
    """The tab bar with its + button. Speaks of conversations by id, never by place.

    Where tabs get narrow, only the one in front has a close button: the others' titles need the room more.
    """

    chosen = Signal(str)
    close_requested = Signal(str)
    new_requested = Signal()
    rename_requested = Signal(str)
    reordered = Signal(list)

    def __init__(self, themes: ThemeManager) -> None:
        super().__init__()
        self._themes = themes
        self._dots: dict[str, tuple[str, bool]] = {}
        self._close_buttons: dict[str, IconButton] = {}
        self.setObjectName("tabStrip")
        self.setFixedHeight(40)
        self.bar = ChatTabBar()
        self.bar.currentChanged.connect(self._current_changed)
        self.bar.tabCloseRequested.connect(lambda index: self.close_requested.emit(self.bar.tabData(index)))
        self.bar.tabMoved.connect(lambda *_: self.reordered.emit(self.ids))
        self.bar.tabBarDoubleClicked.connect(self._double_clicked)
        self.new_button = IconButton("plus", "New chat", themes, size=28)
        self.new_button.clicked.connect(self.new_requested)
        themes.changed.connect(self._fit)
        row = QHBoxLayout(self)
        row.setContentsMargins(SPACE_S - 2, 0, SPACE_S, 0)
        row.setSpacing(SPACE_XS)
        row.addWidget(self.bar, 0, Qt.AlignmentFlag.AlignBottom)
        row.addWidget(self.new_button, 0, Qt.AlignmentFlag.AlignVCenter)
        row.addStretch(1)

    @property
    def ids(self) -> list[str]:
        return [self.bar.tabData(index) for index in range(self.bar.count())]

    def index_of(self, conversation_id: str) -> int:
        """The tab's place, -1 if there is none."""
        ids = self.ids
        return ids.index(conversation_id) if conversation_id in ids else -1

    def add(self, conversation_id: str, title: str) -> None:
        blocked = self.bar.blockSignals(True)
        index = self.bar.addTab("")
        self.bar.setTabData(index, conversation_id)
        self.bar.blockSignals(blocked)
        close = self._close_buttons[conversation_id] = IconButton("close", "Close this chat", self._themes, size=_CLOSE)
        close.setObjectName("tabClose")
        close.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        close.clicked.connect(lambda: self.close_requested.emit(conversation_id))
        close.setParent(self.bar)
        self.set_title(conversation_id, title)
        self._fit()

    def remove(self, conversation_id: str) -> None:
        index = self.index_of(conversation_id)
        if index >= 0:
            blocked = self.bar.blockSignals(True)
            self.bar.setTabButton(index, _CLOSE_SIDE, None)
            self.bar.removeTab(index)
            self.bar.blockSignals(blocked)
            self._close_buttons.pop(conversation_id).deleteLater()
            self._dots.pop(conversation_id, None)
            self._fit()

    def move(self, conversation_id: str, index: int) -> None:
        """Puts a tab at a place without telling anybody."""
        blocked = self.bar.blockSignals(True)
        self.bar.moveTab(self.index_of(conversation_id), index)
        self.bar.blockSignals(blocked)

    def choose(self, conversation_id: str) -> None:
        """Shows a tab as the current one without telling anybody."""
        blocked = self.bar.blockSignals(True)
        self.bar.setCurrentIndex(self.index_of(conversation_id))
        self.bar.blockSignals(blocked)
        self._fit()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self, *_: object) -> None:
        """Gives every tab its close button, or only the one in front where all are narrow."""
        room = self.width() - self.new_button.width() - SPACE_XS - 2 * SPACE_S
        narrow = self.bar.count() * self.bar.comfortable_width > room
        for index in range(self.bar.count()):
            has_close = not narrow or index == self.bar.currentIndex()
            wanted = self._close_buttons[self.bar.tabData(index)] if has_close else None
            if self.bar.tabButton(index, _CLOSE_SIDE) is not wanted:
                self.bar.setTabButton(index, _CLOSE_SIDE, wanted)

    def set_title(self, conversation_id: str, title: str) -> None:
        index = self.index_of(conversation_id)
        self.bar.setTabText(index, title.replace("&", "&&"))
        self.bar.setTabToolTip(index, title)

    def set_dot(self, conversation_id: str, colour: str, *, pulsing: bool) -> None:
        if self._dots.get(conversation_id) != (colour, pulsing):
            self._dots[conversation_id] = (colour, pulsing)
            self.bar.setTabIcon(self.index_of(conversation_id), dot_icon(colour, pulsing=pulsing))

    def _current_changed(self, index: int) -> None:
        self._fit()
        if index >= 0 and self.bar.tabData(index):
            self.chosen.emit(self.bar.tabData(index))

    def _double_clicked(self, index: int) -> None:
        if index >= 0:
            self.rename_requested.emit(self.bar.tabData(index))
        else:
            self.new_requested.emit()
