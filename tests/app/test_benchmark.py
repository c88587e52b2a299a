"""The serving benchmark: what it sends, how it counts, and the table and file that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.__main__ import main
from app.benchmark.plan import BenchmarkPlan, RequestResult, percentile, random_prompt, summarise
from app.benchmark.report import BenchmarkReport
from app.benchmark.run import BenchmarkRun
from app.cli import engine_session
from engine.protocol import AnyCommand, Cancel, Delta, Finished, Generate, ModelInfo, RequestMetrics
from tests.fake_engine import fake_client

PLAN = BenchmarkPlan(concurrency=(1, 3), input_tokens=8, output_tokens=4, requests_per_stream=2)


def model_info(max_context: int = 1024, num_kv_blocks: int = 64) -> ModelInfo:
    return ModelInfo(
        name="tiny",
        path="tiny.gguf",
        architecture="llama",
        format="GGUF F16",
        num_parameters=1,
        num_layers=1,
        vocab_size=1000,
        max_context=max_context,
        device="cpu",
        kernels="reference",
        dtype="fp32",
        kv_dtype="fp32",
        weight_bytes=1,
        kv_bytes_per_token=1,
        num_kv_blocks=num_kv_blocks,
        block_size=16,
        max_num_seqs=8,
        load_seconds=0.0,
    )


class Scene:
    """A run whose engine is this test: it answers the requests that are under way, on a clock of its own."""

    def __init__(self, plan: BenchmarkPlan = PLAN, price_per_hour: float | None = None) -> None:
        self.now = 0.0
        self.sent: list[Generate] = []
        self.waiting: list[Generate] = []
        self.cancelled: list[str] = []
        self.run = BenchmarkRun(plan, model_info(), self._send, price_per_hour, clock=lambda: self.now)
        self.run.start()

    def _send(self, command: AnyCommand) -> None:
        if isinstance(command, Cancel):
            self.cancelled.append(command.request_id)
        else:
            assert isinstance(command, Generate)
            self.sent.append(command)
            self.waiting.append(command)

    def answer(self, error: str | None = None) -> None:
        """Answers the oldest request: first token after 1 s, then one every 0.25 s."""
        request = self.waiting.pop(0)
        if error is not None:
            self.run.take(Finished(request_id=request.request_id, finish_reason="error", error=error))
            return
        num_tokens = request.params.max_tokens
        assert num_tokens is not None
        self.now += 1.0
        for number in range(num_tokens):
            self.now += 0.25 if number else 0.0
            self.run.take(Delta(request_id=request.request_id, text="x", token_ids=[number]))
        metrics = RequestMetrics(8, 0, num_tokens, queue_ms=100.0, ttft_ms=None, tpot_ms=None)
        self.run.take(Finished(request_id=request.request_id, finish_reason="length", metrics=metrics))


def test_as_many_requests_as_the_concurrency_are_under_way_until_all_are_answered() -> None:
    scene = Scene()
    assert len(scene.waiting) == 1  # warms up
    scene.answer()
    under_way = []
    while not scene.run.is_done:
        under_way.append((scene.run.concurrency, len(scene.waiting)))
        scene.answer()
    assert under_way == [(1, 1)] * 4 + [(3, 3)] * 4 + [(3, 2), (3, 1)]
    assert [level.requests for level in scene.run.levels] == [4, 6]
    assert scene.run.num_answered == PLAN.total_requests == len(scene.sent) == 11


def test_latencies_are_those_the_sender_saw() -> None:
    scene = Scene(price_per_hour=1.8)
    while not scene.run.is_done:
        scene.answer()
    alone = scene.run.levels[0]
    assert (alone.ttft_p50, alone.tpot_p50, alone.queue_p50) == (1000.0, 250.0, 100.0)
    assert alone.seconds == 4 * 1.75
    assert alone.output_tokens_per_s == pytest.approx(4 / 1.75)
    assert alone.total_tokens_per_s == pytest.approx(12 / 1.75)
    assert alone.cost_per_million_tokens == pytest.approx(1.8 / 3600 / (4 / 1.75) * 1e6)
    # The third of three waits for the two before it as well.
    assert scene.run.levels[1].ttft_p99 == pytest.approx(1000 + 2 * 1750, rel=0.05)


def test_every_prompt_has_its_own_beginning_and_the_asked_for_length() -> None:
    scene = Scene()
    while not scene.run.is_done:
        scene.answer()
    prompts = [request.token_ids or [] for request in scene.sent]
    assert {len(prompt) for prompt in prompts} == {8}
    assert len({tuple(prompt[:3]) for prompt in prompts}) == len(prompts)
    assert all(0 <= token_id < 1000 for prompt in prompts for token_id in prompt)
    assert random_prompt(PLAN, 3, 1000) == random_prompt(PLAN, 3, 1000)
    assert all(request.params.ignore_eos and request.params.temperature == 0 for request in scene.sent)


def test_a_failed_request_is_counted_and_the_others_go_on() -> None:
    scene = Scene()
    scene.answer()
    scene.answer(error="no room")
    while not scene.run.is_done:
        scene.answer()
    first, second = scene.run.levels
    assert (first.requests, first.errors, first.first_error) == (4, 1, "no room")
    assert second.errors == 0
    assert first.output_tokens_per_s == pytest.approx(3 * 4 / (3 * 1.75))


def test_cancelling_stops_what_is_under_way_and_keeps_finished_levels() -> None:
    scene = Scene()
    while not scene.run.levels:
        scene.answer()
    scene.run.cancel()
    assert scene.run.is_done and len(scene.run.levels) == 1
    assert len(scene.cancelled) == 3


def test_tokens_that_come_in_the_first_delta_together_do_not_make_the_rest_look_faster() -> None:
    scene = Scene(BenchmarkPlan(concurrency=(1,), input_tokens=8, output_tokens=4, requests_per_stream=1))
    for _ in range(5):
        request = scene.waiting.pop(0).request_id
        scene.now += 1.0
        scene.run.take(Delta(request_id=request, text="", token_ids=[1, 2]))
        scene.now += 0.5
        scene.run.take(Delta(request_id=request, text="", token_ids=[3, 4]))
        scene.run.take(Finished(request_id=request, finish_reason="length"))
    assert scene.run.levels[0].tpot_p50 == 250.0
    assert scene.run.levels[0].queue_p50 is None


@pytest.mark.parametrize(
    "fault", [{"concurrency": ()}, {"concurrency": (0,)}, {"input_tokens": 0}, {"output_tokens": 0}]
)
def test_a_plan_that_measures_nothing_is_refused(fault: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fault))):
        BenchmarkPlan(**fault)


@pytest.mark.parametrize(
    ("info", "what"), [(model_info(max_context=11), "context"), (model_info(num_kv_blocks=0), "KV")]
)
def test_a_model_without_room_for_one_request_is_refused(info: ModelInfo, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        BenchmarkRun(PLAN, info, lambda command: None)


def test_percentiles_lie_between_neighbours_by_proportion() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)


def test_a_level_of_failures_only_has_no_latencies() -> None:
    level = summarise(PLAN, 1, [RequestResult(error="broken")], 2.0, None, None, price_per_hour=1.0)
    assert (level.errors, level.ttft_p50, level.output_tokens_per_s) == (1, None, 0.0)
    assert level.cost_per_million_tokens is None


def test_the_command_prints_a_table_and_writes_a_report_that_can_be_read_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script: dict[str, Any] = {"tokens_per_second": 150, "ttft_ms": 1, "repeat": 5}
    monkeypatch.setattr(
        engine_session, "LocalEngineClient", lambda log_path=None: fake_client(log_path=log_path, **script)
    )
    file = tmp_path / "report.json"
    options = ["--concurrency", "1,2", "--input-tokens", "16", "--output-tokens", "8", "--price-per-hour", "2"]
    assert main(["bench", *options, "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "fake-135M" in lines[0]
    assert lines[3].split()[:2] == ["chats", "TTFT"] and lines[4].endswith("/1M tok")
    assert [line.split()[0] for line in lines[5:7]] == ["1", "2"]
    report = msgspec.json.decode(file.read_bytes(), type=BenchmarkReport)
    assert [level.concurrency for level in report.levels] == [1, 2]
    assert report.levels[0].requests == 4 and report.levels[0].errors == 0
    assert report.levels[0].memory_peak and report.machine.cores >= 1
    assert report.config.max_num_seqs == 2


def test_the_chart_is_drawn_into_a_file(qapp: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script: dict[str, Any] = {"tokens_per_second": 2000, "ttft_ms": 1}
    monkeypatch.setattr(
        engine_session, "LocalEngineClient", lambda log_path=None: fake_client(log_path=log_path, **script)
    )
    file = tmp_path / "chart.png"
    assert main(["bench", "--concurrency", "1", "--output-tokens", "2", "--chart", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_profile_is_no_chart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "--profile", "--chart", str(tmp_path / "chart.png")]) == 2
    assert "--profile" in capsys.readouterr().err


def test_a_file_in_a_folder_that_is_not_there_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "--json", str(tmp_path / "missing" / "report.json")]) == 2
    assert "no such folder" in capsys.readouterr().err
