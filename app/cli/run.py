"""`kvasir run`: one answer on standard output."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from app.cli.chosen_model import choose_draft_model, choose_model
from app.cli.engine_session import Answer, EngineSession, open_session
from app.cli.failure import CommandError, Interrupted, UsageError, reports_failures
from app.cli.options import check_text, engine_config, sampling_params
from app.cli.output import AnswerPrinter
from engine.protocol import ChatMessage, ModelInfo, SamplingParams


@reports_failures
def run(arguments: argparse.Namespace) -> int:
    params = sampling_params(arguments)
    if arguments.raw and arguments.system is not None:
        raise UsageError("--raw and --system exclude each other: a raw prompt has no system turn")
    prompt = _read_prompt(arguments.prompt)
    messages = None if arguments.raw else [ChatMessage(role="user", content=prompt)]
    if messages is not None and arguments.system is not None:
        messages.insert(0, ChatMessage(role="system", content=check_text(arguments.system, "the system prompt")))
    config = engine_config(arguments, choose_model(arguments.model), choose_draft_model(arguments.draft_model))
    with open_session(config, arguments.log) as session:
        if arguments.json:
            answer = session.ask(params, messages=messages, prompt=prompt if arguments.raw else None)
            print(msgspec.json.encode(_record(answer, session.info)).decode())
        else:
            answer = _print_answer(session, params, messages, prompt if arguments.raw else None)
    if answer.finished.finish_reason == "cancelled":
        raise Interrupted("interrupted")
    return 0


def _print_answer(
    session: EngineSession, params: SamplingParams, messages: list[ChatMessage] | None, prompt: str | None
) -> Answer:
    printer = AnswerPrinter()
    answer = None
    try:
        answer = session.ask(params, messages=messages, prompt=prompt, on_text=printer.write)
        return answer
    finally:
        if answer is not None or printer.has_written:
            printer.end()


def _read_prompt(argument: str) -> str:
    prompt = argument
    if argument == "-":
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise CommandError(f"the prompt on standard input is not UTF-8 text: {error}") from error
    if not prompt.strip():
        raise UsageError("the prompt is empty")
    return check_text(prompt, "the prompt")


def _record(answer: Answer, info: ModelInfo) -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finished.finish_reason,
        "stop_reason": answer.finished.stop_reason,
        "metrics": answer.finished.metrics,
        "logprobs": answer.logprobs or None,
        "seed": answer.accepted.seed if answer.accepted else None,
        "model": info.name,
    }
