"""Whatever keeps a GPU from being used is named, with what to do about it; the CPU never takes over in silence."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch

from app.cli import doctor
from engine import memory, preflight
from engine.machine import describe_worker
from engine.memory import nvml
from engine.placement import device_memory, load_warnings, resolve_device
from engine.protocol import EngineConfig
from kernels import gpu as gpu_kernels
from kernels import ops
from tests.engine.gpu_machine import GIB, GPUMachine
from tests.engine.gpu_machine import forgotten_machines as forgotten_machines

NAME = "NVIDIA GeForce RTX 4090"


@pytest.fixture(autouse=True)
def a_linux_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ops.BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setenv("CPATH", "/usr/include/python")


BROKEN: list[tuple[dict[str, Any], str, str, str]] = [
    ({"cuda": None}, f"{NAME} is not used", "has no CUDA", "Install a CUDA build of it into"),
    ({"driver": "535.54.03", "driver_cuda": 12020}, f"{NAME} is not used",
     "NVIDIA driver 535.54.03 knows CUDA up to 12.2, and this torch", "Update the driver to version 580 or later, or"),
    ({"capability": (6, 1)}, f"{NAME} is not used", "it has compute capability 6.1, and torch", "older torch"),
    ({"archs": ["sm_80", "sm_90"], "capability": (12, 0)}, f"{NAME} is not used", "knows GPUs up to 9.0",
     "Install a newer torch."),
    ({"starts": "CUDA unknown error - this may be due to an incorrectly set up environment"}, f"{NAME} is not used",
     "torch cannot start CUDA 13.0: CUDA unknown error", "Restart the computer"),
    ({"starts": "CUDA error: out of memory", "processes": {2**22 + 5: 24 * GIB}}, f"{NAME} is not used",
     "CUDA error: out of memory", f"Close other programs that use the GPU: process {2**22 + 5} with 24.0 GiB."),
    ({"starts": "Error 802: system not yet initialized"}, f"{NAME} is not used", "802", "nvidia-fabricmanager"),
    ({"driver_error": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}, "No GPU is used", "the old one still runs",
     "Restart the computer."),
    ({"driver_error": pynvml.NVML_ERROR_NO_PERMISSION}, "No GPU is used", "refuses access", "groups video and render"),
    ({"driver_error": pynvml.NVML_ERROR_GPU_IS_LOST}, "No GPU is used", "GPU is lost", "Install or update it"),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "what", "why", "advice"), BROKEN)
def test_a_gpu_that_cannot_be_used_is_named_everywhere_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], what: str, why: str, advice: str
) -> None:
    GPUMachine(**machine).install(monkeypatch)
    finding = preflight.why_no_cuda()
    assert finding is not None and not finding.is_absence
    assert finding.what == what and why in finding.why and advice in finding.advice
    worker = describe_worker()
    assert (worker.device, worker.warnings[0]) == ("cpu", f"{finding} The engine runs on the CPU.")
    assert resolve_device("auto").type == "cpu" and worker.kernels != "triton"
    assert load_warnings(EngineConfig(model="m"), resolve_device("auto")) == [worker.warnings[0]]
    assert load_warnings(EngineConfig(model="m", device="cpu"), resolve_device("cpu")) == [], "it was asked for"
    with pytest.raises(ValueError, match="cannot be used") as raised:
        resolve_device("cuda")
    assert why in str(raised.value)


def full(device: torch.device) -> tuple[int, int]:
    raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`.")


def test_a_gpu_that_can_be_used_is_and_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    GPUMachine().install(monkeypatch)
    worker = describe_worker()
    assert (worker.device, worker.device_name, worker.kernels, worker.warnings) == ("cuda", NAME, "triton", [])
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:0")
    with pytest.raises(ValueError, match="there are 1 GPUs, counted from 0"):
        resolve_device("cuda:1")
    device = torch.device("cuda:0")
    assert device_memory(device) == memory.DeviceMemory("VRAM", NAME, 24 * GIB, 23 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    with pytest.raises(ValueError, match=r"4090 cannot be used: CUDA error: out of memory\. Close other"):
        device_memory(device)
    assert load_warnings(EngineConfig(model="m", device="cuda"), torch.device("cuda:0")) == []


def test_a_model_on_the_cpu_of_a_machine_with_a_gpu_is_computed_by_the_kernels_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    GPUMachine().install(monkeypatch)
    assert ops.kernel_backend() == "triton"
    assert ops.compute_on("cpu")
    assert ops.kernel_backend() == ("reference" if ops.why_no_cpu_kernels() else "cpu")
    assert not ops.compute_on("cpu") and ops.compute_on("cuda")
    assert ops.kernel_backend() == "triton"


def test_a_hidden_gpu_is_told_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    GPUMachine().install(monkeypatch, visible="")
    finding = preflight.why_no_cuda()
    assert finding is not None and finding.why == "CUDA_VISIBLE_DEVICES='' hides it"
    assert "Unset CUDA_VISIBLE_DEVICES" in str(finding)


@pytest.mark.parametrize(
    ("platform", "on_bus", "in_kernel", "absent", "text"),
    [
        ("linux", "0x10de 0x030200", False, False, "There is an NVIDIA GPU without a driver: install NVIDIA's driver"),
        ("linux", "0x10de 0x040300", False, True, "There is no NVIDIA GPU in this machine, or no driver for it"),
        ("linux", "0x8086 0x030000", True, False, "its libraries are missing here"),
        ("darwin", "", False, True, "MacOS has no CUDA: NVIDIA GPUs are used on Linux and Windows."),
        ("win32", "", False, True, "if there is one, install NVIDIA's driver"),
    ],
)
def test_without_a_driver_the_bus_tells_whether_one_is_missing(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    platform: str,
    on_bus: str,
    in_kernel: bool,
    absent: bool,
    text: str,
) -> None:
    GPUMachine(driver_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND).install(monkeypatch)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(nvml, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(nvml, "_DRIVER_IN_KERNEL", tmp_path if in_kernel else tmp_path / "none")
    if on_bus:
        (tmp_path / "0000:01:00.0").mkdir()
        for name, value in zip(("vendor", "class"), on_bus.split()):
            (tmp_path / "0000:01:00.0" / name).write_text(f"{value}\n")
    gpu = memory.vram()
    assert isinstance(gpu, memory.NoGPU) and text in gpu.reason and gpu.is_absent == absent
    finding = preflight.why_no_cuda()
    assert finding is not None and finding.is_absence == absent
    assert bool(preflight.warnings_on("cpu")) != absent, "a machine without a GPU is no reason to warn"
    with pytest.raises(ValueError, match=r"device='cuda' cannot be used: .* Or use device='cpu'\."):
        resolve_device("cuda")


def test_a_machine_without_triton_or_with_another_one_computes_on_the_gpu_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = GPUMachine().install(monkeypatch)
    wanted = ["triton==3.9.9; platform_system == 'Linux'", "triton==1.0; extra == 'old'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: wanted)
    (worry,) = preflight.worries()
    assert worry.what == "The GPU kernels may fail" and "torch" in worry.why and "goes with triton==3.9.9" in worry.why
    assert worry.advice.endswith("-m pip install 'triton==3.9.9'"), "a command to be copied"
    monkeypatch.setattr(gpu_kernels, "LEAST_TRITON", gpu_kernels.Version("99"))
    machine.install(monkeypatch)
    assert "is older than 99" in preflight.worries()[0].why
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for platform, why in (("linux", "Triton is missing"), ("win32", "Triton is not made for Windows")):
        machine.install(monkeypatch)
        monkeypatch.setattr(sys, "platform", platform)
        worker = describe_worker()
        assert (worker.device, worker.kernels) == ("cuda", "reference")
        assert worker.warnings[0].startswith(f"{NAME} computes without Kvasir's own kernels, much slower: {why}.")
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "reference")
    assert preflight.worries() == [], "it was asked for"


def test_an_old_gpu_and_a_missing_compiler_keep_the_kernels_away(monkeypatch: pytest.MonkeyPatch) -> None:
    GPUMachine(capability=(7, 5)).install(monkeypatch)
    assert "has compute capability 7.5, and they need 8.0" in preflight.worries()[0].why
    GPUMachine().install(monkeypatch)
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert preflight.worries()[0].why == "Triton finds no C compiler"
    assert ops.kernel_backend() == "reference"
    GPUMachine().install(monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/cc")
    monkeypatch.delenv("CPATH")
    monkeypatch.setattr("sysconfig.get_path", lambda name, scheme: "/nowhere")
    assert "finds no Python.h" in preflight.worries()[0].why


def test_a_gpu_that_others_fill_is_reported_with_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {os.getppid(): 17 * GIB, 2**22 + 5: 3 * GIB, os.getpid(): GIB}
    machine = GPUMachine(free=2 * GIB, processes=dict(others), drawing={os.getppid(): 17 * GIB, 2**22 + 6: None})
    machine.install(monkeypatch)
    (worry,) = preflight.worries()
    assert (worry.what, worry.why) == (f"{NAME} is nearly full", "2.00 GiB of 24.0 GiB are free")
    parent = f"(process {os.getppid()}) with 17.0 GiB"
    assert f"{parent}, process {2**22 + 5} with 3.00 GiB and process {2**22 + 6}." in worry.advice
    gpu = doctor._gpu()
    assert gpu.status == "note" and "2.00 GiB free of 24.0 GiB, driver 580.65.06" in gpu.text and parent in gpu.advice
    assert memory.available_to(memory.DeviceMemory("VRAM", NAME, 24 * GIB, GIB), os.getpid()).free == 2 * GIB
    many = [memory.GPUProcess(number, "python", None) for number in range(5)]
    assert memory.describe_processes(many).endswith("python (process 2) and 2 more")
    dataclasses.replace(machine, free=20 * GIB).install(monkeypatch)
    assert preflight.worries() == [] and doctor._gpu().status == "ok"
