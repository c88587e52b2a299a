"""The messages of a session, of which only those near the viewport are real widgets."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

from PySide6.QtCore import QPoint, QRect, QSize, Qt, QTimer
from PySide6.QtGui import QKeyEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QAbstractScrollArea, QFrame, QPushButton, QWidget

from app.chat.height_index import HeightIndex
from app.chat.icons import cached_icon
from app.chat.markdown import Block
from app.chat.message_widget import MessageWidget
from app.chat.text_style import TextStyle, text_style
from app.state.records import MessageView
from app.state.session import ChatSession
from app.theme import Theme

MAX_COLUMN = 760
MIN_SIDE = 24
PADDING = 24
OVERSCAN = 300  # pixels above and below the viewport that are kept as widgets
LINE_STEP = 48
RENDER_MS = (33, 250)  # a growing answer is shown no more often than this, less often if it is slow
RENDER_SHARE = 4  # and takes no more than a fourth of the time
MAX_CACHED_BLOCKS = 512
MAX_PASSES = 12


class MessageListView(QAbstractScrollArea):
    """Shows a session's visible path in a centred column.

    All positions follow from remembered heights. When one proves wrong, the content
    under the reader's eye stays where it is; at the very bottom it stays at the bottom.
    Nothing is laid out while the view is hidden.
    """

    def __init__(self, session: ChatSession, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("messageList")
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName("Messages")
        self.verticalScrollBar().setSingleStep(LINE_STEP)
        self._session = session
        self._style: TextStyle = text_style(theme)
        self._ids: list[int] = []
        self._index: dict[int, int] = {}
        self._heights = HeightIndex()
        self._bound: dict[int, MessageWidget] = {}
        self._pool: list[MessageWidget] = []
        self._stale: set[int] = set()
        self._blocks: OrderedDict[int, tuple[int, Sequence[Block]]] = OrderedDict()
        self._value = 0
        self._follows = True
        self._syncing = False
        self._dirty = True
        self._find_text = ""
        self._after: QWidget | None = None
        self._render_timer = QTimer(self)
        self._render_timer.setSingleShot(True)
        self._render_timer.timeout.connect(self._render)
        self._render_interval = RENDER_MS[0]
        self.num_renders = 0
        self.jump_button = QPushButton("Jump to latest", self)
        self.jump_button.setObjectName("jumpButton")
        self.jump_button.setCursor(Qt.CursorShape.PointingHandCursor)
        self.jump_button.clicked.connect(self.scroll_to_end)
        self.jump_button.hide()
        session.path_changed.connect(self._load)
        session.message_appended.connect(self._on_appended)
        session.message_changed.connect(self._on_changed)
        session.text_appended.connect(self._on_text_appended)
        session.generating_changed.connect(self._on_generating_changed)
        self.set_theme(theme)
        self._load()

    # ---------------------------------------------------------------- what is shown

    @property
    def widgets(self) -> list[MessageWidget]:
        """The widgets that exist now, top to bottom."""
        return [self._bound[message_id] for message_id in sorted(self._bound, key=self._index.__getitem__)]

    @property
    def is_at_bottom(self) -> bool:
        return self._follows

    def widget_of(self, message_id: int) -> MessageWidget | None:
        return self._bound.get(message_id)

    def set_theme(self, theme: Theme) -> None:
        self._style = text_style(theme)
        self.jump_button.setIcon(cached_icon("chevron-down", theme.text_muted))
        anchor = self._anchor()
        self._heights.set_width(0)
        self._stale.update(self._bound)
        self._sync(anchor)

    def set_tab_successor(self, widget: QWidget) -> None:
        """Names what the Tab key goes to behind the last message."""
        self._after = widget

    def _load(self) -> None:
        """Takes over the whole path; what the old and the new one share at their beginning keeps its heights."""
        messages: list[MessageView] = list(self._session.messages)
        anchor = self._anchor()
        ids = [message.id for message in messages]
        known = {
            message_id: self._heights.height(index)
            for index, message_id in enumerate(self._ids)
            if self._heights.is_measured(index)
        }
        index_of = {message_id: index for index, message_id in enumerate(ids)}
        gone = [bound for bound in self._bound if bound not in index_of]
        had_focus = self._take_focus(gone)
        self._ids, self._index = ids, index_of
        self._heights.reset((message.text for message in messages), self._column_width())
        for message_id, height in known.items():
            if (index := self._index.get(message_id)) is not None:
                self._heights.set(index, height)
        for message_id in gone:
            self._release(message_id)
        self._stale.update(self._bound)
        if not known or (messages and messages[-1].is_streaming):
            self._set_follows(True)
        self._sync(anchor)
        if had_focus is not None:
            self._give_focus(*had_focus)

    def _on_appended(self, message_id: int) -> None:
        message = self._session.message(message_id)
        self._index[message_id] = len(self._ids)
        self._ids.append(message_id)
        self._heights.append(message.text)
        if message.role == "user":
            self._set_follows(True)
        self._schedule()

    def _on_changed(self, message_id: int) -> None:
        self._stale.add(message_id)
        self._schedule()

    def _on_text_appended(self, message_id: int, _text: str) -> None:
        self._stale.add(message_id)
        self._schedule()

    def _on_generating_changed(self, generating: bool) -> None:
        for widget in self._bound.values():
            widget.set_can_generate(not generating)

    # ---------------------------------------------------------------- scrolling

    def scroll_to_end(self) -> None:
        self._set_follows(True)
        self._sync()

    def scroll_to_start(self) -> None:
        self.verticalScrollBar().setValue(0)

    def scroll_by_pages(self, pages: float) -> None:
        bar = self.verticalScrollBar()
        bar.setValue(bar.value() + round(pages * bar.pageStep() * 0.9))

    def scroll_to_message(self, message_id: int) -> bool:
        """Brings a message's top near the top of the view; returns False if it is not on the visible path."""
        if (index := self._index.get(message_id)) is None:
            return False
        self._set_follows(False)
        self._sync((index, 0.0))
        self._set_follows(self._value >= self._max_value())
        return True

    def ensure_visible(self, rect: QRect, widget: QWidget) -> None:
        """Scrolls no more than needed to show `rect` of a widget inside a message."""
        top = widget.mapTo(self.viewport(), rect.topLeft()).y()
        bottom = top + rect.height()
        bar = self.verticalScrollBar()
        if top < PADDING:
            bar.setValue(bar.value() + top - PADDING)
        elif bottom > self.viewport().height() - PADDING:
            beyond = bottom - self.viewport().height() + PADDING
            bar.setValue(bar.value() + min(beyond, top - PADDING))

    def scrollContentsBy(self, dx: int, dy: int) -> None:
        if self._syncing:
            return
        self._value = self.verticalScrollBar().value()
        self._set_follows(self._value >= self._max_value() - 2)
        self.viewport().scroll(0, dy)  # moves the pixels that are there; _sync paints what comes in
        self._sync()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Home:
            self.scroll_to_start()
        elif event.key() == Qt.Key.Key_End:
            self.scroll_to_end()
        else:
            super().keyPressEvent(event)

    def _set_follows(self, follows: bool) -> None:
        self._follows = follows
        self._place_jump_button()

    def _max_value(self) -> int:
        return max(0, self._heights.total + 2 * PADDING - self.viewport().height())

    # ---------------------------------------------------------------- laying out

    def _column_width(self) -> int:
        return max(200, min(MAX_COLUMN, self.width() - 2 * MIN_SIDE))

    def _schedule(self) -> None:
        if not self.isVisible():
            self._dirty = True
        elif not self._render_timer.isActive():
            self._render_timer.start(self._render_interval if self._session.is_generating else 0)

    def _render(self) -> None:
        started = time.perf_counter()
        self._sync()
        self.num_renders += 1
        spent_ms = (time.perf_counter() - started) * 1000
        self._render_interval = round(max(RENDER_MS[0], min(RENDER_MS[1], spent_ms * RENDER_SHARE)))

    def _anchor(self) -> tuple[int, float]:
        """The item at the top of the page as (index, share of its height that is above)."""
        if not len(self._heights):
            return 0, 0.0
        index = self._heights.at(self._value)
        return index, (self._value - self._heights.start(index)) / max(1, self._heights.height(index))

    def _sync(self, anchor: tuple[int, float] | None = None) -> None:
        """Brings widgets, heights and scroll bar in line. `anchor` is what to hold on to if the width changed."""
        if self._syncing:
            return
        if not self.isVisible():
            self._dirty = True
            return
        self._syncing = True
        try:
            self._dirty = False
            width = self._column_width()
            self._heights.set_width(width)
            first, last = self._measure_visible(width, anchor)
            self._release_outside(first, last)
            self._stale.intersection_update(self._bound)
            self._place(width)
        finally:
            self._syncing = False

    def _measure_visible(self, width: int, hold: tuple[int, float] | None) -> tuple[int, int]:
        """Makes widgets for all items in reach and corrects heights until they agree; returns the items' range."""
        heights, view_height = self._heights, self.viewport().height()
        for index in [self._index[i] for i in self._stale if i in self._index and i not in self._bound]:
            heights.forget(index, self._session.message(self._ids[index]).text)
        first, last = 0, -1
        for _ in range(MAX_PASSES):
            if not len(heights):
                break
            if hold is not None:
                index = min(hold[0], len(heights) - 1)
                self._value = heights.start(index) + round(hold[1] * heights.height(index))
            self._value = self._max_value() if self._follows else max(0, min(self._value, self._max_value()))
            first = heights.at(self._value - PADDING - OVERSCAN)
            last = heights.at(self._value - PADDING + view_height + OVERSCAN)
            anchor = heights.at(self._value)
            if not heights.is_measured(anchor) and anchor + 1 < len(heights):
                anchor += 1  # scrolling up: what is already in view stays, what comes in grows upwards
            offset = self._value - heights.start(anchor)
            changed = False
            for index in range(last, first - 1, -1) if self._follows else range(first, last + 1):
                changed |= self._bind(index, width)
            if not changed:
                break
            self._value = heights.start(anchor) + offset
        return first, last

    def _bind(self, index: int, width: int) -> bool:
        """Sees to it that an item has an up-to-date widget; returns whether its height changed."""
        message_id = self._ids[index]
        widget = self._bound.get(message_id)
        is_fresh = widget is not None and message_id not in self._stale
        if is_fresh and self._heights.is_measured(index):
            return False
        if widget is None:
            widget = self._pool.pop() if self._pool else self._make_widget()
            self._bound[message_id] = widget
        if not is_fresh:
            self._stale.discard(message_id)
            self._fill(widget, self._session.message(message_id), width)
        height = widget.layout_for(width)
        widget.resize(width, height)
        return self._heights.set(index, height)

    def _fill(self, widget: MessageWidget, message: MessageView, width: int) -> None:
        cached = self._blocks.get(message.id)
        # A text that is complete never changes, so its length tells whether the blocks are of it.
        blocks = cached[1] if cached and cached[0] == len(message.text) and not message.is_streaming else None
        blocks = widget.set_message(message, self._style, width, not self._session.is_generating, blocks)
        if self._find_text:
            widget.body.highlight(self._find_text, self._style)
        if not message.is_streaming:
            self._blocks[message.id] = (len(message.text), blocks)
            self._blocks.move_to_end(message.id)
            if len(self._blocks) > MAX_CACHED_BLOCKS:
                self._blocks.popitem(last=False)

    def _make_widget(self) -> MessageWidget:
        widget = MessageWidget(self.viewport())
        widget.edit_submitted.connect(self._resend)
        widget.regenerate_requested.connect(self._session.regenerate)
        widget.delete_requested.connect(self._session.delete_message_branch)
        widget.sibling_requested.connect(self._session.switch_sibling)
        widget.height_changed.connect(self._on_height_changed)
        return widget

    def _resend(self, message_id: int, text: str) -> None:
        """Asks an edited question; one that is refused stays in its editor, and the session says why."""
        if self._session.edit_and_resend(message_id, text) and (widget := self._bound.get(message_id)) is not None:
            widget.end_edit()

    def _on_height_changed(self, message_id: int) -> None:
        widget, index = self._bound.get(message_id), self._index.get(message_id)
        if widget is None or index is None or self._syncing:
            return
        self._heights.set(index, widget.layout_for(self._column_width()))
        self._sync()
        if widget.is_editing and widget.editor is not None:
            self.ensure_visible(widget.editor.rect(), widget.editor)

    def _release_outside(self, first: int, last: int) -> None:
        focus = self.focusWidget()
        for message_id in list(self._bound):
            if first <= self._index[message_id] <= last:
                continue
            widget = self._bound[message_id]
            has_focus = focus is not None and widget.isAncestorOf(focus) and focus.hasFocus()
            if not (widget.is_editing or has_focus or widget.body.selected_text()):
                self._release(message_id)

    def _release(self, message_id: int) -> None:
        widget = self._bound.pop(message_id)
        widget.end_edit()
        widget.hide()
        self._pool.append(widget)

    def _place(self, width: int) -> None:
        left = (self.width() - width) // 2  # of the whole view, so that a scroll bar moves nothing
        for message_id, widget in self._bound.items():
            index = self._index[message_id]
            top = PADDING + self._heights.start(index) - self._value
            widget.setGeometry(left, top, width, self._heights.height(index))
            widget.show()
        bar = self.verticalScrollBar()
        bar.setRange(0, self._max_value())
        bar.setPageStep(max(1, self.viewport().height()))
        bar.setValue(self._value)
        self._place_jump_button()

    def _place_jump_button(self) -> None:
        shown = not self._follows and self._value < self._max_value() - 40
        self.jump_button.setVisible(shown)
        if shown:
            size = QSize(self.jump_button.sizeHint().width(), 32)
            x = (self.width() - size.width()) // 2
            self.jump_button.setGeometry(QRect(QPoint(x, self.height() - size.height() - 12), size))
            self.jump_button.raise_()

    def resizeEvent(self, event: QResizeEvent) -> None:
        anchor = self._anchor()
        self._sync(anchor if self._column_width() != self._heights.width else None)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        if self._dirty:
            self._sync(self._anchor() if self._column_width() != self._heights.width else None)

    # ---------------------------------------------------------------- find and focus

    def set_find_text(self, text: str) -> None:
        """Marks every occurrence of `text`; an empty one marks nothing."""
        self._find_text = text
        for widget in (*self._bound.values(), *self._pool):
            widget.body.highlight(text, self._style)

    def focusNextPrevChild(self, forward: bool) -> bool:
        """Moves the focus in reading order, which the recycled widgets' own order is not."""
        stops = [stop for widget in self.widgets for stop in widget.focus_stops()]
        focus = self.focusWidget()
        if focus in stops:
            position = stops.index(focus) + (1 if forward else -1)
        elif focus is self or focus is None:
            if not forward:
                return super().focusNextPrevChild(False)
            position = next((i for i, stop in enumerate(stops) if self._is_in_view(stop)), len(stops))
        else:
            return super().focusNextPrevChild(forward)
        reason = Qt.FocusReason.TabFocusReason if forward else Qt.FocusReason.BacktabFocusReason
        if position < 0:
            self.setFocus(reason)
        elif position < len(stops):
            self.ensure_visible(stops[position].rect(), stops[position])
            stops[position].setFocus(reason)
        elif self._after is not None:
            self._after.setFocus(reason)
        else:
            return super().focusNextPrevChild(forward)
        return True

    def _take_focus(self, message_ids: Sequence[int]) -> tuple[int, str] | None:
        """Takes the focus from these messages; returns the place of the one that had it and its control's name.

        Qt would otherwise look for another control the moment one is hidden, with the list half changed.
        """
        focus = self.focusWidget()
        if focus is None or not focus.hasFocus():
            return None
        for message_id in message_ids:
            if self._bound[message_id].isAncestorOf(focus):
                self.setFocus(Qt.FocusReason.OtherFocusReason)
                return self._index[message_id], focus.accessibleName()
        return None

    def _give_focus(self, index: int, name: str) -> None:
        """Gives the focus to the control of that name in the message at a place, or to what follows the list."""
        widget = self._bound.get(self._ids[index]) if index < len(self._ids) else None
        stops = widget.focus_stops() if widget is not None else []
        target = next((stop for stop in stops if stop.accessibleName() == name), self._after or self)
        target.setFocus(Qt.FocusReason.OtherFocusReason)

    def _is_in_view(self, widget: QWidget) -> bool:
        top = widget.mapTo(self.viewport(), QPoint(0, 0)).y()
        return 0 <= top < self.viewport().height() or (top < 0 < top + widget.height())
