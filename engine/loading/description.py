"""What a model is, as its headers say. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.loading.limits import MAX_LAYERS
from engine.memory import ModelShape, WeightGroup


class DescriptionError(ValueError):
    """A model that cannot be described. The message says what is wrong and what to do, without the path."""


@dataclass(frozen=True)
class ModelDescription:
    format: str
    architecture: str
    quantisation: str
    size_bytes: int
    shape: ModelShape


class GroupKey(NamedTuple):
    """What tensors have in common that count as one `WeightGroup`."""

    role: str
    stored: str
    columns: int
    group_size: int = 0


def weight_groups(rows: Mapping[GroupKey, int]) -> tuple[WeightGroup, ...]:
    """The groups of a model, from the rows counted for each key."""
    return tuple(
        WeightGroup(key.role, key.stored, count, key.columns, key.group_size)  # type: ignore[arg-type]
        for key, count in sorted(rows.items())
        if count
    )


def checked_layers(value: int) -> int:
    if value > MAX_LAYERS:
        raise DescriptionError(f"it claims to have {value} layers; its header is damaged, download it again")
    return value


def largest(value: Any) -> Any:
    """Of one value for each layer the largest, which bounds them all; a single value, or what is no list of numbers,
    as it is."""
    is_list = isinstance(value, list) and value and all(isinstance(item, int | float) for item in value)
    return max(value) if is_list else value


def positive(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 40:
        raise DescriptionError(f"its value of {name} is {value!r}, not a positive number; download it again")
    return value


def heads_of_layers(value: Any, layers: int, name: str) -> tuple[int, ...]:
    """One number of heads for each layer, given one for all or a list."""
    heads = value if isinstance(value, list) else [value] * layers
    if len(heads) != layers or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in heads):
        raise DescriptionError(f"{name} does not fit its {layers} layers; convert the model again")
    return tuple(heads)


def commonest(sizes: Counter[str]) -> str:
    return sizes.most_common(1)[0][0] if sizes else "none"
