"""Opens a model file or folder and makes the decoder in it."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.dtypes import DTYPES
from engine.loading.folder import FolderError, read_model_config
from engine.loading.gguf import GGUFError, GGUFFile
from engine.loading.gguf_weights import GGUFWeights
from engine.loading.names import ROPE_FACTORS, expected_tensors
from engine.loading.safetensors_weights import SafetensorsWeights
from engine.loading.weights import WeightSource, check_tensors
from engine.models.config import ModelConfig, ModelError, UnsupportedModelError
from engine.models.decoder import Decoder, build_decoder, check_supported
from engine.models.native_decoder import why_not_native
from engine.models.registry import config_from_gguf, config_from_hf
from engine.protocol import EngineConfig
from kernels import ops

ProgressCallback = Callable[[str, int, int], None]
"""Called with a phrase for people, bytes done and bytes in all."""


class LoadCancelled(Exception):
    """Loading was stopped because the caller asked for it; nothing is kept."""


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A decoder ready to run, and what it is. `config.max_context` is already cut to what was asked for."""

    model: Decoder
    config: ModelConfig
    format: str
    num_parameters: int
    dtype: torch.dtype
    device: torch.device
    native: bool
    """The matrices are packed for the native CPU kernels."""

    @property
    def weight_bytes(self) -> int:
        return self.model.nbytes


def load_model(
    path: Path,
    config: EngineConfig,
    device: torch.device,
    on_progress: ProgressCallback = lambda stage, done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> LoadedModel:
    """Loads a GGUF file or a Hugging Face folder with safetensors.

    Names, shapes and formats of all tensors are checked before memory is spent; then each is unpacked
    from the file straight into its place. Progress counts bytes on disk.
    Raises ModelError (UnsupportedModelError among them) with a message for people, LoadCancelled
    when `cancelled()` becomes true, and OSError where the disk fails.
    """
    model_config, source = open_model(path)
    try:
        model_config = _cut_context(model_config, config.max_context)
        check_supported(model_config)
        check_tensors(source, expected_tensors(model_config), optional=frozenset({ROPE_FACTORS}))
        dtype = compute_dtype(config.dtype, device)
        native = _use_native(model_config, config.block_size, dtype, device)
        total = sum(stored.nbytes for stored in source.tensors.values())
        done = 0

        def on_tensor(name: str) -> None:
            nonlocal done
            if cancelled():
                raise LoadCancelled
            on_progress("Loading weights", done, total)
            done += source.tensors[name].nbytes

        model = build_decoder(model_config, source, device, dtype, native, on_tensor)
        if cancelled():
            raise LoadCancelled
        on_progress("Loading weights", total, total)
        num_parameters = sum(math.prod(shape) for shape in expected_tensors(model_config).values())
        return LoadedModel(model, model_config, source.format, num_parameters, dtype, device, native)
    finally:
        source.close()
        _trim_heap()  # of the bytes that passed through on their way into place


def open_model(path: Path) -> tuple[ModelConfig, WeightSource]:
    """Reads what the model is and opens its weights, which the caller closes. Raises ModelError."""
    if path.is_dir():
        with _naming(path):
            model_config = config_from_hf(read_model_config(path))
        return model_config, SafetensorsWeights(path, model_config.tie_word_embeddings)
    if not path.exists():
        raise ModelError(f"{path}: there is no such file or folder")
    if path.suffix.lower() != ".gguf":
        raise UnsupportedModelError(f"{path}: is neither a .gguf file nor a folder with config.json and safetensors")
    try:
        file = GGUFFile(path)
    except GGUFError as error:
        raise ModelError(str(error)) from error
    try:
        with _naming(path):
            model_config = config_from_gguf(file.metadata, file.tensors)
        return model_config, GGUFWeights(file, model_config)
    except BaseException:
        file.close()
        raise


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in. "auto" is float32 on a CPU, where halves are slow, and bfloat16 on a GPU."""
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _use_native(model_config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the native CPU kernels compute this model.

    Raises UnsupportedModelError where they are forced and cannot.
    """
    if device.type != "cpu" or ops.kernel_backend() != "cpu":
        return False
    if dtype != torch.float32:
        obstacle: str | None = f"computing in {dtype}"
    else:
        obstacle = why_not_native(model_config, block_size)
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
    _trim_heap()


def _trim_heap() -> None:
    """Has the C library give back the pages it keeps for later, where it has a call for that."""
    try:
        if sys.platform == "win32":
            ctypes.CDLL("ucrtbase")._heapmin()
        elif sys.platform == "darwin":
            relieve = ctypes.CDLL(None).malloc_zone_pressure_relief
            relieve.argtypes, relieve.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_size_t
            relieve(None, 0)  # all zones, as much as there is
        else:
            ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass  # another C library, such as musl's, which keeps little


def _cut_context(model_config: ModelConfig, max_context: int | None) -> ModelConfig:
    if max_context is None:
        return model_config
    if not 1 <= max_context <= model_config.max_context:
        raise ModelError(f"max_context={max_context} is outside the model's range, 1 to {model_config.max_context}")
    return dataclasses.replace(model_config, max_context=max_context)


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
