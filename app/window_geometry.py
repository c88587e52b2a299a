"""Where the window stands: restored as it was, pulled back when that place is no longer on a screen."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QPoint, QRect, QSize
from PySide6.QtGui import QGuiApplication

DEFAULT_SIZE = QSize(1440, 900)
MINIMUM_SIZE = QSize(860, 560)
_TITLE_BAR = 32


def fit_on_screens(wanted: QRect, screens: Sequence[QRect]) -> QRect:
    """The nearest rectangle to `wanted` that lies within the screen it overlaps most (the first, if none).

    `screens` are the available areas, in device-independent pixels.
    """
    if not screens:
        return wanted

    def overlap(screen: QRect) -> int:
        common = screen.intersected(wanted)
        return max(0, common.width()) * max(0, common.height())

    screen = max(screens, key=overlap)  # the first of equals
    size = wanted.size().expandedTo(MINIMUM_SIZE).boundedTo(screen.size())
    left = min(max(wanted.x(), screen.left()), screen.left() + screen.width() - size.width())
    top = min(max(wanted.y(), screen.top()), screen.top() + screen.height() - size.height())
    return QRect(QPoint(left, top), size)


def first_rect(screen: QRect) -> QRect:
    """Where a window that was never open before stands: centred, with room around it on a large screen."""
    room = QSize(screen.width(), screen.height() - _TITLE_BAR)
    size = DEFAULT_SIZE.boundedTo(room)
    left = screen.left() + (screen.width() - size.width()) // 2
    top = screen.top() + max(_TITLE_BAR, (screen.height() - size.height()) // 2)
    return QRect(QPoint(left, top), size)


def available_screens() -> list[QRect]:
    """The available areas of all screens, the primary one first."""
    primary = QGuiApplication.primaryScreen()
    screens = sorted(QGuiApplication.screens(), key=lambda screen: screen is not primary)
    return [screen.availableGeometry() for screen in screens]


def start_rect(saved: tuple[int, int, int, int] | None) -> QRect:
    screens = available_screens()
    if saved is None:
        return first_rect(screens[0]) if screens else QRect(QPoint(0, 0), DEFAULT_SIZE)
    return fit_on_screens(QRect(*saved), screens)
