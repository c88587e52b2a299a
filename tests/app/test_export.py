"""Chats as files: what is exported comes back whole, and a bad file changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.state.records import Conversation, MessageRecord, RunRecord
from app.store import ImportRefusedError, conversations
from app.store.markdown_export import to_markdown
from app.store.transfer import encode_export, read_export
from engine.protocol import SamplingParams
from tests.app.app_parts import AppParts, wait_until
from tests.app.store_samples import conversation_record, exchange
from tests.fake_engine.script import DEFAULT_ANSWER

MakeParts = Callable[..., AppParts]


def counter(first: int = 1000) -> Callable[[], int]:
    return iter(range(first, 10_000)).__next__


def branched() -> Conversation:
    """Question 1 with answers 2 and 5; 3 and 4 go on from 2. The branch of 5 is visible."""
    record = conversation_record("chat", "Two ways", active_leaf_id=5, system_prompt="Be brief.\n\nAnd kind.")
    messages = exchange(["Which way?", "Left.", "And then?", "Right."])
    run = RunRecord(
        5,
        5,
        "finished",
        "model-x",
        SamplingParams(temperature=0.1, stop=("END",)),
        1_700_000_001.5,
        seed=2**63 - 1,
        output_tokens=3,
        ttft_ms=12.5,
        tpot_ms=3.25,
        finish_reason="stop",
        stop_reason="END",
        finished_at=1_700_000_002.0,
    )
    messages.append(MessageRecord(5, 1, "assistant", "Straight on 😀.", 1_700_000_001.5, True, run))
    return Conversation(record, messages, {})


def shape(conversation: Conversation) -> list[tuple[Any, ...]]:
    """Everything but the ids, which are only compared by what they point at."""
    place = {message.id: index for index, message in enumerate(sorted(conversation.messages, key=lambda m: m.id))}
    texts = {message.id: message.text for message in conversation.messages}
    return sorted(
        (
            message.text,
            message.role,
            message.created_at,
            None if message.parent_id is None else texts[message.parent_id],
            None if message.run is None else msgspec.structs.replace(message.run, id=0, message_id=0),
            message.id == conversation.record.active_leaf_id,
        )
        for message in sorted(conversation.messages, key=lambda m: place[m.id])
    )


def write_export(path: Path, *exported: Conversation) -> Path:
    path.write_bytes(encode_export(exported))
    return path


def test_json_gives_back_all_branches_and_runs_under_new_ids(tmp_path: Path) -> None:
    original = branched()
    (imported,) = read_export(write_export(tmp_path / "chats.json", original), counter())
    assert shape(imported) == shape(original)
    assert imported.record.id != original.record.id
    ignored = {"id": "", "active_leaf_id": None}
    assert replace(imported.record, **ignored) == replace(original.record, **ignored)
    assert all(message.id >= 1000 for message in imported.messages)
    siblings = [m.text for m in sorted(imported.messages, key=lambda m: m.id) if m.text in ("Left.", "Straight on 😀.")]
    assert siblings == ["Left.", "Straight on 😀."], "siblings keep their order"


def test_an_answer_still_being_written_is_exported_as_interrupted(tmp_path: Path) -> None:
    growing = Conversation(conversation_record(), exchange(["Q", "half an ans"], status="streaming"), {})
    (imported,) = read_export(write_export(tmp_path / "chats.json", growing), counter())
    answer = imported.messages[1]
    assert answer.run is not None
    assert (answer.text, answer.complete, answer.run.status) == ("half an ans", True, "interrupted")


def test_markdown_holds_the_visible_branch_with_the_answers_as_they_are() -> None:
    document = to_markdown(branched())
    assert document.startswith("# Two ways\n\n*Kvasir chat of 20")
    assert "> Be brief.\n>\n> And kind." in document
    assert "## You\n\nWhich way?\n\n## model-x\n\nStraight on 😀.\n" in document
    assert "Left." not in document


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"status": "interrupted"}, "*This answer was interrupted.*"),
        ({"status": "failed", "error": "Out of\nmemory."}, "*This answer failed: Out of memory.*"),
        ({"finish_reason": "cancelled"}, "*This answer was stopped.*"),
        ({"finish_reason": "length"}, "*This answer reached its token limit.*"),
    ],
)
def test_markdown_says_how_an_answer_ended(changes: dict[str, Any], note: str) -> None:
    conversation = branched()
    last = conversation.messages[-1]
    assert last.run is not None
    conversation.messages[-1] = msgspec.structs.replace(last, run=msgspec.structs.replace(last.run, **changes))
    assert to_markdown(conversation).endswith(f"Straight on 😀.\n\n{note}\n")


def broken(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A good export with one thing made wrong."""
    file = msgspec.json.decode(encode_export([branched()]))
    change(file)
    return msgspec.json.encode(file)


def first_message(file: dict[str, Any]) -> dict[str, Any]:
    return file["conversations"][0]["messages"][0]


def last_run(file: dict[str, Any]) -> dict[str, Any]:
    return file["conversations"][0]["messages"][-1]["run"]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "not a Kvasir export"),
        (b"not json", "not a Kvasir export"),
        (b"\xff\xfe\x00", "not a Kvasir export"),
        (b"[1, 2]", "not a Kvasir export"),
        (b'{"format": "something-else", "version": 1}', "format is 'something-else'"),
        (b'{"format": "kvasir-conversations", "version": 1}', "missing required field"),
        (encode_export([branched()])[:-200], "not a Kvasir export"),
        (broken(lambda f: f.update(version=99)), "newer Kvasir"),
        (broken(lambda f: f.update(extra=1)), "unknown field `extra`"),
        (broken(lambda f: first_message(f).update(role="system")), r"\$.conversations\[0\].messages\[0\].role"),
        (broken(lambda f: first_message(f).update(text=5)), r"messages\[0\].text"),
        (broken(lambda f: first_message(f).pop("text")), "`text`"),
        (broken(lambda f: first_message(f).update(parent_id=77)), "answers message 77, which is not there"),
        (broken(lambda f: first_message(f).update(parent_id=4)), "in a circle"),
        (broken(lambda f: first_message(f).update(parent_id=1)), "in a circle"),
        (broken(lambda f: first_message(f).update(id=2)), "same id|not there"),
        (broken(lambda f: first_message(f).update(created_at=1e300)), "created_at"),
        (broken(lambda f: f["conversations"][0].update(active_leaf_id=99)), "active message 99"),
        (broken(lambda f: f["conversations"][0].update(title="")), "title"),
        (broken(lambda f: last_run(f).update(status="streaming")), "status"),
        (broken(lambda f: last_run(f).update(seed=2**70)), "seed"),
        (broken(lambda f: last_run(f).update(tpot_ms=-1)), "tpot_ms"),
        (broken(lambda f: last_run(f)["params"].update(temperature=99)), "temperature must lie in"),
    ],
)
def test_a_bad_file_is_refused_with_the_place_and_the_fault(tmp_path: Path, data: bytes, fault: str) -> None:
    path = tmp_path / "chats.json"
    path.write_bytes(data)
    with pytest.raises(ImportRefusedError, match=fault) as caught:
        read_export(path, counter())
    assert "chats.json" in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportRefusedError, match="cannot be read"):
        read_export(tmp_path / "none.json", counter())


def test_exporting_and_importing_through_the_workspace(make_parts: MakeParts, tmp_path: Path) -> None:
    parts = make_parts(tokens_per_second=2000)
    session = parts.workspace.new_session()
    parts.ask(session, "Who is Kvasir?")
    session.regenerate(session.messages[-1].id)
    wait_until(lambda: not session.is_generating)
    done: list[str] = []
    parts.workspace.export_finished.connect(done.append)
    parts.workspace.export_json(tmp_path / "all.json")
    parts.workspace.export_markdown(session.conversation_id, tmp_path / "one.md")
    wait_until(lambda: len(done) == 2)
    assert (tmp_path / "one.md").read_text().startswith("# Who is Kvasir?")

    imported: list[str] = []
    parts.workspace.import_finished.connect(imported.extend)
    parts.workspace.import_json(tmp_path / "all.json")
    wait_until(lambda: imported)
    assert len(parts.workspace.conversations) == 2
    copy = parts.workspace.open(imported[0])
    wait_until(lambda: copy.is_loaded)
    assert [m.text for m in copy.messages] == ["Who is Kvasir?", DEFAULT_ANSWER]
    assert copy.messages[-1].sibling_count == 2
    assert {m.id for m in copy.messages}.isdisjoint(m.id for m in session.messages)
    assert parts.ask(copy, "More?") == DEFAULT_ANSWER, "a copy can be gone on with"


def test_nothing_is_imported_when_one_of_several_chats_is_bad(make_parts: MakeParts, tmp_path: Path) -> None:
    file = msgspec.json.decode(encode_export([branched(), branched()]))
    file["conversations"][1]["messages"][2]["parent_id"] = 99
    (tmp_path / "bad.json").write_bytes(msgspec.json.encode(file))
    parts = make_parts()
    parts.workspace.import_json(tmp_path / "bad.json")
    wait_until(lambda: parts.errors)
    assert parts.errors[0].startswith("Nothing was imported. bad.json is not a valid Kvasir export: in “Two ways”")
    assert parts.read(conversations.list_conversations) == []


def test_an_import_that_the_database_refuses_leaves_nothing_behind(make_parts: MakeParts, tmp_path: Path) -> None:
    parts = make_parts()
    path = write_export(tmp_path / "chats.json", *(branched() for _ in range(200)))
    parts.read(lambda db: db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}"))
    parts.workspace.import_json(path)
    wait_until(lambda: parts.errors)
    assert "full" in parts.errors[0]
    assert parts.read(conversations.list_conversations) == []
    assert parts.workspace.conversations == []


def test_what_a_full_disk_keeps_out_of_the_database_can_still_be_exported(
    make_parts: MakeParts, tmp_path: Path
) -> None:
    parts = make_parts()
    session = parts.workspace.new_session()
    parts.read(lambda db: db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}"))
    session.send("A long question. " * 1000)
    wait_until(lambda: parts.errors)
    done: list[str] = []
    parts.workspace.export_finished.connect(done.append)
    parts.workspace.export_markdown(session.conversation_id, tmp_path / "rescued.md")
    wait_until(lambda: done)
    assert "A long question." in (tmp_path / "rescued.md").read_text()
    parts.read(lambda db: db.execute("PRAGMA max_page_count = 1000000").fetchone())


def test_an_export_that_cannot_be_written_says_so_and_leaves_the_old_file(
    make_parts: MakeParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = make_parts(tokens_per_second=2000)
    session = parts.workspace.new_session()
    parts.ask(session, "Hello")
    parts.workspace.export_markdown(session.conversation_id, tmp_path / "no such folder" / "chat.md")
    wait_until(lambda: parts.errors)
    assert "cannot be written" in parts.errors[-1] and "No such file" in parts.errors[-1]

    target = tmp_path / "chat.md"
    target.write_text("the old file")

    def disk_is_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_is_full)
    parts.workspace.export_markdown(session.conversation_id, target)
    wait_until(lambda: len(parts.errors) == 2)
    assert "No space left" in parts.errors[-1]
    assert target.read_text() == "the old file"
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name.endswith(".md")) == ["chat.md"]
    assert not list(tmp_path.glob(".chat.md*")), "no half file stays"
