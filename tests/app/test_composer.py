"""The composer: grows, sends on Enter, stops on Escape, and leaves an input method's keys alone."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QEvent, QMimeData, Qt, QUrl
from PySide6.QtGui import QInputMethodEvent, QKeyEvent
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.chat.composer import MAX_LINES, Composer
from app.theme import load_theme


@pytest.fixture
def composer(qtbot: QtBot) -> Composer:
    result = Composer(load_theme("light"))
    qtbot.addWidget(result)
    result.resize(600, 100)
    result.show()
    qtbot.waitExposed(result)
    return result


def test_enter_sends_and_does_not_clear(composer: Composer, qtbot: QtBot) -> None:
    qtbot.keyClicks(composer.text_edit, "  Hello ")
    with qtbot.waitSignal(composer.submitted) as sent:
        qtbot.keyClick(composer.text_edit, Qt.Key.Key_Return)
    assert sent.args == ["Hello"]
    assert composer.text == "  Hello "


def test_shift_enter_breaks_the_line(composer: Composer, qtbot: QtBot) -> None:
    qtbot.keyClicks(composer.text_edit, "a")
    with qtbot.assertNotEmitted(composer.submitted):
        qtbot.keyClick(composer.text_edit, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    qtbot.keyClicks(composer.text_edit, "b")
    assert composer.text == "a\nb"


def test_nothing_is_sent_from_an_empty_field(composer: Composer, qtbot: QtBot) -> None:
    composer.set_text("  \n ")
    assert not composer.send_button.isEnabled()
    with qtbot.assertNotEmitted(composer.submitted):
        qtbot.keyClick(composer.text_edit, Qt.Key.Key_Return)


def test_it_grows_with_the_text_up_to_a_limit_and_shrinks_again(composer: Composer) -> None:
    one = composer.text_edit.height()
    composer.set_text("a\nb\nc")
    three = composer.text_edit.height()
    composer.set_text("\n".join("x" * (MAX_LINES + 20)))
    most = composer.text_edit.height()
    assert one < three < most
    composer.set_text("\n".join("x" * 200))
    assert composer.text_edit.height() == most
    composer.clear()
    assert composer.text_edit.height() == one


def test_a_long_line_wraps_and_counts(composer: Composer) -> None:
    one = composer.text_edit.height()
    composer.set_text("word " * 60)
    assert composer.text_edit.height() > one


def test_while_generating_the_button_stops_and_so_does_escape(composer: Composer, qtbot: QtBot) -> None:
    composer.set_text("next question")
    composer.set_generating(True)
    assert composer.send_button.accessibleName() == "Stop the answer"
    with qtbot.waitSignal(composer.stop_requested):
        composer.send_button.click()
    with qtbot.waitSignal(composer.stop_requested):
        qtbot.keyClick(composer.text_edit, Qt.Key.Key_Escape)
    with qtbot.assertNotEmitted(composer.submitted):
        qtbot.keyClick(composer.text_edit, Qt.Key.Key_Return)
    composer.set_generating(False)
    assert composer.send_button.accessibleName() == "Send"
    assert composer.text == "next question"


def test_escape_does_nothing_when_there_is_nothing_to_stop(composer: Composer, qtbot: QtBot) -> None:
    with qtbot.assertNotEmitted(composer.stop_requested):
        qtbot.keyClick(composer.text_edit, Qt.Key.Key_Escape)


def test_enter_in_an_input_method_composition_does_not_send(composer: Composer, qtbot: QtBot) -> None:
    composer.set_text("你好")
    QApplication.sendEvent(composer.text_edit, QInputMethodEvent("shijie", []))
    with qtbot.assertNotEmitted(composer.submitted):
        qtbot.keyClick(composer.text_edit, Qt.Key.Key_Return)
    commit = QInputMethodEvent("", [])
    commit.setCommitString("世界")
    QApplication.sendEvent(composer.text_edit, commit)
    assert "世界" in composer.text
    with qtbot.waitSignal(composer.submitted):
        qtbot.keyClick(composer.text_edit, Qt.Key.Key_Return)


def test_pasting_takes_the_text_and_nothing_else(composer: Composer) -> None:
    data = QMimeData()
    data.setHtml("<h1>big</h1>")
    data.setText("big\nplain")
    composer.text_edit.insertFromMimeData(data)
    assert composer.text == "big\nplain"
    files = QMimeData()
    files.setUrls([QUrl("file:///tmp/x")])
    composer.clear()
    composer.text_edit.insertFromMimeData(files)
    assert "<" not in composer.text


def test_it_says_why_nothing_can_be_sent_but_lets_one_write(composer: Composer, qtbot: QtBot) -> None:
    composer.set_unready("No model is loaded. Choose one first.")
    qtbot.keyClicks(composer.text_edit, "draft")
    assert composer.text == "draft"
    assert not composer.send_button.isEnabled()
    assert composer.hint.text() == "No model is loaded. Choose one first."
    composer.set_unready("")
    assert composer.send_button.isEnabled()


@pytest.mark.parametrize(("used", "tone"), [(100, ""), (7800, "warning"), (9000, "danger")])
def test_the_counter_warns_before_the_context_is_full(composer: Composer, used: int, tone: str) -> None:
    composer.set_context_usage(used, 8192)
    assert composer.counter.isVisible()
    assert composer.counter.text().endswith("/ 8.2k")
    assert composer.counter.property("tone") == (tone or None) or composer.counter.property("tone") == tone
    composer.set_context_usage(None, 8192)
    assert not composer.counter.isVisible()


def test_filling_in_a_prompt_can_be_undone(composer: Composer) -> None:
    composer.set_text("my own words")
    composer.set_text("an example")
    composer.text_edit.undo()
    assert composer.text == "my own words"


def test_with_nothing_to_redo_the_redo_keys_are_left_to_the_window(composer: Composer) -> None:
    def claims() -> bool:
        event = QKeyEvent(
            QEvent.Type.ShortcutOverride,
            Qt.Key.Key_Z,
            Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier,
        )
        event.ignore()
        QApplication.sendEvent(composer.text_edit, event)
        return event.isAccepted()

    assert not claims()
    composer.set_text("words")
    composer.text_edit.undo()
    assert claims()
