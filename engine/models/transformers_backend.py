"""Loads a decoder that Kvasir has no code of its own for: the model of transformers, over our KV cache.

Safetensors only, and no code that comes with the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.loading.folder import FolderError, read_model_config, shard_paths
from engine.loading.limits import MAX_CONTEXT
from engine.models.config import ModelError, UnsupportedModelError, checked_layers
from engine.models.transformers_model import TransformersModel
from engine.models.transformers_quantization import PackingConfig
from engine.quantization.rounding import Rounding
from kernels import ops

_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def load_transformers_model(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    max_context: int | None,
    rounding: Rounding | None,
    on_tensor: Callable[[int, int], None],
) -> tuple[TransformersModel, str]:
    """Reads the model in a Hugging Face folder and tries it out. Returns it, and its format for people.

    `on_tensor(bytes before, bytes in all)` is called before each tensor is read; what it raises ends the loading.
    Raises UnsupportedModelError where Kvasir cannot serve the model, ModelError where it is damaged.
    """
    config = _read_config(folder)
    model_class = _model_class(config)
    text = config.get_text_config(decoder=True)
    num_layers = checked_layers(_positive(text, "num_hidden_layers"))
    context = _context(text, max_context)
    with _StoredWeights(folder, device, on_tensor) as weights:
        if num_layers > len(weights.tensors):
            raise ModelError(f"{num_layers} layers are claimed, but the files hold {len(weights.tensors)} tensors")
        num_parameters = _count_parameters(model_class, config, weights)
        model = _read_weights(model_class, config, weights, dtype, rounding)
        stored_format = weights.format
    torch.nn.Module.to(model, device)
    try:
        return TransformersModel(model, num_layers, context, num_parameters), stored_format
    except (ModelError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:  # whatever code that expects something else than we do sets off
        raise UnsupportedModelError(f"it fails when tried out: {type(error).__name__}: {_first_line(error)}") from error


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        values = read_model_config(folder)
    except FolderError as error:
        raise ModelError(str(error)) from error
    quantization = values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise UnsupportedModelError(f"weights quantised as {method!r} are not served through transformers")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged configuration sets off in there
        name = values.get("model_type")
        if "auto_map" in values:
            raise UnsupportedModelError(f"{name!r} comes with code of its own, which Kvasir does not run") from error
        raise UnsupportedModelError(f"transformers does not know {name!r}: {_first_line(error)}") from error


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{config.model_type!r} is an encoder and a decoder; only decoders are served")
    try:
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (KeyError, ImportError) as error:
        missing = f": {_first_line(error)}" if isinstance(error, ImportError) else ""
        raise UnsupportedModelError(
            f"transformers has no decoder of text for {config.model_type!r}{missing}"
        ) from error
    return found[0] if isinstance(found, tuple) else found


def _context(config: PreTrainedConfig, asked_for: int | None) -> int:
    """The context to serve: what the model has, or what was asked for.

    With rope that depends on the length of the whole batch, transformers gives each request what it gives
    it alone only up to the context that the model was trained on first.
    """
    longest = _positive(config, "max_position_embeddings", 2048)
    if longest > MAX_CONTEXT:
        raise ModelError(f"a context of {longest} tokens is claimed; the model's metadata is damaged")
    limited = ""
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in _LENGTH_DEPENDENT_ROPE:
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            if isinstance(original, int) and 1 <= original < longest:
                longest, limited = original, f" (rope scaling {kind!r} goes no further through transformers)"
    if asked_for is None:
        return longest
    if not 1 <= asked_for <= longest:
        raise ModelError(f"max_context={asked_for} is outside the model's range, 1 to {longest}{limited}")
    return asked_for


def _rope_parameters(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """The model's rope settings: one, or one for each type of layer."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(given, Mapping):
        return
    nested = [value for value in given.values() if isinstance(value, Mapping)]
    yield from nested or [given]


def _positive(config: PreTrainedConfig, name: str, default: int | None = None) -> int:
    value = getattr(config, name, None)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {name} is {value!r}, not a positive whole number; download it again")
    return value


# ------------------------------------------------------------ weights


class _StoredTensor:
    """What transformers needs of a tensor that is still on disk."""

    def __init__(self, weights: _StoredWeights, stored: Any) -> None:
        self._weights = weights
        self._stored = stored
        self.num_elements = math.prod(stored.get_shape())
        self.type: str = stored.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._stored[index]
        self._weights.reading(tensor.nbytes)
        # A copy on a CPU: the file may be replaced while the model is in use.
        return tensor.clone() if self._weights.device.type == "cpu" else tensor

    def get_shape(self) -> list[int]:
        return self._stored.get_shape()

    def get_dtype(self) -> str:
        return self.type


class _StoredWeights:
    """The tensors of a folder by name, read when they are asked for."""

    def __init__(self, folder: Path, device: torch.device, on_tensor: Callable[[int, int], None]) -> None:
        self.device = device
        self._on_tensor = on_tensor
        self._done = 0
        self.tensors: dict[str, _StoredTensor] = {}
        try:
            paths = shard_paths(folder)
        except FolderError as error:
            raise ModelError(str(error)) from error
        self._total = sum(path.stat().st_size for path in paths)
        for path in paths:
            try:
                shard = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path.name} cannot be read ({error}); download it again") from error
            for name in shard.keys():  # noqa: SIM118 (a safe_open handle is no mapping)
                self.tensors[name] = _StoredTensor(self, shard.get_slice(name))
                if self.tensors[name].type not in _FLOAT_TYPES:
                    kind = self.tensors[name].type
                    raise UnsupportedModelError(f"tensor {name!r} is stored as {kind}, which is not supported")

    @property
    def format(self) -> str:
        types = [tensor.type for tensor in self.tensors.values()]
        return f"safetensors {max(set(types), key=types.count)}" if types else "safetensors"

    @property
    def num_elements(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors.values())

    def reading(self, nbytes: int) -> None:
        self._on_tensor(self._done, self._total)
        self._done += nbytes

    def __enter__(self) -> _StoredWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.tensors.clear()


def _count_parameters(model_class: type[PreTrainedModel], config: PreTrainedConfig, weights: _StoredWeights) -> int:
    """The model's weights. Refuses, before memory is spent, a configuration that asks for more than the files hold."""
    with _quiet():
        try:
            with torch.device("meta"):
                empty = model_class(config)
        except Exception as error:  # whatever a damaged configuration sets off in there
            raise ModelError(f"transformers cannot make this model: {_first_line(error)}") from error
    tied = set(getattr(empty, "all_tied_weights_keys", None) or ())
    wanted = sum(parameter.numel() for name, parameter in empty.named_parameters() if name not in tied)
    if wanted > weights.num_elements:
        raise ModelError(
            f"the configuration asks for {wanted} weights and the files hold {weights.num_elements}; "
            "they are incomplete or belong to another model"
        )
    return wanted


def _read_weights(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    weights: _StoredWeights,
    dtype: torch.dtype,
    rounding: Rounding | None,
) -> PreTrainedModel:
    # Only float32 is what the native kernels compute in.
    native = weights.device.type == "cpu" and dtype == torch.float32 and ops.kernel_backend() == "cpu"
    with _quiet():
        try:
            loaded: Any = model_class.from_pretrained(
                None,
                config=config,
                state_dict=dict(weights.tensors),
                dtype=dtype,
                quantization_config=PackingConfig(rounding, native, weights.device),
                # Packed experts can be had one by one only.
                experts_implementation="eager" if rounding is not None else None,
                ignore_mismatched_sizes=True,  # they are in the report
                output_loading_info=True,
            )
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, KeyError, SafetensorError) as error:
            raise ModelError(f"transformers cannot load these weights: {_first_line(error)}") from error
    model, report = loaded
    for kind, what in (
        ("missing_keys", "missing"),
        ("mismatched_keys", "of another shape than the configuration's"),
        ("unexpected_keys", "not used by this model"),
    ):
        if report[kind]:
            names = sorted(str(each[0] if isinstance(each, tuple) else each) for each in report[kind])
            listed = ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
            raise ModelError(f"tensors {listed} are {what}")
    return model.requires_grad_(False).eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports: ours say it."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
