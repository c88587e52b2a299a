"""Stop strings are found wherever they lie, and nothing else is held back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stops import StopChecker

SHORT_TEXT = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def search_whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: read on until the text so far ends with a stop; the longest such stop is taken off."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)])]


@settings(max_examples=500, deadline=None)
@given(SHORT_TEXT, STOPS, st.data())
def test_any_cutting_gives_what_a_search_of_the_whole_text_gives(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    checker = StopChecker(stops)
    shown, matched = "", None
    for piece in cut(data, text):
        emitted, matched = checker.feed(piece)
        shown += emitted
    shown += checker.flush()
    assert (shown, matched) == search_whole(text, stops)


@settings(max_examples=300, deadline=None)
@given(SHORT_TEXT, STOPS, st.data())
def test_only_text_that_can_still_become_a_stop_is_held_back(text: str, stops: list[str], data: st.DataObject) -> None:
    checker = StopChecker(stops)
    fed = shown = ""
    for piece in cut(data, text):
        fed += piece
        emitted, matched = checker.feed(piece)
        shown += emitted
        if matched is not None:
            return
        assert fed.startswith(shown)
        held = fed[len(shown) :]
        candidates = [fed[start:] for start in range(len(fed)) if any(s.startswith(fed[start:]) for s in stops)]
        assert held == max(candidates, key=len, default="")


def test_a_stop_that_spans_pieces_ends_the_text() -> None:
    checker = StopChecker(["\nUser:"])
    assert checker.feed("Hello.\nUs") == ("Hello.", None)
    assert checker.feed("er") == ("", None)
    assert checker.feed(": more") == ("", "\nUser:")
    assert checker.feed("nothing more") == ("", "\nUser:")
    assert checker.flush() == ""


def test_held_text_is_given_back_when_it_becomes_no_stop_or_the_answer_ends() -> None:
    checker = StopChecker(["END!"])
    assert checker.feed("the EN") == ("the ", None)
    assert checker.feed("Ds meet, EN") == ("ENDs meet, ", None)
    assert checker.flush() == "EN"


def test_without_stops_everything_passes() -> None:
    checker = StopChecker([])
    assert checker.feed("anything") == ("anything", None)
    assert checker.flush() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopChecker(["ok", ""])
