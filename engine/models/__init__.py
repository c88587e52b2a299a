"""Decoders: what a model is, which are supported, and how one is loaded.

The names below are imported when first used: `engine.models.config` alone needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.models.loader import LoadCancelled, LoadedModel, load_model, release_memory

__all__ = ["LoadCancelled", "LoadedModel", "load_model", "release_memory"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine.models import loader

    return getattr(loader, name)
