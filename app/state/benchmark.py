"""The benchmark as the window runs it: on the loaded model, beside the chats, without touching them."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal

from app.benchmark.plan import BenchmarkPlan
from app.benchmark.report import BenchmarkReport, make_report
from app.benchmark.run import OWNER, BenchmarkRun
from app.bridge import Bridge, RequestEvent
from app.state.engine_state import EngineState
from app.state.workspace import Workspace
from app.units import plural
from engine.protocol import AnyCommand, EngineConfig, Generate, Telemetry


class BenchmarkState(QObject):
    """One benchmark at a time. `changed` tells of any difference in what can be read here.

    Latencies count until the bridge has handed an event over, which is once a frame.
    """

    changed = Signal()

    def __init__(
        self, engine: EngineState, bridge: Bridge, workspace: Workspace, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._engine, self._bridge, self._workspace = engine, bridge, workspace
        self._run: BenchmarkRun | None = None
        self._price_per_hour: float | None = None
        self._config = EngineConfig(model="")
        self.report: BenchmarkReport | None = None
        """The levels measured so far, kept until the next start."""
        self.failure = ""
        """Why the last benchmark did not begin or did not come to its end, in words for people."""
        self.was_stopped = False
        self.was_disturbed = False
        """Whether a chat was answered while the figures were taken."""
        bridge.subscribe(Telemetry, self._telemetry_came)
        engine.changed.connect(self._engine_changed)

    @property
    def is_running(self) -> bool:
        return self._run is not None

    @property
    def progress(self) -> tuple[int, int, int]:
        """Requests answered, requests in all, and how many are under way at a time; zeros at rest."""
        run = self._run
        return (run.num_answered, run.plan.total_requests, run.concurrency) if run is not None else (0, 0, 0)

    @property
    def model_name(self) -> str:
        """Of the model that would be measured; empty without one."""
        return self._engine.model.name if self._engine.model is not None else ""

    @property
    def num_chats_answering(self) -> int:
        return sum(session.is_generating for session in self._workspace.sessions)

    @property
    def obstacle(self) -> str:
        """Why no benchmark can start now; empty when one can."""
        if not self._engine.is_ready:
            return {
                "no_model": "No model is loaded. Load one first.",
                "dead": "The engine has stopped. Restart it.",
            }.get(self._engine.status, self._engine.unready_reason)
        if number := self.num_chats_answering:
            waits = "is" if number == 1 else "are"
            return (
                f"{plural(number, 'chat')} {waits} being answered, which would make the figures worse. "
                "Wait for the end, or stop the answers."
            )
        return ""

    def start(self, plan: BenchmarkPlan, price_per_hour: float | None = None) -> None:
        """Begins to measure; what was measured before is dropped. `failure` says so if it cannot begin."""
        if self._run is not None:
            return
        self.report, self.was_stopped, self.was_disturbed = None, False, False
        self.failure = self.obstacle
        model = self._engine.model
        if not self.failure and model is not None:
            self._price_per_hour = price_per_hour
            self._config = self._engine.config or EngineConfig(model=model.path)
            try:
                self._run = run = BenchmarkRun(plan, model, self._send, price_per_hour)
                run.start()
            except Exception as error:
                self._run = None
                self.failure = str(error)
        self.changed.emit()

    def stop(self) -> None:
        """Ends early; the levels that are complete stay."""
        if self._run is not None:
            self.was_stopped = True
            self._end()

    def _send(self, command: AnyCommand) -> None:
        if isinstance(command, Generate):
            self._bridge.register_request(command.request_id, self._take, OWNER)
        self._bridge.send(command)

    def _take(self, event: RequestEvent) -> None:
        run = self._run
        if run is None:  # what comes of requests that were cancelled
            return
        answered = run.num_answered
        try:
            run.take(event)
        except Exception as error:  # the engine takes no further request
            self._end(str(error))
            return
        if run.num_answered > answered:
            self._note_chats()
            self._renew_report(run)
            if run.is_done:
                self._run = None
            self.changed.emit()

    def _telemetry_came(self, telemetry: Telemetry) -> None:
        if self._run is not None:
            self._run.take(telemetry)
            self._note_chats()

    def _note_chats(self) -> None:
        self.was_disturbed = self.was_disturbed or self.num_chats_answering > 0

    def _renew_report(self, run: BenchmarkRun) -> None:
        known = len(self.report.levels) if self.report is not None else 0
        worker, model = self._engine.worker, self._engine.model
        if len(run.levels) > known and worker is not None and model is not None:
            self.report = make_report(run.plan, run.levels, worker, model, self._config, self._price_per_hour)

    def _engine_changed(self) -> None:
        if self._run is not None and not self._engine.is_ready:
            reason = self._engine.failure if self._engine.status == "dead" else ""
            self._end(reason or "The model was unloaded or loaded anew while it was measured.")
        else:
            self.changed.emit()

    def _end(self, failure: str = "") -> None:
        run, self._run = self._run, None
        self.failure = failure
        if run is not None:
            try:
                run.cancel()
            except Exception:  # there is no engine to hear it, which is told already
                self.failure = failure or "The engine could not be told to stop."
        self.changed.emit()
