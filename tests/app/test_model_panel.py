"""The model page and what is done about models from the window."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs
from PySide6.QtWidgets import QMenu
from pytestqt.qtbot import QtBot

from app.panels.header import HeaderBar
from app.panels.library import ModelLibrary
from app.panels.model import DEFAULT_CONTEXT_LIMIT, ModelPanel
from app.panels.model_actions import ModelActions, default_config
from app.settings import SettingsFile
from app.state.engine_state import EngineState
from app.theme import ThemeManager
from engine import catalog, memory
from engine.memory import DeviceMemory, estimate, format_bytes
from engine.protocol import EngineConfig, LoadModel, ModelLoaded, WorkerDied
from tests.app.telemetry_scene import STARTED, Source, engine_on, model_info
from tests.engine.tiny_gguf import write_model

GIB = 1 << 30


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def engine(source: Source) -> EngineState:
    return engine_on(source)


@pytest.fixture
def library(qtbot: QtBot, tmp_path: Path) -> ModelLibrary:
    """The starter model and a damaged file."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "damaged.gguf").write_bytes(b"GGUF and nothing else")
    library = ModelLibrary(lambda: [str(tmp_path / "models")])
    with qtbot.waitSignal(library.changed):
        library.refresh()
    library.close()
    assert [entry.error is None for entry in library.entries] == [True, False]
    return library


@pytest.fixture
def panel(qtbot: QtBot, engine: EngineState, library: ModelLibrary) -> ModelPanel:
    panel = ModelPanel(engine, library, ThemeManager("light"))
    qtbot.addWidget(panel)
    return panel


@pytest.fixture
def actions(engine: EngineState, library: ModelLibrary, tmp_path: Path) -> ModelActions:
    return ModelActions(engine, library, SettingsFile(tmp_path / "settings.json"))


def test_load_can_be_pressed_when_there_is_a_usable_model_and_an_engine_at_rest(
    source: Source, engine: EngineState, library: ModelLibrary, panel: ModelPanel
) -> None:
    usable, damaged = (str(entry.path) for entry in library.entries)

    def may_load() -> list[bool]:
        """For the usable and the damaged model: after each was chosen, and after the engine has spoken again."""
        answers = []
        for path in (usable, damaged):
            panel.models.setCurrentIndex(panel.models.findData(path))
            answers.append(panel.load_button.isEnabled())
            panel.refresh()
            answers.append(panel.load_button.isEnabled())
        return answers

    assert engine.status == "starting" and may_load() == [False] * 4
    engine.start()
    source.emit(STARTED)
    assert engine.status == "no_model" and may_load() == [True, True, False, False]
    engine.load(default_config(library.entries[0]))
    assert engine.status == "loading" and may_load() == [False] * 4
    source.emit(ModelLoaded(model_info()))
    assert engine.status == "ready" and may_load() == [True, True, False, False]
    source.emit(WorkerDied("killed", "", -9))
    assert engine.status == "dead" and may_load() == [True, True, False, False]


def test_the_header_names_the_kernels_that_compute_the_model_and_what_the_worker_warns_of(
    qtbot: QtBot, source: Source, engine: EngineState
) -> None:
    header = HeaderBar(engine, ThemeManager("light"), QMenu())
    qtbot.addWidget(header)
    engine.start(EngineConfig(model="/models/fake.gguf"))
    source.emit(structs.replace(STARTED, kernels="cpu", device="cpu", warnings=["The engine runs slower: why."]))
    assert header.kernels.text() == "cpu"
    source.emit(ModelLoaded(structs.replace(model_info(), kernels="native avx2")))
    assert header.kernels.text() == "native avx2 · cpu"
    assert header.kernels.toolTip().startswith("Compute kernels: native avx2\n")
    assert header.kernels.toolTip().endswith("The engine runs slower: why.")


def test_the_memory_that_is_told_is_what_the_engine_will_take(
    qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, library: ModelLibrary, panel: ModelPanel
) -> None:
    monkeypatch.setattr("app.panels.library.ram", lambda: DeviceMemory("RAM", "system memory", 64 * GIB, 32 * GIB))
    shape = library.entries[0].shape
    assert shape is not None
    weights, kv_cache = memory.cpu_formats()
    panel.show()
    for context, chats in ((8192, 8), (8192, 1), (512, 2)):
        panel.context.setValue(context)
        panel.tabs.setValue(chats)
        wanted = estimate(
            shape, "RAM", max_context=context, max_num_seqs=chats, weights_held_as=weights, kv_dtype=kv_cache
        )
        assert f"needs {format_bytes(wanted.total)} of 32.0 GiB" in panel._estimate.text()


@pytest.mark.parametrize(("own", "loaded"), [(131_072, DEFAULT_CONTEXT_LIMIT), (512, 512)])
def test_menu_file_and_start_load_a_model_with_the_same_context(
    monkeypatch: pytest.MonkeyPatch, source: Source, engine: EngineState, actions: ModelActions, tmp_path: Path,
    own: int, loaded: int,
) -> None:  # fmt: skip
    path = write_model(tmp_path / "long.gguf", context=own)
    monkeypatch.setattr("app.panels.model_actions.starter_model", lambda: path)
    engine.start()
    source.emit(STARTED)
    actions.load_entry(catalog.describe_path(path))
    actions.load_file(str(path))
    actions.load_starter()
    configs = [command.config for command in source.sent if isinstance(command, LoadModel)]
    at_start = actions.config_at_start()
    assert at_start is not None
    assert [(config.model, config.max_context) for config in (*configs, at_start)] == [(str(path), loaded)] * 4


def test_a_damaged_file_is_told_and_the_model_before_stays(
    source: Source, engine: EngineState, actions: ModelActions, library: ModelLibrary
) -> None:
    problems: list[str] = []
    actions.problem.connect(problems.append)
    engine.start(default_config(library.entries[0]))
    source.emit(STARTED)
    source.emit(ModelLoaded(model_info()))
    actions.load_file(str(library.entries[1].path))
    assert engine.status == "ready"
    assert len(problems) == 1 and problems[0].startswith("damaged cannot be loaded: ")
