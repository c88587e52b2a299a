"""`kvasir chat`: a chat in the terminal, or with a pipe."""

from __future__ import annotations

import argparse
import importlib
import queue
import sys
import threading
from collections.abc import Iterator

from app.cli.arguments import EXAMPLE_QUESTION
from app.cli.chosen_model import choose_draft_model, choose_model
from app.cli.engine_session import EngineSession, open_session
from app.cli.failure import CommandError, reports_failures
from app.cli.options import check_text, engine_config, sampling_params
from app.cli.output import AnswerPrinter
from engine.protocol import ChatMessage, SamplingParams

# A pipe that says nothing for this long once the model is ready is taken for one that never will.
FIRST_QUESTION_SECONDS = 5.0

_HELP = "Ctrl+C stops an answer. /reset starts anew, /quit or Ctrl+D leaves."


@reports_failures
def run(arguments: argparse.Namespace) -> int:
    params = sampling_params(arguments)
    system = check_text(arguments.system, "the system prompt") if arguments.system is not None else None
    config = engine_config(arguments, choose_model(arguments.model), choose_draft_model(arguments.draft_model))
    interactive = sys.stdin is not None and sys.stdin.isatty()
    piped = None if interactive else _PipedLines()
    with open_session(config, arguments.log) as session:
        print(_greeting(session), file=sys.stderr, flush=True)
        chat = Chat(session, params, system)
        if piped is None:
            print(_HELP, file=sys.stderr, flush=True)
            return chat.answer_all(_typed_questions())
        return chat.answer_all(_echoed(_questions_or_example(piped)))


class Chat:
    """One conversation in the terminal. A stopped answer stays in it; a failed question leaves it."""

    def __init__(self, session: EngineSession, params: SamplingParams, system: str | None) -> None:
        self._session = session
        self._params = params
        self._start = [ChatMessage(role="system", content=system)] if system is not None else []
        self._messages = list(self._start)

    def answer_all(self, questions: Iterator[str]) -> int:
        """Answers until the questions end; returns 1 if one of them could not be answered."""
        code = 0
        for question in questions:
            match question.split():
                case []:
                    continue
                case ["/quit" | "/exit"]:
                    break
                case ["/reset"]:
                    self._messages = list(self._start)
                    continue
                case ["/help"]:
                    print(_HELP, file=sys.stderr, flush=True)
                    continue
            try:
                self._answer(question)
            except CommandError as error:
                print(f"kvasir: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
                code = 1
                if not self._session.is_alive:
                    break
        return code

    def _answer(self, question: str) -> None:
        asked = ChatMessage(role="user", content=check_text(question, "the question"))
        printer = AnswerPrinter()
        try:
            answer = self._session.ask(self._params, messages=[*self._messages, asked], on_text=printer.write)
        except CommandError:
            if printer.has_written:
                printer.end()
            raise
        printer.end()
        if answer.finished.finish_reason == "cancelled":
            print("(stopped)", file=sys.stderr, flush=True)
        if answer.accepted is not None and answer.accepted.dropped_messages:
            print(f"({answer.accepted.dropped_messages} oldest messages left out)", file=sys.stderr, flush=True)
        self._messages += [asked, ChatMessage(role="assistant", content=answer.text)]


def _greeting(session: EngineSession) -> str:
    info = session.info
    lines = [f"{info.name} on {session.worker.device_name}, {info.max_context} tokens of context."]
    return "\n".join([*lines, *session.worker.warnings])


def _typed_questions() -> Iterator[str]:
    """Lines from the terminal. Ctrl+C clears the line, Ctrl+D ends."""
    try:
        importlib.import_module("readline")  # line editing and history, where there is any
    except ImportError:
        pass
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        except EOFError:
            print(file=sys.stderr)
            return
        except UnicodeDecodeError as error:
            print(f"kvasir: that line is not UTF-8 text: {error}", file=sys.stderr)
            continue
        yield line


def _echoed(questions: Iterator[str]) -> Iterator[str]:
    """Shows each question above its answer, since nobody typed it here."""
    for question in questions:
        if question.strip():
            print(f"> {question}", flush=True)
        yield question


def _questions_or_example(lines: _PipedLines) -> Iterator[str]:
    """What the pipe says; the example question if it ends, or stays silent, before it has said anything."""
    asked = False
    while not asked:
        line = lines.get(FIRST_QUESTION_SECONDS)
        if line is None:
            print("Nothing to read on standard input: here is an example question.", file=sys.stderr, flush=True)
            yield EXAMPLE_QUESTION
            line = lines.get(0.0)  # may have come meanwhile
            if line is None:
                return
        asked = bool(line.strip())
        yield line
    while (line := lines.get()) is not None:
        yield line


class _PipedLines:
    """Reads standard input on a thread of its own, which is the only way to wait for it everywhere."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="kvasir-stdin", daemon=True).start()

    def get(self, timeout: float | None = None) -> str | None:
        """The next line without its end; None at the end of input or after `timeout` seconds."""
        try:
            line = self._lines.get(timeout=timeout) if timeout else self._lines.get(block=timeout is None)
        except queue.Empty:
            return None
        if line is None:
            self._lines.put(None)
        return line

    def _read(self) -> None:
        try:
            while sys.stdin is not None and (line := sys.stdin.readline()):
                self._lines.put(line.rstrip("\r\n"))
        except (OSError, ValueError) as error:  # ValueError: closed, or not UTF-8
            print(f"kvasir: standard input cannot be read: {error}", file=sys.stderr)
        self._lines.put(None)
