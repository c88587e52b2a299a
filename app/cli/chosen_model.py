"""Which models there are for a command, and which one it uses."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from app.cli.failure import CommandError
from app.cli.options import check_text
from app.paths import settings_path
from app.settings import read_settings
from engine import catalog


def find_models() -> list[catalog.CatalogEntry]:
    """All that the window finds, in the folders that its settings name too."""
    return catalog.find_models(_settings_folders())


def choose_model(name_or_path: str | None) -> str:
    """The path of the model that was named, else the starter model, else the first usable one.

    Raises `CommandError`, listing near names for an unknown one; a damaged file is found out
    here, before an engine is started for it.
    """
    if name_or_path is not None:
        return str(_named_model(check_text(name_or_path, "--model")))
    starter = catalog.starter_model()
    if starter is not None:
        return str(starter)
    usable = [entry for entry in find_models() if entry.error is None]
    if not usable:
        raise CommandError(
            "there is no model on this machine: `make setup` installs the starter model, "
            f"or put a .gguf file into {catalog.user_models_folder()}"
        )
    return str(usable[0].path)


def choose_draft_model(name_or_path: str | None) -> str | None:
    """The path of the draft model that was named; None where none was. Raises `CommandError`."""
    return None if name_or_path is None else str(_named_model(check_text(name_or_path, "--draft-model")))


def _named_model(name_or_path: str) -> Path:
    try:
        path = catalog.resolve(name_or_path, _settings_folders()).absolute()
    except (catalog.CatalogError, OSError, ValueError) as error:  # ValueError: no path at all, as with a zero byte
        raise CommandError(str(error)) from error
    entry = catalog.describe_path(path)
    if entry.error is not None:
        raise CommandError(f"{path}: {entry.error}")
    return path


def _settings_folders() -> list[str]:
    path = settings_path()
    try:
        return read_settings(path).model_folders
    except (OSError, msgspec.MsgspecError) as error:
        print(f"kvasir: the model folders in {path} are left out: it cannot be read ({error})", file=sys.stderr)
        return []
