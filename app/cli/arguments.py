"""The commands and their arguments. Imports nothing heavy: `kvasir --help` answers in a blink."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from engine.protocol import PARAMETER_RANGES, EngineConfig, ParameterRange, SamplingParams

EXAMPLE_QUESTION = "What is the capital of Japan?"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def _command(module: str) -> Callable[[argparse.Namespace], int]:
    """Imports a command's module only when it runs."""

    def run(arguments: argparse.Namespace) -> int:
        return importlib.import_module(module).run(arguments)

    return run


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="kvasir",
        description="Chat with open-weight models on this machine. With no command, the window opens.",
    )
    parser.set_defaults(run=_command("app.cli.window"))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    run = commands.add_parser("run", help="one answer on standard output")
    run.add_argument("prompt", metavar="PROMPT", help="the question; - reads it from standard input")
    run.add_argument("--json", action="store_true", help="print text, token_ids, finish_reason and metrics as JSON")
    run.add_argument("--raw", action="store_true", help="continue PROMPT as it is, without the chat template")
    _add_model_arguments(run)
    _add_sampling_arguments(run)
    run.set_defaults(run=_command("app.cli.run"))

    chat = commands.add_parser(
        "chat",
        help="a chat in the terminal",
        description="A chat in the terminal. Ctrl+C stops an answer, Ctrl+D leaves. "
        "Questions may come from a pipe, one a line; with none at all, an example is answered.",
    )
    _add_model_arguments(chat)
    _add_sampling_arguments(chat)
    chat.set_defaults(run=_command("app.cli.chat"))

    _add_bench(commands.add_parser("bench", help="how fast a model serves one and several chats here"))

    models = commands.add_parser("models", help="the models found on this machine, and whether they fit")
    models.add_argument("--json", action="store_true", help="print them as JSON")
    _add_precision_arguments(models.add_argument_group("to be loaded with"))
    models.set_defaults(run=_command("app.cli.models"))

    doctor = commands.add_parser("doctor", help="what works on this machine, and what to do about the rest")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(run=_command("app.cli.doctor"))
    return parser


def _add_bench(bench: argparse.ArgumentParser) -> None:
    group = bench.add_argument_group("load")
    group.add_argument(
        "--concurrency",
        type=_whole_numbers,
        default=(1, 4, 8),
        metavar="N,N",
        help="chats at a time, one line of the table each [default 1,4,8]",
    )
    group.add_argument("--input-tokens", type=_whole_number(1), default=512, metavar="N", help="[default 512]")
    group.add_argument("--output-tokens", type=_whole_number(1), default=64, metavar="N", help="[default 64]")
    group.add_argument(
        "--requests-per-stream", type=_whole_number(1), default=2, metavar="N", help="of each chat [default 2]"
    )
    group.add_argument("--price-per-hour", type=_price, metavar="X", help="of this machine: adds the cost of tokens")
    group.add_argument("--json", type=Path, metavar="FILE", help="write machine, settings and figures to a file")
    group.add_argument("--chart", type=Path, metavar="FILE", help="draw the figures into a PNG file")
    group.add_argument("--profile", action="store_true", help="show instead where the time of a step goes")
    _add_model_arguments(bench)
    bench.set_defaults(run=_command("app.cli.bench"))


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    defaults = EngineConfig(model="")
    group.add_argument("--model", metavar="MODEL", help="a name from `kvasir models`, a .gguf file or a folder")
    group.add_argument("--system", metavar="TEXT", help="the system prompt")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--dtype", default="auto", choices=("auto", "fp32", "fp16", "bf16"), help="of activations")
    group.add_argument(
        "--backend", default="auto", choices=("auto", "native", "transformers"), help="whose decoder computes"
    )
    _add_precision_arguments(group)
    group.add_argument(
        "--speculation", choices=("ngram", "draft"), help="guess tokens ahead, from the chat itself or by a draft model"
    )
    group.add_argument("--draft-model", metavar="MODEL", help="a smaller model with the same tokens; implies draft")
    group.add_argument(
        "--num-draft-tokens",
        type=_whole_number(1),
        default=defaults.num_draft_tokens,
        metavar="N",
        help="tokens guessed ahead at most",
    )
    group.add_argument("--no-cuda-graphs", action="store_true", help="call a GPU's kernels one by one in every step")
    group.add_argument("--log", metavar="FILE", help="append the engine's own messages to this file")


def _add_precision_arguments(group: argparse._ArgumentGroup) -> None:
    """What decides how much memory a model takes."""
    group.add_argument("--quantization", choices=("int8", "int4"), help="quantise the weights at load")
    group.add_argument(
        "--group-size",
        type=int,
        default=EngineConfig(model="").quantization_group_size,
        choices=(32, 64, 128),
        help="weights that share a scale in int4",
    )
    group.add_argument(
        "--kv-dtype", default="auto", choices=("auto", "fp32", "fp16", "bf16", "int8"), help="of keys and values"
    )
    group.add_argument(
        "--context", "--max-context", dest="max_context", type=_whole_number(1), metavar="TOKENS", help="of one chat"
    )
    group.add_argument(
        "--gpu-memory-share",
        type=_share,
        default=EngineConfig(model="").gpu_memory_share,
        metavar="X",
        help="of a GPU's memory, for this and all other programs together [above 0 to 1, default 0.9]",
    )


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    defaults = SamplingParams()
    for name, allowed in PARAMETER_RANGES.items():
        default = getattr(defaults, name)
        range_ = f"{_number(allowed.low)} to {_number(allowed.high)}"
        group.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            type=_within(allowed),
            metavar="N" if allowed.integer else "X",
            help=f"{allowed.help} [{range_}{'' if default is None else f', default {_number(default)}'}]",
        )
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer at this text (repeatable)")
    group.add_argument("--stop-token-id", dest="stop_token_ids", action="append", type=_whole_number(0), metavar="ID")
    group.add_argument(
        "--logit-bias",
        action="append",
        type=_bias,
        metavar="ID=BIAS",
        help="add BIAS to the logit of token ID (repeatable)",
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after an end token")
    group.add_argument(
        "--temperature-last", action="store_true", default=None, help="apply the temperature behind the filters"
    )
    group.add_argument(
        "--overflow",
        choices=("refuse", "drop_oldest", "stop_at_limit"),
        help="what to do with a conversation longer than the context",
    )


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _within(allowed: ParameterRange) -> Callable[[str], float | int]:
    def parse(text: str) -> float | int:
        try:
            value = int(text) if allowed.integer else float(text)
        except ValueError:
            kind = "a whole number" if allowed.integer else "a number"
            raise argparse.ArgumentTypeError(f"must be {kind}, got {text!r}") from None
        if not allowed.low <= value <= allowed.high:
            raise argparse.ArgumentTypeError(
                f"must lie in [{_number(allowed.low)}, {_number(allowed.high)}], got {text}"
            )
        return value

    return parse


def _whole_number(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {low}, got {text!r}")
        return int(text)

    return parse


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(_whole_number(1)(part) for part in text.split(","))


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not 0 <= price < float("inf"):
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return price


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"must lie above 0 and up to 1, got {text}")
    return share


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        pair = int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 123=-5.0, got {text!r}") from None
    if pair[0] < 0 or not -100.0 <= pair[1] <= 100.0:
        raise argparse.ArgumentTypeError(f"takes a token id and a bias in [-100, 100], got {text!r}")
    return pair
