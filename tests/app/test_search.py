"""Search over all chats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.state.records import SearchResult
from app.store import Store, conversations
from tests.app.store_samples import add_chat, conversation_record, exchange, search_all

Find = Callable[[str], list[SearchResult]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "kvasir.db")
    store.write(add_chat("Capitals of Europe", ["What is the capital of France?", "It is **Paris**."], 1))
    store.write(add_chat("地理", ["法国的首都是哪里？", "法国的首都是巴黎。"], 11))
    store.write(add_chat("Código", ["¿Qué es la Übersetzung? 😀", 'print("hello world")  # 100% _safe_'], 21))
    store.write(add_chat("Long", ["intro " * 300 + "the needle in the hay" + " outro" * 300, "ok"], 31))
    yield store
    store.close()


@pytest.fixture
def find(store: Store) -> Find:
    return lambda text: store.submit(lambda db: search_all(db, text)).result(5)


def ids(results: list[SearchResult]) -> list[int | None]:
    return [result.message_id for result in results]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("capital of france", [1]),
        ("CAPITAL", [None, 1]),
        ("apita", [None, 1]),
        ("france what", [1]),
        ("france paris", []),
        ("首都", [12, 11]),
        ("首", [12, 11]),
        ("法国的首都", [12, 11]),
        ("巴黎", [12]),
        ("地理", [None]),
        ("übersetzung", [21]),
        ("ÜB", [21]),
        ("código", [None]),
        ("😀", [21]),
        ("hello world", [22]),
        ('"hello', [22]),
        ("100%", [22]),
        ("_safe_", [22]),
        ("is it", [2, 1]),  # capITal
        ("needle in", [31]),
        ("no such words", []),
        ("", []),
        ("   ", []),
        ("\0", []),
        ("AND", []),
        ("hello OR", [22]),
        ("NEAR(", []),
        ("-", []),
        ("*", [2]),
    ],
)
def test_words_are_found_as_substrings_in_any_script(find: Find, query: str, expected: list[int | None]) -> None:
    assert ids(find(query)) == expected


def test_a_snippet_shows_the_match_and_where_it_is(find: Find) -> None:
    (result,) = find("NEEDLE")
    assert result.title == "Long"
    assert result.snippet.startswith("…") and result.snippet.endswith("…")
    assert len(result.snippet) < 140
    (start, end) = result.matches[0]
    assert result.snippet[start:end] == "needle"


def test_deleted_chats_and_branches_are_not_found_until_they_are_back(store: Store, find: Find) -> None:
    chat = find("needle")[0].conversation_id
    for hide in (
        conversations.mark_conversation_deleted,
        lambda db, _, at: conversations.mark_messages_deleted(db, [31], at),
    ):
        store.write(lambda db, hide=hide: hide(db, chat, 1.0))
        assert find("needle") == []
        store.write(lambda db, hide=hide: hide(db, chat, None))
        assert ids(find("needle")) == [31]


def test_the_index_follows_changes_and_forgets_what_is_purged(store: Store, find: Find) -> None:
    store.write(lambda db: db.execute("UPDATE messages SET text = 'thimble' WHERE id = 31")).result(5)
    assert find("needle") == []
    assert ids(find("thimble")) == [31]
    store.write(lambda db: conversations.mark_conversation_deleted(db, find_chat(db, 31), 1.0))
    store.write(conversations.purge_deleted)
    assert find("thimble") == []
    check = "INSERT INTO message_search(message_search, rank) VALUES ('integrity-check', 0)"
    store.write(lambda db: db.execute(check)).result(5)


def test_an_answer_is_found_once_it_is_complete(store: Store, find: Find) -> None:
    question, answer = exchange(["a question", "growing zebra"], first_id=51, status="streaming")
    assert answer.run is not None
    store.write(lambda db: conversations.insert_conversation(db, conversation_record()))
    store.write(lambda db: conversations.add_messages(db, "chat", [question, answer], 1.0)).result(5)
    assert find("zebra") == []
    run = answer.run
    store.write(lambda db: conversations.save_answer(db, 52, "a grown zebra", complete=True, run=run))
    assert ids(find("zebra")) == [52]
    assert find("growing") == []


def test_a_search_in_slices_finds_the_same_as_one_in_one_piece(
    store: Store, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = ["首", "the", "a e", "capital", "is"]
    whole = [find(query) for query in queries]
    assert all(len(found) > 1 for found in whole)
    monkeypatch.setattr("app.store.search.SLICE_LENGTH", 3)
    assert [find(query) for query in queries] == whole
    limited = store.submit(lambda db: search_all(db, "the", limit=2)).result(5)
    assert limited == find("the")[:2]


def find_chat(db, message_id: int) -> str:  # type: ignore[no-untyped-def]
    return db.execute("SELECT conversation_id FROM messages WHERE id = ?", (message_id,)).fetchone()[0]
