"""What can be chosen when a model is loaded, and why some of it cannot. Without widgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from engine.catalog import CatalogEntry
from engine.memory import (
    DeviceMemory,
    Fit,
    Hardware,
    NoGPU,
    available_to,
    cpu_hardware,
    estimate,
    fits,
    precision_of,
    ram,
    vram,
    weight_bytes,
)
from engine.protocol import EngineConfig, WorkerStarted

MIN_CONTEXT = 256
DEFAULT_CONTEXT_LIMIT = 8192
MAX_TABS = 64
MAX_DRAFT_TOKENS = 16
GPU_MEMORY_SHARES = (0.01, 1.0)
# A model may come in sizes whose vocabularies are padded differently; the engine compares the tokens themselves.
_VOCABULARY_PADDING = 1024

# Rounding that saves less than a tenth is all loss.
_WORTH = 0.9

Reasons = Mapping[str, str]
"""Why each choice is not to be had, in words; empty for one that is."""


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """What one model can be loaded with: where, and why not for what is impossible."""

    precision: Reasons
    kv_dtype: Reasons
    speculation: Reasons
    backend: Reasons
    drafts: tuple[CatalogEntry, ...]
    """Models that may draft for this one, the smallest first."""
    gpu_memory_share: str
    """Why it means nothing, in words; empty where it does something."""
    cuda_graphs: str
    """The same."""


def default_config(entry: CatalogEntry) -> EngineConfig:
    """How a model is loaded when nobody chose: its own context, but no more than a usual chat needs."""
    context = min(entry.max_context, DEFAULT_CONTEXT_LIMIT) if entry.error is None else None
    return EngineConfig(model=str(entry.path), max_context=context)


def remembered_config(entry: CatalogEntry, load_options: Mapping[str, EngineConfig]) -> EngineConfig:
    """How a model was loaded last, as far as that is still possible; else the default."""
    config = load_options.get(str(entry.path))
    if config is None:
        return default_config(entry)
    if entry.error is None and config.max_context is not None:
        config = replace(config, max_context=min(config.max_context, entry.max_context))
    return config


def hardware_for(config: EngineConfig, worker: WorkerStarted | None) -> Hardware:
    """What will hold the model: the device that was asked for, or the worker's own."""
    kind = _device(config, worker).partition(":")[0]
    if kind != "cpu":
        return Hardware("VRAM")
    if worker is not None and worker.device == "cpu":
        return Hardware("RAM", native=worker.kernels == "cpu")
    return cpu_hardware()


def options_for(
    entry: CatalogEntry, entries: Sequence[CatalogEntry], config: EngineConfig, worker: WorkerStarted | None
) -> LoadOptions:
    """What can be chosen for a model, given the other choices in `config`."""
    hardware = hardware_for(config, worker)
    precision = precision_of(config, hardware)
    no_use = [
        name for name in ("int8", "int4") if not _is_smaller(entry, replace(config, quantization=name), config, worker)
    ]
    why = f"The weights take no more as they are stored than in {' or '.join(name.upper() for name in no_use)}."
    rounding = {name: why if name in no_use else "" for name in ("int8", "int4")}
    no_bf16 = "The CPU kernels know no BF16 cache: FP16 takes as much memory." if precision.native else ""
    drafts = draft_candidates(entry, entries)
    no_draft = "" if drafts else "No smaller model with a vocabulary like this one's is on this machine."
    no_transformers = "A GGUF file is computed by Kvasir's own decoder only." if entry.format == "gguf" else ""
    no_gpu = "" if hardware.kind == "VRAM" else "Only for a model on a GPU."
    no_graphs = "" if precision.own_decoder else "Only for Kvasir's own decoder."
    return LoadOptions(
        precision={"stored": "", **rounding},
        kv_dtype={"auto": "", "fp32": "", "fp16": "", "bf16": no_bf16, "int8": ""},
        speculation={"off": "", "ngram": "", "draft": no_draft},
        backend={"auto": "", "native": "", "transformers": no_transformers},
        drafts=drafts,
        gpu_memory_share=no_gpu,
        cuda_graphs=no_gpu or no_graphs,
    )


def _is_smaller(entry: CatalogEntry, rounded: EngineConfig, config: EngineConfig, worker: WorkerStarted | None) -> bool:
    """Whether rounding saves memory worth the loss: a file may hold as few bits already."""
    if entry.shape is None:
        return False
    hardware = hardware_for(config, worker)
    as_stored = precision_of(replace(config, quantization=None), hardware)
    return weight_bytes(entry.shape, precision_of(rounded, hardware)) < _WORTH * weight_bytes(entry.shape, as_stored)


def possible_config(config: EngineConfig, options: LoadOptions) -> EngineConfig:
    """The configuration with every impossible choice given up for the plain one."""
    if options.precision[config.quantization or "stored"]:
        config = replace(config, quantization=None)
    if options.kv_dtype[config.kv_dtype]:
        config = replace(config, kv_dtype="auto")
    if options.backend[config.backend]:
        config = replace(config, backend="auto")
    if options.speculation[config.speculation or "off"]:
        config = replace(config, speculation=None)
    if config.speculation != "draft":
        return replace(config, draft_model=None)
    if config.draft_model not in [str(draft.path) for draft in options.drafts]:
        config = replace(config, draft_model=str(options.drafts[0].path))
    return config


def draft_candidates(entry: CatalogEntry, entries: Sequence[CatalogEntry]) -> tuple[CatalogEntry, ...]:
    """Smaller models whose vocabulary may be the same, as far as its size tells, the smallest first."""
    if entry.shape is None:
        return ()
    size = entry.shape.vocab_size
    fitting = [
        other
        for other in entries
        if other.shape is not None
        and other.path != entry.path
        and other.num_parameters < entry.num_parameters
        and abs(other.shape.vocab_size - size) <= _VOCABULARY_PADDING
    ]
    return tuple(sorted(fitting, key=lambda other: (other.num_parameters, other.size_bytes)))


def device_choices(worker: WorkerStarted | None) -> dict[str, tuple[str, str]]:
    """The devices by their name for the engine: (title, why not). Those the driver does not show are left out."""
    found = worker.device_name if worker is not None else ""
    choices = {"auto": (f"Automatic ({found})" if found else "Automatic", ""), "cpu": ("CPU", "")}
    index = 0
    while isinstance(gpu := vram(index), DeviceMemory):
        choices[f"cuda:{index}"] = (gpu.name, "")
        index += 1
    if index == 0:
        choices["cuda"] = ("GPU", gpu.reason)
    elif worker is not None and worker.device == "cpu":
        no_cuda = next(iter(worker.warnings), "The engine's torch cannot use it.")
        choices |= {name: (title, no_cuda) for name, (title, _) in choices.items() if name.startswith("cuda")}
    return choices


def fit_on(
    entry: CatalogEntry, worker: WorkerStarted | None, config: EngineConfig, draft: CatalogEntry | None = None
) -> Fit | None:
    """Whether a model, loaded with these settings in place of what the worker holds now, fits its device.

    None when the entry cannot be used or the device's memory cannot be read.
    """
    if entry.shape is None:
        return None
    kind, _, number = _device(config, worker).partition(":")
    index = int(number or 0)
    device: DeviceMemory | NoGPU = ram() if kind == "cpu" else vram(index)
    if isinstance(device, NoGPU):
        return None
    device = available_to(device, worker.pid if worker is not None else None, index)
    shape = draft.shape if draft is not None else None
    return fits(estimate(entry.shape, config, hardware_for(config, worker), shape), device)


def _device(config: EngineConfig, worker: WorkerStarted | None) -> str:
    if config.device != "auto":
        return config.device
    return worker.device if worker is not None else "cpu"
