"""A machine with an NVIDIA GPU as NVML and torch report it: their lowest functions answer from one description."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml
import pytest
import torch

from engine.memory import nvml as engine_nvml
from kernels import gpu as gpu_kernels
from kernels import ops

GIB = 1 << 30


@dataclass
class GPUMachine:
    """`driver_error` is what NVML fails with; `cuda` the version torch was built for, `archs` the GPUs.

    `starts` tells whether CUDA starts where all else is right.
    """

    name: str = "NVIDIA GeForce RTX 4090"
    total: int = 24 * GIB
    free: int = 23 * GIB
    driver: str = "580.65.06"
    driver_cuda: int = 13000
    driver_error: int | None = None
    cuda: str | None = "13.0"
    archs: list[str] = field(default_factory=lambda: ["sm_75", "sm_80", "sm_90", "sm_120", "compute_120"])
    capability: tuple[int, int] = (8, 9)
    starts: str = ""
    processes: dict[int, int | None] = field(default_factory=dict)
    drawing: dict[int, int | None] = field(default_factory=dict)

    def install(self, monkeypatch: pytest.MonkeyPatch, visible: str | None = None) -> GPUMachine:
        _forget()
        monkeypatch.setattr(ops, "_device_type", None)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        seen = self.cuda is not None and not self.starts and visible in (None, "0") and self.driver_error is None
        seen = seen and self.driver_cuda // 1000 >= int((self.cuda or "99").partition(".")[0])
        for name, answer in {
            "nvmlInit": self._init,
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": self._handle,
            "nvmlDeviceGetHandleByUUID": self._handle,
            "nvmlDeviceGetName": lambda handle: self.name,
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=self.total, free=self.free),
            "nvmlSystemGetDriverVersion": lambda: self.driver,
            "nvmlSystemGetCudaDriverVersion_v2": lambda: self.driver_cuda,
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: self._listed(self.processes),
            "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: self._listed(self.drawing),
        }.items():
            monkeypatch.setattr(pynvml, name, answer)
        monkeypatch.setattr(torch.version, "cuda", self.cuda)
        for name, answer in {
            "is_available": lambda: seen,
            "device_count": lambda: int(seen),
            "init": self._start,
            "get_arch_list": lambda: self.archs,
            "get_device_name": lambda device=None: self.name,
            "get_device_capability": lambda device=None: self.capability,
            "get_device_properties": lambda device: SimpleNamespace(uuid="0e3a5c1e"),
            "mem_get_info": lambda device=None: (self.free, self.total),
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        return self

    def _init(self) -> None:
        if self.driver_error is not None:
            raise pynvml.NVMLError(self.driver_error)

    def _handle(self, device: int | str) -> str:
        if device not in (0, "GPU-0e3a5c1e"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.name

    def _start(self) -> None:
        if self.starts:
            raise RuntimeError(self.starts)

    @staticmethod
    def _listed(processes: dict[int, int | None]) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in processes.items()]


def _forget() -> None:
    for cached in (engine_nvml._initialised, gpu_kernels.triton_obstacle, ops._backend, ops._host_sampling):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def forgotten_machines():
    """Imported by tests that install a machine: what the caches learnt of it is gone after each."""
    yield
    _forget()
