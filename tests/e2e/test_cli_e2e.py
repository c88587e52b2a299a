"""The command line with the real engine and the real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from kernels.ops import kernel_backend
from tests.fake_engine import ROOT

QUESTION = "What is the capital of Japan?"


def kvasir(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", *argv],
        input=stdin,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_run_answers_and_nothing_else_is_printed() -> None:
    done = kvasir("run", QUESTION, "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert "Tokyo" in done.stdout and done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_run_json_and_a_prompt_from_a_pipe() -> None:
    done = kvasir("run", "-", "--json", "--temperature", "0", "--max-tokens", "5", stdin=QUESTION)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["finish_reason"] == "length" and len(record["token_ids"]) == 5
    assert record["metrics"]["output_tokens"] == 5 and record["metrics"]["ttft_ms"] > 0
    assert record["model"] == "SmolLM2-135M-Instruct.Q4_1"


def test_chat_answers_two_piped_questions_and_remembers_the_first() -> None:
    questions = f"{QUESTION}\nName the country again, in one word.\n"
    done = kvasir("chat", "--temperature", "0", "--max-tokens", "24", stdin=questions)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("> Name the country again, in one word.\n")
    assert first.startswith(f"> {QUESTION}\n") and "Tokyo" in first
    assert "Japan" in second


def test_a_prompt_longer_than_the_context_is_one_line_of_error() -> None:
    done = kvasir("run", "-", "--max-context", "256", stdin="word " * 400)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "context" in done.stderr and "Traceback" not in done.stderr


def test_the_doctor_finds_nothing_broken_here() -> None:
    done = kvasir("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = re.search(r"CPU kernels +(.+)", done.stdout)
    assert kernels is not None and ("native ones compute" in kernels[1]) == (kernel_backend() == "cpu")
    assert "torch" in done.stdout
