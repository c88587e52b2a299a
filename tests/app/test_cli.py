"""The command line, on the fake engine: what it prints, its exit codes and its one-line errors."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.__main__ import main
from app.cli import chat, engine_session
from app.cli.arguments import build_parser
from app.cli.options import engine_config
from app.paths import settings_path
from app.settings import SettingsFile
from engine import catalog, memory
from engine.protocol import EngineConfig
from tests.fake_engine import ROOT, fake_client

posix_only = pytest.mark.skipif(os.name != "posix", reason="signals")
UseFake = Callable[..., None]


@pytest.fixture
def use_fake(monkeypatch: pytest.MonkeyPatch) -> UseFake:
    """Makes the commands start the fake engine with a script."""

    def use(**script: Any) -> None:
        monkeypatch.setattr(
            engine_session, "LocalEngineClient", lambda log_path=None: fake_client(log_path=log_path, **script)
        )

    return use


def pipe_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def in_subprocess(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def run_fails(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 1) -> str:
    """Runs a command that must fail; returns its one line of error."""
    try:
        result = main(argv)
    except SystemExit as exit_:
        result = exit_.code
    captured = capsys.readouterr()
    assert result == code, captured
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err, captured.err
    return captured.err


def test_run_prints_the_answer_and_nothing_else(use_fake: UseFake, capsys: pytest.CaptureFixture[str]) -> None:
    use_fake(text="The capital is Tokyo.", tokens_per_second=1000)
    assert main(["run", "What is the capital of Japan?"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "The capital is Tokyo.\n"
    assert captured.err == ""


def test_run_json_holds_text_tokens_reason_and_metrics(use_fake: UseFake, capsys: pytest.CaptureFixture[str]) -> None:
    use_fake(text="one two three four", tokens_per_second=1000)
    assert main(["run", "count", "--json", "--max-tokens", "2", "--seed", "7", "--logprobs", "0"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] == "one two" and len(record["token_ids"]) == 2
    assert record["finish_reason"] == "length" and record["seed"] == 7
    assert record["metrics"]["output_tokens"] == 2 and len(record["logprobs"]) == 2


def test_run_reads_the_prompt_from_standard_input(
    use_fake: UseFake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake(answers={"from the pipe": "heard"}, tokens_per_second=1000)
    pipe_in(monkeypatch, "a question\nfrom the pipe\n")
    assert main(["run", "-"]) == 0
    assert capsys.readouterr().out == "heard\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "9"], "--temperature: must lie in [0, 5], got 9"),
        (["--temperature", "nan"], "--temperature: must lie in [0, 5], got nan"),
        (["--top-p", "-0.1"], "--top-p: must lie in [0, 1], got -0.1"),
        (["--top-k", "1.5"], "--top-k: must be a whole number, got '1.5'"),
        (["--max-tokens", "0"], "--max-tokens: must lie in [1, "),
        (["--repetition-penalty", "big"], "--repetition-penalty: must be a number, got 'big'"),
        (["--logit-bias", "12"], "--logit-bias: must look like 123=-5.0"),
        (["--min-tokens", "9", "--max-tokens", "3"], "min_tokens (9) must not exceed max_tokens (3)"),
        (["--stop", ""], "stop strings must not be empty"),
        (["--raw", "--system", "be nice"], "--raw and --system exclude each other"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--stop", "\udcff"], "--stop is not valid UTF-8 text"),
        (["--model", "/models/\udcff.gguf"], "--model is not valid UTF-8 text"),
        (["--device", "\udcff"], "--device is not valid UTF-8 text"),
        (["--system", "\udcff"], "the system prompt is not valid UTF-8 text"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert words in run_fails(capsys, "run", "hello", *flags, code=2)


def test_an_empty_prompt_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the prompt is empty" in run_fails(capsys, "run", " ", code=2)


def test_an_unknown_model_lists_near_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean SmolLM2-135M-Instruct.Q4_1" in run_fails(capsys, "run", "hello", "--model", "smollm")


def test_a_chat_refuses_what_is_no_text_before_it_starts_an_engine(
    use_fake: UseFake, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fake(start_crash="exit")
    assert "--stop is not valid UTF-8" in run_fails(capsys, "chat", "--stop", "\udcff", code=2)


def test_a_folder_with_a_name_that_is_no_text_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, starter_model: Path
) -> None:
    folder = tmp_path / "models-\udcff"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    (folder / "a.gguf").symlink_to(starter_model)
    monkeypatch.chdir(folder)
    assert "not valid UTF-8" in run_fails(capsys, "run", "hello", "--model", "a.gguf")


def test_models_in_the_folders_of_the_windows_settings_are_found(
    use_fake: UseFake, capsys: pytest.CaptureFixture[str], tmp_path: Path, starter_model: Path
) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    (folder / "mine.gguf").write_bytes(starter_model.read_bytes())
    file = SettingsFile(settings_path())
    file.settings.model_folders.append(str(folder))
    file.save()
    assert main(["models", "--json"]) == 0
    assert str(folder / "mine.gguf") in {record["path"] for record in json.loads(capsys.readouterr().out)}
    use_fake(text="Yes.", tokens_per_second=1000)
    assert main(["run", "hello", "--model", "mine"]) == 0
    assert capsys.readouterr().out == "Yes.\n"


def test_settings_that_cannot_be_read_are_told_and_left_alone(
    use_fake: UseFake, capsys: pytest.CaptureFixture[str]
) -> None:
    settings_path().parent.mkdir(parents=True)
    settings_path().write_text("{")
    use_fake(text="Yes.", tokens_per_second=1000)
    assert main(["run", "hello", "--model", "SmolLM2-135M-Instruct.Q4_1"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Yes.\n" and "model folders" in captured.err and captured.err.count("\n") == 1
    assert settings_path().read_text() == "{"


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.gguf")
    assert f"{missing}: no such file" in run_fails(capsys, "run", "hello", "--model", missing)


def test_a_truncated_file_is_refused_before_an_engine_is_started(
    use_fake: UseFake, capsys: pytest.CaptureFixture[str], tmp_path: Path, starter_model: Path
) -> None:
    use_fake(start_crash="exit")
    truncated = tmp_path / "truncated.gguf"
    with starter_model.open("rb") as source:
        truncated.write_bytes(source.read(3_000_000))
    noise = tmp_path / "noise.gguf"
    noise.write_bytes(b"no model at all" * 100)
    for path in (truncated, noise):
        assert str(path) in run_fails(capsys, "run", "hello", "--model", str(path))


def test_a_failed_load_is_told(use_fake: UseFake, capsys: pytest.CaptureFixture[str]) -> None:
    use_fake(load_error="the file is cut short\nin two lines")
    assert run_fails(capsys, "run", "hello") == "kvasir: the file is cut short in two lines\n"


def test_a_refused_request_is_told(use_fake: UseFake, capsys: pytest.CaptureFixture[str]) -> None:
    use_fake(errors={"hello": "the prompt is too long"})
    assert run_fails(capsys, "run", "hello") == "kvasir: the prompt is too long\n"


def test_a_death_at_the_start_is_told(use_fake: UseFake, capsys: pytest.CaptureFixture[str]) -> None:
    use_fake(start_crash="missing_torch")
    assert "lacks the package torch" in run_fails(capsys, "run", "hello")


def test_a_death_half_way_keeps_what_was_written(use_fake: UseFake, capsys: pytest.CaptureFixture[str]) -> None:
    use_fake(text="word " * 100, crash_at_delta=5, crash="exit")
    assert main(["run", "hello"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("word") and captured.out.endswith("\n")
    assert "exit code 3" in captured.err


def test_chat_answers_each_piped_question_in_one_conversation(
    use_fake: UseFake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake(answers={"first": "one", "second": "two"}, tokens_per_second=1000)
    pipe_in(monkeypatch, "first question\n\nsecond question")
    assert main(["chat"]) == 0
    assert capsys.readouterr().out == "> first question\none\n> second question\ntwo\n"


def test_chat_with_nothing_to_read_answers_an_example(
    use_fake: UseFake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake(answers={"capital of Japan": "Tokyo."}, tokens_per_second=1000)
    pipe_in(monkeypatch, "")
    assert main(["chat"]) == 0
    assert capsys.readouterr().out == "> What is the capital of Japan?\nTokyo.\n"


def test_chat_with_a_silent_pipe_answers_an_example_and_ends(
    use_fake: UseFake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(io.StringIO):
        def readline(self, size: int | None = -1, /) -> str:
            threading.Event().wait()
            return ""

    use_fake(text="Tokyo.", tokens_per_second=1000)
    monkeypatch.setattr(chat, "FIRST_QUESTION_SECONDS", 0.2)
    monkeypatch.setattr("sys.stdin", Silent())
    assert main(["chat"]) == 0
    assert capsys.readouterr().out == "> What is the capital of Japan?\nTokyo.\n"


def test_chat_goes_on_after_a_refused_question_and_says_so_at_the_end(
    use_fake: UseFake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake(errors={"bad": "no such thing"}, answers={"good": "fine"}, tokens_per_second=1000)
    pipe_in(monkeypatch, "bad one\ngood one\n")
    assert main(["chat"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "> bad one\n> good one\nfine\n"
    assert "kvasir: no such thing\n" in captured.err


def test_chat_ends_when_the_engine_dies(
    use_fake: UseFake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake(crash_on={"poison": "exit"})
    pipe_in(monkeypatch, "poison\nnever asked\n")
    assert main(["chat"]) == 1
    captured = capsys.readouterr()
    assert "never asked" not in captured.out and captured.err.count("exit code 3") == 1


@pytest.fixture
def interrupt_soon() -> Iterator[Callable[[float], None]]:
    """Presses Ctrl+C after some seconds."""
    timers: list[threading.Timer] = []

    def press(seconds: float) -> None:
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)))
        timers[-1].start()

    yield press
    for timer in timers:
        timer.cancel()
        timer.join()


@posix_only
def test_ctrl_c_ends_a_run_with_what_there_is(
    use_fake: UseFake, capsys: pytest.CaptureFixture[str], interrupt_soon: Callable[[float], None]
) -> None:
    use_fake(text="word " * 10_000)
    interrupt_soon(1.5)
    assert main(["run", "hello", "--max-tokens", "9000"]) == 130
    captured = capsys.readouterr()
    assert captured.out.startswith("word word") and captured.out.endswith("\n")


@posix_only
def test_ctrl_c_in_a_chat_stops_the_answer_and_not_the_program(
    use_fake: UseFake,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    interrupt_soon: Callable[[float], None],
) -> None:
    use_fake(answers={"long": "word " * 10_000, "short": "fine"})
    pipe_in(monkeypatch, "long\nshort\n")
    interrupt_soon(1.5)
    assert main(["chat", "--max-tokens", "9000"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("> long\nword word") and captured.out.endswith("> short\nfine\n")
    assert "(stopped)" in captured.err


@posix_only
def test_ctrl_c_while_loading_ends_the_program(
    use_fake: UseFake, capsys: pytest.CaptureFixture[str], interrupt_soon: Callable[[float], None]
) -> None:
    use_fake(load_seconds=20.0)
    interrupt_soon(1.0)
    assert "interrupted while loading" in run_fails(capsys, "run", "hello", code=130)


def test_without_a_display_the_chat_starts(
    use_fake: UseFake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake(text="Tokyo.", tokens_per_second=1000)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    pipe_in(monkeypatch, "")
    assert main([]) == 0
    captured = capsys.readouterr()
    assert "no window" in captured.err and captured.out.endswith("Tokyo.\n")


def test_models_lists_the_starter_model_and_damaged_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF nothing else")
    monkeypatch.setenv("KVASIR_MODELS", str(tmp_path))
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "FORMAT", "PARAMETERS", "CONTEXT", "FITS"]
    starter = next(line for line in lines if line.startswith("SmolLM2-135M-Instruct.Q4_1"))
    assert "Q4_1" in starter and "135 M" in starter and "8192" in starter and "needs" in starter
    assert any(line.startswith("broken") and "cannot be used" in line for line in lines)
    assert str(catalog.user_models_folder()) in lines[-1]
    assert main(["models", "--json"]) == 0
    assert {record["name"] for record in json.loads(capsys.readouterr().out)} >= {"broken"}


def test_models_weighs_them_in_the_precision_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[EngineConfig] = []

    def fit(shape: object, device: object, config: EngineConfig) -> memory.Fit:
        asked.append(config)
        return real(shape, device, config)  # type: ignore[arg-type]

    real = memory.fit_model
    monkeypatch.setattr(memory, "fit_model", fit)
    argv = ["models", "--quantization", "int4", "--group-size", "32", "--kv-dtype", "int8", "--context", "2048"]
    assert main(argv) == 0
    (config,) = asked
    assert (config.quantization, config.quantization_group_size, config.kv_dtype) == ("int4", 32, "int8")
    assert config.max_context == 2048
    assert "yes, needs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ([], {}),
        (["--context", "512", "--kv-dtype", "int8"], {"max_context": 512, "kv_dtype": "int8"}),
        (["--max-context", "512"], {"max_context": 512}),
        (["--quantization", "int4", "--group-size", "128"], {"quantization": "int4", "quantization_group_size": 128}),
        (["--speculation", "ngram", "--num-draft-tokens", "7"], {"speculation": "ngram", "num_draft_tokens": 7}),
        (["--draft-model", "d"], {"speculation": "draft", "draft_model": "/models/d"}),
        (["--backend", "transformers"], {"backend": "transformers"}),
        (["--gpu-memory-share", "0.5"], {"gpu_memory_share": 0.5}),
        (["--no-cuda-graphs"], {"cuda_graphs": False}),
    ],
)
def test_a_model_is_loaded_as_it_was_asked_for(argv: list[str], wanted: dict[str, object]) -> None:
    arguments = build_parser().parse_args(["chat", *argv])
    draft = "/models/d" if arguments.draft_model else None
    assert engine_config(arguments, "/models/m", draft) == EngineConfig(model="/models/m", max_num_seqs=1, **wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--speculation", "draft"], "--speculation draft needs --draft-model"),
        (["--speculation", "ngram", "--draft-model", "SmolLM2-135M-Instruct.Q4_1"], "exclude each other"),
        (["--draft-model", "no such model"], "No model is called 'no such model'"),
        (["--group-size", "48"], "invalid choice"),
        (["--gpu-memory-share", "90"], "must lie above 0 and up to 1, got 90"),
    ],
)
def test_contradictory_ways_to_load_are_told(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = 1 if message.startswith("No model") else 2
    assert message in run_fails(capsys, "run", "hello", *argv, code=code)


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"]])
def test_help_is_quick_and_loads_neither_torch_nor_qt(argv: list[str]) -> None:
    code = f"""
import sys, time
began = time.perf_counter()
from app.__main__ import main
try:
    main({argv!r})
except SystemExit as exit_:
    assert exit_.code == 0, exit_.code
seconds = time.perf_counter() - began
heavy = {{"torch", "PySide6", "transformers", "numpy", "psutil", "sqlite_utils", "multiprocessing"}} & set(sys.modules)
assert not heavy, heavy
assert seconds < 0.6, seconds  # three times the budget: these machines are noisy
"""
    done = in_subprocess([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert "--temperature" in done.stdout if argv[0] == "run" else "doctor" in done.stdout


@pytest.mark.parametrize("argv", [["models"], ["run", "hello", "--model", "none such"]])
def test_commands_load_neither_torch_nor_qt(argv: list[str]) -> None:
    code = f"""
import sys
from app.__main__ import main
main({argv!r})
heavy = {{"torch", "PySide6", "transformers", "sqlite_utils"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = in_subprocess([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_output_nobody_reads_is_no_error() -> None:
    assert in_subprocess(["sh", "-c", f"{sys.executable} -m app models | true"]).stderr == ""
