"""What the user has chosen and where the window was: one versioned JSON file, written atomically. Qt-free."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from engine.protocol import EngineConfig

SETTINGS_VERSION = 1
DEFAULT_FONT_SIZE = 14
FONT_SIZE_RANGE = (11, 22)
MAX_LOAD_OPTIONS = 100
_log = logging.getLogger(__name__)


class WindowState(msgspec.Struct):
    """Where the window and its parts were. `rect` is x, y, width, height of the normal window."""

    rect: tuple[int, int, int, int] | None = None
    maximized: bool = False
    sidebar_visible: bool = True
    sidebar_width: int = 248
    inspector_visible: bool = True
    inspector_width: int = 312
    inspector_tab: Literal["sampling", "model"] = "sampling"
    dashboard_visible: bool = True
    dashboard_height: int = 196


class Settings(msgspec.Struct):
    """Everything the settings window changes. Unknown fields of a newer version are ignored."""

    version: int = SETTINGS_VERSION
    theme: Literal["system", "light", "dark"] = "system"
    font_size: Annotated[int, msgspec.Meta(ge=FONT_SIZE_RANGE[0], le=FONT_SIZE_RANGE[1])] = DEFAULT_FONT_SIZE
    engine_python: str = ""
    """The interpreter that runs the engine worker; empty is the window's own."""
    model_folders: list[str] = []
    load_model_at_start: bool = True
    last_model: EngineConfig | None = None
    load_options: dict[str, EngineConfig] = {}
    """How each model was loaded last, by its path; those used longest ago come first and are forgotten first."""
    window: WindowState = msgspec.field(default_factory=WindowState)


def read_settings(path: Path) -> Settings:
    """What a file says; the defaults if there is none. Raises `OSError` and `msgspec.MsgspecError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Settings)
    except FileNotFoundError:
        return Settings()


def remember_load(settings: Settings, config: EngineConfig) -> bool:
    """Keeps how a model was loaded, for the next time and for the next start. Returns whether that is news."""
    if settings.last_model == config and settings.load_options.get(config.model) == config:
        return False
    settings.last_model = config
    settings.load_options.pop(config.model, None)
    settings.load_options[config.model] = config
    for path in list(settings.load_options)[:-MAX_LOAD_OPTIONS]:
        del settings.load_options[path]
    return True


class SettingsFile:
    """Loads and saves `Settings`; a file that cannot be understood is set aside, never overwritten.

    `problem` says in words what was wrong with the file, or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self.settings = self._load()

    def save(self) -> None:
        """Writes the settings so that a crash leaves either the old file or the new one.

        Makes the folder if need be; raises `OSError` if it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(self.settings), indent=2)
        temporary = self.path.with_suffix(".json.new")
        with open(temporary, "wb") as file:
            file.write(text + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    def _load(self) -> Settings:
        try:
            return read_settings(self.path)
        except OSError as error:
            self.problem = f"The settings in {self.path} cannot be read ({error.strerror}); defaults are used."
            return Settings()
        except msgspec.MsgspecError as error:
            aside = self.path.with_suffix(".json.unreadable")
            try:
                os.replace(self.path, aside)
            except OSError:
                _log.exception("cannot set aside %s", self.path)
            self.problem = f"The settings file was damaged ({error}). Defaults are used; the old file is {aside}."
            return Settings()
