"""The schema: migrated step by step, with a backup before, and never by an older program."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database

from app.store import SchemaTooNewError, Store, StoreError, conversations, opening
from app.store.migrations import known_migrations, migrations
from app.store.opening import list_backups
from tests.app.store_samples import add_chat, search_all


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvasir.db"


def make_old_database(path: Path) -> None:
    """A database as the first migrations alone leave it, with a message in it."""
    with closing(sqlite3.connect(path)) as connection:
        db = Database(connection)
        migrations.apply(db, stop_before="m003_message_search")
        with db.atomic():
            add_chat("Old", ["an old question", "an old answer"])(db)


def test_a_new_database_has_every_migration_and_no_backup(path: Path) -> None:
    store = Store(path)
    applied = store.submit(lambda db: [m.name for m in migrations.applied(db)]).result(5)
    assert applied == known_migrations()
    assert list_backups(path) == []
    assert store.submit(lambda db: db.journal_mode).result(5) == "wal"
    assert store.submit(lambda db: db.execute("PRAGMA foreign_keys").fetchone()[0]).result(5) == 1
    store.close()


def test_an_older_database_is_backed_up_and_then_migrated(path: Path) -> None:
    make_old_database(path)
    store = Store(path)
    chats = store.submit(conversations.list_conversations).result(5)
    store.close()
    assert [chat.title for chat in chats] == ["Old"]
    (backup,) = list_backups(path)
    with closing(sqlite3.connect(backup)) as copy:
        assert copy.execute("SELECT text FROM messages ORDER BY id").fetchall() == [
            ("an old question",),
            ("an old answer",),
        ]
        tables = {row[0] for row in copy.execute("SELECT name FROM sqlite_master")}
    assert "message_search" not in tables, "the backup was made before the migration"
    Store(path).close()
    assert list_backups(path) == [backup], "no backup without a migration"


def test_messages_from_before_the_search_are_found_after_the_migration(path: Path) -> None:
    make_old_database(path)
    store = Store(path)
    found = store.submit(lambda db: search_all(db, "old question")).result(5)
    store.close()
    assert [result.message_id for result in found] == [1]


def test_a_migration_that_fails_leaves_the_database_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_old_database(path)

    def broken(db: Database) -> None:
        db.execute("DROP TABLE messages")
        db.execute("CREATE TABLE conversations (id TEXT)")  # exists already

    search_step = next(m for m in migrations._migrations if m.name == "m003_message_search")
    monkeypatch.setattr(search_step, "fn", broken)
    with pytest.raises(StoreError, match="already exists"):
        Store(path)
    monkeypatch.undo()
    store = Store(path)
    assert store.submit(lambda db: db["messages"].count).result(5) == 2
    store.close()


def test_a_newer_database_is_refused_unchanged(path: Path) -> None:
    Store(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('kvasir', 'm999_future', 'x')"
        )
        connection.commit()
    before = path.read_bytes()
    with pytest.raises(SchemaTooNewError, match=r"newer Kvasir.*m999_future"):
        Store(path)
    assert path.read_bytes() == before
    assert list_backups(path) == []


def test_only_the_newest_backups_are_kept(path: Path) -> None:
    Store(path).close()
    for day in range(1, 6):
        path.with_name(f"{path.name}.backup-2020010{day}-120000").write_bytes(b"")
    with closing(sqlite3.connect(path)) as connection:
        newest = opening.back_up(Database(connection), path)
    kept = list_backups(path)
    assert len(kept) == opening.NUM_BACKUPS_KEPT
    assert kept[0] == newest


def test_no_backup_no_migration(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_old_database(path)
    before = path.read_bytes()
    folder_in_the_way = path.with_name(f"{path.name}.backup-20200101-000000.part")
    folder_in_the_way.mkdir()
    monkeypatch.setattr(opening.time, "strftime", lambda _: "20200101-000000")
    with pytest.raises(StoreError, match="backup"):
        Store(path)
    assert path.read_bytes() == before
