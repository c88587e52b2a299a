from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from app.settings import MAX_LOAD_OPTIONS, Settings, SettingsFile, read_settings, remember_load
from engine.protocol import EngineConfig


def test_settings_come_back_as_they_were_saved(tmp_path: Path) -> None:
    file = SettingsFile(tmp_path / "settings.json")
    file.settings.theme = "dark"
    file.settings.model_folders.append("/models")
    file.settings.last_model = EngineConfig(model="/models/a.gguf", max_context=4096)
    file.settings.window.rect = (10, 20, 1200, 800)
    file.save()
    assert SettingsFile(file.path).settings == file.settings
    assert list(tmp_path.iterdir()) == [file.path], "no temporary file is left"


def test_without_a_file_there_are_defaults_and_no_complaint(tmp_path: Path) -> None:
    file = SettingsFile(tmp_path / "settings.json")
    assert file.settings == Settings()
    assert file.problem == ""


@pytest.mark.parametrize("text", ["", "{", "[]", '{"theme": "pink"}', '{"font_size": 300}', "\x00\xff"])
def test_a_damaged_file_is_set_aside_and_explained(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text)
    file = SettingsFile(path)
    assert file.settings == Settings()
    assert "damaged" in file.problem
    file.save()
    assert (tmp_path / "settings.json.unreadable").read_text() == text, "what was there is kept"


def test_fields_of_a_newer_version_are_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"version": 7, "theme": "dark", "hologram": True}))
    file = SettingsFile(path)
    assert (file.settings.theme, file.problem) == ("dark", "")


def test_a_file_that_cannot_be_read_is_explained_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.mkdir()
    file = SettingsFile(path)
    assert "cannot be read" in file.problem
    assert path.is_dir()


def test_each_file_has_folders_of_its_own(tmp_path: Path) -> None:
    first, second = SettingsFile(tmp_path / "a.json"), SettingsFile(tmp_path / "b.json")
    first.settings.model_folders.append("/models")
    first.settings.window.maximized = True
    assert second.settings == Settings()


def test_the_folder_is_made_when_there_is_something_to_save(tmp_path: Path) -> None:
    file = SettingsFile(tmp_path / "new" / "settings.json")
    assert not file.path.parent.exists()
    file.save()
    assert read_settings(file.path) == file.settings


def test_reading_leaves_a_damaged_file_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text("{")
    with pytest.raises(msgspec.MsgspecError):
        read_settings(path)
    assert list(tmp_path.iterdir()) == [path]


def test_how_models_were_loaded_is_kept_for_the_latest_of_them(tmp_path: Path) -> None:
    file = SettingsFile(tmp_path / "settings.json")
    configs = [EngineConfig(model=f"/models/{n}.gguf", max_context=256 + n) for n in range(MAX_LOAD_OPTIONS + 5)]
    for config in configs:
        assert remember_load(file.settings, config)
    assert not remember_load(file.settings, configs[-1]), "no news"
    assert remember_load(file.settings, configs[10])
    file.save()
    settings = SettingsFile(file.path).settings
    assert settings.last_model == configs[10]
    assert len(settings.load_options) == MAX_LOAD_OPTIONS
    assert settings.load_options[configs[-1].model] == configs[-1]
    assert configs[0].model not in settings.load_options and configs[10].model in settings.load_options
