"""The machine, and what it can do at most: the copy bandwidth and the matmul rate that all shares are of."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from engine.placement import gpu_id
from tests.gpu.clock import Clock
from tests.gpu.report import Report

_PACKAGES = ("torch", "triton", "transformers")


@dataclass(frozen=True, slots=True)
class Limits:
    """bandwidth: bytes a second of a large copy, read and written; matmul: bf16 operations a second."""

    bandwidth: float
    matmul: float

    def share_of_bandwidth(self, nbytes: float, seconds: float) -> float:
        return nbytes / seconds / self.bandwidth

    def share_of_matmul(self, operations: float, seconds: float) -> float:
        return operations / seconds / self.matmul


def describe_machine(device: torch.device) -> dict[str, Any]:
    """GPU, driver, capability, clocks in MHz, memory in bytes, versions."""
    facts: dict[str, Any] = {"python": platform.python_version()}
    facts |= {package: _version(package) for package in _PACKAGES}
    if device.type != "cuda":
        return {"device": platform.processor() or platform.machine(), **facts}
    properties = torch.cuda.get_device_properties(device)
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device": properties.name,
        "capability": f"{major}.{minor}",
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "multiprocessors": properties.multi_processor_count,
        **_driver_and_clocks(device),
        "cuda": torch.version.cuda,
        **facts,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # built from source, or under another name
        return "unknown"


def _driver_and_clocks(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    try:
        import pynvml

        pynvml.nvmlInit()
        facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(gpu_id(device))
        return facts | {
            "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
            "sm_clock_max_mhz": pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
            "power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000,
        }
    except Exception as error:  # some clouds hide clocks and power; nothing else depends on them
        return facts | {"clocks": f"not to be had: {type(error).__name__}: {error}"}


def measure(
    report: Report, device: str = "cuda", copy_bytes: int = 2 << 30, matmul_size: int = 8192, repeats: int = 20
) -> Limits:
    """Describes the machine and measures its limits; `copy_bytes` are read and as many written."""
    place = torch.device(device)
    report.machine(describe_machine(place))
    clock = Clock(place, repeats)
    bandwidth = _copy(clock, copy_bytes)
    report.figure("device copy, read and written", bandwidth / 1e9, "GB/s")
    matmul = _matmul(clock, matmul_size)
    report.figure(f"dense bf16 matmul of {matmul_size}", matmul / 1e12, "TFLOP/s")
    limits = Limits(bandwidth, matmul)
    report.limits(asdict(limits))
    return limits


def _copy(clock: Clock, nbytes: int) -> float:
    """Bytes a second, of both directions together."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * nbytes / clock.seconds(lambda: target.copy_(source))


def _matmul(clock: Clock, size: int) -> float:
    """Operations a second, of random numbers: a GPU is slower on them than on zeros."""
    a, b = torch.randn(2, size, size, device=clock.device).to(torch.bfloat16)
    return 2 * size**3 / clock.seconds(lambda: a @ b, budget=1.0)
