"""Icons of the chat, drawn once: a chat has the same few on every message."""

from __future__ import annotations

import functools

from PySide6.QtGui import QIcon

from app.theme import ICON_SIZE, icon


@functools.lru_cache(maxsize=256)
def cached_icon(name: str, colour: str, disabled: str | None = None, size: int = ICON_SIZE) -> QIcon:
    """`app.theme.icon`, remembered. Needs a running application."""
    return icon(name, colour, disabled, size)
