"""The model page and what is done about models from the window."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs
from PySide6.QtWidgets import QMenu
from pytestqt.qtbot import QtBot

from app.panels.header import HeaderBar
from app.panels.library import ModelLibrary
from app.panels.model import ModelPanel, loaded_facts
from app.panels.model_actions import ModelActions
from app.panels.widgets import ElidedLabel
from app.settings import SettingsFile
from app.state.engine_state import EngineState
from app.state.load_options import DEFAULT_CONTEXT_LIMIT, default_config, fit_on
from app.state.telemetry import TelemetryState
from app.theme import ThemeManager
from engine import catalog
from engine.memory import format_bytes
from engine.protocol import EngineConfig, LoadModel, LoadProgress, MemoryBreakdown, ModelLoaded, ModelUnloaded
from tests.app.telemetry_scene import STARTED, Source, engine_on, model_info, telemetry
from tests.engine.tiny_gguf import write_model


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
def panel(qtbot: QtBot, source: Source, engine: EngineState, library: ModelLibrary) -> ModelPanel:
    panel = ModelPanel(engine, library, TelemetryState(source, engine), ThemeManager("light"))
    qtbot.addWidget(panel)
    return panel


@pytest.fixture
def actions(engine: EngineState, library: ModelLibrary, tmp_path: Path) -> ModelActions:
    return ModelActions(engine, library, SettingsFile(tmp_path / "settings.json"))


def test_the_page_lists_the_models_of_this_machine_and_asks_for_the_dialog(
    library: ModelLibrary, panel: ModelPanel
) -> None:
    asked: list[object] = []
    panel.dialog_requested.connect(asked.append)
    assert [(row.entry.name, row.isEnabled()) for row in panel.rows] == [
        ("SmolLM2-135M-Instruct.Q4_1", True),
        ("damaged", False),
    ]
    assert "135 M" in panel.rows[0].accessibleName() and "GGUF" in panel.rows[1].toolTip()
    panel.rows[0].click()
    panel.load_button.click()
    assert asked == [library.entries[0], None]


def test_the_page_says_what_is_loaded_and_how(source: Source, engine: EngineState, panel: ModelPanel) -> None:
    config = EngineConfig(model="/models/fake.gguf", speculation="draft", num_draft_tokens=6)
    engine.start(config)
    source.emit(STARTED)
    assert panel._progress.isVisibleTo(panel) and panel._unload.text() == "Cancel"
    source.emit(LoadProgress("Loading weights", 32 << 20, 128 << 20))
    assert panel._stage.text() == "Loading weights · 32.0 MiB of 128 MiB"
    assert panel._progress.value() == 250
    info = structs.replace(
        model_info(), backend="transformers", quantization="int4", kv_dtype="int8", speculation="draft",
        draft_model="/models/tiny.gguf", warnings=["The GPU is not used: why. What to do."],
    )  # fmt: skip
    source.emit(ModelLoaded(info))
    assert panel._warnings.text() == "The GPU is not used: why. What to do." and panel._warnings.isVisibleTo(panel)
    facts = dict(loaded_facts(info, config))
    assert (facts["Backend"], facts["Precision"], facts["Speculation"]) == (
        "transformers",
        "INT4, since loading",
        "tiny, up to 6",
    )
    assert facts["KV cache"].endswith("· int8")
    shown = [label.full_text for label in panel.findChildren(ElidedLabel)]
    assert set(facts.values()) <= set(shown)
    source.emit(ModelUnloaded())
    assert panel._warnings.isHidden()
    plain = dict(loaded_facts(structs.replace(model_info(), speculation="ngram"), None))
    assert (plain["Precision"], plain["Speculation"]) == ("as stored", "n-gram")


def test_the_estimate_stands_beside_what_is_measured(
    source: Source, engine: EngineState, library: ModelLibrary, panel: ModelPanel
) -> None:
    panel.show()
    starter = library.entries[0]
    config = EngineConfig(model=starter.name, max_context=1024)
    engine.start(config)
    source.emit(structs.replace(STARTED, kernels="cpu", device="cpu"))
    assert panel.memory.isHidden()
    source.emit(ModelLoaded(structs.replace(model_info(), path=str(starter.path), device="cpu")))
    fit = fit_on(starter, engine.worker, config)
    assert fit is not None
    assert panel.memory.rows()[0] == ("Weights", format_bytes(fit.granted.weights), "–")
    memory = MemoryBreakdown("RAM", 16 << 30, 90 << 20, 180 << 20, 8 << 20, 250 << 20, 0, 0)
    source.emit(telemetry(memory=memory))
    rows = {name: (estimated, measured) for name, estimated, measured in panel.memory.rows()}
    assert rows["KV cache"] == (format_bytes(fit.granted.kv_cache), "180 MiB")
    assert rows["In all"] == (format_bytes(fit.granted.total), "528 MiB")
    source.emit(ModelUnloaded())
    assert panel.memory.isHidden()


def test_a_draft_models_memory_is_compared_as_a_whole(
    source: Source, engine: EngineState, library: ModelLibrary, panel: ModelPanel
) -> None:
    panel.show()
    starter = library.entries[0]
    engine.start(EngineConfig(model=starter.name, speculation="draft", draft_model=str(starter.path)))
    source.emit(structs.replace(STARTED, kernels="cpu", device="cpu"))
    source.emit(ModelLoaded(structs.replace(model_info(), path=str(starter.path), device="cpu")))
    assert [row[0] for row in panel.memory.rows()] == ["In all"]


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


@pytest.mark.parametrize(("own", "loaded"), [(131_072, DEFAULT_CONTEXT_LIMIT), (512, 512)])
def test_menu_and_start_load_a_model_with_the_same_context(
    monkeypatch: pytest.MonkeyPatch, source: Source, engine: EngineState, actions: ModelActions, tmp_path: Path,
    own: int, loaded: int,
) -> None:  # fmt: skip
    path = write_model(tmp_path / "long.gguf", context=own)
    monkeypatch.setattr("app.panels.model_actions.starter_model", lambda: path)
    engine.start()
    source.emit(STARTED)
    actions.load_entry(catalog.describe_path(path))
    actions.load_starter()
    configs = [command.config for command in source.sent if isinstance(command, LoadModel)]
    at_start = actions.config_at_start()
    assert at_start is not None
    assert [(config.model, config.max_context) for config in (*configs, at_start)] == [(str(path), loaded)] * 3


def test_a_model_is_loaded_as_it_was_loaded_last_in_this_run_and_the_next(
    source: Source, engine: EngineState, actions: ModelActions, library: ModelLibrary, tmp_path: Path
) -> None:
    entry = library.entries[0]
    chosen = EngineConfig(model=str(entry.path), max_context=1024, kv_dtype="int8", speculation="ngram")
    engine.start()
    source.emit(STARTED)
    actions.load(chosen)
    assert actions.config_at_start() != chosen, "a load that fails is not remembered"
    source.emit(ModelLoaded(model_info()))
    actions.load_entry(entry)
    assert source.sent[-1] == LoadModel(chosen)
    again = ModelActions(engine, library, SettingsFile(tmp_path / "settings.json"))
    assert again.config_at_start() == chosen


def test_a_chosen_file_is_shown_in_the_dialog_and_a_damaged_one_is_told(
    source: Source, engine: EngineState, actions: ModelActions, library: ModelLibrary, tmp_path: Path
) -> None:
    problems: list[str] = []
    wanted: list[catalog.CatalogEntry] = []
    actions.problem.connect(problems.append)
    actions.dialog_wanted.connect(wanted.append)
    engine.start(default_config(library.entries[0]))
    source.emit(STARTED)
    source.emit(ModelLoaded(model_info()))
    actions.show_file(str(library.entries[1].path))
    assert engine.status == "ready"
    assert len(problems) == 1 and problems[0].startswith("damaged cannot be loaded: ")
    actions.show_file(str(write_model(tmp_path / "elsewhere.gguf")))
    assert [entry.name for entry in wanted] == ["elsewhere"]
