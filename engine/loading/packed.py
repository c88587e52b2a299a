"""Matrices that a quantised checkpoint spreads over several stored tensors, and which methods of it are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.loading.tensor_files import TensorFiles
from engine.loading.weights import StoredTensor
from engine.models.config import ModelError, UnsupportedModelError
from engine.quantization.affine import AffineMatrix, pack_nibbles, unpack_nibbles


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix [out, in] made of the stored tensors `parts`. Exactly one of the readers is set.

    affine: its integer codes. fill: writes its plain values into a tensor of its shape. ggml_rows: its rows
    in the GGUF format that `stored.type` names, uint8 [..., out, row_bytes].
    Each raises ModelError naming the tensor where the bytes cannot be read or contradict each other.
    """

    stored: StoredTensor
    parts: frozenset[str]
    affine: Callable[[], AffineMatrix] | None = None
    fill: Callable[[torch.Tensor], None] | None = None
    ggml_rows: Callable[[], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """The `quantization_config` of a config.json, or a part of it. `label` is the folder, for messages."""

    label: str
    values: Mapping[str, Any]

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of several spellings of a setting that is present and not null."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def whole_number(self, *names: str, default: int | None = None) -> int:
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{names[0]} is {value!r}, not a whole number")
        return value

    def group_size(self, columns: int, *names: str, default: int | None = None) -> int:
        """Columns of a group; -1 means all of them."""
        value = self.whole_number(*names, default=default)
        if value < 1 and value != -1:
            raise self.error(f"{names[0]} is {value}; it must be positive or -1")
        return columns if value == -1 else min(value, columns)

    def part(self, name: str) -> Settings:
        """The object that a setting holds; an empty one where it is missing."""
        return self.of(self.get(name, default={}), name)

    def names(self, name: str) -> list[str]:
        """The texts that a setting lists; none where it is missing."""
        value = self.get(name, default=[])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"{name} is {value!r}, no list of names")
        return value

    def of(self, values: Any, name: str) -> Settings:
        if not isinstance(values, Mapping):
            raise self.error(f"{name} is {values!r}, no object")
        return Settings(self.label, values)

    def matches(self, pattern: Any, module: str) -> bool:
        """Whether a regular expression fits the start of a module's name."""
        try:
            return re.match(pattern, module) is not None
        except (re.error, TypeError) as error:
            raise self.error(f"{pattern!r} is no pattern ({error})") from error

    def error(self, fault: str) -> ModelError:
        return ModelError(f"{self.label}: config.json: quantization_config: {fault}; download it again")

    def unsupported(self, fault: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.label}: {fault}")


class Parts:
    """The stored tensors of one module of a quantised checkpoint, whose headers are checked as they are asked for."""

    def __init__(self, files: TensorFiles, module: str) -> None:
        self._files = files
        self.module = module
        self._used: set[str] = set()

    def has(self, suffix: str) -> bool:
        return f"{self.module}.{suffix}" in self._files.tensors

    def stored_type(self, suffix: str) -> str:
        return self._files.tensors[f"{self.module}.{suffix}"].type

    def shape(self, suffix: str, types: tuple[str, ...], rank: int | None = 2) -> tuple[int, ...]:
        """Shape of `module.suffix`, which becomes a part. Raises ModelError where it is missing or of another kind."""
        name = f"{self.module}.{suffix}"
        stored = self._files.tensors.get(name)
        if stored is None:
            raise ModelError(f"{self._files.label}: tensor {name!r} is missing; the file is incomplete")
        if stored.type not in types or (rank is not None and len(stored.shape) != rank):
            raise self.unsupported(
                f"tensor {name!r} is stored as {stored.type} {list(stored.shape)}, which this method does not use"
            )
        if 0 in stored.shape:
            raise self.error(f"tensor {name!r} is empty")
        self._used.add(name)
        return stored.shape

    def ignore(self, *suffixes: str) -> None:
        """Takes tensors along that are there for quantised activations or caches, and not needed."""
        self._used.update(f"{self.module}.{suffix}" for suffix in suffixes if self.has(suffix))

    def read(self, suffix: str) -> torch.Tensor:
        return self._files.read(f"{self.module}.{suffix}")

    def error(self, fault: str) -> ModelError:
        return ModelError(f"{self._files.label}: {fault}; download it again")

    def unsupported(self, fault: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._files.label}: {fault}")

    def check_shape(self, suffix: str, types: tuple[str, ...], expected: tuple[int, ...], why: str) -> None:
        shape = self.shape(suffix, types)
        if shape != expected:
            raise self.error(
                f"tensor '{self.module}.{suffix}' has shape {list(shape)}, but {why} ask for {list(expected)}"
            )

    def matrix(self, shape: tuple[int, ...], kind: str, **readers: Any) -> PackedMatrix:
        """The matrix `module.weight` made of all parts asked for so far."""
        nbytes = sum(self._files.tensors[name].nbytes for name in self._used)
        stored = StoredTensor(f"{self.module}.weight", shape, kind, nbytes)
        return PackedMatrix(stored, frozenset(self._used), **readers)


def modules_with(files: TensorFiles, suffix: str) -> Iterable[str]:
    """Modules that have a tensor `suffix`, in the order of the files."""
    return [name.removesuffix(f".{suffix}") for name in files.tensors if name.endswith(f".{suffix}")]


def group_count(columns: int, group_size: int) -> int:
    return -(-columns // group_size)


def input_order(parts: Parts, suffix: str, group_size: int) -> torch.Tensor | None:
    """int64 [in]: the inputs sorted by the group that `suffix` gives each, None where they lie in order already.

    Raises ModelError where some group does not get its `group_size` inputs (the last one may get fewer).
    """
    groups = parts.read(suffix).long()
    in_order = torch.arange(groups.numel()) // group_size
    if torch.equal(groups, in_order):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], in_order):
        raise parts.error(f"tensor '{parts.module}.{suffix}' does not put {group_size} inputs into each group")
    return order


def reordered(codes: torch.Tensor, bits: int, order: torch.Tensor) -> torch.Tensor:
    """The columns of packed codes [out, in * bits / 8] in another order."""
    return pack_nibbles(unpack_nibbles(codes)[:, order]) if bits == 4 else codes[:, order]
