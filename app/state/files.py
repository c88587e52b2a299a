"""Reads and writes conversation files off the GUI thread and off the database thread."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from app.state.records import Conversation, ConversationSummary
from app.store import Store, StoreError, conversations
from app.store.markdown_export import to_markdown
from app.store.transfer import encode_export, insert_imported, read_export


class ExportFailedError(Exception):
    """The file could not be written; one that was there before is untouched."""


class ConversationFiles:
    """Exports and imports, one after another. `in_memory` holds conversations that are newer than the database."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvasir-files")

    def export_markdown(self, path: Path, conversation_id: str, in_memory: Mapping[str, Conversation]) -> Future[None]:
        def run() -> None:
            (conversation,) = self._gather([conversation_id], in_memory)
            _write_whole(path, to_markdown(conversation).encode())

        return self._executor.submit(run)

    def export_json(
        self, path: Path, conversation_ids: Sequence[str], in_memory: Mapping[str, Conversation]
    ) -> Future[None]:
        def run() -> None:
            _write_whole(path, encode_export(self._gather(conversation_ids, in_memory)))

        return self._executor.submit(run)

    def import_json(self, path: Path) -> Future[list[ConversationSummary]]:
        """All conversations of the file, or none and an `ImportRefusedError`."""

        def run() -> list[ConversationSummary]:
            imported = read_export(path, self._store.new_id)
            self._store.submit(partial(insert_imported, imported=imported)).result()
            return [
                ConversationSummary(c.record.id, c.record.title, c.record.updated_at, len(c.messages)) for c in imported
            ]

        return self._executor.submit(run)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _gather(self, conversation_ids: Sequence[str], in_memory: Mapping[str, Conversation]) -> list[Conversation]:
        gathered = []
        for conversation_id in conversation_ids:
            conversation = in_memory.get(conversation_id)
            if conversation is None:
                read = partial(conversations.load_conversation, conversation_id=conversation_id)
                conversation = self._store.submit(read).result()
            if conversation is None:
                raise StoreError("A chat that was to be exported is not there any more.")
            gathered.append(conversation)
        return gathered


def _write_whole(path: Path, data: bytes) -> None:
    """Replaces the file only once all of it is on the disk."""
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise ExportFailedError(f"{path} cannot be written: {error.strerror or error}.") from error
