"""Compiles every Triton kernel for every kind of GPU in the tuning table, without a GPU.

    python -m kernels.aot [--target sm_90 ...] [--kernel NAME ...] [--jobs N] [--json FILE]

Prints registers, spills, stack, shared memory and the tensor-core instructions found for each, and exits
with 1 where a decode kernel spills registers, a program needs more shared memory than its target has, or
a product or attention kernel uses no tensor cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path

_TENSOR_CORE = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma_\w+|mfma)\b")
AMD_TARGET = "gfx942"
"""Compiled as a look ahead; its registers and limits are not read."""


@dataclass(frozen=True, slots=True)
class Report:
    """What compiling one kernel for one target gave; sizes are bytes. AMD targets report no registers."""

    case: str
    kernel: str
    target: str
    registers: int
    spill_bytes: int
    stack: int
    shared: int
    tensor_core: tuple[str, ...]
    faults: tuple[str, ...]


def target_names() -> list[str]:
    from kernels.triton.tuning import CAPABILITIES

    return [*(f"sm_{major}{minor}" for major, minor in CAPABILITIES), AMD_TARGET]


def compile_case(name: str, target: str) -> list[Report]:
    """Compiles what one case of `kernels.triton.cases` launches on a target, such as "sm_90"."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels.triton.cases import CASES, record
    from kernels.triton.tuning import SHARED_MEMORY_LIMIT

    case = CASES[name]
    is_amd = target == AMD_TARGET
    capability = (9, 0) if is_amd else _capability(target)
    gpu = GPUTarget("hip", target, 64) if is_amd else GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    reports = []
    for launch in record(case, capability, runs_ptx=not is_amd):
        unspecialised = {param.name for param in launch.kernel.params if param.do_not_specialize}
        signature, constants, attributes = _signature(
            launch.kernel.arg_names, launch.args, launch.constants, unspecialised
        )
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        if launch.max_registers is not None:
            options["maxnreg"] = launch.max_registers
        source = ASTSource(launch.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=gpu, options=options)
        text = compiled.asm["amdgcn" if is_amd else "ptx"]
        registers, stack, spills = (0, 0, 0) if is_amd else _resources(text, target)
        found = tuple(sorted(set(_TENSOR_CORE.findall(text))))
        faults = []
        if case.is_decode and spills:
            faults.append(f"{spills} bytes of registers spilled")
        if not is_amd and compiled.metadata.shared > SHARED_MEMORY_LIMIT[capability]:
            faults.append(f"needs {compiled.metadata.shared} of {SHARED_MEMORY_LIMIT[capability]} bytes shared memory")
        if launch.kernel.__name__ in case.tensor_core_kernels and not found:
            faults.append("no tensor-core instruction")
        reports.append(
            Report(
                name,
                launch.kernel.__name__,
                target,
                registers,
                spills,
                stack,
                compiled.metadata.shared,
                found,
                tuple(faults),
            )
        )
    return reports


def _capability(target: str) -> tuple[int, int]:
    digits = target.removeprefix("sm_")
    return int(digits[:-1]), int(digits[-1])


def _signature(
    names: Sequence[str], args: Sequence[object], constants: dict[str, object], unspecialised: Set[str]
) -> tuple[dict[str, str], dict[str, object], dict[tuple[int], list[list[object]]]]:
    """Types, constants and alignments as Triton derives them from a call: the same kernel a GPU would get."""
    import torch

    types = {
        torch.float64: "*fp64",
        torch.float32: "*fp32",
        torch.float16: "*fp16",
        torch.bfloat16: "*bf16",
        torch.int8: "*i8",
        torch.uint8: "*u8",
        torch.int32: "*i32",
        torch.int64: "*i64",
        torch.bool: "*i1",
    }
    signature: dict[str, str] = {}
    values: dict[str, object] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for index, name in enumerate(names):
        value = args[index] if index < len(args) else constants[name]
        is_specialised = name not in unspecialised
        if index >= len(args) or value is None or (is_specialised and isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            values[name] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = types[value.dtype]
            is_aligned = True
        elif isinstance(value, float):
            signature[name] = "fp32"
            is_aligned = False
        else:
            assert isinstance(value, int), f"{name} is {value!r}"
            signature[name] = "i32"
            is_aligned = is_specialised and value % 16 == 0
        if is_aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, values, attributes


def _resources(ptx: str, target: str) -> tuple[int, int, int]:
    """(registers, stack bytes, spilled bytes) as the assembler that ships with Triton tells them."""
    from triton.backends.nvidia.compiler import get_ptxas

    major, minor = _capability(target)
    assembler = Path(get_ptxas(major * 10 + minor).path)
    arch = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "kernel.ptx")
        source.write_text(ptx)
        command = [assembler, "-v", f"--gpu-name={arch[1] if arch else target}", "-o", Path(scratch, "cubin"), source]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{assembler.name} refuses the code for {target}: {done.stderr.strip()[-500:]}")

    def number(pattern: str) -> int:
        match = re.search(pattern, done.stderr)
        return int(match[1]) if match else 0

    spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    return number(r"Used (\d+) registers"), number(r"(\d+) bytes stack frame"), spills


def compile_all(names: Sequence[str], targets: Sequence[str], jobs: int) -> list[Report]:
    """All cases for all targets, in that many processes."""
    work = [(name, target) for name in names for target in targets]
    if jobs == 1:
        return [report for item in work for report in compile_case(*item)]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return [report for reports in pool.starmap(compile_case, work, chunksize=1) for report in reports]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", nargs="+", metavar="NAME", help="only for these targets, such as sm_90")
    parser.add_argument("--kernel", nargs="+", metavar="TEXT", help="only cases with one of these in their name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the reports to a file")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set, and the interpreter compiles nothing: unset it")
    try:
        from kernels.triton.cases import CASES
    except ModuleNotFoundError as error:
        parser.error(f"{error}: install triton")
    targets = options.target or target_names()
    unknown = set(targets) - set(target_names())
    if unknown:
        parser.error(f"unknown target {', '.join(sorted(unknown))}; there are {', '.join(target_names())}")
    names = [name for name in CASES if not options.kernel or any(text in name for text in options.kernel)]
    if not names:
        parser.error(f"no case is named like {', '.join(options.kernel)}")
    reports = compile_all(names, targets, options.jobs)
    print(f"{'case':34} {'kernel':26} {'target':7} {'regs':>4} {'spill':>6} {'stack':>6} {'shared':>7}  tensor cores")
    for report in reports:
        print(
            f"{report.case:34} {report.kernel:26} {report.target:7} {report.registers:4} {report.spill_bytes:6} "
            f"{report.stack:6} {report.shared:7}  {', '.join(report.tensor_core) or '-'}"
        )
    faulty = [report for report in reports if report.faults]
    for report in faulty:
        print(f"{report.case}, {report.kernel}, {report.target}: {'; '.join(report.faults)}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=1), encoding="utf-8")
    print(f"{len(reports)} kernels compiled, {len(faulty)} with faults")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
