"""The database's schema, as a list of small steps that are applied in order, each once."""

from __future__ import annotations

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

migrations = Migrations("kvasir")


@migrations()
def m001_conversations(db: Database) -> None:
    """Messages form a tree by `parent_id`; a branch points at a leaf of it, a run is the making of one answer.

    `parent_id` does not cascade: SQLite follows a cascade as nested triggers, 1000 deep at most, and a chat is
    a chain of any length. Deleting takes whole conversations or whole marked subtrees.
    """
    _execute_all(
        db,
        """
        CREATE TABLE conversations (
            id TEXT PRIMARY KEY,
            title TEXT NOT NULL,
            title_is_auto INTEGER NOT NULL,
            system_prompt TEXT NOT NULL,
            params TEXT NOT NULL,
            preset_name TEXT NOT NULL,
            draft TEXT NOT NULL,
            active_leaf_id INTEGER,
            created_at REAL NOT NULL,
            updated_at REAL NOT NULL,
            deleted_at REAL
        ) STRICT;

        CREATE TABLE messages (
            id INTEGER PRIMARY KEY,
            conversation_id TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
            parent_id INTEGER REFERENCES messages(id) DEFERRABLE INITIALLY DEFERRED,
            role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
            text TEXT NOT NULL,
            complete INTEGER NOT NULL,
            created_at REAL NOT NULL,
            deleted_at REAL
        ) STRICT;
        CREATE INDEX messages_by_conversation ON messages(conversation_id, id);
        CREATE INDEX messages_by_parent ON messages(parent_id);

        CREATE TABLE branches (
            leaf_id INTEGER PRIMARY KEY REFERENCES messages(id) ON DELETE CASCADE,
            conversation_id TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
            visited_at REAL NOT NULL
        ) STRICT;
        CREATE INDEX branches_by_conversation ON branches(conversation_id);

        CREATE TABLE runs (
            id INTEGER PRIMARY KEY,
            message_id INTEGER NOT NULL UNIQUE REFERENCES messages(id) ON DELETE CASCADE,
            status TEXT NOT NULL CHECK (status IN ('waiting', 'streaming', 'finished', 'interrupted', 'failed')),
            model TEXT NOT NULL,
            params TEXT NOT NULL,
            seed INTEGER,
            prompt_tokens INTEGER,
            cached_tokens INTEGER,
            output_tokens INTEGER,
            dropped_messages INTEGER NOT NULL,
            preemptions INTEGER NOT NULL,
            drafted_tokens INTEGER NOT NULL,
            accepted_tokens INTEGER NOT NULL,
            queue_ms REAL,
            ttft_ms REAL,
            tpot_ms REAL,
            finish_reason TEXT,
            stop_reason TEXT,
            error TEXT,
            started_at REAL NOT NULL,
            finished_at REAL
        ) STRICT;
        CREATE INDEX open_runs ON runs(status) WHERE status IN ('waiting', 'streaming');

        CREATE TABLE token_traces (
            run_id INTEGER NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
            position INTEGER NOT NULL,
            token_id INTEGER NOT NULL,
            text TEXT NOT NULL,
            logprob REAL NOT NULL,
            alternatives TEXT NOT NULL,
            PRIMARY KEY (run_id, position)
        ) STRICT, WITHOUT ROWID
        """,
    )


@migrations()
def m002_presets_and_settings(db: Database) -> None:
    _execute_all(
        db,
        """
        CREATE TABLE sampler_presets (
            name TEXT PRIMARY KEY,
            params TEXT NOT NULL,
            system_prompt TEXT NOT NULL,
            created_at REAL NOT NULL
        ) STRICT;

        CREATE TABLE app_state (
            key TEXT PRIMARY KEY,
            value TEXT NOT NULL
        ) STRICT
        """,
    )


@migrations()
def m003_message_search(db: Database) -> None:
    """Trigrams find any substring of three characters or more, in languages without spaces too.

    Only complete messages are indexed: a growing answer is written every second, and taking its whole
    text out of the index and in again each time would cost more than everything else together.
    """
    for statement in (
        "CREATE VIRTUAL TABLE message_search USING fts5("
        "text, content='messages', content_rowid='id', tokenize='trigram')",
        "INSERT INTO message_search(rowid, text) SELECT id, text FROM messages WHERE complete",
        "CREATE TRIGGER message_search_insert AFTER INSERT ON messages WHEN new.complete BEGIN "
        "INSERT INTO message_search(rowid, text) VALUES (new.id, new.text); END",
        "CREATE TRIGGER message_search_update AFTER UPDATE OF text, complete ON messages BEGIN "
        "INSERT INTO message_search(message_search, rowid, text) "
        "SELECT 'delete', old.id, old.text WHERE old.complete; "
        "INSERT INTO message_search(rowid, text) SELECT new.id, new.text WHERE new.complete; END",
        "CREATE TRIGGER message_search_delete AFTER DELETE ON messages WHEN old.complete BEGIN "
        "INSERT INTO message_search(message_search, rowid, text) VALUES ('delete', old.id, old.text); END",
    ):
        db.execute(statement)


def known_migrations() -> list[str]:
    """Names of all migrations this version knows, oldest first."""
    return [migration.name for migration in migrations._migrations]


def _execute_all(db: Database, statements: str) -> None:
    for statement in statements.split(";"):
        db.execute(statement)
