"""That the proofs run by hand (`python -m tests.kernels.native`) still find what they are to prove."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernels.native.__main__ import CPU_TESTS, ROOT, SANITIZERS, SELF_CHECK

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


def test_the_sanitizers_run_every_test_of_a_native_kernel() -> None:
    assert {Path(path).name for path in CPU_TESTS} >= {
        "test_cpu_attention.py",
        "test_cpu_experts.py",
        "test_cpu_matmul.py",
        "test_cpu_sampling.py",
    }


@needs_compiler
def test_the_sanitizers_stop_a_program_that_reads_beyond_its_memory(tmp_path: Path) -> None:
    source, program = tmp_path / "wrong.cpp", tmp_path / "wrong"
    source.write_text(
        "int sum(const int* p, int n) { return n ? *p + sum(p + 1, n - 1) : 0; }\n"
        "int main(int n, char**) { return sum(new int[4](), n + 4); }\n"
    )
    subprocess.run(["g++", *SANITIZERS.split(), str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], check=False, stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0 and "wrong.cpp" in done.stderr


@needs_compiler
def test_the_self_check_of_foreign_processors_fits_the_interface() -> None:
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/kernels/cpu/src"]
    subprocess.run(["g++", *flags, str(SELF_CHECK)], check=True)
