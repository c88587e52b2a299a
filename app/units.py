"""Numbers as people read them: three figures and a unit."""

from __future__ import annotations

NO_VALUE = "–"


def three_figures(value: float, *, keep_zeros: bool = False) -> str:
    """A number with three significant figures: 0.25, 8.4, 84.2, 842, 8,421.

    `keep_zeros` writes 8.40 and 84.0, so that a live figure keeps its width.
    """
    if value == 0:
        return "0"
    for limit, decimals in ((9.995, 2), (99.95, 1)):
        if abs(value) < limit:
            text = f"{value:.{decimals}f}"
            return text if keep_zeros else text.rstrip("0").rstrip(".")
    return f"{value:,.0f}"


def short_count(number: int) -> str:
    """A count for people, with three figures: 999, 135 M, 8.03 B."""
    for limit, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= 0.9995 * limit:
            return f"{number / limit:.3g}{unit}"
    return str(number)


def format_ms(milliseconds: float | None) -> str:
    """A latency in ms, from one second up in s; a dash for None."""
    if milliseconds is None or milliseconds != milliseconds:
        return NO_VALUE
    if milliseconds < 999.5:
        return f"{three_figures(milliseconds)} ms" if milliseconds < 9.95 else f"{milliseconds:.0f} ms"
    return f"{three_figures(milliseconds / 1000)} s"


def format_rate(per_second: float) -> str:
    """Tokens per second without the unit: 8.4, 48.0, 312, 2,140, 12.3k."""
    if per_second == 0:
        return "0"
    if per_second < 99.95:
        return f"{per_second:.1f}"
    if per_second < 9_999.5:
        return f"{per_second:,.0f}"
    return f"{three_figures(per_second / 1000)}k"


def format_percent(part: float, whole: float) -> str:
    """A share in percent; a dash when there is nothing to take a share of."""
    if whole <= 0:
        return NO_VALUE
    share = 100 * part / whole
    return f"{share:.1f} %" if 0 < share < 9.95 else f"{share:.0f} %"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
