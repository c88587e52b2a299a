"""Markdown text to a flat list of blocks, whole or growing.

Parsed by markdown-it-py as CommonMark with tables and strike-through. Raw HTML stays
text, images become links to their source, and nothing is ever loaded from anywhere.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

from markdown_it import MarkdownIt
from markdown_it.token import Token

MAX_INDENT = 6
MAX_QUOTE = 4
_BULLETS = ("•", "◦")
_TASK = re.compile(r"\[([ xX])\] ")
_URL = re.compile(r"https?://[^\s<>\"'`]+")
_TRAILING_PUNCTUATION = ".,;:!?*_~"
_REFERENCE = re.compile(r"^ {0,3}\[[^\]\n]+\]:", re.M)
_FENCE_OPEN = re.compile(r"(?P<marker>`{3,}(?=[^`\n]*\n)|~{3,})[ \t]*(?P<info>[^\n]*)\n")
# A last line that may still turn into a list, a heading, a rule, a fence or a table row.
_UNDECIDED_LINE = re.compile(r"[ >]*(?:[-*+_=#`~|: ]{1,12}|\d{1,9}[.)]?)$")

Align = Literal["left", "center", "right"]


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A run of text in one manner. `href` is empty where the text is no link."""

    text: str
    bold: bool = False
    italic: bool = False
    strike: bool = False
    code: bool = False
    href: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ProseBlock:
    """One paragraph, heading, list item line or rule.

    `indent` counts the lists and `quote` the quotations around it, `marker` is its list
    marker, `tight` says that the next block of the same list follows closely, `verbatim`
    that spaces and line breaks are the writer's own.
    """

    spans: tuple[Span, ...] = ()
    heading: int = 0
    indent: int = 0
    quote: int = 0
    marker: str = ""
    tight: bool = False
    rule: bool = False
    verbatim: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced or indented code block; `closed` is False while it is still growing."""

    language: str
    text: str
    indent: int = 0
    closed: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class TableBlock:
    """A table: a header row, body rows and one alignment per column."""

    header: tuple[tuple[Span, ...], ...]
    rows: tuple[tuple[tuple[Span, ...], ...], ...]
    align: tuple[Align, ...]
    indent: int = 0


Block = ProseBlock | CodeBlock | TableBlock


def _make_parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 40})
    return parser.enable(["table", "strikethrough"])


_parser = _make_parser()


def parse_markdown(text: str) -> list[Block]:
    """The blocks of a whole text."""
    return _flatten(_parser.parse(text))


def parse_plain(text: str) -> list[Block]:
    """The blocks of a text a person typed: verbatim, except that fenced code becomes a code block."""
    blocks: list[Block] = []
    position = 0
    text = text.replace("\r\n", "\n")
    while opened := _find_fence(text, position):
        marker = opened["marker"]
        closing = re.compile(rf"^ {{0,3}}{marker[0]}{{{len(marker)},}}[ \t]*$", re.M).search(text, opened.end())
        if closing is None:
            break
        _append_plain(blocks, text[position : opened.start()])
        code = text[opened.end() : closing.start()].removesuffix("\n")
        blocks.append(CodeBlock(_language(opened["info"]), code))
        position = closing.end()
    _append_plain(blocks, text[position:])
    return blocks


def _find_fence(text: str, position: int) -> re.Match[str] | None:
    for found in _FENCE_OPEN.finditer(text, position):
        if found.start() == 0 or text[found.start() - 1] == "\n":
            return found
    return None


def _append_plain(blocks: list[Block], text: str) -> None:
    if text.strip():
        blocks.append(ProseBlock(tuple(_linked(Span(text.strip("\n").rstrip()))), verbatim=True))


def plain_text(blocks: Sequence[Block]) -> str:
    """The text of blocks without any markup, one line for each block."""
    lines = []
    for block in blocks:
        if isinstance(block, CodeBlock):
            lines.append(block.text)
        elif isinstance(block, TableBlock):
            lines += ["\t".join(_joined(cell) for cell in row) for row in (block.header, *block.rows)]
        else:
            lines.append(f"{block.marker} {_joined(block.spans)}".strip())
    return "\n".join(lines)


def _joined(spans: Sequence[Span]) -> str:
    return "".join(span.text for span in spans)


class IncrementalMarkdown:
    """Blocks of a text that grows at its end.

    Top-level blocks are committed once another one has begun behind them, since nothing
    that follows can change them; only what comes after the last commit is parsed again.
    An open code fence is not even parsed: its new lines are taken as they are.
    """

    def __init__(self) -> None:
        self._reset("")

    def _reset(self, text: str) -> None:
        self._text = text
        self._committed: list[Block] = []
        self._tail_start = 0
        self._fence: tuple[re.Match[str], re.Pattern[str]] | None = None
        self._fence_scanned = 0

    def update(self, text: str, complete: bool) -> list[Block]:
        """The blocks of `text`. While it is not `complete`, a last line that could still become
        markup is held back and the last code block is not closed."""
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        if not text.startswith(self._text):
            self._reset("")
        self._text = text
        if (block := self._open_fence(complete)) is not None:
            return [*self._committed, block]
        tail = self._parse_tail(complete)  # may commit more blocks
        return [*self._committed, *tail]

    def _open_fence(self, complete: bool) -> CodeBlock | None:
        if self._fence is None:
            return None
        opened, closing = self._fence
        if complete or closing.search(self._text, self._fence_scanned):
            self._fence = None
            return None
        # The last line is not finished and may become the closing fence: look at it again.
        self._fence_scanned = max(self._fence_scanned, self._text.rfind("\n") + 1)
        code = self._text[self._tail_start + opened.end() :]
        return CodeBlock(_language(opened["info"]), _without_undecided_line(code).removesuffix("\n"), closed=False)

    def _parse_tail(self, complete: bool) -> list[Block]:
        tail = self._text[self._tail_start :]
        if not complete:
            tail = _without_undecided_line(tail)
        if complete and self._committed and _REFERENCE.search(self._text):
            # A link's address may be defined far below or above it.
            self._committed, self._tail_start = [], 0
            return parse_markdown(self._text)
        tokens = _parser.parse(tail)
        last = _last_top_level(tokens)
        if last > 0 and not complete:
            token_map = tokens[last].map
            assert token_map is not None
            self._committed += _flatten(tokens[:last])
            self._tail_start += _line_offset(tail, token_map[0])
            tail = self._text[self._tail_start :]
            tokens = tokens[last:]
        if complete or not tokens:
            return _flatten(tokens)
        if tokens[0].type == "fence" and (opened := _FENCE_OPEN.match(tail)):
            marker = opened["marker"]
            closing = re.compile(rf"^ {{0,3}}{marker[0]}{{{len(marker)},}}[ \t]*$", re.M)
            self._fence_scanned = self._tail_start + opened.end()
            self._fence = (opened, closing)
            if (block := self._open_fence(complete)) is not None:
                return [block]
        blocks = _flatten(tokens)
        if blocks and isinstance(blocks[-1], CodeBlock):
            blocks[-1] = dataclasses.replace(blocks[-1], closed=False)
        return blocks


def _without_undecided_line(text: str) -> str:
    start = text.rfind("\n") + 1
    return text[:start] if _UNDECIDED_LINE.match(text, start) else text


def _last_top_level(tokens: Sequence[Token]) -> int:
    for index in range(len(tokens) - 1, 0, -1):
        if tokens[index].level == 0 and tokens[index].nesting >= 0 and tokens[index].map:
            return index
    return 0


def _line_offset(text: str, line: int) -> int:
    offset = 0
    for _ in range(line):
        offset = text.index("\n", offset) + 1
    return offset


def _language(info: str) -> str:
    words = info.strip().split(maxsplit=1)
    return words[0].strip("{}.").lower() if words else ""


class _Lists:
    """The lists around the current token, outermost first: the next number, or None for bullets."""

    def __init__(self) -> None:
        self.numbers: list[int | None] = []
        self.marker = ""

    def begin_item(self) -> None:
        number = self.numbers[-1]
        if number is None:
            bullets = sum(n is None for n in self.numbers)
            self.marker = _BULLETS[(bullets - 1) % len(_BULLETS)]
        else:
            self.marker = f"{number}."
            self.numbers[-1] = number + 1

    @property
    def indent(self) -> int:
        return min(len(self.numbers), MAX_INDENT)


def _flatten(tokens: Sequence[Token]) -> list[Block]:
    blocks: list[Block] = []
    lists = _Lists()
    quote = heading = 0
    tight = False
    index = 0
    while index < len(tokens):
        token = tokens[index]
        match token.type:
            case "bullet_list_open":
                lists.numbers.append(None)
            case "ordered_list_open":
                start = token.attrGet("start")
                lists.numbers.append(int(start) if start is not None else 1)
            case "bullet_list_close" | "ordered_list_close":
                lists.numbers.pop()
                if not lists.numbers and blocks and isinstance(blocks[-1], ProseBlock):
                    blocks[-1] = dataclasses.replace(blocks[-1], tight=False)
            case "list_item_open":
                lists.begin_item()
            case "list_item_close":
                _flush_marker(blocks, lists, quote)
            case "blockquote_open":
                quote += 1
            case "blockquote_close":
                quote -= 1
            case "heading_open":
                heading = int(token.tag[1])
            case "heading_close":
                heading = 0
            case "paragraph_open":
                tight = token.hidden
            case "inline":
                spans, marker = _inline(token.children or []), lists.marker
                lists.marker = ""
                if marker and spans and (task := _TASK.match(spans[0].text)):
                    marker = "☐" if task[1] == " " else "☑"
                    spans = (dataclasses.replace(spans[0], text=spans[0].text[task.end() :]), *spans[1:])
                block = ProseBlock(
                    spans, heading, lists.indent, min(quote, MAX_QUOTE), marker, tight=tight and bool(lists.numbers)
                )
                blocks.append(block)
            case "hr":
                blocks.append(ProseBlock(rule=True, indent=lists.indent, quote=min(quote, MAX_QUOTE)))
            case "fence" | "code_block":
                _flush_marker(blocks, lists, quote)
                blocks.append(CodeBlock(_language(token.info), token.content.removesuffix("\n"), lists.indent))
            case "table_open":
                _flush_marker(blocks, lists, quote)
                end = next(i for i in range(index, len(tokens)) if tokens[i].type == "table_close")
                blocks.append(_table(tokens[index:end], lists.indent))
                index = end
        index += 1
    return blocks


def _flush_marker(blocks: list[Block], lists: _Lists, quote: int) -> None:
    if lists.marker:
        blocks.append(ProseBlock(indent=lists.indent, quote=quote, marker=lists.marker, tight=True))
        lists.marker = ""


def _table(tokens: Sequence[Token], indent: int) -> TableBlock:
    rows: list[list[tuple[Span, ...]]] = []
    align: list[Align] = []
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "th_open":
            style = str(token.attrGet("style") or "")
            align.append("center" if "center" in style else "right" if "right" in style else "left")
        elif token.type == "inline":
            rows[-1].append(_inline(token.children or []))
    return TableBlock(tuple(rows[0]), tuple(map(tuple, rows[1:])), tuple(align), indent)


def _inline(children: Sequence[Token]) -> tuple[Span, ...]:
    spans: list[Span] = []
    bold = italic = strike = 0
    href = ""
    for token in children:
        match token.type:
            case "strong_open" | "strong_close":
                bold += token.nesting
            case "em_open" | "em_close":
                italic += token.nesting
            case "s_open" | "s_close":
                strike += token.nesting
            case "link_open":
                href = str(token.attrGet("href") or "")
            case "link_close":
                href = ""
            case "softbreak" | "hardbreak":
                # A model's own line breaks (verse, addresses) are kept.
                spans.append(Span("\n", bool(bold), bool(italic), bool(strike)))
            case "image":
                alt = token.content or "image"
                spans.append(Span(f"[{alt}]", bool(bold), bool(italic), href=str(token.attrGet("src") or "")))
            case _ if token.content:
                code = token.type == "code_inline"
                span = Span(token.content, bool(bold), bool(italic), bool(strike), code, href)
                spans += [span] if code or href else _linked(span)
    return _merged(spans)


def _linked(span: Span) -> list[Span]:
    """Splits a text at the bare addresses in it."""
    result: list[Span] = []
    position = 0
    for found in _URL.finditer(span.text):
        url = found[0].rstrip(_TRAILING_PUNCTUATION)
        while url.endswith(")") and url.count("(") < url.count(")"):
            url = url[:-1].rstrip(_TRAILING_PUNCTUATION)
        end = found.start() + len(url)
        if found.start() > position:
            result.append(dataclasses.replace(span, text=span.text[position : found.start()]))
        result.append(dataclasses.replace(span, text=url, href=url))
        position = end
    if position < len(span.text):
        result.append(dataclasses.replace(span, text=span.text[position:]))
    return result


def _merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    result: list[Span] = []
    for span in spans:
        if result and dataclasses.replace(result[-1], text="") == dataclasses.replace(span, text=""):
            result[-1] = dataclasses.replace(span, text=result[-1].text + span.text)
        else:
            result.append(span)
    return tuple(result)
