"""Sizes as people read them."""

from __future__ import annotations


def format_bytes(size: float) -> str:
    """A size for people, in powers of 1024 and with three figures: 512 B, 93.8 MiB, 1.25 GiB."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1024, larger
    if unit == "B":
        return f"{value:.0f} B"
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{decimals}f} {unit}"
