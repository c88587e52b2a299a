"""What the NVIDIA driver says about the GPUs of this machine, through NVML. Needs neither torch nor CUDA."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from engine.memory.text import format_bytes

SCARCE_SHARE = 0.25
"""With less of a GPU's memory free, before the engine holds any, others hold what models would need."""

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_DRIVER_IN_KERNEL = Path("/proc/driver/nvidia/version")
_MANY = 3
_IF_THERE_IS = "if there is one, install NVIDIA's driver"
_IN_CONTAINER = "give the container its GPUs (docker run --gpus all)"


class DriverError(Exception):
    """The driver cannot be asked: why, and what to do about it, both without a full stop.

    `no_gpu` tells that the machine has no NVIDIA GPU, as far as can be seen: nothing is wrong with it.
    """

    def __init__(self, why: str, advice: str, no_gpu: bool = False) -> None:
        super().__init__(f"{why}: {advice}.")
        self.why, self.advice, self.no_gpu = why, advice, no_gpu


@dataclass(frozen=True)
class GPUProcess:
    """A process that has memory on a GPU; `held` is None where the driver does not tell how much (Windows)."""

    pid: int
    name: str
    held: int | None

    def __str__(self) -> str:
        held = "" if self.held is None else f" with {format_bytes(self.held)}"
        return f"{self.name}{held}" if self.name.startswith("process") else f"{self.name} (process {self.pid}){held}"


@dataclass(frozen=True)
class Driver:
    """The driver's own version, such as "570.86.10", and the newest CUDA it knows."""

    version: str
    cuda: tuple[int, int]


def nvml() -> Any:
    """The NVML module, ready to be asked. Raises `DriverError` where there is none."""
    try:
        return _initialised()
    except ImportError:
        raise DriverError("GPU memory cannot be read", "install nvidia-ml-py") from None
    except Exception as error:  # NVMLError, a class that exists only in the module
        raise _explain(error) from error


@lru_cache(maxsize=1)
def _initialised() -> Any:
    """Once for the life of the process: it takes many milliseconds."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def handle(device: int | str) -> object:
    """NVML counts all GPUs, CUDA only those in CUDA_VISIBLE_DEVICES. Raises LookupError for one CUDA cannot see."""
    module = nvml()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if isinstance(device, int) and visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        if device >= len(names):
            raise LookupError(f"CUDA_VISIBLE_DEVICES={visible!r} shows {len(names)} GPUs")
        device = int(names[device]) if names[device].isdigit() else names[device]
    if isinstance(device, int):
        return module.nvmlDeviceGetHandleByIndex(device)
    return module.nvmlDeviceGetHandleByUUID(device)


def installed_gpus() -> list[str]:
    """Names of all GPUs the driver knows, whatever CUDA_VISIBLE_DEVICES hides. Raises `DriverError`."""
    module = nvml()
    try:
        count = module.nvmlDeviceGetCount()
        return [module.nvmlDeviceGetName(module.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
    except module.NVMLError as error:
        raise _explain(error) from error


def driver() -> Driver:
    """Raises `DriverError`."""
    module = nvml()
    try:
        cuda = module.nvmlSystemGetCudaDriverVersion_v2()
        return Driver(module.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10))
    except module.NVMLError as error:
        raise _explain(error) from error


def gpu_processes(device: int | str = 0) -> list[GPUProcess]:
    """The processes with memory on a GPU, the largest first; none where the driver does not tell.

    Raises `DriverError` where there is none to ask.
    """
    processes = [GPUProcess(pid, _process_name(pid), held) for pid, held in _held_by(device).items()]
    return sorted(processes, key=lambda process: -(process.held or 0))


def process_bytes(device: int | str, pid: int) -> int:
    """What the driver says a process holds on a GPU; 0 where it does not tell."""
    return _held_by(device).get(pid) or 0


def _held_by(device: int | str) -> dict[int, int | None]:
    """What each process holds on a GPU. One that both computes and draws is listed twice, each time with all of it."""
    module = nvml()
    held: dict[int, int | None] = {}
    try:
        gpu = handle(device)
        for listed in (module.nvmlDeviceGetComputeRunningProcesses, module.nvmlDeviceGetGraphicsRunningProcesses):
            for process in listed(gpu):
                held[process.pid] = max(held.get(process.pid) or 0, process.usedGpuMemory or 0) or None
    except (module.NVMLError, LookupError):
        pass
    return held


def describe_processes(processes: Sequence[GPUProcess]) -> str:
    """The largest of them in words, such as "python (process 812) with 19.5 GiB and 2 more"."""
    named = [str(process) for process in processes[:_MANY]]
    if len(processes) > _MANY:
        named.append(f"{len(processes) - _MANY} more")
    return " and ".join(filter(None, (", ".join(named[:-1]), *named[-1:])))


def close_others(device: int | str = 0) -> str:
    """Advice that names the programs which hold memory of a GPU; this process is not one of them."""
    try:
        others = [process for process in gpu_processes(device) if process.pid != os.getpid()]
    except DriverError:
        others = []
    if not others:
        return "Close other programs that use the GPU."
    return f"Close other programs that use the GPU: {describe_processes(others)}."


def _process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:  # of another user, or outside this container
        return f"process {pid}"


def _explain(error: Exception) -> DriverError:
    """What an NVML error means and what to do about it."""
    import pynvml

    code = getattr(error, "value", None)
    if code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return _no_library()
    if code == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        if sys.platform == "linux" and not _has_nvidia_display() and not _DRIVER_IN_KERNEL.exists():
            return DriverError("there is no NVIDIA GPU in this machine", _IF_THERE_IS, no_gpu=True)
        return DriverError(
            "the NVIDIA driver is installed but does not run",
            "restart the computer; if that does not help (a new kernel, Secure Boot), install the driver again",
        )
    if code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return DriverError("the NVIDIA driver was updated and the old one still runs", "restart the computer")
    if code == pynvml.NVML_ERROR_NO_PERMISSION:
        return DriverError(
            "the NVIDIA driver refuses access",
            f"add this user to the groups video and render, or {_IN_CONTAINER}",
        )
    return DriverError(f"no usable NVIDIA driver ({error})", "install or update it, or run on the CPU")


def _no_library() -> DriverError:
    if sys.platform == "darwin":
        return DriverError("macOS has no CUDA", "NVIDIA GPUs are used on Linux and Windows", no_gpu=True)
    if _DRIVER_IN_KERNEL.exists():
        return DriverError(
            "an NVIDIA driver runs, but its libraries are missing here",
            f"install those of its version, or {_IN_CONTAINER}",
        )
    if _has_nvidia_display():
        return DriverError("there is an NVIDIA GPU without a driver", "install NVIDIA's driver and restart")
    return DriverError("there is no NVIDIA GPU in this machine, or no driver for it", _IF_THERE_IS, no_gpu=True)


def _has_nvidia_display() -> bool:
    """Whether Linux sees an NVIDIA GPU on the bus, with or without a driver."""
    for device in _PCI_DEVICES.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
        except OSError:
            continue
        if vendor.startswith(_NVIDIA) and kind.startswith(_DISPLAY_CLASS):
            return True
    return False
