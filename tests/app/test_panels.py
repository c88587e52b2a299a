"""The small parts of the panels, one by one."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import QEvent, Qt
from PySide6.QtWidgets import QApplication, QWidget

from app.panels.chat_files import file_name, with_suffix
from app.panels.command_palette import CommandPalette, PaletteEntry
from app.panels.fields import SeedField, stops_to_text, text_to_stops
from app.panels.header import model_title
from app.panels.parameter_row import PARAMETER_STYLES, ParameterRow, rounded
from app.panels.sidebar_list import ChatRow, HeaderRow, day_group, grouped_rows
from app.panels.tabs import TabStrip
from app.panels.toast import Toast
from app.panels.widgets import ScrolledColumn, label
from app.state.records import ConversationSummary
from app.theme import DEFAULT_FONT_SIZE, ThemeManager
from app.units import short_count
from engine.protocol import PARAMETER_RANGES, SamplingParams

NUMERIC = sorted(PARAMETER_STYLES)


@pytest.mark.parametrize("name", NUMERIC)
def test_a_slider_reaches_both_ends_of_its_range_and_finds_every_value_again(name: str) -> None:
    allowed, style = PARAMETER_RANGES[name], PARAMETER_STYLES[name]
    assert rounded(style.scale.to_value(0.0), style.decimals, allowed) == allowed.low
    assert rounded(style.scale.to_value(1.0), style.decimals, allowed) == allowed.high
    for step in range(101):
        value = style.scale.to_value(step / 100)
        assert allowed.low <= value <= allowed.high + 1e-6
        assert style.scale.to_value(style.scale.to_travel(value)) == pytest.approx(value, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", NUMERIC)
def test_moving_the_slider_right_never_lowers_the_value(name: str) -> None:
    style, allowed = PARAMETER_STYLES[name], PARAMETER_RANGES[name]
    values = [rounded(style.scale.to_value(step / 1000), style.decimals, allowed) for step in range(1001)]
    assert values == sorted(values)


@pytest.mark.parametrize("name", NUMERIC)
def test_no_value_a_row_can_take_is_refused_by_the_engine(qtbot, name: str) -> None:
    row = ParameterRow(name)
    qtbot.addWidget(row)
    told: list[float] = []
    row.edited.connect(told.append)
    for position in (0, 1, 250, 500, 750, 999, 1000):
        row.slider.setValue(position)
    row.box.setValue(1e12)
    row.box.setValue(-1e12)
    assert told
    for value in told:
        others = {"min_tokens": 0} if name == "max_tokens" else {"max_tokens": None}
        SamplingParams(**{**others, name: value})


@pytest.mark.parametrize(
    ("name", "keys"), [("temperature", "9"), ("top_p", "2"), ("presence_penalty", "-3"), ("top_p", "x")]
)
def test_a_value_out_of_range_cannot_be_typed(qtbot, name: str, keys: str) -> None:
    row = ParameterRow(name)
    qtbot.addWidget(row)
    allowed = PARAMETER_RANGES[name]
    row.box.selectAll()
    qtbot.keyClicks(row.box, keys)
    qtbot.keyClick(row.box, Qt.Key.Key_Return)
    assert allowed.low <= row.box.value() <= allowed.high
    assert row.box.text() != keys


def test_box_and_slider_follow_each_other_and_tell_once(qtbot) -> None:
    row = ParameterRow("temperature")
    qtbot.addWidget(row)
    told: list[float] = []
    row.edited.connect(told.append)
    row.box.setValue(1.25)
    assert row.slider.value() == 500, "the temperature's slider is quadratic: 1.25 of 5 is its middle"
    row.slider.setValue(1000)
    assert row.box.value() == 5.0
    row.set_value(0.7)
    assert told == [1.25, 5.0], "what was set from outside is not told back"


def test_a_whole_parameter_stays_whole(qtbot) -> None:
    row = ParameterRow("top_k")
    qtbot.addWidget(row)
    told: list[object] = []
    row.edited.connect(told.append)
    row.slider.setValue(512)
    assert isinstance(told[-1], int)


def test_every_row_explains_itself(qtbot) -> None:
    for name in NUMERIC:
        row = ParameterRow(name)
        qtbot.addWidget(row)
        assert row.help.text() == PARAMETER_RANGES[name].help
        assert row.box.accessibleName()
        assert row.slider.accessibleDescription() == PARAMETER_RANGES[name].help


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("42", 42),
        ("", None),
        ("9223372036854775807", 2**63 - 1),
        ("9223372036854775808", 922337203685477580),
        ("-1", 1),
        ("1e3", 13),
    ],
)
def test_a_seed_takes_what_fits_and_no_other_key(qtbot, typed: str, value: int | None) -> None:
    field = SeedField(ThemeManager("light"))
    qtbot.addWidget(field)
    told: list[object] = []
    field.edited.connect(told.append)
    qtbot.keyClicks(field.line, typed)
    qtbot.keyClick(field.line, Qt.Key.Key_Return)
    assert field.value == value
    assert told == ([] if value is None else [value])


@given(
    st.lists(
        st.text(min_size=1).filter(lambda text: not set(text) & set("\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")),
        unique=True,
    )
)
def test_stop_strings_survive_being_shown(stops: list[str]) -> None:
    assert text_to_stops(stops_to_text(tuple(stops))) == tuple(stops)


def test_stop_strings_are_written_one_a_line() -> None:
    assert text_to_stops("END\n\n\\n\\n\nEND\n\\\\n") == ("END", "\n\n", "\\n")
    assert stops_to_text(("\n", "a b")) == "\\n\na b"


def test_conversations_stand_under_their_day() -> None:
    now = datetime.datetime(2026, 3, 10, 0, 30)
    at = lambda *when: datetime.datetime(*when).timestamp()  # noqa: E731
    assert day_group(at(2026, 3, 10, 0, 5), now) == "Today"
    assert day_group(at(2026, 3, 11, 9, 0), now) == "Today", "a clock that was set back"
    assert day_group(at(2026, 3, 9, 23, 59), now) == "Yesterday"
    assert day_group(at(2026, 3, 3, 12, 0), now) == "Previous 7 days"
    assert day_group(at(2026, 3, 2, 12, 0), now) == "Older"


def test_headings_stand_before_the_first_of_each_group_only() -> None:
    now = datetime.datetime(2026, 3, 10, 12)
    hours = (1, 2, 30, 24 * 20)
    chats = [
        ConversationSummary(str(n), f"chat {n}", (now - datetime.timedelta(hours=hour)).timestamp(), 2)
        for n, hour in enumerate(hours)
    ]
    rows = grouped_rows(chats, now, lambda chat: ChatRow(chat.id, chat.title))
    shape = [row.id if isinstance(row, ChatRow) else row.title for row in rows if isinstance(row, (ChatRow, HeaderRow))]
    assert shape == ["Today", "0", "1", "Yesterday", "2", "Older", "3"]


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("What is a/b?", "What is a b.md"),
        ("Two of…", "Two of.md"),
        ("...", "chat.md"),
        ("CON:\n\x00", "CON.md"),
        ("x" * 200, "x" * 80 + ".md"),
    ],
)
def test_a_title_becomes_a_file_name_every_system_takes(title: str, name: str) -> None:
    assert file_name(title, "md") == name


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("chat", "chat.md"),
        ("chat.md", "chat.md"),
        ("chat.txt", "chat.txt"),
        ("v1.2 notes", "v1.2 notes.md"),
        ("v1.2", "v1.2.md"),
        ("Who? Me.", "Who? Me..md"),
    ],
)
def test_only_what_ends_like_a_files_name_keeps_its_end(typed: str, path: str) -> None:
    assert with_suffix(Path("folder") / typed, "md") == Path("folder") / path


def test_names_and_numbers_are_written_for_people() -> None:
    assert model_title("/models/SmolLM2-135M.Q4_1.gguf") == "SmolLM2-135M.Q4_1"
    assert model_title("C:\\models\\a.gguf") == "a"
    assert model_title("org/name") == "name"
    assert [short_count(n) for n in (999, 134_515_008, 999_999_999, 8_030_261_248)] == ["999", "135 M", "1 B", "8.03 B"]


def test_tabs_speak_of_chats_and_not_of_places(qtbot) -> None:
    strip = TabStrip(ThemeManager("light"))
    qtbot.addWidget(strip)
    for name in "abc":
        strip.add(name, f"chat {name} & more")
    chosen: list[str] = []
    order: list[list[str]] = []
    strip.chosen.connect(chosen.append)
    strip.reordered.connect(order.append)
    strip.bar.setCurrentIndex(2)
    strip.bar.moveTab(0, 2)
    assert set(chosen) == {"c"}
    assert order == [["b", "c", "a"]]
    strip.remove("c")
    strip.choose("a")
    assert (strip.ids, strip.bar.currentIndex(), set(chosen)) == (["b", "a"], 1, {"c"})
    strip.set_dot("a", "#ff0000", pulsing=True)
    assert not strip.bar.tabIcon(1).isNull()
    assert strip.bar.tabText(0) == "chat b && more", "an ampersand is no shortcut"


def test_a_middle_click_closes_a_tab(qtbot) -> None:
    strip = TabStrip(ThemeManager("light"))
    qtbot.addWidget(strip)
    strip.add("a", "first")
    strip.add("b", "second")
    strip.resize(600, 40)
    strip.show()
    closed: list[str] = []
    strip.close_requested.connect(closed.append)
    qtbot.mouseClick(strip.bar, Qt.MouseButton.MiddleButton, pos=strip.bar.tabRect(1).center())
    assert closed == ["b"]


def test_tabs_get_narrow_before_any_is_hidden(qtbot) -> None:
    themes = ThemeManager("light")
    themes.apply()
    strip = TabStrip(themes)
    qtbot.addWidget(strip)
    for name in "abcde":
        strip.add(name, f"What is the number {name} good for?")
    strip.choose("b")
    strip.resize(480, 40)
    strip.show()

    def closable() -> str:
        side = strip.bar.ButtonPosition.RightSide
        shown = [strip.bar.tabButton(index, side) for index in range(strip.bar.count())]
        return "".join(name for name, close in zip(strip.ids, shown, strict=True) if close and close.isVisible())

    def hidden() -> list[str]:
        bar = strip.bar
        return [name for i, name in enumerate(strip.ids) if not bar.rect().contains(bar.tabRect(i).center())]

    assert not hidden() and strip.bar.tabRect(4).right() <= strip.bar.width()
    assert closable() == "b", "the others' titles need the room"
    strip.bar.setCurrentIndex(3)
    assert closable() == "d"
    closed: list[str] = []
    strip.close_requested.connect(closed.append)
    qtbot.mouseClick(strip.bar.tabButton(3, strip.bar.ButtonPosition.RightSide), Qt.MouseButton.LeftButton)
    assert closed == ["d"]
    strip.resize(700, 40)
    assert closable() == "abcde"
    themes.set_font_size(22)
    assert closable() == "d", "larger letters take more room"
    themes.set_font_size(DEFAULT_FONT_SIZE)
    assert closable() == "abcde"
    strip.resize(480, 40)
    strip.remove("d")
    strip.remove("e")
    assert closable() == "abc", "three have room again"
    for name in "fghijk":
        strip.add(name, name)
    strip.choose("k")
    assert hidden() and "k" not in hidden() and closable() == "k"


@pytest.mark.parametrize("wrap", [True, False])
def test_a_scrolled_column_is_as_high_as_its_parts_and_no_higher(qtbot, wrap: bool) -> None:
    scroll = ScrolledColumn(8, 8, 8, 8)
    qtbot.addWidget(scroll)
    text = "Some help that takes more than one line where there is little room. " * 2
    for _ in range(12):
        scroll.column.addWidget(label(text, wrap=wrap))
    for width in (300, 500):
        scroll.resize(width, 200)
        scroll.show()
        size = scroll.column.geometry().size()
        wanted = scroll.column.totalHeightForWidth(size.width()) if wrap else scroll.column.totalMinimumSize().height()
        assert size.height() == wanted > scroll.viewport().height()


def test_the_palette_finds_by_letters_and_runs_on_enter(qtbot) -> None:
    ran: list[str] = []
    host = QWidget()
    host.resize(800, 600)
    qtbot.addWidget(host)
    palette = CommandPalette(host, ThemeManager("light"))
    titles = ("New chat", "Close chat", "Settings")
    palette.set_sources(lambda: [PaletteEntry(title, "", lambda title=title: ran.append(title)) for title in titles])
    host.show()
    palette.open()
    assert palette.model.rowCount() == 3
    qtbot.keyClicks(palette.field, "cha")
    assert palette.model.rowCount() == 2
    qtbot.keyClick(palette.field, Qt.Key.Key_Down)
    qtbot.keyClick(palette.field, Qt.Key.Key_Return)
    assert ran == ["Close chat"]
    assert not palette.isVisible()
    palette.open()
    assert palette.field.text() == "", "it opens empty each time"
    qtbot.keyClicks(palette.field, "zzz")
    qtbot.keyClick(palette.field, Qt.Key.Key_Return)
    assert ran == ["Close chat"], "nothing matches, so nothing runs"
    qtbot.keyClick(palette.field, Qt.Key.Key_Escape)
    assert not palette.isVisible()


def test_a_toast_runs_its_action_once_and_goes_by_itself(qtbot) -> None:
    host = QWidget()
    host.resize(600, 400)
    qtbot.addWidget(host)
    toast = Toast(host, ThemeManager("light"))
    host.show()
    ran: list[int] = []
    toast.say("Deleted", "Undo", lambda: ran.append(1))
    assert host.rect().contains(toast.geometry())
    toast.action_button.click()
    toast.action_button.click()
    assert (ran, toast.isVisible()) == ([1], False)
    toast.say("Gone soon", milliseconds=20)
    qtbot.waitUntil(lambda: not toast.isVisible())
    toast.say("Stays", milliseconds=0)
    qtbot.wait(40)
    assert toast.isVisible()


def test_a_toast_that_stays_until_dismissed_outlives_the_pointer_on_it(qtbot, monkeypatch) -> None:
    monkeypatch.setattr("app.panels.toast.AFTER_POINTER_MS", 10)
    host = QWidget()
    qtbot.addWidget(host)
    toast = Toast(host, ThemeManager("light"))
    host.show()
    for milliseconds, stays in ((0, True), (60_000, False)):
        toast.say("Look at me", milliseconds=milliseconds)
        QApplication.sendEvent(toast, QEvent(QEvent.Type.Leave))
        qtbot.wait(40)
        assert toast.isVisible() is stays


def test_a_toast_is_withdrawn_only_by_the_action_it_offers(qtbot) -> None:
    host = QWidget()
    qtbot.addWidget(host)
    toast = Toast(host, ThemeManager("light"))
    host.show()
    done: list[int] = []
    toast.say("Deleted", "Undo", done.clear)
    toast.withdraw(done.copy)
    assert toast.isVisible()
    toast.withdraw(done.clear)
    assert not toast.isVisible()
