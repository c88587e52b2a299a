"""What the worker runs on: device, kernels, versions, and what is not as good as it could be."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from pathlib import Path

import psutil
import torch

from engine import preflight
from engine.protocol import PROTOCOL_VERSION, WorkerStarted
from kernels import ops

_PACKAGES = ("torch", "triton", "transformers", "tokenizers")


def describe_worker() -> WorkerStarted:
    """Looks at this process. Raises `RuntimeError` if `KVASIR_KERNELS` asks for kernels that cannot run here."""
    kernels = ops.kernel_backend()
    on_gpu = preflight.why_no_cuda() is None
    device, device_name = ("cuda", torch.cuda.get_device_name(0)) if on_gpu else ("cpu", processor_name())
    warnings = preflight.warnings_on(device)
    if not on_gpu and not ops.is_forced() and (reason := ops.why_no_cpu_kernels()) is not None:
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
