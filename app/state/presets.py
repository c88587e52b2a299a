"""The sampler presets to choose from and what a new conversation starts with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.state.prompt import clean_text
from app.state.records import Preset
from app.store import Store, presets
from engine.protocol import SamplingParams


class PresetLibrary:
    """Built-in presets and a person's own, kept in the database."""

    def __init__(self, store: Store, builtin: Sequence[Preset]) -> None:
        self._store = store
        self._builtin = [replace(preset, is_builtin=True) for preset in builtin]
        self._own: list[Preset] = []
        self.default_params = SamplingParams()

    def restore(self, own: Sequence[Preset], default_params: SamplingParams | None) -> None:
        self._own = list(own)
        if default_params is not None:
            self.default_params = default_params

    @property
    def all(self) -> list[Preset]:
        return [*self._builtin, *self._own]

    def save(self, name: str, params: SamplingParams, system_prompt: str) -> Preset:
        """Keeps a preset, replacing an own one of that name.

        Raises `ValueError` for a blank name and for that of a built-in preset.
        """
        name = " ".join(clean_text(name).split())
        if not name:
            raise ValueError("Give the preset a name.")
        if any(preset.name.casefold() == name.casefold() for preset in self._builtin):
            raise ValueError(f"“{name}” is a built-in preset. Choose another name.")
        preset = Preset(name, params, system_prompt)
        others = [other for other in self._own if other.name != name]
        self._own = sorted([*others, preset], key=lambda own: own.name.casefold())
        self._store.write(lambda db: presets.save_preset(db, preset))
        return preset

    def delete(self, name: str) -> bool:
        """Removes an own preset; returns whether there was one."""
        kept = [preset for preset in self._own if preset.name != name]
        found = len(kept) < len(self._own)
        if found:
            self._own = kept
            self._store.write(lambda db: presets.delete_preset(db, name))
        return found

    def set_default_params(self, params: SamplingParams) -> None:
        self.default_params = params
        self._store.write(lambda db: presets.set_value(db, "default_params", params))
