"""Real sessions for tests of the chat view: a real store, bridge and engine state on a client without a process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from PySide6.QtWidgets import QApplication

from app.bridge import Bridge
from app.state.delivery import Delivery
from app.state.engine_state import EngineState
from app.state.records import Conversation, ConversationRecord, MessageRecord, RunRecord
from app.state.session import ChatSession, Services
from app.store import Store, conversations
from engine.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    AnyCommand,
    AnyEvent,
    CountTokens,
    Delta,
    EngineConfig,
    Finished,
    FinishReason,
    Generate,
    ModelInfo,
    ModelLoaded,
    RequestMetrics,
    SamplingParams,
    TokenCount,
    WorkerStarted,
)

MODEL = ModelInfo(
    name="SmolLM2-135M-Instruct.Q4_1",
    path="model.gguf",
    architecture="llama",
    format="gguf",
    num_parameters=134_515_008,
    num_layers=30,
    vocab_size=49152,
    max_context=8192,
    device="cpu",
    kernels="reference",
    dtype="fp32",
    kv_dtype="fp32",
    weight_bytes=98_000_000,
    kv_bytes_per_token=46080,
    num_kv_blocks=1024,
    block_size=16,
    max_num_seqs=8,
    load_seconds=1.2,
)


class QueueClient:
    """An engine client whose events are put in by the test; counts tokens as four characters each."""

    is_alive = True
    stderr_tail = ""

    def __init__(self) -> None:
        self.sent: list[AnyCommand] = []
        self.events: list[AnyEvent] = []

    def start(self) -> None:
        self.events.append(
            WorkerStarted(
                pid=1, protocol_version=PROTOCOL_VERSION, kernels="reference", device="cpu", device_name="", versions={}
            )
        )

    def restart(self) -> None:
        self.start()

    def send(self, command: AnyCommand) -> None:
        self.sent.append(command)
        if isinstance(command, CountTokens):
            characters = sum(len(message.content) for message in command.messages)
            self.events.append(TokenCount(query_id=command.query_id, count=characters // 4))

    def take_events(self) -> list[AnyEvent]:
        events, self.events = self.events, []
        return events

    def wait_events(self, timeout: float | None = None) -> list[AnyEvent]:
        return self.take_events()

    def close(self, timeout: float = 5.0) -> None:
        pass


class ChatScene:
    """Makes sessions and plays the engine for them."""

    def __init__(self, folder: Path, *, with_model: bool = True) -> None:
        self.client = QueueClient()
        self.store = Store(folder / "chats.db")
        self.bridge = Bridge(self.client)
        self.delivery = Delivery()
        self.engine = EngineState(self.client, self.bridge)
        self.services = Services(self.store, self.bridge, self.engine, self.delivery)
        self.sessions: list[ChatSession] = []
        if with_model:
            self.engine.start(EngineConfig(model="model"))
            self.settle()
            self.client.events.append(ModelLoaded(info=MODEL))
            self.settle()
            assert self.engine.is_ready

    def close(self) -> None:
        for session in self.sessions:
            session.interrupt("The test is over.")
        self.bridge.stop()
        self.store.close()

    def settle(self) -> None:
        """Brings what the engine sent to the sessions, without waiting for a timer."""
        self.bridge._drain()
        QApplication.processEvents()

    def session(self, messages: Sequence[tuple[str, str]] = (), **last_run: object) -> ChatSession:
        """A session with (role, text) messages; `last_run` changes the run of its last answer."""
        now = time.time()
        number = len(self.sessions) + 1
        record = ConversationRecord(f"chat-{number}", "New chat", True, "", SamplingParams(), "", "", None, now, now)
        self.store.write(lambda db: conversations.insert_conversation(db, record))
        session = ChatSession(self.services, record)
        if messages:
            records = self._records(messages, last_run)
            self.store.write(lambda db: conversations.add_messages(db, record.id, records, now))
            session.set_conversation(Conversation(record, records, {}))
        self.sessions.append(session)
        return session

    def _records(self, messages: Sequence[tuple[str, str]], last_run: dict[str, object]) -> list[MessageRecord]:
        records: list[MessageRecord] = []
        for role, text in messages:
            message_id = self.store.new_id()
            run = (
                self._run(message_id, last_run if len(records) == len(messages) - 1 else {}) if role != "user" else None
            )
            parent = records[-1].id if records else None
            records.append(MessageRecord(message_id, parent, role, text, time.time(), True, run))  # type: ignore[arg-type]
        return records

    @staticmethod
    def _run(message_id: int, changes: dict[str, object]) -> RunRecord:
        fields: dict[str, object] = {
            "id": message_id,
            "message_id": message_id,
            "status": "finished",
            "model": MODEL.name,
            "params": SamplingParams(),
            "started_at": 0.0,
            "seed": 42,
            "prompt_tokens": 120,
            "cached_tokens": 96,
            "output_tokens": 212,
            "queue_ms": 1.5,
            "ttft_ms": 84.2,
            "tpot_ms": 80.6,
            "finish_reason": "stop",
        }
        return RunRecord(**{**fields, **changes})  # type: ignore[arg-type]

    # ---------------------------------------------------------------- playing the engine

    def request_of(self, session: ChatSession) -> str:
        """The id of the session's request, once it has reached the engine."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for command in reversed(self.client.sent):
                if isinstance(command, Generate) and command.owner == session.conversation_id:
                    return command.request_id
            QApplication.processEvents()
            time.sleep(0.002)
        raise AssertionError("the session sent no request")

    def accept(self, request_id: str) -> None:
        self.client.events.append(Accepted(request_id=request_id, prompt_tokens=120, seed=42, max_tokens=1024))
        self.settle()

    def stream(self, request_id: str, text: str, num_tokens: int = 1) -> None:
        self.client.events.append(Delta(request_id=request_id, text=text, token_ids=[1] * num_tokens))
        self.settle()

    def finish(self, request_id: str, reason: FinishReason = "stop", error: str | None = None) -> None:
        metrics = RequestMetrics(
            prompt_tokens=120, cached_tokens=96, output_tokens=212, queue_ms=1.5, ttft_ms=84.2, tpot_ms=80.6
        )
        self.client.events.append(
            Finished(request_id=request_id, finish_reason=reason, error=error, metrics=None if error else metrics)
        )
        self.settle()
