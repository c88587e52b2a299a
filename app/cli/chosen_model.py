"""Which model a command uses."""

from __future__ import annotations

from app.cli.failure import CommandError
from engine import catalog
from engine.loading.describe import DescriptionError, describe


def choose_model(name_or_path: str | None) -> str:
    """The path of the model that was named, else the starter model, else the first usable one.

    Raises `CommandError`, listing near names for an unknown one; a damaged file is found out
    here, before an engine is started for it.
    """
    if name_or_path is not None:
        try:
            path = catalog.resolve(name_or_path).absolute()
        except (catalog.CatalogError, OSError, ValueError) as error:  # ValueError: no path at all, as with a zero byte
            raise CommandError(str(error)) from error
        try:
            describe(path)
        except (DescriptionError, OSError) as error:
            raise CommandError(f"{path}: {error}") from error
        return str(path)
    starter = catalog.starter_model()
    if starter is not None:
        return str(starter)
    usable = [entry for entry in catalog.find_models() if entry.error is None]
    if not usable:
        raise CommandError(
            "there is no model on this machine: `make setup` installs the starter model, "
            f"or put a .gguf file into {catalog.user_models_folder()}"
        )
    return str(usable[0].path)
