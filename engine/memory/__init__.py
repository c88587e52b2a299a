"""What a model needs and what the machine has: arithmetic from metadata, and measured breakdowns.

Torch-free, so that the window and the command line can ask before anything is loaded.
"""

from __future__ import annotations

import os

from engine.memory.budget import Fit as Fit
from engine.memory.budget import MemoryEstimate as MemoryEstimate
from engine.memory.budget import affordable_kv_bytes as affordable_kv_bytes
from engine.memory.budget import default_batched_tokens as default_batched_tokens
from engine.memory.budget import estimate as estimate
from engine.memory.budget import fits as fits
from engine.memory.budget import graph_allowance as graph_allowance
from engine.memory.budget import planned_kv_tokens as planned_kv_tokens
from engine.memory.measure import DeviceMemory as DeviceMemory
from engine.memory.measure import MemoryKind as MemoryKind
from engine.memory.measure import NoGPU as NoGPU
from engine.memory.measure import WorkerParts as WorkerParts
from engine.memory.measure import available_to as available_to
from engine.memory.measure import break_down as break_down
from engine.memory.measure import measure_ram as measure_ram
from engine.memory.measure import measure_vram as measure_vram
from engine.memory.measure import ram as ram
from engine.memory.measure import resident_bytes as resident_bytes
from engine.memory.measure import vram as vram
from engine.memory.nvml import SCARCE_SHARE as SCARCE_SHARE
from engine.memory.nvml import Driver as Driver
from engine.memory.nvml import DriverError as DriverError
from engine.memory.nvml import GPUProcess as GPUProcess
from engine.memory.nvml import close_others as close_others
from engine.memory.nvml import describe_processes as describe_processes
from engine.memory.nvml import driver as driver
from engine.memory.nvml import gpu_processes as gpu_processes
from engine.memory.nvml import installed_gpus as installed_gpus
from engine.memory.precision import Hardware as Hardware
from engine.memory.precision import Precision as Precision
from engine.memory.precision import kv_bytes_per_token as kv_bytes_per_token
from engine.memory.precision import precision_of as precision_of
from engine.memory.precision import weight_bytes as weight_bytes
from engine.memory.shape import ModelShape as ModelShape
from engine.memory.shape import WeightGroup as WeightGroup
from engine.memory.text import format_bytes as format_bytes
from engine.memory.workspace import workspace_bytes as workspace_bytes
from engine.protocol import EngineConfig
from kernels.cpu.library import library_path


def cpu_hardware() -> Hardware:
    """This machine's CPU, as a worker will use it: with the native kernels where they are built and not forbidden."""
    wanted = os.environ.get("KVASIR_KERNELS", "").strip()
    return Hardware("RAM", native=wanted in ("", "cpu") and library_path() is not None)


def hardware_of(kind: MemoryKind) -> Hardware:
    """What holds models in a kind of memory of this machine."""
    return cpu_hardware() if kind == "RAM" else Hardware("VRAM")


def fit_model(shape: ModelShape, device: DeviceMemory, config: EngineConfig, draft: ModelShape | None = None) -> Fit:
    """Whether a model fits a device of this machine when it is loaded with `config`."""
    return fits(estimate(shape, config, hardware_of(device.kind), draft), device)
