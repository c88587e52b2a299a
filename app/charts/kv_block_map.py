"""The KV cache block by block: which chat owns what, what is shared, what is only remembered."""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QEvent, QPoint, QPointF, QRect, QRectF, QSize, Qt
from PySide6.QtGui import (
    QColor,
    QFocusEvent,
    QFontMetrics,
    QHelpEvent,
    QImage,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
)
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.charts import block_image
from app.charts.block_image import BlockLayout, lay_out, paint_blocks
from app.charts.figures import Figure, sized_font
from app.charts.page import ChartPage, SessionTitles
from app.state.telemetry import TelemetryState
from app.theme import Theme
from app.units import format_percent, plural
from engine.protocol import BLOCK_ACTIVE, BLOCK_CACHED, BLOCK_FREE, BLOCK_SHARED, pack_block_state, unpack_block_state

KIND_NAMES = {BLOCK_FREE: "free", BLOCK_ACTIVE: "active", BLOCK_SHARED: "shared", BLOCK_CACHED: "cached"}
_LEGEND_OWNERS = 3


class KVBlockMap(QWidget):
    """A cell for each block, coloured by the chat that owns it.

    The mouse, or the arrow keys when the map has the focus, picks a cell whose tooltip names the block.
    """

    def __init__(
        self, state: TelemetryState, theme: Theme, session_titles: SessionTitles, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._state = state
        self._session_titles = session_titles
        self._version = -1
        self._image = QImage()
        self.layout_ = BlockLayout(0, 1, 0, 2, 2)
        self.picked: int | None = None
        self._keyboard = False
        self._legend: list[tuple[str, list[str]]] = []
        self.setMouseTracking(True)
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Ignored)
        self.setAccessibleName("KV block map")
        self.set_theme(theme)

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._palette = block_image.palette(theme)
        self._colours = [QColor(colour).rgb() for colour in self._palette]
        self._font = sized_font(self.font(), theme.font_size_tiny)
        self._metrics = QFontMetrics(self._font)
        self._version = -1
        self.refresh()

    def refresh(self) -> None:
        """Paints the image again if blocks have changed."""
        if self._version == self._state.blocks_version:
            return
        self._version = self._state.blocks_version
        states = self._state.block_states
        area = self._map_area()
        scale = self.devicePixelRatioF()
        self.layout_ = lay_out(len(states), int(area.width() * scale), int(area.height() * scale))
        pixels = paint_blocks(states, self.layout_)
        height, width = pixels.shape
        indexed = QImage(pixels.data, width, height, width, QImage.Format.Format_Indexed8)
        indexed.setColorTable(self._colours)
        # Painting an indexed image looks every pixel up on its own; converting it first is ten times faster.
        self._image = indexed.convertToFormat(QImage.Format.Format_RGB32)
        self._image.setDevicePixelRatio(scale)
        if self.picked is not None and self.picked >= self.layout_.num_cells:
            self.picked = None
        legend = self._make_legend()
        self.update(area if legend == self._legend else self.rect())
        self._legend = legend

    def describe_cell(self, cell: int) -> str:
        """What a cell shows, in words: block number, chat and state."""
        blocks = self.layout_.blocks_of(cell)
        states = self._state.block_states[blocks.start : blocks.stop]
        if len(states) == 1:
            kind, slot = unpack_block_state(int(states[0]))
            head = f"Block {blocks.start:,}: {KIND_NAMES[kind]}"
            if kind == BLOCK_FREE:
                return head
            title = self._title(slot)
            if kind == BLOCK_SHARED:
                return f"{head}, a prefix of several chats\nfirst read by {title}"
            if kind == BLOCK_CACHED:
                return f"{head}, used by nobody now\nleft by {title}"
            return f"{head}\n{title}"
        counts = np.bincount(states >> 6, minlength=4)
        listed = ", ".join(f"{counts[kind]} {name}" for kind, name in KIND_NAMES.items() if counts[kind])
        slots = np.unique(states[states >> 6 != BLOCK_FREE] & 63)
        titles = [self._title(int(slot)) for slot in slots[:_LEGEND_OWNERS]]
        if len(slots) > _LEGEND_OWNERS:
            titles.append(f"and {len(slots) - _LEGEND_OWNERS} more")
        return "\n".join([f"Blocks {blocks.start:,} to {blocks.stop - 1:,}: {listed}", *titles])

    def sizeHint(self) -> QSize:
        return QSize(300, 120)

    def minimumSizeHint(self) -> QSize:
        return QSize(120, 40)

    def resizeEvent(self, event: QResizeEvent) -> None:
        self._version = -1
        self.refresh()

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip:
            assert isinstance(event, QHelpEvent)
            return True  # shown at once from mouseMoveEvent, not after a delay
        return super().event(event)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        self._pick(self._cell_at(event.position()), event.globalPosition().toPoint())

    def leaveEvent(self, event: QEvent) -> None:
        self._pick(None, QPoint())

    def focusInEvent(self, event: QFocusEvent) -> None:
        self._keyboard = event.reason() in (Qt.FocusReason.TabFocusReason, Qt.FocusReason.BacktabFocusReason)
        self.update()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        self._keyboard = False
        self._pick(None, QPoint())
        self.update()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        last = self.layout_.num_cells - 1
        moves = {
            Qt.Key.Key_Left: -1,
            Qt.Key.Key_Right: 1,
            Qt.Key.Key_Up: -self.layout_.columns,
            Qt.Key.Key_Down: self.layout_.columns,
            Qt.Key.Key_Home: -last,
            Qt.Key.Key_End: last,
        }
        move = moves.get(Qt.Key(event.key()))
        if move is None or last < 0:
            super().keyPressEvent(event)
            return
        cell = 0 if self.picked is None else max(0, min(last, self.picked + move))
        corner = self._cell_rect(cell).bottomRight().toPoint()
        self._pick(cell, self.mapToGlobal(corner))

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(event.rect(), QColor(self._theme.surface))
        area = self._map_area()
        if not self._image.isNull():
            painter.drawImage(area.topLeft(), self._image)
        if self.picked is not None:
            painter.setPen(QPen(QColor(self._theme.accent), 2))
            painter.drawRect(self._cell_rect(self.picked).adjusted(-1, -1, 0, 0))
        if event.rect().bottom() > area.bottom():
            self._paint_legend(painter)
        if self._keyboard and self.picked is None:
            painter.setPen(QPen(QColor(self._theme.accent), 1))
            painter.drawRect(area.adjusted(0, 0, -1, -1))
        painter.end()

    def _make_legend(self) -> list[tuple[str, list[str]]]:
        owners = sorted(self._state.latest.owners)[:_LEGEND_OWNERS] if self._state.latest is not None else []
        slots = owners or [0]
        active = [self._palette[pack_block_state(BLOCK_ACTIVE, slot)] for slot in slots]
        cached = [self._palette[pack_block_state(BLOCK_CACHED, slot)] for slot in slots]
        ringed = self.layout_.cell_width >= block_image.SMALLEST_CELL_WITH_RING
        shared = active[:1] if ringed else [self._palette[block_image.SHARED_MARK]]
        free = [self._palette[pack_block_state(BLOCK_FREE, 0)]]
        return [("active", active), ("shared", shared), ("cached", cached), ("free", free)]

    def _paint_legend(self, painter: QPainter) -> None:
        painter.setFont(self._font)
        row = QRect(0, self.height() - self._metrics.height(), self.width(), self._metrics.height())
        x = 0
        for name, swatches in self._legend:
            text_width = self._metrics.horizontalAdvance(name)
            if x + 8 * len(swatches) + 4 + text_width > row.width():
                break
            top = row.center().y() - 3
            for colour in swatches:
                painter.fillRect(QRect(x, top, 8, 8), QColor(colour))
                if name == "shared":
                    painter.setPen(QPen(QColor(self._theme.text), 1))
                    painter.drawRect(x, top, 7, 7)
                x += 8
            painter.setPen(QColor(self._theme.text_muted))
            text = QRect(x + 4, row.top(), row.width() - x, row.height())
            painter.drawText(text, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, name)
            x += 4 + text_width + 12

    def _map_area(self) -> QRect:
        return QRect(0, 2, self.width(), max(0, self.height() - self._metrics.height() - 8))

    def _cell_at(self, position: QPointF) -> int | None:
        scale = self.devicePixelRatioF()
        area = self._map_area()
        return self.layout_.cell_at(
            int((position.x() - area.left()) * scale // 1), int((position.y() - area.top()) * scale // 1)
        )

    def _cell_rect(self, cell: int) -> QRectF:
        row, column = divmod(cell, self.layout_.columns)
        scale = self.devicePixelRatioF()
        width, height = self.layout_.cell_width / scale, self.layout_.cell_height / scale
        area = self._map_area()
        return QRectF(area.left() + column * width, area.top() + row * height, width, height)

    def _pick(self, cell: int | None, position: QPoint) -> None:
        if cell is not None:
            words = self.describe_cell(cell)
            QToolTip.showText(position, words, self)
            self.setAccessibleDescription(words)
        elif self.picked is not None:
            QToolTip.hideText()
        if cell != self.picked:
            self.picked = cell
            self.update()

    def _title(self, slot: int) -> str:
        owner = self._state.owner_name(slot)
        return (self._session_titles(owner) if owner is not None else "") or "a closed chat"


class KVPage(ChartPage):
    title = "KV cache"

    def __init__(
        self, state: TelemetryState, theme: Theme, session_titles: SessionTitles, parent: QWidget | None = None
    ) -> None:
        super().__init__(state, theme, parent)
        self.map = KVBlockMap(state, theme, session_titles, self)
        self.add_picture(self.map)

    def set_theme(self, theme: Theme) -> None:
        super().set_theme(theme)
        self.map.set_theme(theme)

    def refresh(self, now: float) -> None:
        self.map.refresh()

    def refresh_figures(self) -> None:
        telemetry = self.state.latest
        if telemetry is None:
            return
        used, total = telemetry.kv_blocks_used, telemetry.kv_blocks_total
        hits = format_percent(telemetry.prefix_hit_tokens, telemetry.prefix_query_tokens)
        self.figure_row.set_figures(
            Figure(format_percent(used, total), f"of {plural(total, 'block')}"), Figure(hits, "prefix hits")
        )
        notes = []
        if self.map.layout_.blocks_per_cell > 1:
            notes.append(f"{self.map.layout_.blocks_per_cell} blocks per cell")
        if telemetry.preemptions:
            notes.append(plural(telemetry.preemptions, "preemption"))
        self.set_note(" · ".join(notes))
        counts = self.state.block_counts
        listed = ", ".join(f"{counts[kind]:,} {name}" for kind, name in KIND_NAMES.items())
        self.describe(
            f"{plural(total, 'block')}: {listed}. {hits} of prompt tokens were found in the prefix cache. "
            f"{plural(telemetry.preemptions, 'preemption')}."
        )
