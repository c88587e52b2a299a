"""The settings of a `config.json`, each checked as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.config import ModelError

_LARGEST = 1 << 40


class HFValues:
    """Settings by name, with what transformers takes for those that are missing.

    A setting that is null counts as missing, but for `optional_number`, where null may be what is meant.
    Every method raises ModelError naming a setting that is missing or of another kind.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self._defaults = defaults
        self._path = path

    def get(self, name: str) -> Any:
        value = self.values.get(name)
        return self._defaults.get(name) if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.bad(name, value, "not a number" if not isinstance(value, float) else "not a whole number")
        if abs(value) > _LARGEST:
            raise self.bad(name, hex(value), "a number no model has")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        return self._as_number(name, default if value is None else value)

    def optional_number(self, name: str) -> float | None:
        """None where the setting is null; the default only where there is no setting of that name at all."""
        value = self.values.get(name, self._defaults.get(name))
        return None if value is None else self._as_number(name, value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, (bool, type(None))):
            raise self.bad(name, value, "neither true nor false")
        return bool(value)

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self.bad(name, value, "no text")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self.get(name)
        if not isinstance(value, list):
            raise self.bad(name, value, "no list")
        return tuple(self._as_number(name, item) for item in value)

    def section(self, name: str) -> Mapping[str, Any]:
        """A group of settings; empty where there is none."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.bad(name, value, "no group of settings")
        return value

    def bad(self, name: str, value: Any, fault: str) -> ModelError:
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
        what = "missing" if value is None else f"{shown}, {fault}"
        return ModelError(f"config.json: {self._path}{name} is {what}; download it again")

    def _as_number(self, name: str, value: Any) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.bad(name, value, "not a number")
        if not abs(value) < 1e30:  # NaN included
            raise self.bad(name, value if isinstance(value, float) else hex(value), "a number no model has")
        return float(value)
