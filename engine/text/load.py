"""Finds the tokenizer of a model. Imports what reads one at once, so that no load has to wait for that."""

from __future__ import annotations

from pathlib import Path

from engine.loading.gguf import GGUFFile
from engine.text.folder_tokenizer import load_folder_tokenizer
from engine.text.gguf_tokenizer import load_gguf_tokenizer
from engine.text.tokenizer import Tokenizer


def load_tokenizer(path: Path, file: GGUFFile | None = None) -> Tokenizer:
    """Loads the tokenizer of a `.gguf` file, from `file` where that is open already, or of a Hugging Face folder.

    Raises `TokenizerError`, or `GGUFError` for a damaged file.
    """
    return load_folder_tokenizer(path) if path.is_dir() else load_gguf_tokenizer(path, file)
