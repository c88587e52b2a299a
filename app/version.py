"""Which Kvasir this is."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """The installed package's version; "development" where it runs from its source folder."""
    try:
        return importlib.metadata.version("kvasir")
    except importlib.metadata.PackageNotFoundError:
        return "development"
