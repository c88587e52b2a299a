"""What lies in a Hugging Face model folder: its configuration and its weight files. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.loading.limits import MAX_LABELS, MAX_LAYERS

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LAYER_COUNT = re.compile(r"(n|num)_(\w+_)?layers?|(en|de)coder_layers|layers|depth")


class FolderError(ValueError):
    """A folder that holds no usable model. The message says what is wrong and what to do, without the folder's path."""


def parse_json(data: bytes) -> Any:
    """As `json.loads`. Raises ValueError also for halves of characters, which no file, window or pipe can take."""
    content = json.loads(data)
    if b"\\ud" in data.lower():
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file. Raises `FolderError` naming the file, `FileNotFoundError` where there is none."""
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FolderError(f"{path.name} cannot be read ({error.strerror or error}); check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{path.name} is damaged ({error}); download it again") from error
    if not isinstance(content, dict):
        raise FolderError(f"{path.name} holds no configuration but a {type(content).__name__}; download it again")
    return content


def read_model_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`, in which nothing is counted that no model has so many of. Raises `FolderError`."""
    try:
        values = read_json(folder / CONFIG_FILE)
    except FileNotFoundError:
        raise FolderError(f"{CONFIG_FILE} is missing; choose a whole model folder or a .gguf file") from None
    _check_counts(values)
    return values


def _check_counts(values: Mapping[str, Any]) -> None:
    """Refuses what transformers makes a list for, of any length, as soon as it reads a configuration."""
    for section in (values, *(value for value in values.values() if isinstance(value, dict))):
        for name, value in section.items():
            limit = MAX_LABELS if name == "num_labels" else MAX_LAYERS if _LAYER_COUNT.fullmatch(name) else None
            if limit is not None and isinstance(value, int | float) and not value <= limit:
                what = "labels" if name == "num_labels" else "layers"
                raise FolderError(
                    f"{CONFIG_FILE}: {name}: {value} {what} are claimed; it is damaged, download it again"
                )


def shard_paths(folder: Path) -> list[Path]:
    """The safetensors files that make up the model in a folder: those its index names, else the single one.

    Raises `FolderError` where there are none, where some are missing, or where the index leads out of the folder.
    """
    if (folder / INDEX_FILE).is_file():
        return _indexed_shards(folder)
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if any(folder.glob("*.bin")):
        raise FolderError("its weights are pickled (.bin), which can run code; use a safetensors version")
    raise FolderError(f"holds no weights ({SINGLE_FILE} or {INDEX_FILE}); download the whole model")


def _indexed_shards(folder: Path) -> list[Path]:
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FolderError(f"{INDEX_FILE} has no weight_map; download it again")
    shards: list[Path] = []
    for name in sorted({str(value) for value in weight_map.values()}):
        if Path(name).name != name or name == "..":
            raise FolderError(f"{INDEX_FILE} names {name!r}, which is no file of this folder; download it again")
        shards.append(folder / name)
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise FolderError(
            f"{len(missing)} of {len(shards)} weight files are missing ({missing[0]} ...); download the rest"
        )
    return shards
