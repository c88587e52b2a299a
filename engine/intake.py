"""The worker's way in: a thread that turns conversations into tokens while the engine keeps stepping."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from engine.failures import describe_error
from engine.protocol import CountTokens, Event, Finished, Generate, TokenCount
from engine.text.prompt import build_prompt, encode_chat
from engine.text.tokenizer import Tokenizer

NO_MODEL = "No model is loaded: load one first."


@dataclass(frozen=True)
class PreparedRequest:
    """A `Generate` whose prompt is tokens of the model of `epoch`, see `Intake`; `arrival_time` is monotonic."""

    command: Generate
    epoch: int
    arrival_time: float
    token_ids: list[int]
    dropped_messages: int = 0


@dataclass(frozen=True)
class Text:
    """What the intake needs of a loaded model. `token_limit` is the most a prompt and its answer can have."""

    tokenizer: Tokenizer
    token_limit: int


class Intake:
    """Prepares requests in order of arrival.

    Every command carries the epoch it was read in: the number of loads and unloads before it. It waits
    until that many are done; if more are, its model is gone and it is cancelled. A model may also go while
    a prompt is being prepared: the prepared request carries its epoch, and only the engine of the same
    epoch may take it. Nothing is done before the first `set_model`.

    Invariant: a request's id is in `_pending` from `submit` until somebody takes it out with
    `claim`; who takes it out owes the client the `Finished`, or gives it to the engine.
    """

    def __init__(self, put_event: Callable[[Event], None], put_prepared: Callable[[PreparedRequest], None]) -> None:
        self._put_event = put_event
        self._put_prepared = put_prepared
        self._commands: queue.SimpleQueue[tuple[int, float, Generate | CountTokens]] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._pending: set[str] = set()
        self._epoch = -1
        self._text: Text | None = None
        threading.Thread(target=self._run, name="kvasir-intake", daemon=True).start()

    def submit(self, epoch: int, command: Generate | CountTokens) -> None:
        if isinstance(command, Generate):
            with self._lock:
                self._pending.add(command.request_id)
        self._commands.put((epoch, time.monotonic(), command))

    def claim(self, request_id: str) -> bool:
        """Takes a request out of the intake; False if it is not there (any more)."""
        with self._lock:
            if request_id in self._pending:
                self._pending.remove(request_id)
                return True
            return False

    def set_model(self, epoch: int, text: Text | None) -> None:
        """Says what is loaded after the load or unload number `epoch`, 0 being the start."""
        with self._lock:
            self._epoch, self._text = epoch, text
            self._lock.notify_all()

    def _run(self) -> None:
        while True:
            epoch, arrival_time, command = self._commands.get()
            with self._lock:
                self._lock.wait_for(lambda: self._epoch >= epoch)  # noqa: B023 - called before the next round
                text, replaced = self._text, self._epoch > epoch
            if isinstance(command, CountTokens):
                self._put_event(_count(command, text))
            else:
                self._prepare(command, epoch, arrival_time, text, replaced)

    def _prepare(self, command: Generate, epoch: int, arrival_time: float, text: Text | None, replaced: bool) -> None:
        try:
            if replaced:
                if self.claim(command.request_id):
                    self._put_event(Finished(request_id=command.request_id, finish_reason="cancelled"))
                return
            if text is None:
                raise ValueError(NO_MODEL)
            self._put_prepared(prepare(command, epoch, arrival_time, text))
        except Exception as error:
            if not isinstance(error, ValueError):
                traceback.print_exc()
            if self.claim(command.request_id):
                self._put_event(
                    Finished(request_id=command.request_id, finish_reason="error", error=describe_error(error))
                )


def prepare(command: Generate, epoch: int, arrival_time: float, text: Text) -> PreparedRequest:
    """Raises `ValueError` with a message for people if no prompt can be made of the command.

    Whether the prompt fits is for `Engine.add_request` to say.
    """
    given = [source for source in (command.messages, command.prompt, command.token_ids) if source is not None]
    if len(given) != 1:
        raise ValueError(f"exactly one of messages, prompt and token_ids must be given, not {len(given)}")
    if command.messages is not None:
        params = command.params
        prompt = build_prompt(text.tokenizer, command.messages, text.token_limit, params.max_tokens, params.overflow)
        return PreparedRequest(command, epoch, arrival_time, prompt.token_ids, prompt.dropped_messages)
    token_ids = text.tokenizer.encode(command.prompt) if command.prompt is not None else command.token_ids
    if not token_ids:
        raise ValueError("the prompt is empty")
    return PreparedRequest(command, epoch, arrival_time, token_ids)


def _count(command: CountTokens, text: Text | None) -> TokenCount:
    try:
        if text is None:
            raise ValueError(NO_MODEL)
        count = len(encode_chat(text.tokenizer, command.messages)) if command.messages else 0
        return TokenCount(query_id=command.query_id, count=count)
    except Exception as error:
        if not isinstance(error, ValueError):
            traceback.print_exc()
        return TokenCount(query_id=command.query_id, count=None, error=describe_error(error))
