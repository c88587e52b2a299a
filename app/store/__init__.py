"""Everything that lasts: conversations, runs, presets and settings in one SQLite file."""

from app.store.errors import (
    DatabaseCorruptError,
    DatabaseFullError,
    DatabaseLockedError,
    DatabaseReadOnlyError,
    DatabaseUnreachableError,
    ForeignDatabaseError,
    ImportRefusedError,
    SchemaTooNewError,
    StoreClosedError,
    StoreError,
)
from app.store.store import Store

__all__ = [
    "DatabaseCorruptError",
    "DatabaseFullError",
    "DatabaseLockedError",
    "DatabaseReadOnlyError",
    "DatabaseUnreachableError",
    "ForeignDatabaseError",
    "ImportRefusedError",
    "SchemaTooNewError",
    "Store",
    "StoreClosedError",
    "StoreError",
]
