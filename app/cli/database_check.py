"""Looks at the chat database without changing it."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Literal

from app.paths import database_path
from engine.memory import format_bytes

Status = Literal["ok", "note", "broken"]
_LOW_DISK_BYTES = 200 << 20


def check_database(path: Path | None = None) -> tuple[Status, str, str]:
    """Returns (status, finding, advice)."""
    path = database_path() if path is None else path
    with closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.execute("CREATE VIRTUAL TABLE probe USING fts5(text)")
        except sqlite3.OperationalError:
            version = sqlite3.sqlite_version
            return "broken", f"SQLite {version} is built without full-text search (FTS5)", "use another Python build"
    folder = next(parent for parent in path.parents if parent.exists())
    if not os.access(folder, os.W_OK):
        return "broken", f"the folder {folder} is read-only, chats cannot be saved", f"chmod u+w {folder}"
    free = shutil.disk_usage(folder).free
    if free < _LOW_DISK_BYTES:
        return "note", f"only {format_bytes(free)} of disk are free at {folder}", "free some space"
    if not path.exists():
        return "ok", f"none yet, will be made at {path}", ""
    return _check_file(path)


def _check_file(path: Path) -> tuple[Status, str, str]:
    from sqlite_utils import Database

    from app.store import StoreError
    from app.store.migrations import known_migrations
    from app.store.opening import inspect_schema

    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=2.0)) as connection:
            result = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if result != "ok":
                return "broken", f"{path} is damaged: {result}", "put the newest backup beside it in its place"
            applied = inspect_schema(Database(connection), path)
            size = path.stat().st_size
    except StoreError as error:
        return "broken", str(error), ""
    except (sqlite3.Error, OSError) as error:
        return "broken", f"{path} cannot be read: {error}", "close other programs that use it, or restore a backup"
    found = f"{path}, {format_bytes(size)}"
    if applied and applied < set(known_migrations()):
        return "note", f"{found}, of an older Kvasir", "the next start of the window backs it up and updates it"
    return "ok", found, ""
