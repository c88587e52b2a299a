from __future__ import annotations

import json
from pathlib import Path

import pytest

from app import settings
from app.settings import Settings, SettingsFile
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


def test_one_variable_moves_all_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_DATA", str(tmp_path / "here"))
    assert settings.data_folder() == tmp_path / "here"
    assert settings.config_folder() == tmp_path / "here"
    assert settings.log_folder() == tmp_path / "here" / "logs"


def test_data_and_settings_go_to_the_platforms_folders(private_folders: Path) -> None:
    assert private_folders in settings.data_folder().parents
    assert private_folders in settings.config_folder().parents
    assert settings.data_folder() != settings.config_folder()
