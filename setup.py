"""Builds the native CPU kernels: one plain shared library, its kernels compiled once per instruction set.

Everything else is declared in pyproject.toml. Without a C++ compiler the build goes on
without the library: Kvasir then runs on its reference kernels, and `kvasir doctor` says so.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels/cpu/src")
# Left alone, GCC rebalances the integer sums into trees that no longer fit into the registers.
# Python's own -fwrapv keeps it from proving loops finite and addresses simple: attention took twice as long.
GNU_FLAGS = [
    "-fno-tree-reassoc",
    "-fno-wrapv",
    "-O3",
    "-std=c++20",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-g0",
    "-Wall",
    "-Wextra",
]
# Compiled once, for any processor.
COMMON = ("program.cpp", "check.cpp", "sampling.cpp", "steps.cpp", "pack.cpp", "threads.cpp")
# Without vector registers the rest of -O3 only takes the compiler twice as long.
PORTABLE = ["-O2", "-fvect-cost-model=dynamic", "-fpeel-loops"]
MSVC_FLAGS = ["/O2", "/std:c++20", "/EHsc", "/fp:precise"]
# The flags with which isa_kernels.cpp is compiled for each instruction set.
X86 = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"],
}
X86_MSVC = {"avx2": ["/arch:AVX2"], "avx512": ["/arch:AVX512"]}
ARM = {"neon": ["-march=armv8.2-a+dotprod+fp16"]}


class BuildNative(build_ext):
    """Compiles with flags per source, which an Extension alone cannot say."""

    def build_extension(self, ext: Extension) -> None:
        msvc = self.compiler.compiler_type == "msvc"
        # Python's own name for a platform other than this one, where a cross compiler builds for that.
        machine = os.environ.get("_PYTHON_HOST_PLATFORM", platform.machine()).rpartition("-")[2].lower()
        on_x86, on_arm = machine in ("x86_64", "amd64"), machine in ("aarch64", "arm64")
        sets = (X86_MSVC if msvc else X86) if on_x86 else ARM if on_arm and not msvc else {}
        # KVASIR_NATIVE_FLAGS serves sanitizer builds: it goes to the compiler and the linker.
        extra = os.environ.get("KVASIR_NATIVE_FLAGS", "").split()
        base = (MSVC_FLAGS if msvc else GNU_FLAGS) + extra

        def compile_source(name: str, flags: list[str], macros: list[tuple[str, str | None]], tag: str) -> list[str]:
            folder = os.path.join(self.build_temp, tag)
            return self.compiler.compile(
                [str(SOURCES / name)], output_dir=folder, macros=macros, extra_postargs=base + flags
            )

        usable = {name: flags for name, flags in sets.items() if self.compiles(base + flags)}
        portable = PORTABLE if not msvc and self.compiles(base + PORTABLE) else []
        have: list[tuple[str, str | None]] = [(f"KV_HAVE_{name.upper()}", None) for name in usable]
        # The portable objects come first: of an inline function that several objects
        # hold, the linker keeps the first, and that one must run on every processor.
        work = [("isa_kernels.cpp", portable, [("KV_ISA", "kv_portable")], "portable")]
        work += [(name, [], have, "common") for name in COMMON]
        work += [("isa_kernels.cpp", flags, [("KV_ISA", f"kv_{name}")], name) for name, flags in usable.items()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the kernels of each set take most of a minute
            objects = [made for part in pool.map(lambda item: compile_source(*item), work) for made in part]
        link_flags = extra + ([] if msvc or sys.platform == "darwin" else ["-pthread"])
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), extra_postargs=link_flags, target_lang="c++"
        )

    def compiles(self, flags: list[str]) -> bool:
        """Whether this compiler knows the flags."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text("int probe() { return 0; }\n")
            try:
                self.compiler.compile([str(source)], output_dir=folder, extra_postargs=flags)
            except Exception as error:
                print(f"the compiler does not take {' '.join(flags)}: {error}")  # noqa: T201
                return False
        return True

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # a plain library, not a Python module: there is no PyInit function


setup(
    ext_modules=[
        Extension(
            "kernels.cpu._native",
            sources=[str(path) for path in sorted(SOURCES.glob("*.cpp"))],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
