"""Renders conversations with a model's own chat template, which is code from a stranger.

It runs in a sandbox that equals transformers', so that prompts are the ones the model was trained on, with
limits of our own on time and size.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import FrameType, TracebackType
from typing import Any

import jinja2

from engine.protocol import ChatMessage
from engine.text.messages import fold_system, merge_neighbours, without_empty_answers
from engine.text.template_environment import environment

# CPU seconds of the rendering thread, so that a busy machine fails no honest template.
TIME_LIMIT = 5.0
MAX_OUTPUT_CHARS = 1 << 25
# Looking at the clock takes longer than a line of a template.
_EVENTS_PER_LOOK = 32
# What Jinja calls the code of a template that is no file.
_TEMPLATE_FILE = "<template>"
# Of one string or list that an operator in a template may build.
_MAX_OPERAND_SIZE = 1 << 20


class ChatTemplateError(ValueError):
    """A conversation cannot be rendered. The message names the fault and the template's `line`, if known.

    `over_limit`: it did not fail by itself but was stopped.
    """

    def __init__(self, fault: str, line: int | None = None, over_limit: bool = False) -> None:
        where = f" (line {line} of the template)" if line is not None else ""
        super().__init__(f"The model's chat template {fault}{where}")
        self.line = line
        self.over_limit = over_limit


class ChatTemplate:
    """A model's chat template. `special_tokens` maps names such as `bos_token` to their text.

    Compiled on first use. Safe to use from several threads.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})

    def render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation, with the start of the answer's turn behind it if asked for.

        A template without a system role gets system messages in front of the next user turn;
        one that insists on alternating roles gets neighbours of the same role joined.
        Raises `ChatTemplateError`.
        """
        return self._render(self.prepare(messages), add_generation_prompt)

    def prepare(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """The conversation in the shape this template accepts."""
        prepared = without_empty_answers(messages)
        if any(message.role == "system" for message in prepared):
            if not self.supports_system_role:
                prepared = fold_system(prepared, keep_first=False)
            elif self.insists_on_alternation:
                prepared = fold_system(prepared, keep_first=True)
        return merge_neighbours(prepared) if self.insists_on_alternation else prepared

    @cached_property
    def supports_system_role(self) -> bool:
        """Whether the template renders a system message; some refuse it, some leave it out in silence."""
        probe = "kvasir-system-probe"
        return probe in (self._probe(("system", probe), ("user", "a")) or "")

    @cached_property
    def insists_on_alternation(self) -> bool:
        """Whether the template refuses two messages of the same role in a row."""
        for start in ([], [("system", "s")]):
            if self._probe(*start, ("user", "a")) is not None:
                return self._probe(*start, ("user", "a"), ("user", "b")) is None
        return False

    def _probe(self, *turns: tuple[Any, str]) -> str | None:
        """Renders a small conversation; None where the template fails on it. Raises if it had to be stopped."""
        try:
            return self._render([ChatMessage(role=role, content=content) for role, content in turns], False)
        except ChatTemplateError as error:
            if error.over_limit:
                raise
            return None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return environment(_guard).from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"is not valid: {error.message}", error.lineno) from error
        except (RecursionError, MemoryError, OverflowError, ValueError, SyntaxError) as error:
            raise ChatTemplateError(f"is not valid: {error}") from error

    def _render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        template = self._compiled
        variables = {
            **self.special_tokens,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        pieces: list[str] = []
        size = 0
        try:
            with _time_limit(TIME_LIMIT):
                for piece in template.generate(variables):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_OUTPUT_CHARS:
                        raise _LimitExceeded(f"writes more than {MAX_OUTPUT_CHARS} characters")
        except _LimitExceeded as error:
            line = _template_line(error.__traceback__)
            raise ChatTemplateError(f"was stopped: it {error}", line, over_limit=True) from None
        except Exception as error:  # whatever a stranger's code raises
            fault = f"failed: {error or type(error).__name__}"
            raise ChatTemplateError(fault, _template_line(error.__traceback__)) from error
        return "".join(pieces)


class _LimitExceeded(BaseException):
    """Not an `Exception`, so that nothing on the way out of a template takes it for one of its own."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Ends the block with `_LimitExceeded` when this thread has computed for `seconds`.

    Python has no way to stop a thread from outside, so the thread looks at its own clock: a
    trace function runs at every call and before every line of a template, which Jinja
    compiles to Python. What a single operation in C can cost is bounded by
    `_guard` and by the sandbox's limit on `range`.
    """
    deadline = time.thread_time() + seconds
    events = 0

    def look_at_clock(frame: FrameType, _event: str, _arg: Any) -> Any:
        nonlocal events
        events += 1
        if events % _EVENTS_PER_LOOK == 0 and time.thread_time() > deadline:
            raise _LimitExceeded(f"ran for more than {seconds:g} s")
        # Lines of Jinja's own functions need no look: each is short, and a template calls them again and again.
        return look_at_clock if frame.f_code.co_filename == _TEMPLATE_FILE else None

    previous = sys.gettrace()
    sys.settrace(look_at_clock)
    try:
        yield
    finally:
        sys.settrace(previous)


def _guard(operator: str, left: Any, right: Any) -> None:
    """Refuses the operations with which a few characters of template ask for gigabytes."""
    too_large = False
    if operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                too_large |= len(sequence) * count > _MAX_OPERAND_SIZE
        if isinstance(left, int) and isinstance(right, int):
            too_large |= left.bit_length() + right.bit_length() > _MAX_OPERAND_SIZE
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            too_large = left.bit_length() * right > _MAX_OPERAND_SIZE
    elif operator == "+":
        if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            too_large = len(left) + len(right) > MAX_OUTPUT_CHARS
    elif operator == "%" and isinstance(left, str):
        too_large = re.search(r"\*|\d{6}", left) is not None
    if too_large:
        raise _LimitExceeded(f"builds too large a value with {operator!r}")


def _template_line(traceback: TracebackType | None) -> int | None:
    """The template line an error came from: the innermost frame that belongs to a template."""
    line = None
    while traceback is not None:
        frame_globals = traceback.tb_frame.f_globals
        if "__jinja_exception__" in frame_globals:  # a frame Jinja has rewritten to template lines
            line = traceback.tb_lineno
        elif template := frame_globals.get("__jinja_template__"):
            line = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return line
