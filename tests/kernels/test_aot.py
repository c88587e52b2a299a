"""Compiling the kernels without a GPU: what is read from the compiler, and what counts as a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is made for Linux only")
import kernels.triton.cases  # noqa: F401  now, while the interpreter is asked for: other tests run these kernels in it
from kernels.aot import main

ROOT = Path(__file__).parents[2]


def aot(*arguments: str, interpreter: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs `python -m kernels.aot` in a process of its own: triton cannot compile where it interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpreter:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "kernels.aot", "--jobs", "1", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_kernels_of_every_kind_compile_without_spills_within_shared_memory_and_on_tensor_cores(tmp_path):
    """The whole table takes minutes (`python -m kernels.aot`); these are its corners."""
    report = tmp_path / "report.json"
    cases = ["decode d128 bf16", "prefill d256 bf16", "int4 g32 1 rows bf16", "int4 g128 512 rows bf16"]
    cases += ["experts 4 bits 256 tokens bf16", "rope normed to int8 from bf16", "norm 576 bf16", "silu bf16"]
    done = aot("--target", "sm_86", "sm_90", "--kernel", *cases, "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(report.read_text())
    assert {entry["target"] for entry in reports} == {"sm_86", "sm_90"}
    kernels = {entry["kernel"] for entry in reports}
    assert kernels == {
        "attention_kernel",
        "combine_kernel",
        "tiled_matmul_kernel",
        "sum_splits_kernel",
        "choose_kernel",
        "sort_kernel",
        "combine_experts_kernel",
        "grouped_matmul_kernel",
        "rope_and_write_kv_kernel",
        "rms_norm_kernel",
        "gated_kernel",
    }
    for entry in reports:
        assert 8 < entry["registers"] <= 255
        assert entry["faults"] == []
    on_hopper = [entry for entry in reports if entry["target"] == "sm_90" and "512 rows" in entry["case"]]
    assert on_hopper[0]["tensor_core"] == ["wgmma.mma_async"]


def test_what_a_target_cannot_run_is_a_fault_and_the_exit_code_says_so(tmp_path):
    """A tile too large for a small GPU: the check would be worth nothing if it could not fail."""
    script = tmp_path / "too_large.py"
    script.write_text(
        "import sys\n"
        "from dataclasses import replace\n"
        "from kernels import aot\n"
        "from kernels.triton import attention\n"
        "right = attention.attention_tiles\n"
        "attention.attention_tiles = lambda *shape: replace(right(*shape), block_m=64, block_n=128, num_warps=4)\n"
        "sys.exit(aot.main(['--target', 'sm_86', '--kernel', 'decode d256 bf16', '--jobs', '1']))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "bytes shared memory" in done.stderr and "spilled" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--target", "sm_70"], "unknown target sm_70"), (["--kernel", "nonsense"], "no case is named like nonsense")],
)
def test_bad_arguments_are_refused_with_the_choices(arguments, message, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_it_does_not_pretend_to_compile_in_the_interpreter():
    done = aot(interpreter=True)
    assert done.returncode == 2 and "TRITON_INTERPRET" in done.stderr
