"""The load dialog: what can be chosen, what it takes, and what becomes of loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from pytestqt.qtbot import QtBot

from app.panels.library import ModelLibrary
from app.panels.load_dialog import LoadDialog
from app.panels.memory_estimate import MemoryEstimateCard
from app.state import load_options
from app.state.engine_state import EngineState
from app.state.load_options import default_config, options_for, possible_config
from app.theme import ThemeManager
from engine.catalog import CatalogEntry
from engine.memory import DeviceMemory, Hardware, ModelShape, NoGPU, WeightGroup, estimate, fits, format_bytes
from engine.protocol import EngineConfig, LoadFailed, LoadModel, LoadProgress, ModelLoaded, UnloadModel, WorkerStarted
from tests.app.telemetry_scene import STARTED, Source, engine_on, model_info

GIB = 1 << 30
ON_CPU = structs.replace(STARTED, kernels="cpu", device="cpu", device_name="Test CPU")
NATIVE = Hardware("RAM", native=True)
GPU = DeviceMemory("VRAM", "Test GPU", 80 * GIB, 60 * GIB)


def entry(
    name: str, vocab_size: int = 50_000, rows: int = 100_000, stored: str = "BF16", **changes: Any
) -> CatalogEntry:
    shape = ModelShape(
        weights=(WeightGroup("embedding", stored, vocab_size, 1024), WeightGroup("layers", stored, rows, 1024)),
        stored_bytes=0, kv_heads=(4,) * 10, num_heads=8, key_dim=128, value_dim=128, hidden_size=1024,
        intermediate_size=4096, vocab_size=vocab_size, max_context=32768,
    )  # fmt: skip
    values = {"format": "safetensors", "quantisation": stored, "shape": shape, "max_context": 32768} | changes
    return CatalogEntry(
        name=name, path=Path(f"/models/{name}"), architecture="LlamaForCausalLM", size_bytes=100 << 20,
        num_parameters=shape.num_parameters, **values,
    )  # fmt: skip


LARGE = entry("large")
SMALL = entry("small", rows=10_000)
PADDED = entry("padded", vocab_size=50_176, rows=20_000)
OTHER = entry("other", vocab_size=32_000, rows=10_000)
PACKED = entry("packed", stored="Q4_1", format="gguf", rows=50_000)
BROKEN = CatalogEntry("broken", Path("/models/broken"), "gguf", "", 0, "", 0, 9, None, "the file is truncated")
ENTRIES = [LARGE, SMALL, PADDED, OTHER, PACKED, BROKEN]


def options(chosen: CatalogEntry, **changes: Any) -> load_options.LoadOptions:
    return options_for(chosen, ENTRIES, EngineConfig(model=str(chosen.path), **changes), ON_CPU)


def test_drafts_are_smaller_models_with_a_vocabulary_of_about_the_same_size() -> None:
    assert [draft.name for draft in options(LARGE).drafts] == ["small", "padded", "packed"]
    assert options(LARGE).speculation["draft"] == ""
    assert options(SMALL).drafts == ()
    assert "No smaller model" in options(SMALL).speculation["draft"]


def test_what_does_not_apply_is_not_to_be_had_and_why() -> None:
    assert set(options(LARGE).precision.values()) == {""}
    assert "no more as they are stored" in options(PACKED).precision["int4"]
    assert "FP16" in options(LARGE).kv_dtype["bf16"]
    assert "GGUF" in options(PACKED).backend["transformers"]
    impossible = EngineConfig(
        model="m", quantization="int8", kv_dtype="bf16", backend="transformers", speculation="draft", draft_model="gone"
    )
    assert possible_config(impossible, options(PACKED)) == EngineConfig(
        model="m", speculation="draft", draft_model=str(SMALL.path)
    )
    assert possible_config(impossible, options(SMALL)).draft_model is None


def test_what_only_a_gpu_has_says_so_elsewhere_and_keeps_what_was_chosen() -> None:
    def reasons(worker: WorkerStarted | None, **changes: Any) -> tuple[str, str]:
        found = options_for(LARGE, ENTRIES, EngineConfig(model="m", **changes), worker)
        return found.gpu_memory_share, found.cuda_graphs

    no_gpu = "Only for a model on a GPU."
    assert reasons(STARTED) == reasons(ON_CPU, device="cuda:0") == ("", "")
    assert reasons(STARTED, backend="transformers") == ("", "Only for Kvasir's own decoder.")
    assert reasons(ON_CPU) == reasons(None) == reasons(STARTED, device="cpu") == (no_gpu, no_gpu)
    chosen = EngineConfig(model="m", gpu_memory_share=0.5, cuda_graphs=False)
    assert possible_config(chosen, options(LARGE)) == chosen


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def engine(source: Source) -> EngineState:
    engine = engine_on(source)
    engine.start()
    source.emit(ON_CPU)
    return engine


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, qtbot: QtBot) -> ModelLibrary:
    monkeypatch.setattr(load_options, "ram", lambda: DeviceMemory("RAM", "system memory", 64 * GIB, 8 * GIB))
    monkeypatch.setattr(load_options, "vram", lambda index: NoGPU("There is no GPU here."))
    monkeypatch.setattr(load_options, "available_to", lambda device, pid, index: device)
    library = ModelLibrary(list)
    library.close()
    library.entries = list(ENTRIES)
    return library


@pytest.fixture
def remembered() -> dict[str, EngineConfig]:
    return {}


@pytest.fixture
def dialog(
    qtbot: QtBot, source: Source, engine: EngineState, library: ModelLibrary, remembered: dict[str, EngineConfig]
) -> LoadDialog:
    dialog = LoadDialog(engine, library, ThemeManager("light"), remembered)
    dialog.load_requested.connect(engine.load)
    dialog.cancel_requested.connect(engine.unload)
    qtbot.addWidget(dialog)
    dialog.show()
    dialog.choose(LARGE)
    return dialog


def test_the_estimate_follows_every_option(dialog: LoadDialog) -> None:
    form = dialog.form

    def told() -> int:
        """What the parts that are shown add up to, which is what was estimated for the configuration."""
        assert LARGE.shape is not None
        draft = SMALL.shape if form.config.speculation == "draft" else None
        total = fits(
            estimate(LARGE.shape, form.config, NATIVE, draft), DeviceMemory("RAM", "", 64 * GIB, 8 * GIB)
        ).needed
        assert sum(part.size for part in dialog.memory.bar.parts if part.name != "Still free") == total
        assert dialog.memory.words.text() == f"Needs {format_bytes(total)} of 8.00 GiB RAM free."
        return total

    stored = told()
    form.precision.chosen.emit("int8")
    int8 = told()
    form.precision.chosen.emit("int4")
    assert told() < int8 < stored
    form.context.setValue(32768)
    form.kv_dtype.chosen.emit("fp16")
    assert form.config.max_context == 32768
    half = told()
    form.kv_dtype.chosen.emit("int8")
    assert told() < half
    assert dialog.memory.facts["Tokens in all"].full_text == "32,768 for all chats"
    assert dialog.memory.facts["Full chats"].full_text == "1 of 32,768 tokens"
    without = told()
    form.speculation.chosen.emit("draft")
    assert form.config.draft_model == str(SMALL.path)
    assert told() > without
    assert "Draft model" in [part.name for part in dialog.memory.bar.parts]
    form.tabs.setValue(40)
    assert form.config.max_num_seqs == 40 and told()


def test_slider_and_box_show_one_context(dialog: LoadDialog) -> None:
    form = dialog.form
    assert (form.context.value(), form.context.maximum()) == (8192, 32768)
    form.context_slider.setValue(form.context_slider.maximum())
    assert form.context.value() == form.config.max_context == 32768
    form.context_slider.setValue(0)
    assert form.context.value() == form.config.max_context == 256
    form.context.setValue(4096)
    middle = form.context_slider.value()
    assert 0 < middle < form.context_slider.maximum() and form.config.max_context == 4096


def test_what_was_chosen_for_a_model_last_is_chosen_again(
    dialog: LoadDialog, remembered: dict[str, EngineConfig]
) -> None:
    last = EngineConfig(model=str(SMALL.path), max_context=1024, quantization="int4", quantization_group_size=32)
    remembered[last.model] = last
    dialog.choose(SMALL)
    assert dialog.form.config == last
    assert (dialog.form.precision.choice, dialog.form.group_size.choice) == ("int4", "32")
    dialog.choose(OTHER)
    assert dialog.form.config == default_config(OTHER)


def test_where_only_a_shorter_context_fits_it_is_offered(dialog: LoadDialog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_options, "ram", lambda: DeviceMemory("RAM", "system memory", 64 * GIB, 1 * GIB))
    dialog.form.context.setValue(32768)
    assert dialog.memory.verdict.text() == "Context too long"
    assert dialog.load_button.text() == "Load anyway"
    assert dialog.memory.shorter.isVisible()
    dialog.memory.shorter.click()
    assert dialog.memory.verdict.text() == "Fits"
    assert 256 <= (dialog.form.config.max_context or 0) < 32768
    assert dialog.load_button.text() == "Load"


def test_what_does_not_fit_is_said_and_its_bar_goes_beyond_the_limit(qtbot: QtBot) -> None:
    card = MemoryEstimateCard(ThemeManager("dark"))
    qtbot.addWidget(card)
    assert LARGE.shape is not None
    wanted = estimate(LARGE.shape, EngineConfig(model="m"), NATIVE)
    card.show_fit(fits(wanted, DeviceMemory("RAM", "", GIB, 100 << 20)))
    assert card.verdict.text() == "Does not fit"
    assert card.words.text() == f"Needs {format_bytes(wanted.total)}, 100 MiB RAM free."
    assert sum(part.size for part in card.bar.parts) == wanted.total > 100 << 20
    assert card.facts["KV blocks"].full_text == "–"
    card.show_fit(None, "The memory of this device cannot be read.")
    assert card.words.text() == "The memory of this device cannot be read." and not card.bar.parts


def test_loading_shows_its_progress_and_closes_the_dialog_when_it_is_done(source: Source, dialog: LoadDialog) -> None:
    dialog.form.speculation.chosen.emit("ngram")
    dialog.load_button.click()
    assert source.sent[-1] == LoadModel(structs.replace(default_config(LARGE), speculation="ngram"))
    source.emit(LoadProgress("Loading weights", 41 << 20, 164 << 20))
    assert dialog.stage.text() == "Loading weights · 41.0 MiB of 164 MiB"
    assert dialog.progress.isVisible() and dialog.progress.value() == 250
    assert not dialog.form.isEnabled() and dialog.load_button.text() == "Cancel"
    source.emit(ModelLoaded(model_info()))
    assert not dialog.isVisible()


def test_a_load_that_fails_says_why_and_the_options_can_be_changed(source: Source, dialog: LoadDialog) -> None:
    dialog.load_button.click()
    source.emit(LoadFailed("large", "The tensor 'lm_head.weight' is missing."))
    assert dialog.isVisible() and dialog.error.text == "The tensor 'lm_head.weight' is missing."
    assert dialog.form.isEnabled() and dialog.load_button.text() == "Load"
    dialog.load_button.click()
    assert dialog.error.text == "", "a new try, a new chance"


def test_loading_can_be_cancelled_from_the_dialog(source: Source, engine: EngineState, dialog: LoadDialog) -> None:
    dialog.load_button.click()
    dialog.load_button.click()
    assert isinstance(source.sent[-1], UnloadModel)
    source.emit(LoadFailed("large", "Loading was stopped."))
    assert dialog.isVisible() and dialog.error.text == "", "what one asked for is no fault"
    assert engine.status == "no_model" and dialog.load_button.isEnabled()


def test_a_model_that_cannot_be_used_cannot_be_loaded(dialog: LoadDialog) -> None:
    dialog.choose(BROKEN)
    assert not dialog.load_button.isEnabled() and not dialog.form.isVisible()
    assert dialog._about.text() == "Cannot be used: the file is truncated."
    dialog.choose(entry("from a file"))
    assert dialog.entry is not None and dialog.entry.name == "from a file"
    assert dialog.load_button.isEnabled()
    assert [dialog.models.itemText(i) for i in range(dialog.models.count())][-1] == "from a file"


def test_options_of_a_gpu_are_greyed_where_a_cpu_computes(dialog: LoadDialog) -> None:
    form = dialog.form
    form.advanced_button.click()
    assert form.cuda_graphs.isVisible() and not form.cuda_graphs.isEnabled()
    assert form.gpu_memory_share.isVisible() and not form.gpu_memory_share.isEnabled()
    assert form.gpu_memory_share.text() == "0.90" and form.cuda_graphs.isChecked()
    for words in (form._share_help, form._graphs_help):
        assert words.text().endswith(" Only for a model on a GPU.")
    assert form.cuda_graphs.accessibleDescription() == "Only for a model on a GPU."


def test_the_options_of_a_gpu_are_chosen_estimated_and_remembered(
    dialog: LoadDialog, source: Source, remembered: dict[str, EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_options, "vram", lambda index: NoGPU("No more.") if index else GPU)
    source.emit(STARTED)
    form, bar = dialog.form, dialog.memory.bar
    form.advanced_button.click()
    assert form.cuda_graphs.isEnabled() and form.gpu_memory_share.isEnabled()
    assert "Only" not in form._share_help.text() + form._graphs_help.text()

    def told(name: str) -> int:
        assert LARGE.shape is not None
        wanted = fits(estimate(LARGE.shape, form.config, Hardware("VRAM")), GPU)
        sizes = {part.name: part.size for part in bar.parts}
        assert (sizes["KV cache"], sizes["Workspace"]) == (wanted.granted.kv_cache, wanted.granted.workspace)
        return sizes[name]

    form.context.setValue(32768)
    form.tabs.setValue(64)
    with_graphs, large = told("Workspace"), told("KV cache")
    form.cuda_graphs.click()
    assert form.config.cuda_graphs is False and told("Workspace") < with_graphs
    form.gpu_memory_share.setValue(0.5)
    assert form.config.gpu_memory_share == 0.5 and told("KV cache") < large
    form.gpu_memory_share.setValue(0.0)
    assert form.config.gpu_memory_share == form.gpu_memory_share.minimum() > 0, "all of it cannot be left to others"
    form.gpu_memory_share.setValue(0.5)
    dialog.load_button.click()
    asked = source.sent[-1]
    assert isinstance(asked, LoadModel)
    assert (asked.config.cuda_graphs, asked.config.gpu_memory_share) == (False, 0.5)
    source.emit(LoadFailed("large", "The GPU is full."))
    remembered[asked.config.model] = asked.config
    dialog.choose(SMALL)
    assert form.cuda_graphs.isChecked() and form.gpu_memory_share.value() == 0.9
    dialog.choose(LARGE)
    assert not form.cuda_graphs.isChecked() and form.gpu_memory_share.value() == 0.5
    form.backend.chosen.emit("transformers")
    assert not form.cuda_graphs.isEnabled() and form._graphs_help.text().endswith("Only for Kvasir's own decoder.")
    assert form.gpu_memory_share.isEnabled()


@pytest.mark.parametrize("changes", [{"cuda_graphs": False}, {"gpu_memory_share": 0.5}, {"device": "cpu"}])
def test_what_is_unusual_is_not_hidden(
    dialog: LoadDialog, remembered: dict[str, EngineConfig], changes: dict[str, Any]
) -> None:
    assert not dialog.form.backend.isVisible()
    remembered[str(SMALL.path)] = structs.replace(default_config(SMALL), **changes)
    dialog.choose(SMALL)
    assert dialog.form.backend.isVisible()


def test_devices_that_are_not_there_are_shown_with_the_reason(dialog: LoadDialog) -> None:
    titles = [dialog.form.device.itemText(i) for i in range(dialog.form.device.count())]
    assert titles == ["Automatic (Test CPU)", "CPU", "GPU – not usable"]
    assert not dialog.form.backend.isVisible()
    dialog.form.advanced_button.click()
    assert dialog.form.backend.isVisible()
