"""Opens a model file or folder and makes the decoder in it."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from engine.dtypes import DTYPES
from engine.heap import large_blocks_returned, trim_heap
from engine.loading.folder import FolderError, read_model_config
from engine.loading.gguf import GGUFError, GGUFFile
from engine.loading.gguf_split import open_gguf
from engine.loading.gguf_weights import GGUFWeights
from engine.loading.hf_names import CanonicalWeights
from engine.loading.limits import SMALL_TABLES
from engine.loading.names import OPTIONAL_TENSORS, expected_tensors
from engine.loading.safetensors_weights import SafetensorsWeights
from engine.loading.weights import WeightSource, check_tensors
from engine.memory.text import format_bytes
from engine.models.config import ModelConfig, ModelError, UnsupportedModelError
from engine.models.decoder import Decoder, build_decoder
from engine.models.gguf_config import config_from_gguf
from engine.models.hf_config import config_from_hf
from engine.models.native_decoder import is_packed, unpackable, why_not_native
from engine.protocol import EngineConfig
from engine.quantization.rounding import Rounding
from kernels import ops

if TYPE_CHECKING:
    from engine.models.transformers_model import TransformersModel

ProgressCallback = Callable[[str, int, int], None]
"""Called with a phrase for people, bytes done and bytes in all."""


class LoadCancelled(Exception):
    """Loading was stopped because the caller asked for it; nothing is kept."""


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A decoder ready to run, and what it is. `config.max_context` is already cut to what was asked for."""

    model: Decoder | TransformersModel
    config: ModelConfig
    format: str
    num_parameters: int
    dtype: torch.dtype
    device: torch.device
    native: bool
    """The matrices are packed for the native CPU kernels, as far as those have their shapes and formats."""
    backend: Literal["native", "transformers"] = "native"
    """Whose code computes the layers: our own decoder, or the model in transformers."""
    quantization: Literal["int8", "int4"] | None = None
    """What the matrices were rounded to while loading."""

    @property
    def weight_bytes(self) -> int:
        return self.model.nbytes

    def whole_step(self, block_size: int) -> bool:
        """Whether the native kernels compute all of a step, not only its matrix products."""
        return (
            self.native
            and isinstance(self.model, Decoder)
            and is_packed(self.model)
            and why_not_native(self.config, block_size) is None
        )

    def kernels(self, block_size: int) -> str:
        """What computes it, for people: "native avx2", with "(eager)" where that is the matrix products only."""
        if not self.native:
            return "triton" if ops.kernel_backend() == "triton" else "reference"
        return ops.describe_backend() + ("" if self.whole_step(block_size) else " (eager)")


def load_model(
    path: Path,
    config: EngineConfig,
    device: torch.device,
    on_progress: ProgressCallback = lambda stage, done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
    file: GGUFFile | None = None,
) -> LoadedModel:
    """Loads a GGUF file, from `file` where that is open already, or a Hugging Face folder with safetensors.

    Names, shapes and formats of all tensors are checked before memory is spent; then each is unpacked
    from the file straight into its place, or with `config.quantization` rounded a few rows at a time, whatever
    they are stored as (what is quantised already loses a little more). Progress counts bytes on disk.
    Raises ModelError (UnsupportedModelError among them) with a message for people, LoadCancelled
    when `cancelled()` becomes true, and OSError where the disk fails.
    """
    with large_blocks_returned():
        return _load(path, config, device, on_progress, cancelled, file)


def _load(
    path: Path,
    config: EngineConfig,
    device: torch.device,
    on_progress: ProgressCallback,
    cancelled: Callable[[], bool],
    file: GGUFFile | None,
) -> LoadedModel:
    if config.backend == "transformers":
        return _load_through_transformers(path, config, device, on_progress, cancelled)
    try:
        model_config, source = open_model(path, file)
    except UnsupportedModelError as error:
        if config.backend == "native" or not path.is_dir():
            raise
        return _load_through_transformers(path, config, device, on_progress, cancelled, f"{error}; and ")
    try:
        model_config = _cut_context(model_config, config.max_context)
        check_tensors(source, expected_tensors(model_config), optional=OPTIONAL_TENSORS)
        dtype = compute_dtype(config.dtype, device)
        native = _use_native(model_config, dtype, device)
        total = sum(stored.nbytes for stored in source.tensors.values())
        _check_tables(source.label, model_config, total)
        done = 0

        def on_tensor(name: str) -> None:
            nonlocal done
            if cancelled():
                raise LoadCancelled
            on_progress("Loading weights", done, total)
            done += source.tensors[name].nbytes

        rounding = _rounding(config)
        model = build_decoder(model_config, source, device, dtype, native, on_tensor, rounding)
        if cancelled():
            raise LoadCancelled
        on_progress("Loading weights", total, total)
        num_parameters = sum(math.prod(shape) for shape in expected_tensors(model_config).values())
        return LoadedModel(
            model,
            model_config,
            source.format,
            num_parameters,
            dtype,
            device,
            native,
            quantization=config.quantization,
        )
    finally:
        source.close()
        trim_heap()  # of the bytes that passed through on their way into place


def _rounding(config: EngineConfig) -> Rounding | None:
    """What matrices are rounded to while loading, if at all."""
    if config.quantization is None:
        return None
    return Rounding(config.quantization, config.quantization_group_size)


def _load_through_transformers(
    path: Path,
    config: EngineConfig,
    device: torch.device,
    on_progress: ProgressCallback,
    cancelled: Callable[[], bool],
    obstacle: str = "",
) -> LoadedModel:
    """As `load_model`, with the model of transformers. `obstacle` goes in front of what stands in the way here."""
    if not path.is_dir():
        raise UnsupportedModelError(f"{path}: backend='transformers' needs a model folder with safetensors")
    from engine.models.transformers_backend import load_transformers_model  # takes seconds to import

    def on_tensor(done: int, total: int) -> None:
        if cancelled():
            raise LoadCancelled
        on_progress("Loading weights", done, total)

    dtype = compute_dtype(config.dtype, device)
    try:
        model, stored_format = load_transformers_model(
            path, device, dtype, config.max_context, _rounding(config), on_tensor
        )
    except ModelError as error:
        raise type(error)(f"{obstacle or f'{path}: '}transformers cannot serve it: {error}") from error
    finally:
        trim_heap()
    return LoadedModel(
        model,
        model.config,
        stored_format,
        model.num_parameters,
        dtype,
        device,
        native=False,
        backend="transformers",
        quantization=config.quantization,
    )


def open_model(path: Path, file: GGUFFile | None = None) -> tuple[ModelConfig, WeightSource]:
    """Reads what the model is and opens its weights, which the caller closes. Raises ModelError.

    `file` is the GGUF file at `path` where that is open already.
    """
    if path.is_dir():
        with _naming(path):
            values = read_model_config(path)
            model_config = config_from_hf(values)
        source = SafetensorsWeights(path, values.get("quantization_config"))
        return model_config, CanonicalWeights(source, model_config)
    if not path.exists():
        raise ModelError(f"{path}: there is no such file or folder")
    if path.suffix.lower() != ".gguf":
        raise UnsupportedModelError(f"{path}: is neither a .gguf file nor a folder with config.json and safetensors")
    try:
        file = open_gguf(path) if file is None else file.share()
    except GGUFError as error:
        raise ModelError(str(error)) from error
    try:
        with _naming(path):
            model_config = config_from_gguf(file)
        return model_config, GGUFWeights(file, model_config)
    except BaseException:
        file.close()
        raise


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in. "auto" is float32 on a CPU, where halves are slow, and bfloat16 on a GPU that has it."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def _use_native(model_config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the native CPU kernels compute this model, or at least its matrix products.

    Raises UnsupportedModelError where they are forced and cannot.
    """
    if device.type != "cpu" or ops.kernel_backend() != "cpu":
        return False
    if dtype != torch.float32:
        obstacle: str | None = f"computing in {dtype}"
    else:
        obstacle = unpackable(model_config)
    if obstacle is not None and ops.is_forced():
        raise UnsupportedModelError(
            f"the native CPU kernels, which {ops.BACKEND_VARIABLE} asks for, do not support {obstacle}; unset it"
        )
    return obstacle is None


def release_memory() -> None:
    """Gives the memory of dropped models and caches back to the system. Drop all references first."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim_heap()


def _cut_context(model_config: ModelConfig, max_context: int | None) -> ModelConfig:
    if max_context is None:
        return model_config
    if not 1 <= max_context <= model_config.max_context:
        raise ModelError(f"max_context={max_context} is outside the model's range, 1 to {model_config.max_context}")
    return dataclasses.replace(model_config, max_context=max_context)


def _check_tables(label: str, model_config: ModelConfig, stored_bytes: int) -> None:
    """Refuses a context whose tables of rotary angles would outgrow the weights."""
    ropes = {model_config.layer_rope(layer) for layer in range(model_config.num_layers)} - {None}
    dims = sum(rope.dim * (2 if rope.scaling == "longrope" else 1) for rope in ropes if rope is not None)
    nbytes = 4 * dims * model_config.max_context
    if nbytes > max(stored_bytes, SMALL_TABLES):
        raise ModelError(
            f"{label}: a context of {model_config.max_context} tokens is claimed, whose rotary tables alone would take "
            f"{format_bytes(nbytes)}, more than the weights; choose a shorter context"
        )


class _naming:
    """Puts the path in front of a ModelError or FolderError raised inside and makes it a ModelError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, ModelError):
            raise type(error)(f"{self._path}: {error}") from error
        if isinstance(error, FolderError):
            raise ModelError(f"{self._path}: {error}") from error
