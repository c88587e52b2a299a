"""How the current chat's answers are drawn: presets, system prompt, every sampling parameter, context use."""

from __future__ import annotations

import msgspec
from PySide6.QtCore import QSignalBlocker
from PySide6.QtWidgets import QVBoxLayout

from app.panels.fields import SeedField, TextBox, stops_to_text, text_to_stops
from app.panels.parameter_row import ParameterRow
from app.panels.presets import PresetBar
from app.panels.widgets import ScrolledColumn, Select, Switch, label, separator
from app.state.session import ChatSession
from app.state.workspace import Workspace
from app.theme import SPACE_M, SPACE_S, ThemeManager
from engine.protocol import SamplingParams

MAIN_PARAMETERS = ("temperature", "top_p", "min_p", "top_k")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "penalty_window")
OVERFLOW_TITLES = {
    "refuse": "Refuse and say so",
    "drop_oldest": "Leave out the oldest turns",
    "stop_at_limit": "Answer until the context is full",
}


class SamplingPanel(ScrolledColumn):
    """Shows and edits the settings of one session; every change goes to the session at once."""

    def __init__(self, workspace: Workspace, themes: ThemeManager) -> None:
        super().__init__(SPACE_M, SPACE_S, SPACE_M, SPACE_M)
        self._themes = themes
        self._session: ChatSession | None = None
        self.rows: dict[str, ParameterRow] = {}
        self.presets = PresetBar(workspace, themes)
        self.column.addWidget(self.presets)
        self._build_system_prompt()
        self._build_rows("Sampling", MAIN_PARAMETERS)
        self._build_switch()
        self._build_rows("Penalties", PENALTIES)
        self._build_length()
        self.column.addStretch(1)
        self.set_session(None)

    # ------------------------------------------------------------ building

    def _section(self, title: str) -> None:
        self.column.addWidget(separator())
        self.column.addWidget(label(title.upper(), "section"))

    def _build_system_prompt(self) -> None:
        self.system_prompt = TextBox("System prompt", "How the model should behave in this chat", 4)
        self.system_prompt.edited.connect(self._set_system_prompt)
        part = QVBoxLayout()
        part.setSpacing(SPACE_S // 2)
        part.addWidget(label("System prompt", "strong"))
        part.addWidget(self.system_prompt)
        self.column.addLayout(part)

    def _build_rows(self, title: str, names: tuple[str, ...]) -> None:
        self._section(title)
        for name in names:
            self._add_row(name)

    def _add_row(self, name: str) -> ParameterRow:
        row = ParameterRow(name)
        row.edited.connect(lambda value, name=name: self._set_parameter(name, value))
        self.column.addWidget(row)
        self.rows[name] = row
        return row

    def _build_switch(self) -> None:
        self.temperature_last = Switch("Temperature after the filters", self._themes)
        self.temperature_last.toggled.connect(lambda on: self._set_parameter("temperature_last", on))
        self.column.addWidget(self.temperature_last)

    def _build_length(self) -> None:
        self._section("Length, seed and stops")
        self.no_limit = Switch("As long as the context allows", self._themes)
        self.no_limit.toggled.connect(self._limit_switched)
        self._add_row("max_tokens")
        self.column.addWidget(self.no_limit)
        self._add_row("min_tokens")
        self.seed = SeedField(self._themes)
        self.seed.edited.connect(lambda value: self._set_parameter("seed", value))
        self.column.addWidget(self.seed)
        self.stops = TextBox("Stop strings", "One a line; \\n is a line break", 3)
        self.stops.edited.connect(lambda text: self._set_parameter("stop", text_to_stops(text)))
        part = QVBoxLayout()
        part.setSpacing(SPACE_S // 2)
        part.addWidget(label("Stop strings", "strong"))
        part.addWidget(self.stops)
        part.addWidget(label("The answer ends where one of these would appear.", "faint", wrap=True))
        self.column.addLayout(part)
        self.overflow = Select(self._themes, "When the chat is longer than the context")
        for key, title in OVERFLOW_TITLES.items():
            self.overflow.addItem(title, key)
        self.overflow.activated.connect(lambda _: self._set_parameter("overflow", self.overflow.currentData()))
        part = QVBoxLayout()
        part.setSpacing(SPACE_S // 2)
        part.addWidget(label("Longer than the context", "strong"))
        part.addWidget(self.overflow)
        part.addWidget(label("What happens when a chat does not fit; nothing is cut silently.", "faint", wrap=True))
        self.column.addLayout(part)

    # ------------------------------------------------------------ session

    def set_session(self, session: ChatSession | None) -> None:
        """Shows another chat's settings; what was being typed goes to the chat it was typed for."""
        self.system_prompt.commit()
        self.stops.commit()
        if self._session is not None:
            self._session.settings_changed.disconnect(self._show)
        self._session = session
        self.presets.set_session(session)
        if session is not None:
            session.settings_changed.connect(self._show)
        widget = self.widget()
        if widget is not None:
            widget.setEnabled(session is not None)
        self._show()

    def _show(self) -> None:
        params = self._session.params if self._session is not None else SamplingParams()
        for name, row in self.rows.items():
            value = getattr(params, name)
            if value is not None:
                row.set_value(value)
        self.rows["max_tokens"].setEnabled(params.max_tokens is not None)
        for switch, on in (
            (self.no_limit, params.max_tokens is None),
            (self.temperature_last, params.temperature_last),
        ):
            if switch.isChecked() != on:
                with QSignalBlocker(switch):
                    switch.setChecked(on)
                switch.settle()
        self.seed.set_value(params.seed)
        # The same stop strings can be written in many ways, half a line being typed among them: leave it so.
        if text_to_stops(self.stops.toPlainText()) != params.stop:
            self.stops.set_value(stops_to_text(params.stop))
        self.overflow.setCurrentIndex(self.overflow.findData(params.overflow))
        self.system_prompt.set_value(self._session.system_prompt if self._session is not None else "")
        self.presets.show_choice()

    def _set_parameter(self, name: str, value: object) -> None:
        if self._session is None:
            return
        changes = {name: value}
        params = self._session.params
        if name == "max_tokens" and value is not None and params.min_tokens > value:  # type: ignore[operator]
            changes["min_tokens"] = value
        if name == "min_tokens" and params.max_tokens is not None and value > params.max_tokens:  # type: ignore[operator]
            changes["max_tokens"] = value
        self._session.set_params(msgspec.structs.replace(params, **changes))

    def _limit_switched(self, unlimited: bool) -> None:
        self._set_parameter("max_tokens", None if unlimited else self.rows["max_tokens"].value)

    def _set_system_prompt(self, text: str) -> None:
        if self._session is not None:
            self._session.set_system_prompt(text)
