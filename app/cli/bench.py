"""`kvasir bench`: how fast a model serves one and several chats on this machine."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from app.benchmark.plan import BenchmarkPlan
from app.benchmark.report import BenchmarkReport, as_json, as_text, make_report
from app.benchmark.run import BenchmarkRun
from app.cli.chosen_model import choose_draft_model, choose_model
from app.cli.engine_session import EngineSession, deferred_interrupt, open_session, show_status
from app.cli.failure import CommandError, Interrupted, UsageError, reports_failures
from app.cli.options import engine_config
from engine.client import worker_command
from engine.protocol import EngineConfig

_POLL_SECONDS = 0.1


@reports_failures
def run(arguments: argparse.Namespace) -> int:
    plan = _plan(arguments)
    for option, path in (("--json", arguments.json), ("--chart", arguments.chart)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{option} {path}: there is no such folder")
    if arguments.profile and arguments.chart is not None:
        raise UsageError("--chart draws what the benchmark measured: it does not go with --profile")
    config = engine_config(arguments, choose_model(arguments.model), choose_draft_model(arguments.draft_model))
    config = msgspec.structs.replace(config, max_num_seqs=max(plan.concurrency))
    if arguments.profile:
        return _profile(config, max(plan.concurrency), plan, arguments.json)
    with open_session(config, arguments.log) as session:
        report = _measure(session, plan, config, arguments.price_per_hour)
    print(as_text(report))
    if arguments.json is not None:
        _write(arguments.json, as_json(report))
    if arguments.chart is not None:
        _write(arguments.chart, _draw(report))
    return 1 if any(level.errors for level in report.levels) else 0


def _plan(arguments: argparse.Namespace) -> BenchmarkPlan:
    try:
        return BenchmarkPlan(
            concurrency=arguments.concurrency,
            input_tokens=arguments.input_tokens,
            output_tokens=arguments.output_tokens,
            requests_per_stream=arguments.requests_per_stream,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _measure(
    session: EngineSession, plan: BenchmarkPlan, config: EngineConfig, price_per_hour: float | None
) -> BenchmarkReport:
    try:
        benchmark = BenchmarkRun(plan, session.info, session.send, price_per_hour)
    except ValueError as error:
        raise CommandError(str(error)) from error
    show = sys.stderr.isatty()
    with deferred_interrupt() as interrupted:
        benchmark.start()
        while not benchmark.is_done:
            for event in session.wait_events(_POLL_SECONDS):
                benchmark.take(event)
            if interrupted.is_set():
                benchmark.cancel()
            if show:
                show_status(
                    f"{benchmark.num_answered} of {plan.total_requests} requests, {benchmark.concurrency} at a time"
                )
    if show:
        show_status("")
    if interrupted.is_set() and not benchmark.levels:
        raise Interrupted("interrupted")
    return make_report(plan, benchmark.levels, session.worker, session.info, config, price_per_hour)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}") from error


def _draw(report: BenchmarkReport) -> bytes:
    """The picture that the window exports too, drawn without a screen."""
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    from app.application import make_qt_application
    from app.panels.benchmark_sheet import picture
    from app.theme import ThemeManager

    make_qt_application([])
    themes = ThemeManager("light")
    themes.apply()
    return picture(report, themes.theme)


def _profile(config: EngineConfig, concurrency: int, plan: BenchmarkPlan, json_path: Path | None) -> int:
    """The engine looks at itself in a process of its own: this one never loads torch."""
    command = [worker_command()[0], "-P", "-m", "engine.profile", "--concurrency", str(concurrency)]
    command += ["--input-tokens", str(plan.input_tokens), msgspec.json.encode(config).decode()]
    if json_path is None:
        return subprocess.run(command, check=False).returncode
    done = subprocess.run([*command, "--json"], check=False, stdout=subprocess.PIPE)
    if done.returncode == 0:
        _write(json_path, done.stdout)
    return done.returncode
