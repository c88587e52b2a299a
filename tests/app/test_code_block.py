"""Code blocks: colours, copying, and work bounded by what is new."""

from __future__ import annotations

import pytest
from PySide6.QtGui import QFont, QGuiApplication
from pytestqt.qtbot import QtBot

from app.chat import highlight
from app.chat.code_block import CodeView
from app.chat.highlight import lexer_for
from app.chat.markdown import CodeBlock
from app.chat.text_style import TextStyle, text_style
from app.theme import load_theme


class _ShownView(CodeView):
    """A code view that is always given the light theme."""

    def show_code(self, language: str, text: str, closed: bool = True) -> None:
        self.set_block(CodeBlock(language, text, closed=closed), text_style(load_theme("light")))

    def wait_for_colours(self, qtbot: QtBot) -> None:
        qtbot.waitUntil(lambda: not self.is_highlighting, timeout=10_000)


@pytest.fixture
def view(qtbot: QtBot) -> _ShownView:
    result = _ShownView()
    qtbot.addWidget(result)
    return result


def colours(view: _ShownView, line: int) -> set[str]:
    layout = view.text_edit.document().findBlockByNumber(line).layout()
    return {found.format.foreground().color().name() for found in layout.formats()}  # type: ignore[attr-defined]


def test_code_is_coloured_and_labelled_with_its_language(view: _ShownView, qtbot: QtBot) -> None:
    view.show_code("python", "def f():\n    return 'x'  # why")
    view.wait_for_colours(qtbot)
    assert view.language_label == "Python"
    assert len(colours(view, 0)) >= 2
    assert len(colours(view, 1)) >= 3


def test_an_unknown_language_is_shown_plain_under_its_own_name(view: _ShownView) -> None:
    assert lexer_for("no-such-language") is None
    view.show_code("no-such-language", "x = 1")
    assert view.language_label == "no-such-language"
    assert not colours(view, 0)
    assert view.text_edit.toPlainText() == "x = 1"


def test_copy_puts_the_code_without_its_fence_on_the_clipboard(view: _ShownView) -> None:
    view.show_code("python", "x = 1\n\ty = '中😀'")
    view.copy_button.click()
    assert QGuiApplication.clipboard().text() == "x = 1\n\ty = '中😀'"
    assert view.copy_button.text() == "Copied"
    assert view.copy_button.accessibleName() == "Copy the Python code"


def test_growing_code_is_appended_and_keeps_the_selection(view: _ShownView, qtbot: QtBot) -> None:
    view.show_code("python", "first = 1\nsec", closed=False)
    cursor = view.text_edit.textCursor()
    cursor.setPosition(5, cursor.MoveMode.KeepAnchor)
    view.text_edit.setTextCursor(cursor)
    view.show_code("python", "first = 1\nsecond = 'two'", closed=False)
    assert view.text_edit.toPlainText() == "first = 1\nsecond = 'two'"
    assert view.text_edit.textCursor().selectedText() == "first"
    view.wait_for_colours(qtbot)
    assert len(colours(view, 1)) >= 2


def test_a_reused_view_shows_nothing_of_the_code_before(view: _ShownView, qtbot: QtBot) -> None:
    view.show_code("python", "def f():\n    pass")
    view.wait_for_colours(qtbot)
    view.show_code("", "def f():\n    pass")
    assert not colours(view, 0)


def test_colours_are_at_the_right_place_behind_characters_of_two_units(view: _ShownView, qtbot: QtBot) -> None:
    view.show_code("python", "x = '😀😀' # c")
    view.wait_for_colours(qtbot)
    text = view.text_edit.document().firstBlock().text()
    layout = view.text_edit.document().firstBlock().layout()
    comment = next(f for f in layout.formats() if f.format.fontItalic())  # type: ignore[attr-defined]
    in_units = text.encode("utf-16-le")
    assert in_units[comment.start * 2 : (comment.start + comment.length) * 2].decode("utf-16-le") == "# c"


def test_only_the_end_of_long_growing_code_is_lexed_again(view: _ShownView, monkeypatch: pytest.MonkeyPatch) -> None:
    lexed: list[int] = []
    real = highlight._lex_lines

    def counting(lexer, text, first_line):
        lexed.append(len(text))
        return real(lexer, text, first_line)

    monkeypatch.setattr(highlight, "_lex_lines", counting)
    code = "".join(f"value_{n} = {n}  # number\n" for n in range(2000))
    view.show_code("python", code, closed=False)
    view.show_code("python", code + "x = 1", closed=False)
    assert max(lexed) <= highlight.WINDOW
    view.show_code("python", code + "x = 1", closed=True)
    assert lexed[-1] == len(code) + 5


def test_long_code_is_coloured_in_slices_and_in_the_end_completely(view: _ShownView, qtbot: QtBot) -> None:
    code = "\n".join(f"value_{n} = 'text'  # number" for n in range(3000))
    view.show_code("python", code)
    assert view.is_highlighting
    view.wait_for_colours(qtbot)
    assert colours(view, 2999) == colours(view, 0)


def test_height_counts_every_line_and_leaves_room_for_a_scroll_bar_only_if_needed(view: _ShownView) -> None:
    view.show_code("", "a\nb")
    two = view.height_for(400)
    view.show_code("", "a\nb\nc\n\nd")
    five = view.height_for(400)
    view.show_code("", "a\nb" + "x" * 200)
    assert five > two
    assert view.height_for(400) > two
    assert view.height_for(4000) == two


def test_no_line_is_cut_off(view: _ShownView) -> None:
    view.show_code("", "plain\n中文 and 😀\nلغة\nlast")
    view.resize(400, view.height_for(400))
    view.show()
    edit = view.text_edit
    last = edit.document().lastBlock()
    bottom = edit.blockBoundingGeometry(last).translated(edit.contentOffset()).bottom()
    assert bottom <= edit.viewport().height() + 1
    assert edit.verticalScrollBar().maximum() == 0


def test_no_line_is_cut_off_with_a_font_whose_lines_are_no_whole_pixels(view: _ShownView) -> None:
    style = TextStyle(load_theme("light"))
    style.mono.setHintingPreference(QFont.HintingPreference.PreferNoHinting)
    style.mono.setPointSizeF(10.3)
    view.set_block(CodeBlock("", "\n".join(f"line {n}" for n in range(40)), closed=True), style)
    view.resize(400, view.height_for(400))
    view.show()
    edit = view.text_edit
    bottom = edit.blockBoundingGeometry(edit.document().lastBlock()).bottom()
    assert bottom <= edit.viewport().height() + 1
