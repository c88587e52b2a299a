"""The pages that are curves over the last minute: TTFT, TPOT and throughput."""

from __future__ import annotations

import numpy as np
from PySide6.QtWidgets import QWidget

from app.charts.figures import Figure
from app.charts.live_plot import LivePlot, Series
from app.charts.page import ChartPage
from app.state import telemetry as columns
from app.state.telemetry import TelemetryState
from app.theme import Theme
from app.units import format_ms, format_rate, plural, three_figures
from engine.protocol import Distribution

P50_COLOUR, P95_COLOUR, LAST_COLOUR = "accent", "warning", "text_faint"


def format_per_s(value: float) -> str:
    return f"{three_figures(value) if value < 9_999.5 else format_rate(value)}/s"


# The engine keeps its percentiles as long.
_NONE_LATELY = "None in the last 5 minutes"


class LatencyPage(ChartPage):
    """p50 and p95 of one latency, over what they are taken of."""

    full_name = ""
    empty_text = ""
    p50_column = 0
    p95_column = 0
    single = Series("", LAST_COLOUR)

    def __init__(self, state: TelemetryState, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(state, theme, parent)
        self.plot = LivePlot(self._series(), format_ms, theme)
        self.plot.setAccessibleName(f"{self.full_name} over the last minute")
        self.add_picture(self.plot)
        self.setToolTip(f"{self.title}: {self.full_name}")

    def set_theme(self, theme: Theme) -> None:
        super().set_theme(theme)
        self.plot.set_theme(theme)
        self.refresh_figures()

    def refresh(self, now: float) -> None:
        history = self.state.curve_rows()
        times = history[columns.TIME]
        percentiles = [(times, history[self.p50_column]), (times, history[self.p95_column])]
        self.plot.set_data([self._single_values(), *percentiles], now)

    def refresh_figures(self) -> None:
        if self.state.latest is None:
            return
        figures = self._distribution()
        empty_text = _NONE_LATELY if len(self.state.first_tokens) else self.empty_text
        self.plot.set_empty_text("" if figures.count else empty_text)
        self.figure_row.set_figures(
            Figure(format_ms(figures.p50), "p50", getattr(self.theme, P50_COLOUR)),
            Figure(format_ms(figures.p95), "p95", getattr(self.theme, P95_COLOUR)),
        )
        self.set_note(f"last {format_ms(figures.last)}" if figures.count else "")
        if figures.count:
            self.describe(
                f"{self.full_name}: median {format_ms(figures.p50)}, 95th percentile {format_ms(figures.p95)}, "
                f"last {format_ms(figures.last)}."
            )
        else:
            self.describe(f"{self.full_name}: {empty_text.lower()}.")

    def _series(self) -> tuple[Series, ...]:
        return (self.single, Series("p50", P50_COLOUR), Series("p95", P95_COLOUR))

    def _single_values(self) -> tuple[np.ndarray, np.ndarray]:
        """Times and values of what the percentiles are taken of, as far as it was seen."""
        raise NotImplementedError

    def _distribution(self) -> Distribution:
        raise NotImplementedError


class TTFTPage(LatencyPage):
    """Besides the percentiles, a dot for each request's own first token."""

    title = "TTFT"
    full_name = "time to first token"
    empty_text = "No answers yet"
    p50_column, p95_column = columns.TTFT_P50, columns.TTFT_P95
    single = Series("one request", LAST_COLOUR, dots=True)

    def _single_values(self) -> tuple[np.ndarray, np.ndarray]:
        seen = self.state.first_tokens
        return seen.column(0).copy(), seen.column(1).copy()

    def _distribution(self) -> Distribution:
        assert self.state.latest is not None
        return self.state.latest.ttft


class TPOTPage(LatencyPage):
    """Besides the percentiles, the latest gap between two tokens: it jumps when a prompt of another chat is read."""

    title = "TPOT"
    full_name = "time per output token"
    empty_text = "No tokens yet"
    p50_column, p95_column = columns.TPOT_P50, columns.TPOT_P95
    single = Series("latest token", LAST_COLOUR, faint=True)

    def _single_values(self) -> tuple[np.ndarray, np.ndarray]:
        history = self.state.history
        return history.column(columns.TIME).copy(), history.column(columns.TPOT_LAST).copy()

    def _distribution(self) -> Distribution:
        assert self.state.latest is not None
        return self.state.latest.tpot


class ThroughputPage(ChartPage):
    """Decode and prefill rates one above the other: prefill is often a hundred times faster."""

    title = "Throughput"

    def __init__(self, state: TelemetryState, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(state, theme, parent)
        self.decode_plot = LivePlot(
            [Series("decode", "accent", filled=True)], format_per_s, theme, time_axis=False, widest_tick="8,888/s"
        )
        self.prefill_plot = LivePlot(
            [Series("prefill", "link", filled=True)], format_per_s, theme, smallest_top=100.0, widest_tick="8,888/s"
        )
        self.add_picture(self.decode_plot, 3)
        self.add_picture(self.prefill_plot, 3)
        self._column.setSpacing(2)

    def set_theme(self, theme: Theme) -> None:
        super().set_theme(theme)
        self.decode_plot.set_theme(theme)
        self.prefill_plot.set_theme(theme)
        self.refresh_figures()

    def refresh(self, now: float) -> None:
        history = self.state.curve_rows()
        times = history[columns.TIME]
        self.decode_plot.set_data([(times, history[columns.DECODE_RATE])], now)
        self.prefill_plot.set_data([(times, history[columns.PREFILL_RATE])], now)

    def refresh_figures(self) -> None:
        telemetry = self.state.latest
        if telemetry is None:
            return
        decode, prefill = telemetry.decode_tokens_per_s, telemetry.prefill_tokens_per_s
        self.figure_row.set_figures(
            Figure(format_rate(decode), "tok/s decode", self.theme.accent),
            Figure(format_rate(prefill), "tok/s prefill", self.theme.link),
        )
        self.set_note(*self.queue_words())
        self.describe(
            f"Decode {format_rate(decode)} tokens per second, prefill {format_rate(prefill)} tokens per second. "
            f"{plural(telemetry.running, 'request')} running, {telemetry.waiting} waiting."
        )
