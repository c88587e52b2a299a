"""The store: what is written stays, and a database that cannot be written loses nothing."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlite_utils import Database

from app.store import (
    DatabaseCorruptError,
    DatabaseFullError,
    DatabaseLockedError,
    DatabaseReadOnlyError,
    DatabaseUnreachableError,
    ForeignDatabaseError,
    Store,
    StoreClosedError,
    StoreError,
    conversations,
    presets,
)
from tests.app.store_samples import add_chat, conversation_record, exchange


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "kvasir.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    store = Store(path, busy_timeout_s=0.02, retry_interval_s=0.05)
    yield store
    store.close(0.2)


def set_value(key: str, value: object) -> Callable[[Database], None]:
    return lambda db: presets.set_value(db, key, value)


def values(db: Database) -> dict[str, str]:
    return dict(db.execute("SELECT key, value FROM app_state").fetchall())


def reopened_values(path: Path) -> dict[str, str]:
    with closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("SELECT key, value FROM app_state").fetchall())


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Troubles:
    """Remembers what held the store's writes up."""

    def __init__(self, store: Store) -> None:
        self.seen: list[StoreError | None] = []
        store.on_trouble = self.seen.append


def test_a_conversation_comes_back_as_it_was_written(store: Store) -> None:
    record = conversation_record(system_prompt="Be brief.", draft="half a question", active_leaf_id=4)
    messages = exchange(["Hello 😀", "Guten Tag", "再见", "Bye"])

    def write(db: Database) -> None:
        conversations.insert_conversation(db, record)
        conversations.add_messages(db, record.id, messages, record.updated_at)

    store.write(write).result(5)
    loaded = store.submit(lambda db: conversations.load_conversation(db, record.id)).result(5)
    assert loaded is not None
    assert loaded.record == record
    assert loaded.messages == messages


def test_work_runs_on_one_thread_that_is_not_the_callers(store: Store) -> None:
    threads = {store.submit(lambda db: threading.get_ident()).result(5) for _ in range(3)}
    threads |= {store.write(lambda db: threading.get_ident()).result(5)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_read_sees_what_was_written_before_it(store: Store) -> None:
    for number in range(20):
        store.write(set_value("n", number))
        assert store.submit(values).result(5)["n"] == str(number)


def test_a_write_that_fails_half_way_leaves_no_trace_and_is_reported(store: Store) -> None:
    lost: list[Exception] = []
    store.on_lost_write = lost.append

    def half(db: Database) -> None:
        presets.set_value(db, "a", 1)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        store.write(half).result(5)
    assert store.submit(values).result(5) == {}
    assert [str(error) for error in lost] == ["half way"]
    store.write(set_value("b", 2)).result(5)


def test_writes_to_a_full_disk_are_kept_in_order_and_saved_when_there_is_room(store: Store, path: Path) -> None:
    troubles = Troubles(store)

    def fill(db: Database) -> None:
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages}")

    store.submit(fill).result(5)
    first = store.write(set_value("answer", "x" * 100_000))
    second = store.write(set_value("answer", "short"))
    wait_for(lambda: troubles.seen)
    assert isinstance(troubles.seen[0], DatabaseFullError)
    assert "full" in str(troubles.seen[0]) and str(path) in str(troubles.seen[0])
    assert not first.done() and not second.done()
    assert store.num_unsaved == 2
    assert store.submit(values).result(5) == {}, "reading goes on"

    store.submit(lambda db: db.execute("PRAGMA max_page_count = 1000000").fetchone()).result(5)
    second.result(5)
    assert first.done()
    assert troubles.seen[-1] is None
    assert reopened_values(path) == {"answer": '"short"'}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.rollback()


def test_writes_to_a_locked_database_wait_for_the_lock(store: Store, path: Path) -> None:
    troubles = Troubles(store)
    with locked(path):
        written = store.write(set_value("question", "kept"))
        wait_for(lambda: troubles.seen)
        assert isinstance(troubles.seen[0], DatabaseLockedError)
        assert not written.done()
    written.result(5)
    assert troubles.seen == [troubles.seen[0], None], "one report when it begins, one when it ends"
    assert reopened_values(path) == {"question": '"kept"'}


def test_a_database_locked_by_another_program_still_opens(store: Store, path: Path) -> None:
    store.write(set_value("a", 1)).result(5)
    with locked(path):
        second = Store(path, busy_timeout_s=0.02)
        assert second.submit(values).result(5) == {"a": "1"}
        second.close()


def test_a_database_that_turned_read_only_keeps_writes(store: Store) -> None:
    troubles = Troubles(store)
    store.submit(lambda db: db.execute("PRAGMA query_only = ON")).result(5)
    written = store.write(set_value("a", 1))
    wait_for(lambda: troubles.seen)
    assert isinstance(troubles.seen[0], DatabaseReadOnlyError)
    store.submit(lambda db: db.execute("PRAGMA query_only = OFF")).result(5)
    written.result(5)


def test_closing_saves_what_is_queued_and_says_what_it_could_not_save(path: Path) -> None:
    store = Store(path, busy_timeout_s=0.02, retry_interval_s=0.05)
    queued = [store.write(set_value(str(number), number)) for number in range(50)]
    assert store.close() == 0
    assert all(write.done() for write in queued)
    assert len(reopened_values(path)) == 50

    store = Store(path, busy_timeout_s=0.02, retry_interval_s=0.05)
    with locked(path):
        lost = store.write(set_value("lost", 1))
        assert store.close(0.3) == 1
    with pytest.raises(DatabaseLockedError):
        lost.result(5)
    with pytest.raises(StoreClosedError):
        store.write(set_value("late", 1)).result(5)


def test_ids_go_on_behind_the_highest_one_in_the_file(path: Path) -> None:
    store = Store(path)
    store.write(add_chat("One", ["a", "b", "c"], first_id=40)).result(5)
    store.close()
    store = Store(path)
    assert [store.new_id(), store.new_id()] == [43, 44]
    store.close()


def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is not a database, " * 100)
    with pytest.raises(DatabaseCorruptError, match="damaged"):
        Store(path)
    assert path.read_bytes().startswith(b"this is not")


def test_a_damaged_database_is_refused(path: Path) -> None:
    store = Store(path)
    store.write(add_chat("One", ["word " * 2000, "word " * 2000])).result(5)
    store.close()
    damaged = bytearray(path.read_bytes())
    damaged[100:4096] = os.urandom(3996)  # the first page: the list of tables
    path.write_bytes(damaged)
    with pytest.raises(DatabaseCorruptError, match="damaged"):
        Store(path)


def test_a_database_of_another_program_is_refused(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
        other.commit()
    before = path.read_bytes()
    with pytest.raises(ForeignDatabaseError, match="another program"):
        Store(path)
    assert path.read_bytes() == before


def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnreachableError, match="cannot be opened"):
        Store(tmp_path)  # a folder
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseUnreachableError, match="cannot be reached"):
        Store(tmp_path / "file" / "kvasir.db")


@contextmanager
def without_root() -> Iterator[None]:
    """Root may write everywhere; become an ordinary person for a while."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have no owner's permissions here")
@pytest.mark.parametrize("is_new", [True, False], ids=["no database yet", "a database in it"])
def test_a_read_only_folder_is_refused_in_words(is_new: bool) -> None:
    folder = Path(tempfile.mkdtemp())  # outside pytest's private folder, which only its owner may enter
    try:
        path = folder / "kvasir.db"
        if not is_new:
            Store(path).close()
            path.chmod(0o444)
        folder.chmod(0o555)
        with without_root(), pytest.raises((DatabaseReadOnlyError, DatabaseUnreachableError)) as caught:
            Store(path)
        assert str(path) in str(caught.value)
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_open_runs_are_repaired_as_interrupted_with_their_text(store: Store) -> None:
    messages = exchange(["question", "half an answ"], status="streaming")

    def write(db: Database) -> None:
        conversations.insert_conversation(db, conversation_record())
        conversations.add_messages(db, "chat", messages, 1.0)

    store.write(write)
    assert store.write(conversations.repair_open_runs).result(5) == 1
    assert store.write(conversations.repair_open_runs).result(5) == 0
    loaded = store.submit(lambda db: conversations.load_conversation(db, "chat")).result(5)
    assert loaded is not None
    answer = loaded.messages[1]
    assert answer.run is not None
    assert (answer.text, answer.complete, answer.run.status) == ("half an answ", True, "interrupted")


def test_deleting_removes_a_chat_of_ten_thousand_messages_and_its_runs(store: Store) -> None:
    # A cascade along the chain of parents would be deeper than SQLite allows.
    chat = store.write(add_chat("Long", ["word"] * 10_000)).result(10)
    store.write(lambda db: conversations.mark_conversation_deleted(db, chat, 1.0))
    store.write(conversations.purge_deleted).result(10)

    def counts(db: Database) -> list[int]:
        tables = ("conversations", "messages", "runs", "branches")
        return [db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]

    assert store.submit(counts).result(5) == [0, 0, 0, 0]
    assert store.submit(lambda db: db.execute("PRAGMA foreign_key_check").fetchall()).result(5) == []


def test_a_chat_of_ten_thousand_messages_loads_in_well_under_a_second(
    store: Store, record_property: Callable[[str, object], None]
) -> None:
    chat = store.write(add_chat("Long", ["What is a word? " * 8] * 10_000)).result(10)
    start = time.perf_counter()
    loaded = store.submit(lambda db: conversations.load_conversation(db, chat)).result(10)
    seconds = time.perf_counter() - start
    record_property("load_10k_messages_s", seconds)
    assert loaded is not None and len(loaded.messages) == 10_000
    assert seconds < 0.9


def test_stored_parameters_that_are_not_valid_any_more_do_not_lock_a_chat_away(store: Store) -> None:
    chat = store.write(add_chat("One", ["a", "b"])).result(5)
    store.write(lambda db: db.execute("UPDATE conversations SET params = '{\"temperature\": 99}'"))
    loaded = store.submit(lambda db: conversations.load_conversation(db, chat)).result(5)
    assert loaded is not None and loaded.record.params.temperature == 0.7


def test_of_several_writes_only_the_one_that_cannot_be_saved_is_lost(store: Store) -> None:
    lost: list[Exception] = []
    store.on_lost_write = lost.append

    def half(db: Database) -> None:
        presets.set_value(db, "half", 1)
        db.execute("INSERT INTO no_such_table VALUES (1)")

    store.write_each([set_value("a", 1), half, set_value("b", 2), set_value("a", 3)]).result(5)
    assert store.submit(values).result(5) == {"a": "3", "b": "2"}
    assert len(lost) == 1 and "no_such_table" in str(lost[0])


def test_several_writes_wait_together_for_a_lock_and_none_is_lost(store: Store, path: Path) -> None:
    lost: list[Exception] = []
    store.on_lost_write = lost.append
    runs: list[int] = []

    def locked_once(db: Database) -> None:
        presets.set_value(db, "b", 2)
        runs.append(1)
        if len(runs) == 1:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error

    store.write_each([set_value("a", 1), locked_once]).result(5)
    assert len(runs) == 2 and lost == []
    assert reopened_values(path) == {"a": "1", "b": "2"}
