"""Where a step's time goes: the parts add up, nothing is lost or changed by looking."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine import profile as profile_command
from engine import profiler
from engine.engine import Engine
from engine.pace import MOST_STEPS
from engine.profiler import HEAD, KERNELS, MODEL, REST, Breakdown, Profile, Profiler
from engine.protocol import EngineConfig
from engine.runner import NativeRunner
from engine.stopwatch import Stopwatch, replaced_methods
from kernels import ops
from tests.engine.families import save_family

needs_native = pytest.mark.skipif(ops.why_no_cpu_kernels() is not None, reason="the native library is not built")
SHARED_PARTS = {"scheduling", "building the batch", "sampling", "detokenising and bookkeeping", "sending", REST}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_family("llama", path)
    return path


def config(folder: Path, **changes) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", num_kv_blocks=64, max_num_seqs=4, **changes)


def measure(engine: Engine) -> tuple[Breakdown, Breakdown]:
    """A prefill and a decode step, after which the engine has to be as it was."""
    methods = dict(vars(engine)), dict(vars(engine.scheduler))
    looking = Profiler(engine)
    try:
        result = looking.prefill(8, rounds=1), looking.decode(3, 8, rounds=2, steps=4)
    finally:
        looking.close()
    engine.check_integrity()
    assert engine.pool.num_used == 0 and not engine.has_work
    assert (vars(engine).keys(), vars(engine.scheduler).keys()) == (methods[0].keys(), methods[1].keys())
    assert not {"_send", "_send_telemetry"} & vars(looking).keys()
    return result


def names(breakdown: Breakdown) -> set[str]:
    return {part.name for part in breakdown.parts}


@needs_native
def test_the_parts_of_a_native_step_add_up_to_its_time(folder, monkeypatch):
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "cpu")
    engine = Engine.load(config(folder))
    assert isinstance(engine._runner, NativeRunner)
    prefill, decode = measure(engine)
    assert "run" not in vars(engine._runner.decoder.program)
    for breakdown, sequences, runs in ((prefill, 1, 1), (decode, 3, 8)):
        assert breakdown.sequences == sequences and runs <= breakdown.runs < runs + MOST_STEPS
        assert names(breakdown) - {"telemetry"} == SHARED_PARTS | {KERNELS, HEAD}
        assert sum(part.ms for part in breakdown.parts) == pytest.approx(breakdown.profiled_ms)
        assert sum(part.share for part in breakdown.parts) == pytest.approx(1.0)
        assert all(part.ms > 0 for part in breakdown.parts) and breakdown.plain_ms > 0
        kernels, head = (next(part for part in breakdown.parts if part.name == name) for name in (KERNELS, HEAD))
        assert {"matmul", "attention", "norm", "rope_kv", "embed"} <= kernels.kinds.keys()
        assert sum(kernels.kinds.values()) == pytest.approx(kernels.ms)
        assert breakdown.outside_native == pytest.approx(1 - kernels.share - head.share)
    assert (prefill.tokens, decode.tokens) == (8, 3)


def test_a_model_without_a_native_step_is_timed_as_a_whole(folder, monkeypatch):
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "reference")
    _, decode = measure(Engine.load(config(folder)))
    assert names(decode) - {"telemetry"} == SHARED_PARTS | {MODEL}
    assert sum(part.ms for part in decode.parts) == pytest.approx(decode.profiled_ms)
    assert decode.outside_native is None


def test_guessing_ahead_is_a_part_of_its_own(folder):
    engine = Engine.load(config(folder, speculation="ngram", num_draft_tokens=2))
    _, decode = measure(engine)
    assert "drafting" in names(decode)


def test_what_does_not_fit_is_refused_before_anything_is_computed(folder):
    engine = Engine.load(config(folder))
    looking = Profiler(engine)
    with pytest.raises(ValueError, match="there is room for"):
        looking.decode(1, engine.token_limit)
    with pytest.raises(ValueError, match="KV blocks"):
        looking.decode(64, 8, rounds=1, steps=4)
    assert engine.metrics.num_steps == 0
    looking.close()


def test_a_stopwatch_books_each_moment_once():
    now = [0.0]
    watch = Stopwatch(clock=lambda: now[0])

    def inner() -> None:
        now[0] += 2.0

    def outer() -> str:
        now[0] += 1.0
        watch.timed("inner", inner)()
        now[0] += 4.0
        return "done"

    assert watch.timed("outer", outer)() == "done"
    now[0] += 100.0  # between two measurements
    with pytest.raises(ZeroDivisionError):
        watch.timed("inner", lambda: 1 / 0)()
    assert watch.seconds == {"outer": 5.0, "inner": 2.0} and watch.total == 7.0
    watch.move("outer", "kernels", 3.0)
    assert watch.seconds == {"outer": 2.0, "inner": 2.0, "kernels": 3.0}


def test_replaced_methods_are_given_back_even_after_an_error():
    class Greeter:
        def greet(self) -> str:
            return "hello"

    greeter = Greeter()
    with pytest.raises(RuntimeError), replaced_methods((greeter, "greet", lambda: "bye")):
        assert greeter.greet() == "bye"
        raise RuntimeError
    assert greeter.greet() == "hello"


def test_the_command_prints_a_table_or_json(folder, monkeypatch, capsys):
    monkeypatch.setattr(profiler, "STEPS_PER_ROUND", 2)
    text = msgspec.json.encode(config(folder)).decode()
    assert profile_command.main(["--concurrency", "2", "--input-tokens", "8", text]) == 0
    shown = capsys.readouterr().out
    assert "A decode step of 2 sequences after 8 tokens" in shown and "with its parts timed" in shown
    assert profile_command.main(["--input-tokens", "8", text, "--json"]) == 0
    result = msgspec.json.decode(capsys.readouterr().out, type=Profile)
    assert result.decode.sequences == 1 and result.input_tokens == 8
    assert profile_command.describe(result).startswith(result.model.name)


def test_the_command_says_in_a_line_what_is_wrong(folder, capsys):
    missing = msgspec.json.encode(EngineConfig(model=str(folder / "none.gguf"))).decode()
    assert profile_command.main([missing]) == 1
    told = capsys.readouterr().err
    assert told.startswith("kvasir: ") and told.count("\n") == 1 and "none.gguf" in told
    for arguments in (["{"], ["--concurrency", "0", missing]):
        with pytest.raises(SystemExit):
            profile_command.main(arguments)
