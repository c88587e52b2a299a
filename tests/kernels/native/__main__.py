"""Proofs of the native library that take minutes or a processor that is not at hand; run by hand.

python -m tests.kernels.native sanitize [pytest's arguments]
    The tests of the native kernels, with the library built for the address and undefined behaviour sanitizers.
python -m tests.kernels.native threads
    Every operation on several threads, with the library built for the thread sanitizer.
python -m tests.kernels.native aarch64
    Every operation with NEON against the portable code, cross-compiled and emulated.
    Needs, in Debian's names, g++-aarch64-linux-gnu and qemu-user-static.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kernels.cpu import library

ROOT = Path(__file__).parents[3]
SELF_CHECK = Path(__file__).with_name("self_check.cpp")
CPU_TESTS = sorted(str(path) for path in Path(__file__).parents[1].glob("test_cpu_*.py"))
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1 -g1"
THREAD_SANITIZER = "-fsanitize=thread"
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")


def build(folder: str, **environment: str) -> Path:
    """The library, built by the package's own build with this environment."""
    places = ["--build-lib", f"{folder}/lib", "--build-temp", f"{folder}/objects"]
    run([sys.executable, "setup.py", "-q", "build_ext", *places], **environment)
    return next(Path(folder, "lib").rglob("_native*"))


def run(command: list[str], **environment: str) -> str:
    sys.stdout.write(f"+ {' '.join(command)}\n")
    sys.stdout.flush()
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )
    sys.stdout.write(done.stdout)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout


def sanitize(*arguments: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        built = build(folder, KVASIR_NATIVE_FLAGS=SANITIZERS)
        # The interpreter was not built with them: they have to be there before it starts.
        runtimes = [
            subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
            for name in ("libasan.so", "libubsan.so")
        ]
        run(
            [sys.executable, "-m", "tests.kernels.native", "pytest", str(built), *arguments],
            LD_PRELOAD=" ".join(runtimes),
            ASAN_OPTIONS="detect_leaks=0",  # Python's own
            UBSAN_OPTIONS="print_stacktrace=1",
        )


def run_tests(built: str, *arguments: str) -> None:
    library.library_path = lambda: Path(built)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *CPU_TESTS, *arguments]))


def compile_self_check(folder: str, built: Path, compiler: str, *flags: str) -> str:
    program, include = f"{folder}/self_check", f"-I{ROOT}/kernels/cpu/src"
    run([compiler, "-std=c++20", "-O1", *flags, include, str(SELF_CHECK), str(built), "-o", program])
    return program


def threads() -> None:
    with tempfile.TemporaryDirectory() as folder:
        built = build(folder, KVASIR_NATIVE_FLAGS=f"{THREAD_SANITIZER} -O1 -g1")
        run([compile_self_check(folder, built, "g++", THREAD_SANITIZER)])


def aarch64() -> None:
    emulator = next(filter(shutil.which, EMULATORS), None)
    if emulator is None or not shutil.which(CROSS_COMPILER):
        sys.exit(f"needs {CROSS_COMPILER} and one of {', '.join(EMULATORS)}")
    with tempfile.TemporaryDirectory() as folder:
        linker = f"{CROSS_COMPILER} -shared"
        built = build(
            folder,
            _PYTHON_HOST_PLATFORM="linux-aarch64",
            CC=CROSS_COMPILER,
            CXX=CROSS_COMPILER,
            LDSHARED=linker,
            LDCXXSHARED=linker,
        )
        program = compile_self_check(folder, built, CROSS_COMPILER)
        emulated = [emulator, "-L", "/usr/aarch64-linux-gnu", "-cpu"]
        run([*emulated, "max", program])
        # A processor without the dot products must not be given them.
        if run([*emulated, "cortex-a53", program, "list"]).split() != ["portable"]:
            sys.exit("NEON kernels are offered to a processor that lacks their instructions")


if __name__ == "__main__":
    commands = {"sanitize": sanitize, "pytest": run_tests, "threads": threads, "aarch64": aarch64}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
