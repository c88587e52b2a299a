"""Where Kvasir keeps its files. Imports no Qt, so that the window and the command line agree on every place."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from engine import catalog


def data_folder() -> Path:
    """Where chats, models and logs live; `KVASIR_DATA` moves them. The folder is made, or `OSError` raised."""
    return _made(catalog.data_folder())


def log_folder() -> Path:
    """The logs' folder, made if need be."""
    return _made(catalog.data_folder() / "logs")


def database_path() -> Path:
    """The chat database. Neither the file nor its folder need exist."""
    return catalog.data_folder() / "kvasir.db"


def settings_path() -> Path:
    """The settings file: beside the data if `KVASIR_DATA` is set, else in the platform's place. It need not exist."""
    moved = os.environ.get("KVASIR_DATA")
    folder = catalog.data_folder() if moved else platformdirs.user_config_path("kvasir", appauthor=False)
    return folder / "settings.json"


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
