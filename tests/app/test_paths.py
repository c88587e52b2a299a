"""Every part of Kvasir agrees on where its files are."""

from __future__ import annotations

from pathlib import Path

import pytest

from app import paths
from engine import catalog


def all_places() -> dict[str, Path]:
    return {
        "data": paths.data_folder(),
        "logs": paths.log_folder(),
        "database": paths.database_path().parent,
        "settings": paths.settings_path().parent,
        "models": catalog.user_models_folder(),
    }


def test_one_variable_moves_all_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    monkeypatch.setenv("KVASIR_DATA", str(here))
    assert all_places() == {
        "data": here, "logs": here / "logs", "database": here, "settings": here, "models": here / "models",
    }  # fmt: skip


def test_data_and_settings_go_to_the_platforms_folders(private_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVASIR_DATA", raising=False)
    places = all_places()
    assert all(private_folders in place.parents for place in places.values())
    assert places["data"] != places["settings"]


def test_only_folders_that_are_written_into_at_once_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_DATA", str(tmp_path / "here"))
    for place in (paths.database_path(), paths.settings_path(), catalog.user_models_folder()):
        assert place.is_relative_to(tmp_path / "here")
    assert not (tmp_path / "here").exists()
    assert paths.data_folder().is_dir() and paths.log_folder().is_dir()
