"""Syntax colours from Pygments for a text document, within a bounded time at each change."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.styles import get_style_by_name
from pygments.token import _TokenType
from pygments.util import ClassNotFound
from PySide6.QtCore import QTimer
from PySide6.QtGui import QColor, QFont, QSyntaxHighlighter, QTextCharFormat, QTextDocument

from app.theme import Theme

WINDOW = 3000  # characters before the end that a growing text is lexed again from
SLICE_SECONDS = 0.004
MAX_HIGHLIGHTED = 400_000

LineSpans = tuple[tuple[int, int, _TokenType], ...]


@functools.lru_cache(maxsize=64)
def lexer_for(language: str) -> Lexer | None:
    """The lexer for a fence's language word, None where Pygments knows none."""
    if not language:
        return None
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


@functools.lru_cache(maxsize=512)
def _token_format(style_name: str, token_type: _TokenType) -> QTextCharFormat | None:
    style = get_style_by_name(style_name).style_for_token(token_type)
    result = QTextCharFormat()
    if style["color"]:
        result.setForeground(QColor(f"#{style['color']}"))
    if style["bold"]:
        result.setFontWeight(QFont.Weight.DemiBold)
    if style["italic"]:
        result.setFontItalic(True)
    return result if result.propertyCount() else None


class PygmentsHighlighter(QSyntaxHighlighter):
    """Colours a document whose text is set from outside.

    Lexing is done in slices of a few milliseconds: a first one at once, the rest from a
    timer. While a text grows, only its last `WINDOW` characters are lexed again, from a
    line that starts at the margin; `finish` lexes the whole once more.
    """

    def __init__(self, document: QTextDocument) -> None:
        super().__init__(document)
        self._style = "default"
        self._lines: list[LineSpans] = []
        self._pending: Iterator[tuple[int, LineSpans]] | None = None
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self._work)

    @property
    def is_working(self) -> bool:
        return self._pending is not None

    def set_theme(self, theme: Theme) -> None:
        if theme.pygments_style != self._style:
            self._style = theme.pygments_style
            if self._lines:
                self.rehighlight()

    def forget(self) -> None:
        """Drops all that is known, before the document gets another text."""
        self._timer.stop()
        self._pending = None
        self._lines = []

    def update_text(self, text: str, language: str, closed: bool) -> None:
        """Colours `text`, which the document already shows."""
        self._timer.stop()
        self._pending = None
        lexer = lexer_for(language)
        if lexer is None or len(text) > MAX_HIGHLIGHTED:
            return
        start = 0 if closed else _restart_position(text)
        self._pending = _lex_lines(lexer, text[start:], text.count("\n", 0, start))
        self._work()

    def _work(self) -> None:
        if self._pending is None:
            return
        deadline = time.perf_counter() + SLICE_SECONDS
        for number, spans in self._pending:
            self._set_line(number, spans)
            if time.perf_counter() > deadline:
                self._timer.start(0)
                return
        self._pending = None

    def _set_line(self, number: int, spans: LineSpans) -> None:
        while len(self._lines) <= number:
            self._lines.append(())
        if self._lines[number] != spans:
            self._lines[number] = spans
            block = self.document().findBlockByNumber(number)
            if block.isValid():
                self.rehighlightBlock(block)

    def highlightBlock(self, text: str) -> None:
        number = self.currentBlock().blockNumber()
        if number >= len(self._lines):
            return
        for start, length, token_type in self._lines[number]:
            if (wanted := _token_format(self._style, token_type)) is not None:
                self.setFormat(start, length, wanted)


def _restart_position(text: str) -> int:
    """Where to lex a growing text from: a line at the margin some way before its end."""
    if len(text) <= WINDOW:
        return 0
    position = len(text) - WINDOW
    while (position := text.find("\n", position) + 1) > 0:
        if position < len(text) and not text[position].isspace():
            return position
    return text.rfind("\n", 0, len(text) - WINDOW) + 1


def _lex_lines(lexer: Lexer, text: str, first_line: int) -> Iterator[tuple[int, LineSpans]]:
    """Yields (line number, spans) for each line; columns count UTF-16 units, as Qt does."""
    number, column = first_line, 0
    spans: list[tuple[int, int, _TokenType]] = []
    for token_type, value in lexer.get_tokens(text):
        for index, piece in enumerate(value.split("\n")):
            if index:
                yield number, tuple(spans)
                number, column, spans = number + 1, 0, []
            if piece:
                length = len(piece) if piece.isascii() else len(piece.encode("utf-16-le")) // 2
                spans.append((column, length, token_type))
                column += length
    yield number, tuple(spans)
