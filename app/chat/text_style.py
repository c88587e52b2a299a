"""Character and block formats of a theme, made once and shared by every message."""

from __future__ import annotations

import functools
import math

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QFont, QFontMetricsF, QTextBlockFormat, QTextCharFormat, QTextFormat, QTextOption

from app.chat.markdown import ProseBlock, Span
from app.theme import Theme, mix, mono_font, ui_font

INLINE_CODE = int(QTextFormat.Property.UserProperty) + 1
QUOTE_DEPTH = int(QTextFormat.Property.UserProperty) + 2
RULE = int(QTextFormat.Property.UserProperty) + 3

INDENT = 26
QUOTE_INDENT = 16
LINE_HEIGHT = 1.62
_HEADING_SCALE = (1.0, 1.5, 1.28, 1.12, 1.0, 1.0, 1.0)
_FIXED, _MINIMUM = (
    QTextBlockFormat.LineHeightTypes.FixedHeight.value,
    QTextBlockFormat.LineHeightTypes.MinimumHeight.value,
)


class TextStyle:
    """How a theme's prose looks. Sizes are device-independent pixels."""

    def __init__(self, theme: Theme) -> None:
        self.theme = theme
        self.font = ui_font(theme.font_size)
        self.mono = mono_font(theme.font_size - 1)
        self.line_height = round(theme.font_size * LINE_HEIGHT)
        self.inline_code_background = QColor(mix(theme.surface, theme.text, 0.08))
        self.quote_bar = QColor(mix(theme.surface, theme.accent, 0.45))
        self.rule = QColor(theme.border)
        self._char_formats: dict[tuple, QTextCharFormat] = {}
        self._heading_fonts = [ui_font(round(theme.font_size * scale), bold=True) for scale in _HEADING_SCALE]
        digits = QFontMetricsF(self.font)
        self._marker_width = {count: digits.horizontalAdvance("0" * count + ".") for count in range(1, 10)}

    def char_format(self, span: Span, heading: int = 0, quote: int = 0) -> QTextCharFormat:
        key = (span.bold, span.italic, span.strike, span.code, span.href, heading, quote > 0)
        if (known := self._char_formats.get(key)) is not None:
            return known
        result = QTextCharFormat()
        if span.code:
            font = QFont(self.mono)
            if heading:
                font.setPixelSize(self._heading_fonts[heading].pixelSize() - 1)
        else:
            font = QFont(self._heading_fonts[heading] if heading else self.font)
        if span.bold or heading:
            font.setWeight(QFont.Weight.DemiBold)
        font.setItalic(span.italic)
        font.setStrikeOut(span.strike)
        result.setFont(font)
        result.setForeground(QColor(self.theme.text_muted if quote else self.theme.text))
        if span.code:
            result.setProperty(INLINE_CODE, True)
        if span.href:
            result.setAnchor(True)
            result.setAnchorHref(span.href)
            result.setForeground(QColor(self.theme.link))
            result.setFontUnderline(True)
        if len(self._char_formats) < 4096 or not span.href:
            self._char_formats[key] = result
        return result

    def marker_format(self) -> QTextCharFormat:
        result = QTextCharFormat(self.char_format(Span("")))
        result.setForeground(QColor(self.theme.text_muted))
        return result

    def block_format(self, block: ProseBlock, first: bool) -> QTextBlockFormat:
        """The paragraph's margins and line height; `first` is the top of its document."""
        result = QTextBlockFormat()
        left = block.indent * INDENT + block.quote * QUOTE_INDENT
        result.setLeftMargin(left)
        if block.marker:
            hang = INDENT - 6.0
            if block.marker[0].isdigit():
                hang = max(hang, math.ceil(self._marker_width[len(block.marker) - 1]) + 6.0)
                result.setLeftMargin(left + max(0.0, hang - INDENT))
            result.setTextIndent(-hang)
            result.setTabPositions([QTextOption.Tab(hang, QTextOption.TabType.LeftTab)])
        if block.heading:
            size = self._heading_fonts[block.heading].pixelSize()
            result.setTopMargin(0 if first else round(size * 0.7))
            result.setBottomMargin(round(size * 0.4))
            result.setLineHeight(round(size * 1.35), _MINIMUM)
            result.setHeadingLevel(block.heading)
        elif block.rule:
            result.setTopMargin(4)
            result.setBottomMargin(12)
            result.setLineHeight(9, _FIXED)
            result.setProperty(RULE, True)
        else:
            result.setBottomMargin(0 if block.verbatim else 4 if block.tight else 12)
            result.setLineHeight(self.line_height, _MINIMUM)
        if block.quote:
            result.setProperty(QUOTE_DEPTH, block.quote)
            if block.quote and not block.tight:
                result.setBottomMargin(8)
        result.setAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignLeading)
        return result


@functools.lru_cache(maxsize=4)
def text_style(theme: Theme) -> TextStyle:
    return TextStyle(theme)
