"""Opens the database file: refuses what is not ours, backs up before a migration, then migrates."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from sqlite_utils import Database

from app.store.errors import DatabaseFullError, ForeignDatabaseError, SchemaTooNewError
from app.store.migrations import known_migrations, migrations

NUM_BACKUPS_KEPT = 3


def open_database(path: Path, busy_timeout_s: float) -> Database:
    """The migrated database at `path`, made if there is none; its folder is made too.

    Raises `StoreError` subclasses, `sqlite3.Error` and `OSError`; an existing file is not changed before its
    schema is known to be ours and not newer than this program, and backed up before it is migrated.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=busy_timeout_s)
    try:
        db = Database(connection)
        applied = inspect_schema(db, path)
        pending = [name for name in known_migrations() if name not in applied]
        if applied and pending:
            back_up(db, path)
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA synchronous = FULL")  # a sent message survives a power cut
        if db.journal_mode != "wal":
            db.enable_wal()
        if pending:
            migrations.apply(db)
        else:
            _check_writable(db)
    except BaseException:
        connection.close()
        raise
    return db


def inspect_schema(db: Database, path: Path) -> set[str]:
    """Names of the migrations that made the database; empty for a file with nothing in it. Changes nothing.

    Raises `ForeignDatabaseError` or `SchemaTooNewError` for a database that this program must not touch.
    """
    tables = set(db.table_names())
    if not tables:
        return set()
    if migrations.migrations_table not in tables:
        raise ForeignDatabaseError(
            f"{path} is a database of another program, not a Kvasir chat database. Choose another place."
        )
    applied = {migration.name for migration in migrations.applied(db)}
    unknown = sorted(applied - set(known_migrations()))
    if unknown:
        raise SchemaTooNewError(
            f"The chat database {path} was written by a newer Kvasir (it has {', '.join(unknown)}). "
            "Update Kvasir to open it; nothing was changed."
        )
    if not applied:
        raise ForeignDatabaseError(
            f"{path} is a database of another program, not a Kvasir chat database. Choose another place."
        )
    return applied


def back_up(db: Database, path: Path) -> Path:
    """Copies the database beside itself and removes all but the newest few copies. Returns the copy's path."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = path.with_name(f"{path.name}.backup-{stamp}")
    partial = target.with_name(target.name + ".part")
    copy = sqlite3.connect(partial)
    try:
        db.conn.backup(copy)
    except sqlite3.Error as error:
        raise DatabaseFullError(
            f"The chat database {path} needs an update, and the backup before it failed ({error}). "
            "Nothing was changed. Free some space and start again."
        ) from error
    finally:
        copy.close()
        if not _is_complete(partial):
            partial.unlink(missing_ok=True)
    partial.replace(target)
    for old in list_backups(path)[NUM_BACKUPS_KEPT:]:
        old.unlink(missing_ok=True)
    return target


def list_backups(path: Path) -> list[Path]:
    """Backups of the database at `path`, newest first."""
    backups = path.parent.glob(f"{path.name}.backup-*")
    return sorted((entry for entry in backups if entry.suffix != ".part"), key=lambda entry: entry.name, reverse=True)


def _check_writable(db: Database) -> None:
    """Takes and releases the write lock: a read-only file shows itself here. A lock held by another program
    does not hinder reading, and writes wait for it."""
    try:
        db.conn.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if (error.sqlite_errorcode & 0xFF) != sqlite3.SQLITE_BUSY:
            raise
    db.rollback()


def _is_complete(copy: Path) -> bool:
    connection = sqlite3.connect(copy)
    try:
        return connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok"
    except sqlite3.Error:
        return False
    finally:
        connection.close()
