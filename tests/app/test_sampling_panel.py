"""The sampling panel on real sessions and a real store."""

from __future__ import annotations

import msgspec
import pytest
from PySide6.QtCore import Qt

from app.application import builtin_presets
from app.panels.sampling import SamplingPanel
from app.theme import ThemeManager
from engine.protocol import PARAMETER_RANGES, SamplingParams


@pytest.fixture
def parts(make_parts):
    return make_parts()


@pytest.fixture
def panel(qtbot, parts) -> SamplingPanel:
    panel = SamplingPanel(parts.workspace, ThemeManager("light"))
    qtbot.addWidget(panel)
    panel.set_session(parts.workspace.new_session())
    return panel


def test_every_parameter_of_the_panel_reaches_the_chat(panel: SamplingPanel, parts) -> None:
    session = parts.workspace.current
    for name, row in panel.rows.items():
        value = 5 if PARAMETER_RANGES[name].integer else 0.5
        row.box.setValue(value)
        assert getattr(session.params, name) == value
    assert session.params.max_tokens == 5


def test_each_chat_has_settings_of_its_own(panel: SamplingPanel, parts) -> None:
    first = parts.workspace.current
    panel.rows["temperature"].box.setValue(1.5)
    second = parts.workspace.new_session()
    panel.set_session(second)
    assert panel.rows["temperature"].value == SamplingParams().temperature
    panel.rows["temperature"].box.setValue(0.1)
    panel.set_session(first)
    assert panel.rows["temperature"].value == 1.5
    assert second.params.temperature == 0.1


def test_what_is_being_typed_goes_to_the_chat_it_was_typed_for(panel: SamplingPanel, parts) -> None:
    first = parts.workspace.current
    panel.system_prompt.setPlainText("Be brief.")
    second = parts.workspace.new_session()
    panel.set_session(second)
    assert first.system_prompt == "Be brief."
    assert second.system_prompt == ""
    assert panel.system_prompt.toPlainText() == ""


def test_a_system_prompt_is_told_after_a_pause_in_typing(qtbot, panel: SamplingPanel, parts) -> None:
    qtbot.keyClicks(panel.system_prompt, "Hi")
    assert parts.workspace.current.system_prompt == ""
    qtbot.waitUntil(lambda: parts.workspace.current.system_prompt == "Hi", timeout=3000)


def test_an_answer_may_run_to_the_end_of_the_context(panel: SamplingPanel, parts) -> None:
    panel.rows["max_tokens"].box.setValue(77)
    panel.no_limit.click()
    assert parts.workspace.current.params.max_tokens is None
    assert not panel.rows["max_tokens"].isEnabled()
    panel.no_limit.click()
    assert parts.workspace.current.params.max_tokens == 77


def test_least_and_most_tokens_never_contradict_each_other(panel: SamplingPanel, parts) -> None:
    panel.rows["max_tokens"].box.setValue(100)
    panel.rows["min_tokens"].box.setValue(300)
    assert (parts.workspace.current.params.min_tokens, parts.workspace.current.params.max_tokens) == (300, 300)
    panel.rows["max_tokens"].box.setValue(50)
    assert (parts.workspace.current.params.min_tokens, parts.workspace.current.params.max_tokens) == (50, 50)
    assert panel.rows["min_tokens"].value == 50, "what followed is shown too"


def test_seed_stops_policy_and_order_reach_the_chat(qtbot, panel: SamplingPanel, parts) -> None:
    qtbot.keyClicks(panel.seed.line, "7")
    qtbot.keyClick(panel.seed.line, Qt.Key.Key_Return)
    panel.stops.setPlainText("END\n\\n\\n")
    panel.stops.commit()
    panel.overflow.setCurrentIndex(1)
    panel.overflow.activated.emit(1)
    panel.temperature_last.click()
    params = parts.workspace.current.params
    assert (params.seed, params.stop, params.overflow, params.temperature_last) == (
        7,
        ("END", "\n\n"),
        "drop_oldest",
        True,
    )


def test_a_preset_is_saved_chosen_and_deleted(panel: SamplingPanel, parts) -> None:
    panel.rows["temperature"].box.setValue(0.3)
    panel.presets.save("Mine")
    assert panel.presets.select.currentText() == "Mine"
    panel.rows["temperature"].box.setValue(0.9)
    assert panel.presets.select.currentIndex() == 0, "changed by hand, it is no preset any more"
    index = panel.presets.select.findData("Mine")
    panel.presets.select.setCurrentIndex(index)
    panel.presets.select.activated.emit(index)
    assert panel.rows["temperature"].value == 0.3
    panel.presets.delete_button.click()
    assert panel.presets.select.findData("Mine") == -1
    assert parts.workspace.current.params.temperature == 0.3, "the chat keeps the preset's values"


def test_a_preset_without_a_name_is_refused(panel: SamplingPanel) -> None:
    with pytest.raises(ValueError, match="name"):
        panel.presets.save("  ")


def test_without_a_chat_nothing_can_be_moved(panel: SamplingPanel) -> None:
    panel.set_session(None)
    assert not panel.rows["temperature"].box.isEnabled()


def test_the_shipped_presets_are_valid_and_differ() -> None:
    presets = builtin_presets()
    assert len(presets) >= 4
    assert len({preset.name for preset in presets}) == len(presets)
    assert len({msgspec.json.encode(preset.params) for preset in presets}) == len(presets)
    assert all(preset.is_builtin for preset in presets)


def test_stop_strings_can_be_typed_slowly_one_after_the_other(qtbot, panel: SamplingPanel, parts) -> None:
    for keys in ("END", "\n", "\\", "n\n", "X"):
        qtbot.keyClicks(panel.stops, keys.replace("\n", "\r"))
        panel.stops.commit()  # what a pause in typing does
    assert panel.stops.toPlainText() == "END\n\\n\nX"
    assert parts.workspace.current.params.stop == ("END", "\n", "X")
    other = parts.workspace.new_session()
    panel.set_session(other)
    assert panel.stops.toPlainText() == ""
