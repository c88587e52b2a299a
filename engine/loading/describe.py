"""Describes a model from its headers and configuration alone: no weights are read. Torch-free."""

from __future__ import annotations

from pathlib import Path

from engine.loading.describe_folder import describe_folder
from engine.loading.describe_gguf import describe_gguf
from engine.loading.description import DescriptionError as DescriptionError
from engine.loading.description import ModelDescription as ModelDescription
from engine.loading.folder import FolderError
from engine.loading.gguf import GGUFError


def describe(path: Path) -> ModelDescription:
    """Describes a `.gguf` file or a Hugging Face folder. Raises `DescriptionError`."""
    try:
        return describe_folder(path) if path.is_dir() else describe_gguf(path)
    except (GGUFError, FolderError) as error:
        raise DescriptionError(str(error).removeprefix(f"{path}: ")) from error
    except OSError as error:
        raise DescriptionError(f"cannot be read ({error.strerror or error}); check its permissions") from error
