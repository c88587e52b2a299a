"""How a request chooses its tokens: the parameters, their ranges and their meaning."""

from __future__ import annotations

from typing import Literal

import msgspec

OverflowPolicy = Literal["refuse", "drop_oldest", "stop_at_limit"]


class Struct(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of all protocol structs: keyword-only, immutable, unknown fields refused."""


class ParameterRange(Struct, frozen=True):
    """The closed interval a sampling parameter may lie in, its off value and one line for people."""

    low: float
    high: float
    off: float | None
    help: str
    integer: bool = False


PARAMETER_RANGES: dict[str, ParameterRange] = {
    "temperature": ParameterRange(
        low=0.0,
        high=5.0,
        off=None,
        help="Higher is more varied, lower more predictable; 0 always takes the likeliest token.",
    ),
    "top_p": ParameterRange(
        low=0.0,
        high=1.0,
        off=1.0,
        help="Keeps the likeliest tokens whose probabilities add up to this share; 1 is off.",
    ),
    "min_p": ParameterRange(
        low=0.0,
        high=1.0,
        off=0.0,
        help="Drops tokens less likely than this share of the likeliest one; 0 is off.",
    ),
    "top_k": ParameterRange(
        low=0,
        high=1_000_000,
        off=0,
        integer=True,
        help="Keeps only this many of the likeliest tokens; 0 is off.",
    ),
    "repetition_penalty": ParameterRange(
        low=0.1,
        high=5.0,
        off=1.0,
        help="Makes tokens already in the prompt or answer less likely; 1 is off.",
    ),
    "presence_penalty": ParameterRange(
        low=-2.0,
        high=2.0,
        off=0.0,
        help="Lowers every token that the answer already used, once; 0 is off.",
    ),
    "frequency_penalty": ParameterRange(
        low=-2.0,
        high=2.0,
        off=0.0,
        help="Lowers a token each time the answer uses it; 0 is off.",
    ),
    "penalty_window": ParameterRange(
        low=0,
        high=10_000_000,
        off=0,
        integer=True,
        help="The penalties look at this many latest tokens; 0 looks at all.",
    ),
    "min_tokens": ParameterRange(
        low=0,
        high=10_000_000,
        off=0,
        integer=True,
        help="The answer may not end before this many tokens; 0 is off.",
    ),
    "max_tokens": ParameterRange(
        low=1,
        high=10_000_000,
        off=None,
        integer=True,
        help="The answer ends after this many tokens at the latest.",
    ),
    "logprobs": ParameterRange(
        low=0,
        high=20,
        off=0,
        integer=True,
        help="Reports this many of the likeliest alternatives at every token.",
    ),
    "seed": ParameterRange(
        low=0,
        high=2**63 - 1,
        off=None,
        integer=True,
        help="The same seed, prompt and settings give the same answer; empty draws a new one.",
    ),
}


class SamplingParams(Struct, frozen=True):
    """How one request chooses its tokens. `None` for `seed` draws one; for `logprobs`, reports none.

    Order of application: logit bias and penalties, temperature, min-p, top-k, top-p,
    draw. `temperature_last` moves the temperature behind the filters (llama.cpp's order).
    `max_tokens=None` lets the answer run to the end of the context.

    Raises `ValueError` naming the parameter, its value and its range when one lies outside.
    """

    temperature: float = 0.7
    top_p: float = 0.9
    min_p: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 0
    logit_bias: dict[int, float] = {}
    temperature_last: bool = False
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 1024
    logprobs: int | None = None
    overflow: OverflowPolicy = "refuse"
    speculation: bool = True
    """Whether this request may draft tokens where the model was loaded with speculation."""

    def __post_init__(self) -> None:
        for name, allowed in PARAMETER_RANGES.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int if allowed.integer else (int, float)):
                kind = "a whole number" if allowed.integer else "a number"
                raise ValueError(f"{name} must be {kind}, got {value!r}")
            if not allowed.low <= value <= allowed.high:  # also refuses NaN
                raise ValueError(f"{name} must lie in [{allowed.low:g}, {allowed.high:g}], got {value!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        for bias in self.logit_bias.values():
            if not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias values must lie in [-100, 100], got {bias!r}")
        if any(not stop for stop in self.stop):
            raise ValueError("stop strings must not be empty")
