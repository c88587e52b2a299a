"""What keeps a GPU of this machine from being used, or from being used well: each reason with what to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine import memory
from kernels import gpu as gpu_kernels
from kernels import ops

# The oldest driver that runs programs of a CUDA release family (CUDA Compatibility, minor version compatibility).
_LEAST_DRIVER = {11: "450", 12: "525", 13: "580"}


@dataclass(frozen=True)
class Finding:
    """Something found wrong: half sentences without a full stop, but `advice` is one or several with it.

    `is_absence` tells that there is no GPU at all, which is nothing to be warned of.
    """

    what: str
    why: str
    advice: str
    is_absence: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.why}. {self.advice}".rstrip()


def why_no_cuda() -> Finding | None:
    """Why torch cannot compute on a GPU here; None when it can."""
    if gpu_kernels.is_usable():
        return None
    return next((finding for check in _STOPPING if (finding := check()) is not None), None)


def worries() -> list[Finding]:
    """What makes a GPU that is used slower than it could be, or leaves models too little room."""
    return [finding for check in _WORRYING if (finding := check()) is not None]


def warnings_on(device_type: str) -> list[str]:
    """What people should know who compute on "cuda", or on "cpu" although they did not ask for it."""
    if device_type == "cuda":
        return [str(finding) for finding in worries()]
    finding = why_no_cuda()
    return [] if finding is None or finding.is_absence else [f"{finding} The engine runs on the CPU."]


# ---------------------------------------------------------------- what stops CUDA, in the order it is looked at


def _driver() -> Finding | None:
    try:
        if memory.installed_gpus():
            return None
    except memory.DriverError as error:
        if torch.cuda.is_available():
            return None  # only NVML is missing
        return Finding("No GPU is used", error.why, _sentence(error.advice), error.no_gpu)
    return Finding("No GPU is used", "the NVIDIA driver sees none", "Look at what nvidia-smi says.")


def _torch_build() -> Finding | None:
    if torch.version.cuda is not None or torch.version.hip is not None:
        return None
    return Finding(
        f"{_gpu_name()} is not used",
        f"this torch ({torch.__version__}) has no CUDA",
        f"Install a CUDA build of it into {sys.executable}, as https://pytorch.org/get-started says.",
    )


def _driver_age() -> Finding | None:
    if torch.version.cuda is None:
        return None
    try:
        driver = memory.driver()
    except memory.DriverError:
        return None
    family = int(torch.version.cuda.partition(".")[0])
    if driver.cuda[0] >= family:
        return None
    newer = f"to version {_LEAST_DRIVER[family]} or later" if family in _LEAST_DRIVER else ""
    return Finding(
        f"{_gpu_name()} is not used",
        f"NVIDIA driver {driver.version} knows CUDA up to {driver.cuda[0]}.{driver.cuda[1]}, and this torch "
        f"({torch.__version__}) needs CUDA {family}",
        f"Update the driver {newer}".rstrip() + f", or install a torch built for CUDA {driver.cuda[0]}.",
    )


def _hidden() -> Finding | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or torch.cuda.device_count() > 0 or not isinstance(memory.vram(), memory.NoGPU):
        return None
    return Finding(
        f"{_gpu_name()} is not used",
        f"CUDA_VISIBLE_DEVICES={visible!r} hides it",
        "Unset CUDA_VISIBLE_DEVICES, or let it name a GPU that nvidia-smi lists.",
    )


def _start() -> Finding | None:
    why = None if torch.cuda.is_available() else "torch sees no GPU, and gives no reason"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        why = f"torch cannot start CUDA {torch.version.cuda}: {str(error).strip().splitlines()[0].rstrip('.')}"
    if why is None:
        return None
    advice = "Restart the computer; if that does not help, install the NVIDIA driver again."
    if "not yet initialized" in why:
        advice = "Start its fabric manager: sudo systemctl start nvidia-fabricmanager."
    elif "out of memory" in why or "busy" in why:
        advice = memory.close_others()
    return Finding(f"{_gpu_name()} is not used", why, advice)


def _capability() -> Finding | None:
    obstacle = gpu_kernels.why_not_built_for(torch.cuda.get_device_capability())
    if obstacle is None:
        return None
    return Finding(f"{torch.cuda.get_device_name()} is not used", obstacle.why, _sentence(obstacle.advice))


_STOPPING: tuple[Callable[[], Finding | None], ...] = (
    _driver,
    _torch_build,
    _driver_age,
    _hidden,
    _start,
    _capability,
)


# ---------------------------------------------------------------- what makes it worse


def _kernels() -> Finding | None:
    obstacle = None if ops.is_forced() else gpu_kernels.triton_obstacle()
    if obstacle is None:
        return None
    what = f"{torch.cuda.get_device_name()} computes without Kvasir's own kernels, much slower"
    return Finding(what, obstacle.why, _sentence(obstacle.advice))


def _triton_version() -> Finding | None:
    obstacle = gpu_kernels.triton_mismatch() if gpu_kernels.triton_obstacle() is None else None
    if obstacle is None:
        return None
    return Finding("The GPU kernels may fail", obstacle.why, _sentence(obstacle.advice))


def _scarce_memory() -> Finding | None:
    gpu = memory.vram()
    if isinstance(gpu, memory.NoGPU) or gpu.free >= memory.SCARCE_SHARE * gpu.total:
        return None
    why = f"{memory.format_bytes(gpu.free)} of {memory.format_bytes(gpu.total)} are free"
    return Finding(f"{gpu.name} is nearly full", why, memory.close_others())


_WORRYING: tuple[Callable[[], Finding | None], ...] = (_kernels, _triton_version, _scarce_memory)


def _gpu_name() -> str:
    try:
        return next(iter(memory.installed_gpus()), "The GPU")
    except memory.DriverError:
        return "The GPU"


def _sentence(text: str) -> str:
    """A command is left without a full stop, so that it can be copied."""
    end = "" if text.endswith("'") else "."
    return f"{text[:1].upper()}{text[1:]}{end}" if text else ""
