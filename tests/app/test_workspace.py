"""All chats together: tabs and settings come back, deleting can be undone, nothing is left half done."""

from __future__ import annotations

import gc
import logging
import sqlite3
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.state.records import Preset, SearchResult
from app.state.workspace import OpenTabs, Workspace
from app.store import Store, conversations, presets
from engine.protocol import SamplingParams
from tests.app.app_parts import AppParts, wait_until
from tests.app.store_samples import add_chat, conversation_record, exchange
from tests.fake_engine.script import DEFAULT_ANSWER

MakeParts = Callable[..., AppParts]
QUICK = {"tokens_per_second": 2000.0}
SLOW = {"tokens_per_second": 100.0, "repeat": 20}


def open_ids(parts: AppParts) -> list[str]:
    return [session.conversation_id for session in parts.workspace.sessions]


def test_tabs_messages_branches_and_settings_are_back_after_a_restart(make_parts: MakeParts) -> None:
    parts = make_parts(**QUICK)
    sessions = [parts.workspace.new_session() for _ in range(3)]
    for number, session in enumerate(sessions):
        parts.ask(session, f"Question {number}")
    first = sessions[0]
    first.regenerate(first.messages[-1].id)
    wait_until(lambda: not first.is_generating)
    first.switch_sibling(first.messages[-1].id, -1)
    first.set_params(SamplingParams(temperature=0.25, stop=("END",), logit_bias={5: -1.5}))
    first.set_system_prompt("Answer in verse.")
    first.set_draft("Not sent y")
    sessions[1].rename("Renamed")
    parts.workspace.move(sessions[2].conversation_id, 0)
    parts.workspace.set_current(first.conversation_id)
    expected = [(s.conversation_id, s.title, list(s.messages)) for s in parts.workspace.sessions]
    parts.close()

    again = make_parts(**QUICK)
    assert [(s.conversation_id, s.title, list(s.messages)) for s in again.workspace.sessions] == expected
    current = again.workspace.current
    assert current is not None and current.conversation_id == first.conversation_id
    assert current.params == SamplingParams(temperature=0.25, stop=("END",), logit_bias={5: -1.5})
    assert (current.system_prompt, current.draft) == ("Answer in verse.", "Not sent y")
    assert current.messages[-1].sibling_index == 0 and current.messages[-1].sibling_count == 2
    assert again.ask(current, "And on it goes") == DEFAULT_ANSWER


def test_the_sidebar_lists_used_chats_newest_first(make_parts: MakeParts) -> None:
    parts = make_parts(**QUICK)
    first, second, _empty = (parts.workspace.new_session() for _ in range(3))
    changes: list[bool] = []
    parts.workspace.conversations_changed.connect(lambda: changes.append(True))
    parts.ask(first, "First")
    parts.ask(second, "Second")
    assert [c.title for c in parts.workspace.conversations] == ["Second", "First"]
    parts.ask(first, "More of the first")
    assert [(c.title, c.num_messages) for c in parts.workspace.conversations] == [("First", 4), ("Second", 2)]
    assert len(changes) < 15, "not one per token"


def test_closing_an_empty_tab_leaves_nothing_behind(make_parts: MakeParts) -> None:
    parts = make_parts()
    empty = parts.workspace.new_session()
    typed = parts.workspace.new_session()
    typed.set_draft("something")
    for session in (empty, typed):
        parts.workspace.close(session.conversation_id)
    wait_until(lambda: parts.store.num_unsaved == 0)
    parts.workspace.flush()
    kept = [c.id for c in parts.read(conversations.list_conversations)]
    assert kept == [typed.conversation_id]


def test_closing_the_current_tab_brings_its_neighbour_to_the_front(make_parts: MakeParts) -> None:
    parts = make_parts()
    a, b, c = (parts.workspace.new_session() for _ in range(3))
    told: list[Any] = []
    parts.workspace.current_changed.connect(told.append)
    parts.workspace.set_current(b.conversation_id)
    parts.workspace.close(b.conversation_id)
    parts.workspace.close(a.conversation_id)
    parts.workspace.close(c.conversation_id)
    assert told == [b, c, None]
    assert parts.workspace.current is None


def test_a_closed_tab_opens_again_with_its_messages(make_parts: MakeParts) -> None:
    parts = make_parts(**QUICK)
    session = parts.workspace.new_session()
    parts.ask(session, "Question")
    messages = list(session.messages)
    id_ = session.conversation_id
    parts.workspace.close(id_)
    wait_until(lambda: not parts.workspace._parked)
    opened = parts.workspace.open(id_)
    assert opened is not session and not opened.is_loaded and opened.title == "Question"
    opened.set_draft("typed before it was there")
    wait_until(lambda: opened.is_loaded)
    assert list(opened.messages) == messages
    assert opened.draft == "typed before it was there"
    assert parts.workspace.open(id_) is opened and open_ids(parts) == [id_]


def test_closing_a_tab_stops_its_answer_and_keeps_what_there_is(make_parts: MakeParts) -> None:
    parts = make_parts(**SLOW)
    session = parts.workspace.new_session()
    session.send("Tell me everything")
    wait_until(lambda: session.messages[-1].text)
    id_ = session.conversation_id
    parts.workspace.close(id_)
    reopened = parts.workspace.open(id_)
    assert reopened is session, "its answer is still on its way"
    parts.workspace.close(id_)
    wait_until(lambda: not parts.workspace._parked)
    opened = parts.workspace.open(id_)
    wait_until(lambda: opened.is_loaded)
    assert opened.messages[-1].text == session.messages[-1].text != ""
    run = opened.messages[-1].run
    assert run is not None and run.finish_reason == "cancelled"


def test_a_closed_session_is_not_kept_in_memory(make_parts: MakeParts) -> None:
    parts = make_parts(**QUICK)
    session = parts.workspace.new_session()
    parts.ask(session, "Question")
    session.delete_message_branch(session.messages[-1].id)
    gone = weakref.ref(session)
    parts.workspace.close(session.conversation_id)
    del session
    wait_until(lambda: not parts.workspace._parked)
    gc.collect()
    assert gone() is None


def test_a_deleted_chat_comes_back_with_undo_in_its_place(make_parts: MakeParts) -> None:
    parts = make_parts(**QUICK)
    a, b, c = (parts.workspace.new_session() for _ in range(3))
    for session, text in ((a, "A"), (b, "B"), (c, "C")):
        parts.ask(session, text)
    offers: list[str] = []
    parts.workspace.undo_available.connect(offers.append)
    opened: list[int] = []
    parts.workspace.session_opened.connect(lambda s: opened.append(parts.workspace.sessions.index(s)))
    before = open_ids(parts)
    parts.workspace.delete(b.conversation_id)
    assert open_ids(parts) == [before[0], before[2]]
    assert [c.title for c in parts.workspace.conversations] == ["C", "A"]
    parts.workspace.undo_delete()
    assert offers == ["Deleted “B”", ""]
    assert opened == [1], "it is in its place when it is announced"
    assert open_ids(parts) == before
    back = parts.workspace.session(before[1])
    assert back is not None
    wait_until(lambda: back.is_loaded)
    assert back.messages[0].text == "B"
    parts.workspace.undo_delete()  # nothing more to undo
    parts.close()
    again = make_parts(**QUICK)
    assert open_ids(again) == before


def test_a_deleted_chat_is_gone_for_good_after_the_application_ends(make_parts: MakeParts) -> None:
    parts = make_parts(**QUICK)
    session = parts.workspace.new_session()
    parts.ask(session, "A secret")
    parts.workspace.delete(session.conversation_id)
    parts.close()
    with closing(sqlite3.connect(parts.store.path)) as connection:
        assert connection.execute("SELECT count(*) FROM messages").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM message_search('secret')").fetchone() == (0,)
    assert make_parts(**QUICK).workspace.conversations == []


def test_deleting_a_chat_while_it_is_answered_stops_it(make_parts: MakeParts) -> None:
    parts = make_parts(**SLOW)
    session = parts.workspace.new_session()
    session.send("Tell me everything")
    wait_until(lambda: session.messages[-1].text)
    parts.workspace.delete(session.conversation_id)
    wait_until(lambda: not session.is_generating)
    assert parts.workspace.conversations == []
    parts.workspace.undo_delete()
    assert parts.workspace.current is not None
    assert parts.workspace.current.messages[-1].text == session.messages[-1].text


def test_a_chat_that_is_not_open_can_be_renamed(make_parts: MakeParts) -> None:
    parts = make_parts(**QUICK)
    session = parts.workspace.new_session()
    parts.ask(session, "Question")
    id_ = session.conversation_id
    parts.workspace.close(id_)
    wait_until(lambda: not parts.workspace._parked)
    parts.workspace.rename(id_, " ")
    parts.workspace.rename(id_, "Better")
    assert parts.workspace.title(id_) == "Better"
    opened = parts.workspace.open(id_)
    wait_until(lambda: opened.is_loaded)
    assert opened.title == "Better"


def test_the_search_answers_the_latest_query_and_opens_the_branch_of_a_hit(make_parts: MakeParts) -> None:
    parts = make_parts(answers={"capital": "It is Paris."}, **QUICK)
    session = parts.workspace.new_session()
    parts.ask(session, "The capital?")
    hidden = session.messages[-1].id
    session.edit_and_resend(session.messages[0].id, "Something else")
    wait_until(lambda: not session.is_generating)
    answers: list[tuple[str, list[SearchResult]]] = []
    parts.workspace.search_finished.connect(lambda query, results: answers.append((query, results)))
    for query in ("pa", "par", "paris"):
        parts.workspace.search(query)
    wait_until(lambda: answers and answers[-1][0] == "paris")
    (result,) = answers[-1][1]
    assert result.message_id == hidden
    id_ = session.conversation_id
    parts.workspace.close(id_)
    wait_until(lambda: not parts.workspace._parked)
    opened = parts.workspace.open(id_, result.message_id)
    wait_until(lambda: opened.is_loaded)
    assert opened.messages[-1].id == hidden


def test_presets_are_kept_and_built_in_ones_cannot_be_overwritten(make_parts: MakeParts, qapp: object) -> None:
    parts = make_parts()
    session = parts.workspace.new_session()
    session.set_params(SamplingParams(temperature=0.15))
    session.set_system_prompt("Short.")
    parts.workspace.save_preset("  My   own ", session)
    assert session.preset_name == "My own"
    session.set_params(SamplingParams(temperature=0.2))
    parts.workspace.save_preset("My own", session)
    with pytest.raises(ValueError, match="name"):
        parts.workspace.save_preset("  ", session)
    parts.close()

    again = make_parts()
    assert again.workspace.presets == [Preset("My own", SamplingParams(temperature=0.2), "Short.")]
    again.workspace.delete_preset("My own")
    assert again.workspace.presets == []

    builtin = Workspace(again.store, again.bridge, again.engine, builtin_presets=[Preset("Precise", SamplingParams())])
    assert builtin.presets[0].is_builtin
    builtin.delete_preset("Precise")
    with pytest.raises(ValueError, match="built-in"):
        builtin.save_preset("precise", again.workspace.new_session())
    assert [preset.name for preset in builtin.presets] == ["Precise"]


def test_new_chats_start_with_the_default_parameters(make_parts: MakeParts) -> None:
    parts = make_parts()
    parts.workspace.set_default_params(msgspec.structs.replace(SamplingParams(), temperature=1.5))
    parts.close()
    assert make_parts().workspace.new_session().params.temperature == 1.5


def test_an_orderly_end_marks_answers_as_interrupted_with_all_their_text(make_parts: MakeParts) -> None:
    parts = make_parts(**SLOW)
    session = parts.workspace.new_session()
    session.send("Tell me everything")
    wait_until(lambda: session.messages[-1].text)
    text = session.messages[-1].text
    assert parts.workspace.shutdown() == 0
    assert session.messages[-1].text == text
    again = make_parts()
    current = again.workspace.current
    assert current is not None
    message = current.messages[-1]
    assert message.text == text
    assert message.run is not None and message.run.status == "interrupted" and "closed" in (message.run.error or "")


def test_what_a_killed_process_left_is_shown_as_interrupted_even_if_it_cannot_be_repaired_yet(
    qapp: object, tmp_path: Path
) -> None:
    path = tmp_path / "kvasir.db"
    store = Store(path)

    def leave_open(db: Any) -> None:
        conversations.insert_conversation(db, conversation_record("chat", "Killed", active_leaf_id=2))
        conversations.add_messages(db, "chat", exchange(["Q", "half an ans"], status="streaming"), 1.0)
        presets.set_value(db, "open_tabs", OpenTabs(["chat"], "chat"))

    store.write(leave_open)
    store.close()
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        parts = AppParts(path).start()
        assert parts.workspace.current is not None
        message = parts.workspace.current.messages[-1]
        assert (message.text, message.is_streaming) == ("half an ans", False)
        assert message.run is not None and message.run.status == "interrupted"
        other.rollback()
    wait_until(lambda: parts.store.num_unsaved == 0)
    parts.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT status FROM runs").fetchall() == [("interrupted",)]


def test_an_end_that_cannot_save_says_how_much_is_lost(make_parts: MakeParts) -> None:
    parts = make_parts()
    session = parts.workspace.new_session()
    wait_until(lambda: parts.store.num_unsaved == 0)
    with closing(sqlite3.connect(parts.store.path)) as other:
        other.execute("BEGIN IMMEDIATE")
        session.set_draft("typed into the void")
        assert parts.workspace.shutdown(0.3) > 0
        other.rollback()


def test_a_chat_whose_row_cannot_be_read_is_reported_and_its_tab_closed(
    make_parts: MakeParts, caplog: pytest.LogCaptureFixture
) -> None:
    parts = make_parts(**QUICK)
    session = parts.workspace.new_session()
    parts.ask(session, "Question")
    id_ = session.conversation_id
    parts.workspace.close(id_)
    wait_until(lambda: not parts.workspace._parked)
    parts.store.write(lambda db: conversations.delete_conversation(db, id_)).result(5)
    parts.workspace.open(id_)
    wait_until(lambda: parts.errors)
    assert "could not be opened" in parts.errors[0] and "not there" in parts.errors[0]
    assert parts.workspace.sessions == []


def test_a_write_that_is_lost_is_reported(make_parts: MakeParts, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    parts = make_parts()
    session = parts.workspace.new_session()
    parts.store.write(lambda db: db.execute("DROP TABLE app_state")).result(5)
    session.set_draft("x")
    wait_until(lambda: parts.errors)
    assert "no such table" in parts.errors[0]


def test_many_chats_are_listed_at_once_and_a_long_one_opens_quickly(
    qapp: object, tmp_path: Path, make_parts: MakeParts
) -> None:
    store = Store(tmp_path / "kvasir.db")

    def fill(db: Any) -> None:
        add_chat("Long", ["What is a word? " * 8] * 10_000)(db)
        for number in range(500):
            add_chat(f"Chat {number}", ["q", "a"], 20_001 + 2 * number)(db)

    store.write(fill).result(20)
    store.close()
    parts = make_parts()
    assert len(parts.workspace.conversations) == 501
    long = next(c for c in parts.workspace.conversations if c.title == "Long")
    session = parts.workspace.open(long.id)
    wait_until(lambda: session.is_loaded, 1.0)
    assert len(session.messages) == 10_000
    assert session.messages[9_999].text.startswith("What")


def test_one_chat_that_cannot_be_saved_takes_no_other_with_it(
    make_parts: MakeParts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    parts = make_parts()
    bad, good = parts.workspace.new_session(), parts.workspace.new_session()
    parts.workspace.flush()
    wait_until(lambda: parts.store.num_unsaved == 0 and not parts.workspace._is_flushing)
    bad.apply_preset(Preset("\ud800", SamplingParams()))
    good.set_draft("kept")
    parts.workspace.flush()
    wait_until(lambda: parts.errors)
    assert "encode" in parts.errors[0]
    stored = parts.read(lambda db: conversations.load_conversation(db, good.conversation_id))
    assert stored is not None and stored.record.draft == "kept"


def test_a_chat_that_was_named_or_set_up_is_kept_when_its_tab_closes_and_is_listed(make_parts: MakeParts) -> None:
    parts = make_parts()
    named, set_up, drafted, empty = (parts.workspace.new_session() for _ in range(4))
    named.rename("Renamed")
    set_up.set_system_prompt("Answer in verse.")
    drafted.set_draft("half a thought")
    assert [chat.title for chat in parts.workspace.conversations] == ["Renamed"], "the others are only open"
    kept = {session.conversation_id for session in (named, set_up, drafted)}
    for session in (named, set_up, drafted, empty):
        parts.workspace.close(session.conversation_id)
    assert {chat.id for chat in parts.workspace.conversations} == kept
    wait_until(lambda: not parts.workspace._parked)
    again = parts.workspace.open(set_up.conversation_id)
    wait_until(lambda: again.is_loaded)
    assert again.system_prompt == "Answer in verse."
    parts.close()
    assert {chat.id for chat in make_parts().workspace.conversations} == kept - {set_up.conversation_id}
