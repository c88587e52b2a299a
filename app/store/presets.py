"""Sampler presets and the application's own small values, such as which tabs are open."""

from __future__ import annotations

import logging
import time
from typing import TypeVar

import msgspec
from sqlite_utils import Database

from app.state.records import Preset
from app.store.conversations import decode_params, encode_params

T = TypeVar("T")
logger = logging.getLogger(__name__)


def list_presets(db: Database) -> list[Preset]:
    """A person's own presets by name."""
    rows = db.execute("SELECT name, params, system_prompt FROM sampler_presets ORDER BY name COLLATE NOCASE")
    return [Preset(name, decode_params(params), system_prompt) for name, params, system_prompt in rows]


def save_preset(db: Database, preset: Preset) -> None:
    """Adds a preset or replaces the one of that name."""
    db.execute(
        "INSERT INTO sampler_presets (name, params, system_prompt, created_at) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (name) DO UPDATE SET params = excluded.params, system_prompt = excluded.system_prompt",
        (preset.name, encode_params(preset.params), preset.system_prompt, time.time()),
    )


def delete_preset(db: Database, name: str) -> None:
    db.execute("DELETE FROM sampler_presets WHERE name = ?", (name,))


def get_value(db: Database, key: str, type_: type[T]) -> T | None:
    """A stored value; None, with a warning in the log, if it is not of that type any more."""
    row = db.execute("SELECT value FROM app_state WHERE key = ?", (key,)).fetchone()
    if row is None:
        return None
    try:
        return msgspec.json.decode(row[0], type=type_)
    except (msgspec.DecodeError, ValueError) as error:
        logger.warning("the stored %s is ignored: %s", key, error)
        return None


def set_value(db: Database, key: str, value: object) -> None:
    db.execute(
        "INSERT INTO app_state (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, msgspec.json.encode(value).decode()),
    )
