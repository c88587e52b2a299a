"""What can go wrong with the database, as typed errors with messages for people."""

from __future__ import annotations

import sqlite3
from pathlib import Path


class StoreError(Exception):
    """Base of all database errors. `retryable` ones may go away by themselves: the write is kept and tried again."""

    retryable = False


class DatabaseLockedError(StoreError):
    retryable = True


class DatabaseFullError(StoreError):
    retryable = True


class DatabaseReadOnlyError(StoreError):
    retryable = True


class DatabaseUnreachableError(StoreError):
    """The file or its folder cannot be opened, read or written."""

    retryable = True


class DatabaseCorruptError(StoreError):
    pass


class SchemaTooNewError(StoreError):
    pass


class ForeignDatabaseError(StoreError):
    """A valid SQLite file, but not one of ours."""


class StoreClosedError(StoreError):
    pass


class ImportRefusedError(StoreError):
    """The file to import is not valid; nothing of it was kept."""


def translate(error: sqlite3.Error | OSError, path: Path) -> StoreError:
    """The typed error for what SQLite or the file system reported about `path`."""
    if isinstance(error, PermissionError):
        return DatabaseReadOnlyError(_read_only_message(path))
    if isinstance(error, OSError):
        return DatabaseUnreachableError(f"The chat database {path} cannot be reached: {error.strerror or error}.")
    # The low byte is the primary result code; the rest only refines it.
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return DatabaseLockedError(
            f"The chat database {path} is locked by another program. Close it; saving goes on as soon as it lets go."
        )
    if code == sqlite3.SQLITE_FULL:
        return DatabaseFullError(
            f"The disk that holds the chat database {path} is full. Free some space; what is not saved yet is kept."
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return DatabaseReadOnlyError(_read_only_message(path))
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DatabaseCorruptError(
            f"The chat database {path} is damaged ({error}). Move it away, or put the newest backup beside it in its "
            "place, and start again."
        )
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR):
        return DatabaseUnreachableError(
            f"The chat database {path} cannot be opened or written ({error}). Check the folder and its disk."
        )
    return StoreError(f"The chat database {path} refused a command: {error}.")


def _read_only_message(path: Path) -> str:
    return f"The chat database {path} or its folder is read-only. Allow writing there; what is not saved yet is kept."
