"""`python -m tests.gpu` without a GPU: its sections on the CPU, tiny, with the kernels in Triton's interpreter."""

from __future__ import annotations

import gc
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is made for Linux only")
from kernels.triton import operations
from tests.gpu import __main__ as script
from tests.gpu import correctness, equality, kernel_speed, limits, models
from tests.gpu.bench import Workload
from tests.gpu.inputs import Heads
from tests.gpu.limits import Limits
from tests.gpu.random_model import llama_8b, qwen3_06b
from tests.gpu.report import Check, Figure, Report
from tests.gpu.sections import Outcome, Section, run_together

HALF, FULL = torch.float16, torch.float32
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
WORK = Workload(
    batches=(1, 2), prompt_tokens=5, steps=2, prefills=(8,), peer_batches=(2,), peer_steps=1, peer_prefill=8
)
LIMITS = Limits(bandwidth=1e9, matmul=1e9)


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """Each engine that is closed collects garbage; what other tests left is not looked through every time."""
    gc.freeze()
    yield
    gc.unfreeze()


def run(section: Callable[..., object], *arguments: object, **options: object) -> Report:
    """What a section reports; everything it sends is fit for JSON."""
    report = Report("section", lambda message: json.loads(json.dumps(message)))
    section(report, *arguments, device="cpu", **options)
    return report


def failures(report: Report) -> list[str]:
    return [entry.line() for entry in report.entries if isinstance(entry, Check) and not entry.passed]


def figures(report: Report) -> dict[str, Figure]:
    return {entry.name: entry for entry in report.entries if isinstance(entry, Figure)}


def test_each_kernel_is_compared_with_the_reference():
    lengths = (correctness.Lengths("decode", (1, 1), (17, 33)), correctness.Lengths("prefill", (18, 1), (20, 17)))
    heads = correctness.OptionHeads(int8=Heads(3, 1, 64), windowed=Heads(4, 2, 64), capped=Heads(2, 1, 96))
    experts = (
        correctness.Experts(16, 3, 2, 32, 16, clamped=True, tokens=(2,)),
        correctness.Experts(4, 3, 2, 32, 32, tokens=(2,)),
    )
    rope = correctness.Rope(Heads(2, 1, 96), 72, normed=True, int8=True)
    product = correctness.Product(4, 32, 48, 64, (1, 20))
    reports = [
        run(correctness.attention, dtypes=(HALF,), lengths=lengths[:1], heads=Heads(2, 1, 64)),
        run(correctness.attention_options, dtype=HALF, lengths=lengths, heads=heads),
        run(correctness.wide_attention, dtype=FULL, lengths=lengths[1:], heads=(Heads(7, 1, 112),)),
        run(correctness.products, dtypes=(HALF,), shapes=(product,)),
        run(correctness.experts, dtypes=(HALF,), shapes=experts),
        run(correctness.elementwise, dtypes=(HALF,), rows=2, widths=(64,), ropes=[rope]),
        run(correctness.sampling, rows=2, vocab_sizes=(90,)),
    ]
    assert [failures(report) for report in reports] == [[]] * len(reports)
    assert all(entry.error is not None for report in reports for entry in report.entries if isinstance(entry, Check))


def test_the_parts_of_a_section_are_all_of_its_cases():
    cases = [correctness.Case(f"case {index}", FULL, lambda numbers, exact: [torch.ones(1, 1)]) for index in range(5)]
    reports = [Report(f"part {part}") for part in (1, 2)]
    for part, report in enumerate(reports, start=1):
        correctness.check(report, cases, "cpu", (part, 2))
    names = [[entry.name for entry in report.entries] for report in reports]
    assert [*names[0], *names[1]] == [case.title for case in cases] and all(names)


def test_a_kernel_that_is_wrong_in_one_row_or_raises_fails_its_check(monkeypatch):
    right = operations.rms_norm

    def wrong(x: torch.Tensor, *others: Any) -> torch.Tensor:
        if x.shape[-1] == 32:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        out = right(x, *others)
        out[-1] *= 1.05
        return out

    monkeypatch.setattr(operations, "rms_norm", wrong)
    report = run(correctness.elementwise, dtypes=(HALF,), rows=3, widths=(64, 32), ropes=[])
    failed = failures(report)
    assert len(failed) == 4 and all("norm of" in line for line in failed)
    assert sum("illegal memory access" in line for line in failed) == 2


def test_limits_and_kernels_are_timed():
    report = run(limits.measure, copy_bytes=1 << 16, matmul_size=32, repeats=1)
    assert set(figures(report)) == {"device copy, read and written", "dense bf16 matmul of 32"}
    shapes = kernel_speed.Shapes(
        heads=Heads(1, 1, 64), context=16, chunk=16, batch=2, batch_context=16, hidden=128, inner=16, vocab=40,
        many_rows=17, few_rows=(1,), sampled_rows=2,
    )  # fmt: skip
    report = run(kernel_speed.measure, LIMITS, dtype=HALF, shapes=shapes, repeats=1)
    assert failures(report) == []
    kernels = {name.partition(",")[0] for name in figures(report)}
    assert {"attention decode", "attention prefill", "int4 g32 product", "sampling", "rope and write"} <= kernels
    assert all(figure.share is not None and figure.value > 0 for figure in figures(report).values())


def test_models_answer_and_are_those_of_hugging_face():
    report = run(models.dense, LIMITS, hf_config=llama_8b(**TINY), work=WORK)
    assert failures(report) == []
    names = set(figures(report))
    assert {"8B bf16 decode, batch 1", "8B bf16 decode, batch 2", "8B bf16 prefill, 8 tokens"} <= names
    assert {"8B bf16 decode, batch 2, Hugging Face", "8B bf16 prefill, 8 tokens, Hugging Face"} <= names
    report = run(models.integers, LIMITS, hf_config=llama_8b(**TINY), work=WORK)
    assert {"8B int4 decode, batch 1", "8B int8 prefill, 8 tokens"} <= set(figures(report))
    report = run(models.small, LIMITS, hf_config=qwen3_06b(**TINY), work=WORK)
    assert {f"0.6B bf16{way} decode, batch 2" for way in models.SMALL_WAYS} <= set(figures(report))


def test_all_ways_of_computing_give_the_same_tokens():
    report = run(
        equality.compare, models={"llama": llama_8b(**TINY)}, prompt_lengths=(3, 17), num_tokens=2, kernels="reference"
    )
    assert failures(report) == []
    assert len(report.entries) == len(equality.KINDS) + len(equality.WAYS)
    assert all(entry.error == 0.0 for entry in report.entries if isinstance(entry, Check))


def test_answers_may_part_only_where_two_tokens_are_as_likely():
    asked: list[list[int]] = []

    def logits(token_ids: Sequence[int]) -> torch.Tensor:
        asked.append(list(token_ids))
        return torch.tensor([0.0, 1.0, 3.0, 2.9])

    assert equality.gap_where_they_part([7], [2, 2, 1], [2, 2, 1], logits) == 0.0
    assert equality.gap_where_they_part([7], [2, 2], [2, 2, 1], logits) == float("inf")
    assert asked == []
    assert equality.gap_where_they_part([7], [2, 2, 1], [2, 3, 0], logits) < equality.TIE
    assert equality.gap_where_they_part([7], [2, 2, 1], [2, 2, 0], logits) > equality.TIE
    assert asked == [[7, 2], [7, 2, 2]]


def test_a_section_that_dies_or_hangs_ends_alone():
    messages: list[dict[str, Any]] = []
    names = ("reports", "raises", "dies", "leaves", "hangs")
    options, seconds = {"leaves": {"code": 3}}, {"hangs": 1.0}
    sections = [
        Section(name, f"tests.broken_sections:{name}", seconds.get(name, 60.0), options=options.get(name, {}))
        for name in names
    ]
    outcomes = run_together(sections, 60, {}, messages.append)
    assert [(outcome.name, outcome.status, outcome.message) for outcome in outcomes] == [
        ("reports", "done", ""),
        ("raises", "failed", "ValueError: the model is gone"),
        ("dies", "failed", "the process died of signal 9"),
        ("leaves", "failed", "the process exited with 3"),
        ("hangs", "stopped", "stopped after 1 s"),
    ]
    assert {message["section"] for message in messages} >= {"dies", "raises", "reports"}


def test_every_section_can_be_called():
    for section in (section for stage in script.STAGES for section in stage):
        module, _, name = section.target.partition(":")
        arguments = [Report(section.name)] + [LIMITS] * section.needs_limits
        inspect.signature(getattr(importlib.import_module(module), name)).bind(*arguments, **section.options)


def test_goals_are_compared_with_the_share_or_the_value():
    assert Figure("s", "decode", 100.0, "tok/s", share=0.86, goal=0.85, goal_is_share=True).passed is True
    assert Figure("s", "decode", 100.0, "tok/s", share=0.84, goal=0.85, goal_is_share=True).passed is False
    assert Figure("s", "small", 899.0, "tok/s", share=0.3, goal=900).passed is False
    assert Figure("s", "prefill", 5.0, "tok/s").passed is None
    assert "goal 85%: MISSED" in Figure("s", "d", 1.0, "tok/s", share=0.5, goal=0.85, goal_is_share=True).line()


def test_results_are_written_with_what_was_not_run(tmp_path, capsys):
    path = tmp_path / "results.json"
    results = script.Results(path)
    report = Report("kernels", results.take)
    report.machine({"device": "H200"})
    report.figure("decode", 3.0, "tok/s", share=0.5, goal=0.85, goal_is_share=True, note="of the bandwidth")
    report.check("norm", False, 0.5, 0.1)
    report.check("rope", False, float("inf"), 0.1)
    results.outcomes.append(Outcome("kernels", "done", 1.0))
    graphs = Section("graphs", "tests.broken_sections:captures", 60, fallback={"cuda_graphs": False})
    script.run_stages([[graphs], [Section("8B", "nowhere:at_all", 10, needs_limits=True)]], results, seconds=60)
    written = json.loads(path.read_text())
    assert written["machine"] == {"device": "H200"}
    assert written["figures"][0]["unit"] == "tok/s" and written["figures"][0]["passed"] is False
    assert written["checks"][0]["tolerance"] == 0.1
    assert written["checks"][1]["error"] is None and written["checks"][1]["message"] == "the error is inf"
    assert [(section["name"], section["status"]) for section in written["sections"]] == [
        ("kernels", "done"),
        ("graphs", "failed"),
        ("graphs with cuda_graphs=False", "done"),
        ("8B", "skipped"),
    ]
    assert results.summarise() == 1
    assert "the machine's limits are not known" in capsys.readouterr().out


def test_sections_are_chosen_by_how_their_names_begin():
    chosen = script.chosen_stages(["correctness w", "0.6B"])
    assert [[section.name for section in stage] for stage in chosen] == [
        ["limits"],
        ["correctness wide_attention 1/2", "correctness wide_attention 2/2"],
        ["0.6B"],
    ]
    assert script.chosen_stages(None) == list(script.STAGES)
    with pytest.raises(SystemExit):
        script.main(["--only", "nothing"])


def test_without_cuda_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main(["--json", str(tmp_path / "none.json")]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(script, "_MODULES", ("json", "no_such_module"))
    assert script.main([]) == 2
    assert "lacks no_such_module." in capsys.readouterr().err
