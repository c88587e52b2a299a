"""The row of open chats: colour dot, title, close button, new-tab button."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QColor, QIcon, QMouseEvent, QPainter, QPixmap, QWheelEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QSizePolicy, QTabBar

from app.panels.widgets import IconButton
from app.theme import SPACE_S, SPACE_XS, ThemeManager

_DOT = 10


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
    """The tab bar with its + button. Speaks of conversations by id, never by place."""

    chosen = Signal(str)
    close_requested = Signal(str)
    new_requested = Signal()
    rename_requested = Signal(str)
    reordered = Signal(list)

    def __init__(self, themes: ThemeManager) -> None:
        super().__init__()
        self._themes = themes
        self._dots: dict[str, tuple[str, bool]] = {}
        self.setObjectName("tabStrip")
        self.setFixedHeight(40)
        self.bar = ChatTabBar()
        self.bar.currentChanged.connect(self._current_changed)
        self.bar.tabCloseRequested.connect(lambda index: self.close_requested.emit(self.bar.tabData(index)))
        self.bar.tabMoved.connect(lambda *_: self.reordered.emit(self.ids))
        self.bar.tabBarDoubleClicked.connect(self._double_clicked)
        self.new_button = IconButton("plus", "New chat", themes, size=28)
        self.new_button.clicked.connect(self.new_requested)
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
        close = IconButton("close", "Close this chat", self._themes, size=20)
        close.setObjectName("tabClose")
        close.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        close.clicked.connect(lambda: self.close_requested.emit(conversation_id))
        self.bar.setTabButton(index, QTabBar.ButtonPosition.RightSide, close)
        self.set_title(conversation_id, title)

    def remove(self, conversation_id: str) -> None:
        index = self.index_of(conversation_id)
        if index >= 0:
            blocked = self.bar.blockSignals(True)
            self.bar.removeTab(index)
            self.bar.blockSignals(blocked)
            self._dots.pop(conversation_id, None)

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

    def set_title(self, conversation_id: str, title: str) -> None:
        index = self.index_of(conversation_id)
        self.bar.setTabText(index, title.replace("&", "&&"))
        self.bar.setTabToolTip(index, title)

    def set_dot(self, conversation_id: str, colour: str, *, pulsing: bool) -> None:
        if self._dots.get(conversation_id) != (colour, pulsing):
            self._dots[conversation_id] = (colour, pulsing)
            self.bar.setTabIcon(self.index_of(conversation_id), dot_icon(colour, pulsing=pulsing))

    def _current_changed(self, index: int) -> None:
        if index >= 0 and self.bar.tabData(index):
            self.chosen.emit(self.bar.tabData(index))

    def _double_clicked(self, index: int) -> None:
        if index >= 0:
            self.rename_requested.emit(self.bar.tabData(index))
        else:
            self.new_requested.emit()
