"""Where a decoder's weights come from, one tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.models.config import ModelError, UnsupportedModelError
from engine.quantization.affine import AffineMatrix


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies on disk. `shape` is in torch's order; `type` is the format's own name for it."""

    stored_name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int


class WeightSource(Protocol):
    """An open model file or folder. Tensor names are canonical, see `engine.loading.names`."""

    @property
    def label(self) -> str:
        """Path, for error messages."""
        ...

    @property
    def format(self) -> str:
        """For people: container and the most used tensor type, such as "GGUF Q4_1"."""
        ...

    @property
    def tensors(self) -> dict[str, StoredTensor]: ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Writes the tensor, unpacked and in the order Hugging Face keeps its rows, into `out`.

        `out` has the tensor's shape and any floating dtype and device. Raises ModelError naming the
        tensor where the bytes cannot be read.
        """
        ...

    def stored_rows(self, name: str) -> torch.Tensor:
        """A matrix as it is stored, rows in Hugging Face's order.

        uint8 [rows, row_bytes] in the GGUF format that its type names, or plain floating values [rows, columns].
        Not for a matrix that `quantized` gives. Raises ModelError naming the tensor where the bytes cannot be read.
        """
        ...

    def quantized(self, name: str) -> AffineMatrix | None:
        """A matrix in its integer codes, None for one that is stored otherwise.

        Raises ModelError naming the tensor where the bytes cannot be read or contradict each other.
        """
        ...

    def close(self) -> None: ...


def check_tensors(source: WeightSource, expected: dict[str, tuple[int, ...]], optional: frozenset[str]) -> None:
    """Compares names and shapes with what the decoder will ask for, before any weight is read.

    A tensor the decoder would leave unused is refused too: it means the model computes something else.
    Raises ModelError or UnsupportedModelError naming the first tensors at fault.
    """
    missing = [name for name in expected if name not in source.tensors]
    if missing:
        raise ModelError(f"{source.label}: {_listed('tensor', missing)} missing; the file is incomplete")
    unknown = [
        stored.stored_name for name, stored in source.tensors.items() if name not in expected and name not in optional
    ]
    if unknown:
        raise UnsupportedModelError(
            f"{source.label}: {_listed('tensor', unknown)} not used by this kind of decoder; "
            "the model is of a variant that is not supported"
        )
    for name, shape in expected.items():
        stored = source.tensors[name]
        if stored.shape != shape:
            raise ModelError(
                f"{source.label}: tensor {stored.stored_name!r} has shape {list(stored.shape)}, "
                f"but the model's configuration asks for {list(shape)}"
            )


def _listed(noun: str, names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    if len(names) == 1:
        return f"{noun} {shown} is"
    return f"{len(names)} {noun}s ({shown}{', ...' if len(names) > 3 else ''}) are"
