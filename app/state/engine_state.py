"""What the engine is doing, as the window shows it, and the few things one can ask of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

from PySide6.QtCore import QObject, Signal

from app.bridge import Bridge
from engine.client import EngineClient
from engine.protocol import (
    ChatMessage,
    CountTokens,
    EngineConfig,
    LoadFailed,
    LoadModel,
    LoadProgress,
    ModelInfo,
    ModelLoaded,
    ModelUnloaded,
    TokenCount,
    UnloadModel,
    WorkerDied,
    WorkerStarted,
)

EngineStatus = Literal["starting", "no_model", "loading", "ready", "dead"]


class EngineState(QObject):
    """Follows the worker through its events. `changed` tells of any difference in what can be read here."""

    changed = Signal()

    def __init__(self, client: EngineClient, bridge: Bridge, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._client = client
        self._bridge = bridge
        self.status: EngineStatus = "starting"
        self.worker: WorkerStarted | None = None
        self.model: ModelInfo | None = None
        self.config: EngineConfig | None = None
        """What was asked to be loaded last; `restart` loads it again unless loading it killed the worker."""
        self.progress: LoadProgress | None = None
        self.failure = ""
        """Why there is no model or no engine, in words for people; empty when nothing went wrong."""
        self.death: WorkerDied | None = None
        self._num_loads = 0  # asked for and not answered yet; the worker answers each, in order
        self._counting: dict[str, Callable[[int | None, str | None], None]] = {}
        self._query_ids = itertools.count(1)
        bridge.subscribe(WorkerStarted, self._worker_started)
        bridge.subscribe(WorkerDied, self._worker_died)
        bridge.subscribe(LoadProgress, self._load_progressed)
        bridge.subscribe(ModelLoaded, self._model_loaded)
        bridge.subscribe(LoadFailed, self._load_failed)
        bridge.subscribe(ModelUnloaded, self._model_unloaded)
        bridge.subscribe(TokenCount, self._token_counted)

    @property
    def is_ready(self) -> bool:
        return self.status == "ready"

    @property
    def unready_reason(self) -> str:
        """Why nothing can be generated now, and what to do; empty when the engine is ready."""
        return {
            "ready": "",
            "starting": "The engine is starting. Wait a moment.",
            "loading": "The model is still loading. Wait a moment.",
            "no_model": "No model is loaded. Choose one first.",
            "dead": "The engine has stopped. Restart it, then send again.",
        }[self.status]

    def start(self, config: EngineConfig | None = None) -> None:
        """Starts the worker and the bridge; loads `config` as soon as the worker is there."""
        self.config = config
        self._bridge.start()
        self._client.start()
        self.changed.emit()

    def load(self, config: EngineConfig) -> None:
        """Loads a model in place of the present one. A dead engine is started again for it."""
        self.config = config
        if self.status == "dead":
            self.restart()
        elif self.status != "starting":
            self._send_load(config)

    def unload(self) -> None:
        """Gives the model's memory back. While it is loading, loading is cancelled."""
        self.config = None
        if self.status in ("ready", "loading"):
            self._bridge.send(UnloadModel())

    def restart(self) -> None:
        """Ends the worker if it still runs, starts a new one and loads the last model again.

        Requests under way end with an error; none is sent again.
        """
        self._set("starting")
        self._bridge.start()
        self._client.restart()

    def count_tokens(self, messages: Sequence[ChatMessage], callback: Callable[[int | None, str | None], None]) -> None:
        """Calls `callback(count, error)` with the tokens the messages take after the chat template."""
        if not self.is_ready:
            callback(None, self.unready_reason)
            return
        query_id = f"count-{next(self._query_ids)}"
        self._counting[query_id] = callback
        try:
            self._bridge.send(CountTokens(query_id=query_id, messages=list(messages)))
        except Exception as error:  # no answer will come: whoever waits for it must hear of that
            self._counting.pop(query_id, None)
            callback(None, str(error))

    def _worker_started(self, event: WorkerStarted) -> None:
        self.worker = event
        if self.config is not None:
            self._send_load(self.config)
        else:
            self._set("no_model", failure=self.failure)

    def _worker_died(self, event: WorkerDied) -> None:
        if self.status == "loading":
            self.config = None  # never load again unasked what may have killed the worker
        self.death = event
        self._set("dead", failure=event.reason)

    def _load_progressed(self, event: LoadProgress) -> None:
        if self.status == "loading":
            self.progress = event
            self.changed.emit()

    def _model_loaded(self, event: ModelLoaded) -> None:
        if self._is_last_load():
            self._set("ready", model=event.info)

    def _load_failed(self, event: LoadFailed) -> None:
        if not self._is_last_load():
            return
        was_wanted = self.config is not None
        self.config = None
        self._set("no_model", failure=event.message if was_wanted else "")

    def _is_last_load(self) -> bool:
        """Whether a load's outcome counts: not if another one follows, or the worker is being replaced."""
        if self.status in ("starting", "dead"):
            return False
        self._num_loads -= 1
        return self._num_loads == 0

    def _model_unloaded(self, event: ModelUnloaded) -> None:
        if self.status == "ready":  # while loading, it was the model before
            self._set("no_model")

    def _token_counted(self, event: TokenCount) -> None:
        callback = self._counting.pop(event.query_id, None)
        if callback is not None:
            callback(event.count, event.error)

    def _send_load(self, config: EngineConfig) -> None:
        self._num_loads += 1
        self._set("loading")
        try:
            self._bridge.send(LoadModel(config=config))
        except Exception as error:
            self._num_loads -= 1
            self.config = None
            self._set("no_model", failure=f"The engine could not be asked to load {config.model!r}: {error}")

    def _set(self, status: EngineStatus, *, model: ModelInfo | None = None, failure: str = "") -> None:
        self.status = status
        self.model = model
        self.failure = failure
        self.progress = None
        if status != "dead":
            self.death = None
        if status in ("starting", "dead"):
            self._num_loads = 0
        self.changed.emit()
