"""A chat: asking, stopping, branching, and what happens when the disk or the engine fails."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.state.records import Preset
from app.state.session import ChatSession
from app.store import conversations
from engine.protocol import AnyCommand, Generate, SamplingParams
from tests.app.app_parts import AppParts, wait_until
from tests.fake_engine.script import DEFAULT_ANSWER

MakeParts = Callable[..., AppParts]
SLOW = {"tokens_per_second": 100.0, "repeat": 20}


def texts(session: ChatSession) -> list[str]:
    return [message.text for message in session.messages]


def stored(parts: AppParts, session: ChatSession) -> Any:
    return parts.read(lambda db: conversations.load_conversation(db, session.conversation_id))


def watch_commands(parts: AppParts, monkeypatch: pytest.MonkeyPatch) -> list[AnyCommand]:
    """Records what goes to the engine, which still gets it."""
    sent: list[AnyCommand] = []
    send = parts.client.send

    def record(command: AnyCommand) -> None:
        sent.append(command)
        send(command)

    monkeypatch.setattr(parts.client, "send", record)
    return sent


def wait_for_text(session: ChatSession) -> None:
    wait_until(lambda: session.messages and session.messages[-1].text)


def test_a_question_is_answered_and_both_are_stored_with_their_figures(make_parts: MakeParts) -> None:
    parts = make_parts(tokens_per_second=2000)
    session = parts.workspace.new_session()
    answer = parts.ask(session, "Who is Kvasir?")
    assert answer == DEFAULT_ANSWER
    question, reply = session.messages
    assert (question.role, question.text, reply.role) == ("user", "Who is Kvasir?", "assistant")
    run = reply.run
    assert run is not None
    assert (run.status, run.finish_reason, run.model) == ("finished", "stop", "fake-135M")
    assert run.ttft_ms and run.tpot_ms and run.tokens_per_second and run.seed is not None
    assert (run.output_tokens or 0) > 10 and (run.prompt_tokens or 0) > 0
    assert not reply.is_streaming and not session.is_generating
    conversation = stored(parts, session)
    assert [(m.role, m.text, m.complete) for m in conversation.messages] == [
        ("user", "Who is Kvasir?", True),
        ("assistant", DEFAULT_ANSWER, True),
    ]
    assert conversation.messages[1].run == run
    assert conversation.record.active_leaf_id == reply.id


def test_the_signals_tell_the_whole_text_once_and_in_order(make_parts: MakeParts) -> None:
    parts = make_parts(tokens_per_second=500)
    session = parts.workspace.new_session()
    told: list[tuple[str, Any]] = []
    session.path_changed.connect(lambda: told.append(("path", None)))
    session.message_appended.connect(lambda id_: told.append(("appended", id_)))
    session.message_changed.connect(lambda id_: told.append(("changed", session.message(id_).text)))
    session.text_appended.connect(lambda id_, text: told.append(("text", text)))
    session.generating_changed.connect(lambda on: told.append(("generating", on)))
    parts.ask(session, "Who is Kvasir?")
    question, reply = session.messages
    assert told[:3] == [("appended", question.id), ("appended", reply.id), ("generating", True)]
    shown = ""
    for kind, value in told[3:]:
        if kind == "text":
            shown += value
        elif kind == "changed":
            assert value == shown, "a change never runs ahead of the text that was told"
    assert shown == DEFAULT_ANSWER
    assert told[-1] == ("generating", False) or told[-2] == ("generating", False)


def test_the_question_is_in_the_database_before_the_engine_hears_of_it(
    make_parts: MakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = make_parts()
    session = parts.workspace.new_session()
    in_the_file: list[list[tuple[str, str]]] = []
    send = parts.client.send

    def look_then_send(command: AnyCommand) -> None:
        if isinstance(command, Generate):
            with closing(sqlite3.connect(parts.store.path)) as other:
                in_the_file.append(other.execute("SELECT role, text FROM messages ORDER BY id").fetchall())
        send(command)

    monkeypatch.setattr(parts.client, "send", look_then_send)
    parts.ask(session, "First things first")
    assert in_the_file == [[("user", "First things first"), ("assistant", "")]]


def test_stopping_keeps_the_partial_answer_and_the_next_question_carries_it(
    make_parts: MakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = make_parts(**SLOW)
    sent = watch_commands(parts, monkeypatch)
    session = parts.workspace.new_session()
    session.send("Tell me everything")
    wait_for_text(session)
    session.stop()
    session.stop()
    wait_until(lambda: not session.is_generating)
    partial = session.messages[-1].text
    run = session.messages[-1].run
    assert partial and (DEFAULT_ANSWER * 20).startswith(partial)
    assert run is not None and (run.status, run.finish_reason) == ("finished", "cancelled")
    assert stored(parts, session).messages[-1].text == partial
    assert session.send("And then?")
    wait_for_text(session)
    asked = [command for command in sent if isinstance(command, Generate)][-1].messages
    assert asked is not None
    assert [m.content for m in asked] == ["Tell me everything", partial, "And then?"]


def test_regenerating_adds_a_sibling_and_the_old_answer_stays_reachable(make_parts: MakeParts) -> None:
    parts = make_parts(tokens_per_second=2000)
    session = parts.workspace.new_session()
    parts.ask(session, "Question")
    first = session.messages[-1]
    assert session.regenerate(first.id)
    wait_until(lambda: not session.is_generating)
    second = session.messages[-1]
    assert (second.sibling_index, second.sibling_count) == (1, 2)
    assert second.id != first.id and second.text == first.text
    session.switch_sibling(second.id, -1)
    assert session.messages[-1].id == first.id
    assert len(session.messages) == 2 and session.num_messages == 3
    assert stored(parts, session).record.active_leaf_id == first.id


def test_an_edited_question_keeps_the_old_one_with_all_that_followed(
    make_parts: MakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = make_parts(text="Yes.", tokens_per_second=2000)
    sent = watch_commands(parts, monkeypatch)
    session = parts.workspace.new_session()
    parts.ask(session, "One")
    parts.ask(session, "Two")
    old = [message.id for message in session.messages]
    assert session.edit_and_resend(old[0], "Another one")
    wait_until(lambda: not session.is_generating)
    assert texts(session) == ["Another one", "Yes."]
    assert [m.content for m in sent[-1].messages or []] == ["Another one"]  # type: ignore[union-attr]
    session.switch_sibling(session.messages[0].id, -1)
    assert [message.id for message in session.messages] == old


def test_an_answer_goes_on_in_its_own_branch_while_another_is_shown(make_parts: MakeParts) -> None:
    parts = make_parts(tokens_per_second=300)
    session = parts.workspace.new_session()
    parts.ask(session, "Question")
    first = session.messages[-1].id
    session.regenerate(first)
    wait_for_text(session)
    second = session.messages[-1].id
    session.switch_sibling(second, -1)
    told: list[int] = []
    session.text_appended.connect(lambda id_, _: told.append(id_))
    wait_until(lambda: not session.is_generating)
    assert told == [], "nothing is told of an answer that is not visible"
    assert session.messages[-1].id == first
    assert session.message(second).text == DEFAULT_ANSWER
    assert session.show_message(second) and session.messages[-1].id == second


def test_a_deleted_branch_comes_back_with_undo(make_parts: MakeParts) -> None:
    parts = make_parts(text="Yes.", tokens_per_second=2000)
    session = parts.workspace.new_session()
    parts.ask(session, "One")
    parts.ask(session, "Two")
    before = [message.id for message in session.messages]
    offers: list[str] = []
    parts.workspace.undo_available.connect(offers.append)
    session.delete_message_branch(before[2])
    assert [message.id for message in session.messages] == before[:2]
    assert [m.id for m in stored(parts, session).messages] == before[:2]
    parts.workspace.undo_delete()
    assert offers == ["Deleted 2 messages", ""]
    assert [message.id for message in session.messages] == before
    assert [m.id for m in stored(parts, session).messages] == before


def test_deleting_an_answer_that_is_being_written_stops_it(make_parts: MakeParts) -> None:
    parts = make_parts(**SLOW)
    session = parts.workspace.new_session()
    session.send("Tell me everything")
    wait_for_text(session)
    session.delete_message_branch(session.messages[-1].id)
    wait_until(lambda: not session.is_generating)
    assert texts(session) == ["Tell me everything"]
    parts.workspace.undo_delete()
    assert session.messages[-1].text, "what had been written is there again"


def test_parameters_and_system_prompt_of_the_tab_go_with_the_question(
    make_parts: MakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = make_parts(text="Yes.", tokens_per_second=2000)
    sent = watch_commands(parts, monkeypatch)
    session, other = parts.workspace.new_session(), parts.workspace.new_session()
    changes: list[bool] = []
    session.settings_changed.connect(lambda: changes.append(True))
    params = SamplingParams(temperature=0.1, seed=7, stop=("END",))
    session.set_params(params)
    session.set_params(params)
    session.set_system_prompt("Answer in verse.")
    assert len(changes) == 2, "a setting that stays the same is no change"
    parts.ask(session, "Hi")
    parts.ask(other, "Hi")
    first, second = (command for command in sent if isinstance(command, Generate))
    assert first.params == params and second.params == SamplingParams()
    assert first.messages is not None and first.messages[0].content == "Answer in verse."
    assert first.owner == session.conversation_id


def test_a_preset_is_named_until_a_parameter_is_changed_by_hand(make_parts: MakeParts) -> None:
    session = make_parts().workspace.new_session()
    session.set_system_prompt("Mine.")
    session.apply_preset(Preset("Precise", SamplingParams(temperature=0.2)))
    assert (session.preset_name, session.params.temperature, session.system_prompt) == ("Precise", 0.2, "Mine.")
    session.set_params(msgspec.structs.replace(session.params, temperature=0.3))
    assert session.preset_name == ""


def test_the_first_question_names_the_chat_until_a_person_does(make_parts: MakeParts) -> None:
    parts = make_parts(text="Yes.", tokens_per_second=2000)
    session = parts.workspace.new_session()
    titles: list[str] = []
    session.title_changed.connect(titles.append)
    parts.ask(session, "What is the capital of France?")
    parts.ask(session, "And of Spain?")
    assert titles == ["What is the capital of France?"]
    session.rename("  Capitals\n of Europe ")
    session.rename("   ")
    assert session.title == "Capitals of Europe"
    named = parts.workspace.new_session()
    named.rename("Mine")
    parts.ask(named, "Something else")
    assert named.title == "Mine"


def test_nothing_is_taken_while_an_answer_is_written_or_no_model_is_there(make_parts: MakeParts) -> None:
    parts = make_parts(**SLOW)
    session = parts.workspace.new_session()
    assert not session.send("  \n")
    assert session.send("First")
    assert not session.send("Second")
    assert "Stop it first" in parts.errors[-1]
    session.stop()
    wait_until(lambda: not session.is_generating)
    parts.engine.unload()
    wait_until(lambda: parts.engine.status == "no_model")
    assert not session.regenerate(session.messages[-1].id)
    assert parts.errors[-1] == "No model is loaded. Choose one first."
    assert texts(session)[0] == "First" and len(session.messages) == 2


def test_the_draft_goes_when_it_is_sent(make_parts: MakeParts) -> None:
    parts = make_parts(text="Yes.", tokens_per_second=2000)
    session = parts.workspace.new_session()
    session.set_draft("Half a quest")
    parts.workspace.flush()
    assert stored(parts, session).record.draft == "Half a quest"
    parts.ask(session, "Half a question?")
    assert session.draft == "" and stored(parts, session).record.draft == ""


def test_an_error_of_the_engine_marks_the_answer_and_asking_again_works(make_parts: MakeParts) -> None:
    parts = make_parts(errors={"forbidden": "The logits of this request are not numbers."}, tokens_per_second=2000)
    session = parts.workspace.new_session()
    assert session.send("A forbidden question")
    wait_until(lambda: not session.is_generating)
    run = session.messages[-1].run
    assert run is not None and (run.status, run.finish_reason) == ("failed", "error")
    assert run.error == "The logits of this request are not numbers."
    assert parts.errors == [run.error]
    assert session.edit_and_resend(session.messages[0].id, "Another question")
    wait_until(lambda: not session.is_generating)
    assert session.messages[-1].text == DEFAULT_ANSWER


def test_log_probabilities_are_kept_in_order(make_parts: MakeParts) -> None:
    parts = make_parts(tokens_per_second=500)
    session = parts.workspace.new_session()
    session.set_params(SamplingParams(logprobs=2, max_tokens=40))
    session.send("Tokens, please")
    while session.is_generating:
        wait_until(lambda: parts.workspace.flush() or not session.is_generating)
    run = session.messages[-1].run
    assert run is not None
    query = "SELECT position, text FROM token_traces WHERE run_id = ? ORDER BY position"
    traces = parts.read(lambda db: db.execute(query, (run.id,)).fetchall())
    assert [position for position, _ in traces] == list(range(run.output_tokens or 0))
    assert "".join(text for _, text in traces) == session.messages[-1].text


# ---------------------------------------------------------------- the engine dies


def test_when_the_engine_dies_the_text_stays_and_asking_again_works_after_a_restart(
    make_parts: MakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = make_parts(**SLOW)
    sent = watch_commands(parts, monkeypatch)
    sessions = [parts.workspace.new_session() for _ in range(3)]
    for session in sessions:
        session.send("Tell me everything")
    wait_until(lambda: all(session.messages[-1].text for session in sessions))
    assert parts.engine.worker is not None
    os.kill(parts.engine.worker.pid, signal.SIGKILL)
    wait_until(lambda: not any(session.is_generating for session in sessions))
    wait_until(lambda: parts.engine.status == "dead")
    for session in sessions:
        message = session.messages[-1]
        assert message.run is not None and message.run.status == "failed" and message.run.error
        assert message.text and stored(parts, session).messages[-1].text == message.text
        assert not session.send("More"), "a dead engine takes nothing"
    assert "Restart it" in parts.errors[-1]

    num_asked = sum(isinstance(command, Generate) for command in sent)
    parts.engine.restart()
    wait_until(lambda: parts.engine.is_ready)
    assert sum(isinstance(command, Generate) for command in sent) == num_asked == 3, "nothing is sent again by itself"
    first = sessions[0]
    assert first.regenerate(first.messages[-1].id)
    wait_until(lambda: first.messages[-1].text)
    assert first.messages[-1].sibling_count == 2


def test_unloading_the_model_ends_answers_as_interrupted_not_as_stopped(make_parts: MakeParts) -> None:
    parts = make_parts(**SLOW)
    session = parts.workspace.new_session()
    session.send("Tell me everything")
    wait_for_text(session)
    parts.engine.unload()
    wait_until(lambda: not session.is_generating)
    run = session.messages[-1].run
    assert run is not None and run.status == "interrupted" and "unloaded" in (run.error or "")


def test_stopping_with_a_closed_client_ends_the_answer(make_parts: MakeParts) -> None:
    parts = make_parts(**SLOW)
    session = parts.workspace.new_session()
    session.send("Tell me everything")
    wait_for_text(session)
    parts.bridge.stop()
    parts.client.close(2.0)
    session.stop()
    run = session.messages[-1].run
    assert not session.is_generating and run is not None and run.status == "interrupted"


# ---------------------------------------------------------------- the disk is full


def fill_disk(parts: AppParts) -> None:
    def fill(db: Any) -> None:
        db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")

    parts.read(fill)


def free_disk(parts: AppParts) -> None:
    parts.read(lambda db: db.execute("PRAGMA max_page_count = 1000000").fetchone())


def test_on_a_full_disk_the_question_waits_in_memory_and_is_asked_once_it_is_saved(make_parts: MakeParts) -> None:
    parts = make_parts(tokens_per_second=2000)
    session = parts.workspace.new_session()
    troubles: list[str] = []
    parts.workspace.storage_trouble.connect(troubles.append)
    fill_disk(parts)
    question = "A long question. " * 1000
    assert session.send(question)
    wait_until(lambda: troubles)
    assert "full" in troubles[0] and parts.errors == [troubles[0]]
    assert texts(session) == [question, ""] and session.is_generating
    assert session.messages[-1].run is not None and session.messages[-1].run.status == "waiting"
    free_disk(parts)
    wait_until(lambda: not session.is_generating)
    assert session.messages[-1].text == DEFAULT_ANSWER
    assert troubles[-1] == ""
    assert [m.text for m in stored(parts, session).messages] == [question, DEFAULT_ANSWER]


def test_a_question_that_waits_for_the_disk_can_be_stopped(
    make_parts: MakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = make_parts()
    sent = watch_commands(parts, monkeypatch)
    session = parts.workspace.new_session()
    fill_disk(parts)
    session.send("A long question. " * 1000)
    wait_until(lambda: parts.errors)
    session.stop()
    assert not session.is_generating
    free_disk(parts)
    wait_until(lambda: parts.store.num_unsaved == 0)
    assert not any(isinstance(command, Generate) for command in sent)
    run = stored(parts, session).messages[-1].run
    assert (run.status, run.finish_reason) == ("finished", "cancelled")


def test_an_answer_streams_on_over_a_full_disk_and_is_saved_when_there_is_room(make_parts: MakeParts) -> None:
    parts = make_parts(text="word " * 2000, tokens_per_second=2000)
    session = parts.workspace.new_session()
    session.set_params(SamplingParams(max_tokens=None))
    session.send("Tell me")
    wait_for_text(session)
    fill_disk(parts)
    parts.workspace.flush()
    wait_until(lambda: not session.is_generating)
    assert parts.store.num_unsaved > 0
    assert stored(parts, session).messages[-1].text != session.messages[-1].text
    free_disk(parts)
    wait_until(lambda: parts.store.num_unsaved == 0)
    assert stored(parts, session).messages[-1].text == session.messages[-1].text == "word " * 2000


def test_a_locked_database_holds_the_question_back_no_longer_than_the_lock(
    make_parts: MakeParts, tmp_path: Path
) -> None:
    parts = make_parts(tokens_per_second=2000)
    session = parts.workspace.new_session()
    wait_until(lambda: parts.store.num_unsaved == 0)
    with closing(sqlite3.connect(tmp_path / "kvasir.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        session.send("Hello?")
        wait_until(lambda: parts.errors)
        assert "locked" in parts.errors[0]
        other.rollback()
    wait_until(lambda: not session.is_generating)
    assert session.messages[-1].text == DEFAULT_ANSWER


# ---------------------------------------------------------------- text that cannot be sent or stored


def test_stop_strings_that_are_no_text_are_repaired_and_the_question_is_answered(make_parts: MakeParts) -> None:
    parts = make_parts(tokens_per_second=2000)
    session = parts.workspace.new_session()
    session.set_params(SamplingParams(stop=("\ud800", "a\0b", "a\ufffdb")))
    assert session.params.stop == ("\ufffd", "a\ufffdb")
    session.apply_preset(Preset("Broken", SamplingParams(stop=("\udfff",))))
    assert session.params.stop == ("\ufffd",)
    assert parts.ask(session, "Who is Kvasir?") == DEFAULT_ANSWER
    assert stored(parts, session).record.params.stop == ("\ufffd",)


def test_a_question_that_cannot_be_sent_fails_and_the_next_one_can_be_asked(
    make_parts: MakeParts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = make_parts(tokens_per_second=2000)
    session = parts.workspace.new_session()
    send = parts.client.send

    def refuse(command: AnyCommand) -> None:
        if isinstance(command, Generate):
            "\ud800".encode()
        send(command)

    monkeypatch.setattr(parts.client, "send", refuse)
    session.send("Lost on the way")
    wait_until(lambda: not session.is_generating)
    run = session.messages[-1].run
    assert run is not None and run.status == "failed" and "could not be sent" in (run.error or "")
    assert parts.errors == [run.error]
    monkeypatch.setattr(parts.client, "send", send)
    assert parts.ask(session, "And now?") == DEFAULT_ANSWER
