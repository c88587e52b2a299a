"""One message: its figures in words, its actions, and editing in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs
from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QDesktopServices, QGuiApplication
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.chat.figures import figures, figures_in_full, format_ms, format_rate, status_note
from app.chat.markdown import ProseBlock, parse_markdown
from app.chat.message_body import MessageBody
from app.chat.message_widget import MessageWidget
from app.chat.prose_view import ProseView, open_link
from app.chat.text_style import text_style
from app.state.generation import _Pace
from app.state.records import MessageView, RunRecord
from app.theme import load_theme
from tests.app.chat_scene import ChatScene


@pytest.fixture
def scene(qapp: object, tmp_path: Path) -> Iterator[ChatScene]:
    result = ChatScene(tmp_path, with_model=False)
    yield result
    result.close()


@pytest.fixture
def widget(qtbot: QtBot) -> MessageWidget:
    window = QWidget()
    qtbot.addWidget(window)
    window.resize(800, 900)
    result = MessageWidget(window)
    window.show()
    result.window_of_test = window  # type: ignore[attr-defined]  # keeps it alive
    return result


def show(widget: MessageWidget, message: MessageView, can_generate: bool = True) -> int:
    widget.set_message(message, text_style(load_theme("light")), 700, can_generate)
    height = widget.layout_for(700)
    widget.resize(700, height)
    widget.show()
    return height


def run_of(scene: ChatScene, **changes: object) -> RunRecord:
    run = scene.session([("user", "q"), ("assistant", "a")], **changes).messages[1].run
    assert run is not None
    return run


def test_latencies_and_rates_have_three_figures() -> None:
    assert [format_ms(v) for v in (0.42, 9.96, 84.2, 999.7, 1350, 61_000)] == [
        "0.4 ms",
        "10 ms",
        "84 ms",
        "1.00 s",
        "1.35 s",
        "61.0 s",
    ]
    assert [format_rate(v) for v in (3.21, 99.96, 1234.5)] == ["3.2 tok/s", "100 tok/s", "1234 tok/s"]


def test_an_answer_shows_its_own_figures(scene: ChatScene) -> None:
    assert figures(run_of(scene)) == ["12.4 tok/s", "TTFT 84 ms", "212 tokens", "96 cached", "ended by itself"]
    full = figures_in_full(run_of(scene, preemptions=2))
    assert "Prompt: 120 tokens, 96 of them from the prefix cache" in full
    assert "Seed: 42" in full
    assert "Preempted: 2 times" in full


def test_an_answer_that_was_drafted_says_how_much_of_the_drafts_was_right(scene: ChatScene) -> None:
    drafted = {"drafted_tokens": 200, "accepted_tokens": 126}
    run = run_of(scene, **drafted)
    assert "draft 63 % accepted" in figures(run)
    assert not any("draft" in part for part in figures(structs.replace(run, status="streaming")))


def test_an_answer_under_way_shows_its_pace() -> None:
    pace = _Pace()
    assert pace.tpot_ms(3, 10.0) is None, "the first tokens, however many come together, have no time between them"
    assert pace.tpot_ms(4, 10.1) is None, "too soon to say"
    assert pace.tpot_ms(8, 10.5) == pytest.approx(100)
    assert pace.tpot_ms(99, 10.6) == pytest.approx(100), "no faster than it can be read"
    assert pace.tpot_ms(43, 12.0) == pytest.approx(50)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finish_reason": "length"}, "reached the token limit"),
        ({"finish_reason": "cancelled"}, "stopped by you"),
        ({"stop_reason": "###\n"}, "ended at “###⏎”"),
        ({"stop_reason": 7}, "ended by token 7"),
    ],
)
def test_the_end_is_told_in_words(scene: ChatScene, changes: dict[str, object], words: str) -> None:
    assert figures(run_of(scene, **changes))[-1] == words


@pytest.mark.parametrize(
    ("changes", "note", "tone"),
    [
        ({"status": "failed", "error": "Out of memory."}, "Out of memory.", "danger"),
        ({"status": "interrupted", "error": None}, "Interrupted: Kvasir was closed", "warning"),
        ({"status": "interrupted", "error": "The model was unloaded."}, "The model was unloaded.", "warning"),
        ({"dropped_messages": 3}, "3 oldest messages were left out", "warning"),
        ({"dropped_messages": 1}, "The oldest message was left out", "warning"),
        ({}, "", ""),
    ],
)
def test_what_went_wrong_is_said_in_a_sentence(
    scene: ChatScene, changes: dict[str, object], note: str, tone: str
) -> None:
    message = scene.session([("user", "q"), ("assistant", "a")], **changes).messages[1]
    text, found_tone = status_note(message)
    assert note in text
    assert bool(text) == bool(note)
    assert found_tone == tone


def test_a_question_can_be_edited_and_an_answer_regenerated(scene: ChatScene, widget: MessageWidget) -> None:
    session = scene.session([("user", "q"), ("assistant", "a")])
    show(widget, session.messages[0])
    assert widget.footer.edit.isVisible()
    assert not widget.footer.regenerate.isVisible()
    show(widget, session.messages[1])
    assert widget.footer.regenerate.isVisible()
    assert not widget.footer.edit.isVisible()
    assert widget.footer.sibling_text == "" or not widget.footer.previous.isVisible()


def test_nothing_can_be_changed_while_an_answer_is_written(scene: ChatScene, widget: MessageWidget) -> None:
    session = scene.session([("user", "q"), ("assistant", "a")])
    show(widget, session.messages[1], can_generate=False)
    assert not widget.footer.regenerate.isEnabled()
    assert not widget.footer.delete.isEnabled()
    assert widget.footer.copy.isEnabled()
    widget.set_can_generate(True)
    assert widget.footer.regenerate.isEnabled()


def test_copy_takes_the_markdown_as_it_was_written(scene: ChatScene, widget: MessageWidget) -> None:
    text = "**bold**\n\n```py\nx\n```"
    show(widget, scene.session([("user", "q"), ("assistant", text)]).messages[1])
    widget.footer.copy.click()
    assert QGuiApplication.clipboard().text() == text


def test_editing_in_place_sends_on_enter_and_leaves_on_escape(
    scene: ChatScene, widget: MessageWidget, qtbot: QtBot
) -> None:
    message = scene.session([("user", "What is 1 + 1?"), ("assistant", "2")]).messages[0]
    show(widget, message)
    widget.footer.edit.click()
    assert widget.editor is not None
    assert widget.is_editing
    assert widget.editor.text_edit.toPlainText() == "What is 1 + 1?"
    qtbot.keyClick(widget.editor.text_edit, Qt.Key.Key_Escape)
    assert not widget.is_editing
    widget.begin_edit()
    widget.editor.text_edit.setPlainText("   ")
    assert not widget.editor.send_button.isEnabled()
    widget.editor.text_edit.setPlainText("What is 2 + 2?")
    with qtbot.waitSignal(widget.edit_submitted) as sent:
        qtbot.keyClick(widget.editor.text_edit, Qt.Key.Key_Return)
    assert sent.args == [message.id, "What is 2 + 2?"]
    assert widget.is_editing, "whoever takes the question ends the edit"
    widget.end_edit()
    assert not widget.is_editing


def test_a_reused_widget_shows_nothing_of_the_message_before(scene: ChatScene, widget: MessageWidget) -> None:
    long = scene.session(
        [("user", "q"), ("assistant", "# T\n\n```py\nx\n```\n\n|a|\n|-|\n|1|\n\nend")], status="failed"
    )
    short = scene.session([("user", "q"), ("assistant", "short")])
    alone = show(widget, short.messages[1])
    show(widget, long.messages[1])
    assert widget.note_text
    assert show(widget, short.messages[1]) == alone
    assert widget.note_text == ""
    assert [view.isVisible() for view in widget.body.views] == [True]


def test_everything_that_takes_the_keyboard_has_a_name(scene: ChatScene, widget: MessageWidget) -> None:
    show(widget, scene.session([("user", "q"), ("assistant", "Hi\n\n```py\nx\n```\n\n|a|\n|-|\n|1|")]).messages[1])
    stops = widget.focus_stops()
    assert len(stops) >= 6
    assert all(stop.accessibleName() for stop in stops)


def test_only_the_paragraphs_that_changed_are_written_again(qtbot: QtBot) -> None:
    view = ProseView()
    qtbot.addWidget(view)
    style = text_style(load_theme("light"))

    def blocks(text: str) -> list[ProseBlock]:
        return [block for block in parse_markdown(text) if isinstance(block, ProseBlock)]

    text = "\n\n".join(f"Paragraph {n}." for n in range(200))
    assert view.set_blocks(blocks(text), style) == 200
    assert view.set_blocks(blocks(text + " More"), style) == 1
    assert view.set_blocks(blocks(text + " More"), style) == 0
    assert view.set_blocks(blocks("Paragraph 0."), style) == 0
    assert view.toPlainText() == "Paragraph 0."


def test_links_open_outside_and_only_harmless_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def open_url(url: QUrl) -> bool:
        opened.append(url.toString())
        return True

    monkeypatch.setattr(QDesktopServices, "openUrl", open_url)
    assert open_link(QUrl("https://example.org"))
    assert not open_link(QUrl("file:///etc/passwd"))
    assert not open_link(QUrl("javascript:alert(1)"))
    assert opened == ["https://example.org"]


def test_a_very_long_run_of_prose_is_split_without_a_trace(qtbot: QtBot) -> None:
    """Two widgets one below the other look like one: the same gap, the same lines."""
    style = text_style(load_theme("light"))
    blocks = parse_markdown("\n\n".join(["word " * 40] * 100))
    body = MessageBody()
    qtbot.addWidget(body)
    body.set_blocks(blocks, style, 600, shows_caret=False)
    assert len(body.views) > 1
    whole = ProseView()
    qtbot.addWidget(whole)
    whole.set_blocks([block for block in blocks if isinstance(block, ProseBlock)], style)
    assert body.layout_for(600) == whole.height_for(600)


def test_clicking_elsewhere_takes_the_selection_away(qtbot: QtBot) -> None:
    window = QWidget()
    qtbot.addWidget(window)
    style = text_style(load_theme("light"))
    views = [ProseView(window), ProseView(window)]
    for number, view in enumerate(views):
        view.set_blocks([block for block in parse_markdown("some text") if isinstance(block, ProseBlock)], style)
        view.setGeometry(0, 40 * number, 200, 30)
    window.show()
    window.activateWindow()
    views[0].setFocus()
    qtbot.waitUntil(views[0].hasFocus)
    views[0].selectAll()
    views[1].setFocus(Qt.FocusReason.TabFocusReason)
    assert views[0].textCursor().hasSelection()
    views[0].setFocus()
    views[1].setFocus(Qt.FocusReason.MouseFocusReason)
    assert not views[0].textCursor().hasSelection()
