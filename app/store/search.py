"""Full-text search over titles and messages."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from sqlite_utils import Database

from app.state.records import SearchResult

TRIGRAM_LENGTH = 3
SNIPPET_LENGTH = 120
SNIPPET_LEAD = 40
SLICE_LENGTH = 20_000


@dataclass(frozen=True)
class SearchSlice:
    """What was found in one stretch of messages; `next_below` is where the next, older one starts, None at the end."""

    results: list[SearchResult]
    next_below: int | None


def search_slice(db: Database, text: str, below: int | None, limit: int) -> SearchSlice:
    """Where all words of `text` occur as substrings, whatever their case: titles first, then the newest messages.

    This looks at one stretch of messages, those next older than `below`; None starts with titles and the newest.
    Deleted chats and branches, and answers still being written, are left out. Very short words are not in the
    index and mean reading every message: in slices, writing never waits long for it.
    """
    terms = text.replace("\0", " ").split()
    if not terms:
        return SearchSlice([], None)
    results = [] if below is not None else _search_titles(db, terms)
    newest: int = db.execute("SELECT ifnull(max(id), 0) FROM messages").fetchone()[0]
    end = newest + 1 if below is None else below
    first = max(0, end - SLICE_LENGTH)
    if len(results) < limit:
        results += _search_messages(db, terms, limit - len(results), first, end)
    return SearchSlice(results[:limit], first or None)


def _search_titles(db: Database, terms: list[str]) -> list[SearchResult]:
    folded = [term.casefold() for term in terms]
    rows = db.execute(
        "SELECT id, title, updated_at FROM conversations WHERE deleted_at IS NULL ORDER BY updated_at DESC"
    )
    return [
        SearchResult(id_, None, title, title, _matches(title, terms), updated_at)
        for id_, title, updated_at in rows
        if all(term in title.casefold() for term in folded)
    ]


def _search_messages(db: Database, terms: list[str], limit: int, first: int, below: int) -> list[SearchResult]:
    # A term shorter than a trigram is not in the index. Alone it means a scan; beside a longer one, a filter.
    indexed = [term for term in terms if len(term) >= TRIGRAM_LENGTH]
    conditions: list[str] = ["m.id >= ? AND m.id < ?"]
    values: list[str | int] = [first, below]
    if indexed:
        conditions.append(
            "m.id IN (SELECT rowid FROM message_search WHERE message_search MATCH ? AND rowid >= ? AND rowid < ?)"
        )
        values += [" AND ".join('"' + term.replace('"', '""') + '"' for term in indexed), first, below]
    for term in terms:
        if len(term) < TRIGRAM_LENGTH:
            variants = _case_variants(term)
            conditions.append("(" + " OR ".join("instr(m.text, ?) > 0" for _ in variants) + ")")
            values.extend(variants)
    rows = db.execute(
        "SELECT c.id, m.id, c.title, m.text, c.updated_at "
        "FROM messages m JOIN conversations c ON c.id = m.conversation_id "
        f"WHERE {' AND '.join(conditions)} AND m.complete AND m.deleted_at IS NULL AND c.deleted_at IS NULL "
        "ORDER BY m.id DESC LIMIT ?",
        (*values, limit),
    )
    return [
        SearchResult(conversation_id, message_id, title, *_snippet(text, terms), updated_at)
        for conversation_id, message_id, title, text, updated_at in rows
    ]


def _case_variants(term: str) -> list[str]:
    """All spellings of a very short term in capitals and small letters."""
    letters = [sorted({letter, letter.lower(), letter.upper()}) for letter in term]
    return ["".join(spelling) for spelling in itertools.product(*letters)]


def _snippet(text: str, terms: list[str]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The surroundings of the first match on one line, and where the terms are in it."""
    first = _pattern(terms).search(text)
    start = max(0, first.start() - SNIPPET_LEAD) if first else 0
    window = text[start : start + SNIPPET_LENGTH]
    snippet = ("…" if start else "") + " ".join(window.split()) + ("…" if start + SNIPPET_LENGTH < len(text) else "")
    return snippet, _matches(snippet, terms)


def _matches(text: str, terms: list[str]) -> tuple[tuple[int, int], ...]:
    return tuple(match.span() for match in _pattern(terms).finditer(text))


def _pattern(terms: list[str]) -> re.Pattern[str]:
    longest_first = sorted(terms, key=len, reverse=True)
    return re.compile("|".join(re.escape(term) for term in longest_first), re.IGNORECASE)
