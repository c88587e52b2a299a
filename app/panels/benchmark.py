"""The benchmark's page: what to ask for, how far it is, and what came of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QSize, Qt, QTimer
from PySide6.QtGui import QCloseEvent, QGuiApplication, QHideEvent, QKeyEvent, QShowEvent
from PySide6.QtWidgets import (
    QDialog,
    QGridLayout,
    QHBoxLayout,
    QLineEdit,
    QProgressBar,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app.benchmark.plan import BenchmarkPlan
from app.benchmark.report import BenchmarkReport, as_json, as_text, failures
from app.panels.benchmark_sheet import BenchmarkSheet, picture
from app.panels.chat_files import ask_where, file_name
from app.panels.dialogs import resize_within
from app.panels.widgets import ErrorBox, NumberBox, button, label, separator
from app.state.benchmark import BenchmarkState
from app.theme import SPACE_L, SPACE_M, SPACE_S, SPACE_XS, Theme, ThemeManager
from app.units import plural

PREFERRED_SIZE = QSize(980, 700)
# Chats begin and end without telling this page.
LOOK_MS = 250
_KINDS = {"json": "Benchmark (*.json)", "png": "Picture (*.png)"}


class BenchmarkDialog(QDialog):
    """Not modal: chats can be read, and even written, beside it. Closing it stops a benchmark that runs."""

    def __init__(self, state: BenchmarkState, themes: ThemeManager, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._state, self._themes = state, themes
        self._shown: BenchmarkReport | None = None
        self._folder = Path.home()
        self._note_of_export = ""
        self.setWindowTitle("Benchmark")
        self._build()
        resize_within(self, parent, PREFERRED_SIZE, least=QSize(760, 460))
        self._timer = QTimer(self)
        self._timer.setInterval(LOOK_MS)
        self._timer.timeout.connect(self.refresh)
        state.changed.connect(self.refresh)
        self.concurrency.textChanged.connect(self.refresh)
        self.input_tokens.valueChanged.connect(self.refresh)
        self.output_tokens.valueChanged.connect(self.refresh)
        themes.changed.connect(self._theme_changed)
        self.refresh()

    # ------------------------------------------------------------ building

    def _build(self) -> None:
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addLayout(self._build_head())
        column.addWidget(separator())
        self.sheet = BenchmarkSheet(self._themes.theme)
        self.sheet.setContentsMargins(SPACE_L, SPACE_M, SPACE_L, SPACE_S)
        self._stack = QStackedWidget()
        self._stack.setObjectName("pages")
        self._stack.addWidget(self._build_welcome())
        self._stack.addWidget(self.sheet)
        column.addWidget(self._stack, 1)
        column.addWidget(separator())
        column.addLayout(self._build_foot())

    def _build_head(self) -> QVBoxLayout:
        defaults = BenchmarkPlan()
        self.concurrency = QLineEdit(", ".join(map(str, defaults.concurrency)))
        self.concurrency.setAccessibleName("Chats at a time, one level each")
        self.concurrency.setProperty("number", "true")
        self.input_tokens = NumberBox("Input tokens of a request", 1, 1_000_000, 0, 64)
        self.input_tokens.setValue(defaults.input_tokens)
        self.output_tokens = NumberBox("Output tokens of a request", 1, 1_000_000, 0, 16)
        self.output_tokens.setValue(defaults.output_tokens)
        self.price = NumberBox("Price of this machine per hour", 0, 100_000, 2, 0.1)
        self.price.setSpecialValueText("none")
        fields = {
            "Chats at a time": (self.concurrency, "How many chats are answered at a time; one level after another."),
            "Input tokens": (self.input_tokens, "Length of each prompt. No two prompts begin alike."),
            "Output tokens": (self.output_tokens, "Length of each answer."),
            "Price per hour": (self.price, "Of this machine, in any currency: adds what a million tokens cost."),
        }
        grid = QGridLayout()
        grid.setHorizontalSpacing(SPACE_M)
        grid.setVerticalSpacing(SPACE_XS)
        for place, (name, (field, tip)) in enumerate(fields.items()):
            title = label(name, "small")
            title.setBuddy(field)
            field.setToolTip(tip)
            field.setFixedSize(128, 30)
            grid.addWidget(title, 0, place)
            grid.addWidget(field, 1, place)
        self.start_button = button("Start", "primary")
        self.start_button.setDefault(True)
        self.start_button.setMinimumWidth(96)
        self.start_button.clicked.connect(self._start_or_stop)
        row = QHBoxLayout()
        row.setSpacing(SPACE_M)
        row.addLayout(grid)
        row.addStretch(1)
        row.addWidget(self.start_button, 0, Qt.AlignmentFlag.AlignBottom)
        self.error = ErrorBox()
        self.note = label(role="small", wrap=True)
        head = QVBoxLayout()
        head.setContentsMargins(SPACE_L, SPACE_M, SPACE_L, SPACE_M)
        head.setSpacing(SPACE_S + 2)
        head.addLayout(row)
        head.addWidget(self.note)
        head.addWidget(self.error)
        return head

    def _build_welcome(self) -> QWidget:
        """What is shown while there are no figures."""
        self.question = label(role="heading")
        self.intention = label(role="muted", wrap=True)
        welcome = QWidget()
        column = QVBoxLayout(welcome)
        column.setContentsMargins(SPACE_L * 5, SPACE_L, SPACE_L * 5, SPACE_L)
        column.setSpacing(SPACE_S)
        column.addStretch(1)
        for each in (self.question, self.intention):
            each.setAlignment(Qt.AlignmentFlag.AlignCenter)
            column.addWidget(each)
        column.addStretch(1)
        return welcome

    def _build_foot(self) -> QHBoxLayout:
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName("Requests answered")
        self.words = label(role="small")
        told = QVBoxLayout()
        told.setSpacing(SPACE_XS)
        told.addWidget(self.words)
        told.addWidget(self.progress)
        self.copy_button = button("Copy as text")
        self.copy_button.clicked.connect(self._copy)
        self.json_button = button("Export JSON…")
        self.json_button.clicked.connect(lambda: self._export("json", as_json))
        self.png_button = button("Export PNG…")
        self.png_button.clicked.connect(lambda: self._export("png", lambda report: picture(report, self._themes.theme)))
        self.close_button = button("Close")
        self.close_button.clicked.connect(self.close)
        foot = QHBoxLayout()
        foot.setContentsMargins(SPACE_L, SPACE_M - 4, SPACE_L, SPACE_M - 4)
        foot.setSpacing(SPACE_S)
        foot.addLayout(told, 1)
        foot.addSpacing(SPACE_M)
        for each in (self.copy_button, self.json_button, self.png_button, self.close_button):
            foot.addWidget(each)
        return foot

    # ------------------------------------------------------------ measuring

    def plan(self) -> BenchmarkPlan:
        """What the fields ask for. Raises `ValueError` saying which of them cannot be understood."""
        text = self.concurrency.text()
        parts = [part.strip() for part in text.replace(";", ",").split(",") if part.strip()]
        if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"Chats at a time: {text!r} is no list of whole numbers such as 1, 4, 8.")
        return BenchmarkPlan(
            concurrency=tuple(int(part) for part in parts),
            input_tokens=int(self.input_tokens.value()),
            output_tokens=int(self.output_tokens.value()),
            # The engine may remember the prompts of the last time.
            seed=secrets.randbits(31),
        )

    def _start_or_stop(self) -> None:
        self._note_of_export = ""
        if self._state.is_running:
            self._state.stop()
            return
        try:
            plan = self.plan()
        except ValueError as error:
            self.error.say(str(error))
            return
        self._state.start(plan, self.price.value() or None)

    # ------------------------------------------------------------ showing

    def refresh(self, *_: object) -> None:
        """Brings everything up to date with the state."""
        state = self._state
        running, obstacle = state.is_running, state.obstacle
        for field in (self.concurrency, self.input_tokens, self.output_tokens, self.price):
            field.setEnabled(not running)
        self.start_button.setText("Stop" if running else "Start")
        self.start_button.setAccessibleName("Stop the benchmark" if running else "Start the benchmark")
        self.start_button.setEnabled(running or not obstacle)
        self.start_button.setToolTip("" if running else obstacle)
        self._show_progress()
        self._show_note(running, obstacle)
        if state.failure or running:
            self.error.say(state.failure)
        if state.report is not self._shown:
            self._shown = state.report
            if state.report is not None:
                self.sheet.set_report(state.report)
        if state.report is None:
            self._show_welcome(running)
        self._stack.setCurrentIndex(0 if state.report is None else 1)
        for each in (self.copy_button, self.json_button, self.png_button):
            each.setEnabled(state.report is not None)

    def _show_welcome(self, running: bool) -> None:
        name = self._state.model_name
        self.question.setText(f"How fast does {name} answer?" if name else "How fast does a model answer?")
        try:
            plan = self.plan()
        except ValueError as error:
            self.intention.setText(str(error))
            return
        levels = " and ".join(filter(None, (", ".join(map(str, plan.concurrency[:-1])), str(plan.concurrency[-1]))))
        requests, prompt = plural(plan.total_requests, "request"), plural(plan.input_tokens, "random token")
        words = (
            f"{requests} of {prompt} each, {levels} at a time, every answer {plural(plan.output_tokens, 'token')} long."
        )
        if running:
            words += " The first figures come when the first level is complete."
        else:
            words += (
                " Measured are the time to the first token (TTFT), the time per further token (TPOT), and how many "
                "tokens are written a second."
            )
        self.intention.setText(words)

    def _show_progress(self) -> None:
        answered, total, at_a_time = self._state.progress
        running = self._state.is_running
        self.progress.setVisible(running)
        if running:
            self.progress.setRange(0, total)
            self.progress.setValue(answered)
            doing = f"{plural(at_a_time, 'chat')} at a time" if answered else "warming up"
            self.words.setText(f"{answered} of {plural(total, 'request')} answered · {doing}")
        else:
            self.words.setText(self._note_of_export)

    def _show_note(self, running: bool, obstacle: str) -> None:
        state, notes = self._state, []
        if running:
            notes.append("Chats that are answered meanwhile make the figures worse, and are answered more slowly.")
        elif obstacle:
            notes.append(obstacle)
        if state.report is not None:
            notes += [f"{line}." for line in failures(state.report)]
            seats, most = state.report.model.max_num_seqs, max(state.report.plan.concurrency)
            if most > seats:
                notes.append(f"The model was loaded for {plural(seats, 'answer')} at a time: more than that wait.")
        if state.was_disturbed:
            notes.append("A chat was answered while this was measured: alone, the figures would be better.")
        if state.was_stopped and not running:
            notes.append("Stopped early: only complete levels are shown.")
        self.note.setText(" ".join(notes))
        self.note.setVisible(bool(notes))

    def _theme_changed(self, theme: Theme) -> None:
        self.sheet.set_theme(theme)

    # ------------------------------------------------------------ taking it away

    def _copy(self) -> None:
        if self._state.report is not None:
            QGuiApplication.clipboard().setText(as_text(self._state.report))
            self._tell("Copied.")

    def _export(self, suffix: str, content: Callable[[BenchmarkReport], bytes]) -> None:
        report = self._state.report
        if report is None:
            return
        path = self._ask_where(f"Kvasir benchmark {report.model.name}", suffix)
        if path is not None:
            self.save(path, content(report))

    def save(self, path: Path, content: bytes) -> None:
        """Writes an export and says how it went."""
        try:
            path.write_bytes(content)
        except OSError as error:
            self.error.say(f"{path} cannot be written: {error.strerror or error}")
            return
        self.error.say("")
        self._folder = path.parent
        self._tell(f"Exported to {path}")

    def _ask_where(self, title: str, suffix: str) -> Path | None:
        return ask_where(self, self._folder / file_name(title, suffix), _KINDS[suffix])

    def _tell(self, words: str) -> None:
        self._note_of_export = words
        self._show_progress()

    # ------------------------------------------------------------ coming and going

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._timer.start()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._timer.stop()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape:  # as the close button, not only out of sight
            self.close()
            return
        super().keyPressEvent(event)

    def closeEvent(self, event: QCloseEvent) -> None:
        self._state.stop()
        super().closeEvent(event)
