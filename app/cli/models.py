"""`kvasir models`: what the catalog found, and whether it fits."""

from __future__ import annotations

import argparse
import json
import sys

from app.cli.chosen_model import find_models
from app.cli.failure import reports_failures
from app.cli.options import memory_options
from app.units import short_count
from engine import catalog, memory
from engine.protocol import EngineConfig

# What a first chat needs, where no other context was asked for.
_CONTEXT = 4096


@reports_failures
def run(arguments: argparse.Namespace) -> int:
    entries = find_models()
    device = _device()
    fits = [_fit(entry, device, arguments) for entry in entries]
    if arguments.json:
        records = [_record(entry, fit) for entry, fit in zip(entries, fits, strict=True)]
        print(json.dumps(records, indent=2))
        return 0
    if not entries:
        print(
            f"No models found. Put .gguf files or model folders into {catalog.user_models_folder()}, "
            "or name their folder in KVASIR_MODELS.",
            file=sys.stderr,
        )
        return 1
    _print_table([("NAME", "SIZE", "FORMAT", "PARAMETERS", "CONTEXT", "FITS"), *map(_row, entries, fits)])
    print(f"\nMore are found in {catalog.user_models_folder()}: .gguf files and model folders.")
    return 0


def _row(entry: catalog.CatalogEntry, fit: memory.Fit | None) -> tuple[str, ...]:
    size = memory.format_bytes(entry.size_bytes)
    if fit is None:
        return entry.name, size, entry.format, "", "", f"cannot be used: {entry.error}"
    kind = " ".join(filter(None, (entry.format, entry.quantisation)))
    verdict = f"yes, {fit.message.removeprefix('fits: ')}" if fit.fits else fit.message
    return entry.name, size, kind, short_count(entry.num_parameters), str(entry.max_context), verdict


def _print_table(rows: list[tuple[str, ...]]) -> None:
    """Pads all columns but the last."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for row in rows:
        print("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip())


def _device() -> memory.DeviceMemory:
    gpu = memory.vram()
    return memory.ram() if isinstance(gpu, memory.NoGPU) else gpu


def _fit(entry: catalog.CatalogEntry, device: memory.DeviceMemory, arguments: argparse.Namespace) -> memory.Fit | None:
    if entry.shape is None:
        return None
    options = memory_options(arguments)
    options["max_context"] = min(options["max_context"] or _CONTEXT, entry.max_context)
    return memory.fit_model(entry.shape, device, EngineConfig(model=str(entry.path), **options))


def _record(entry: catalog.CatalogEntry, fit: memory.Fit | None) -> dict[str, object]:
    return {
        "name": entry.name,
        "path": str(entry.path),
        "format": entry.format,
        "quantisation": entry.quantisation,
        "architecture": entry.architecture,
        "num_parameters": entry.num_parameters,
        "max_context": entry.max_context,
        "size_bytes": entry.size_bytes,
        "fits": fit.fits if fit is not None else None,
        "fit": fit.message if fit is not None else None,
        "error": entry.error,
    }
