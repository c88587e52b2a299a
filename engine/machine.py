"""What the worker runs on: device, kernels, versions, and what is not as good as it could be."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import sys
from pathlib import Path

import psutil
import torch

from engine import memory
from engine.protocol import PROTOCOL_VERSION, WorkerStarted
from kernels import ops

_PACKAGES = ("torch", "triton", "transformers", "tokenizers")


def describe_worker() -> WorkerStarted:
    """Looks at this process. Raises `RuntimeError` if `KVASIR_KERNELS` asks for kernels that cannot run here."""
    kernels = ops.kernel_backend()
    warnings = []
    if torch.cuda.is_available():
        device, device_name = "cuda", torch.cuda.get_device_name(0)
        if not ops.is_forced() and (reason := ops.why_no_triton_kernels()) is not None:
            warnings.append(f"The engine runs on {device_name} without its own kernels, much slower: {reason}.")
    else:
        device, device_name = "cpu", processor_name()
        if (reason := why_no_cuda()) is not None:
            warnings.append(f"{reason} The engine runs on the CPU.")
        if not ops.is_forced() and (reason := ops.why_no_cpu_kernels()) is not None:
            warnings.append(f"The engine runs slower than it could: {reason}.")
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    return WorkerStarted(
        pid=os.getpid(),
        protocol_version=PROTOCOL_VERSION,
        kernels=kernels,
        device=device,
        device_name=device_name,
        versions=versions,
        warnings=warnings,
    )


def why_no_cuda() -> str | None:
    """Why torch cannot use the NVIDIA GPU of this machine; None if there is no such GPU."""
    gpu = memory.vram()
    if isinstance(gpu, memory.NoGPU):
        if Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists():
            return f"There is an NVIDIA driver, but {gpu.reason[0].lower()}{gpu.reason[1:]}"
        return None
    if torch.version.cuda is None:
        return (
            f"{gpu.name} is not used: this torch ({torch.__version__}) has no CUDA. "
            f"Install a CUDA build of it into {sys.executable}."
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return (
            f"{gpu.name} is not used: torch (CUDA {torch.version.cuda}) cannot start it: {error}. "
            "Update the NVIDIA driver."
        )
    return f"{gpu.name} is not used: CUDA_VISIBLE_DEVICES hides it."


def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def num_compute_threads() -> int:
    """Threads that compute: physical cores this process may use; two threads of one core only share its units.

    `OMP_NUM_THREADS` overrides it.
    """
    forced = os.environ.get("OMP_NUM_THREADS", "")
    if forced.isdecimal() and int(forced) > 0:
        return int(forced)
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    return max(1, min(cores, _cpu_quota()))


def _cpu_quota() -> int:
    """Whole processors the control group grants, rounded up; more than any machine has where there is no limit."""
    unlimited = 1 << 16
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no control groups, or "max"
        return unlimited
