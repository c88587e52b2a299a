"""Rotary position embedding: the angles of every position, computed once at load."""

from __future__ import annotations

import math

import torch

from engine.models.config import RopeConfig


class RotaryTable:
    """Cosine and sine of the angles of all positions below `max_positions`.

    `cos` and `sin` are float32 [rows, rotary_dim / 2], the attention factor multiplied in. Row p is position
    p; longrope has `max_positions` more, which hold the angles for sequences longer than the model was
    trained on first. `frequency_factors` [rotary_dim / 2] divide the frequencies (`rope_freqs` of a GGUF file).
    """

    __slots__ = ("_config", "_long_offset", "cos", "sin")

    def __init__(
        self,
        config: RopeConfig,
        max_positions: int,
        device: torch.device,
        frequency_factors: torch.Tensor | None = None,
    ) -> None:
        self._config = config
        frequencies = [inverse_frequencies(config)]
        self._long_offset = 0
        if config.scaling == "longrope" and max_positions > config.original_max_position:
            frequencies.append(inverse_frequencies(config, max_positions))
            self._long_offset = max_positions
        if frequency_factors is not None:
            factors = frequency_factors.to("cpu", torch.float32)
            frequencies = [row / factors for row in frequencies]
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.cat([torch.outer(positions, row) for row in frequencies])
        self.cos = angles.cos().mul_(config.attention_factor).to(device)
        self.sin = angles.sin_().mul_(config.attention_factor).to(device)

    @property
    def nbytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes

    def __call__(
        self, positions: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin as `kernels.ops.rope_and_write_kv` takes them: [num_tokens, rotary_dim] each.

        positions and lengths int64 [num_tokens]: where each token is, and how long its sequence counts as,
        which some kinds of rope depend on. Raises IndexError for a position out of range.
        """
        cos, sin = self._half(positions, lengths)
        cos, sin = cos.to(dtype), sin.to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _half(self, positions: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._long_offset:
            rows = positions + self._long_offset * (lengths > self._config.original_max_position)
            return self.cos[rows], self.sin[rows]
        cos, sin = self.cos[positions], self.sin[positions]
        if self._config.scaling == "dynamic" and self.cos.shape[0] > self._config.original_max_position:
            # Beyond the trained context every length has frequencies of its own: too many for a table.
            angles = positions.float().unsqueeze(1) * dynamic_frequencies(self._config, lengths)
            is_long = (lengths > self._config.original_max_position).unsqueeze(1)
            cos, sin = torch.where(is_long, angles.cos(), cos), torch.where(is_long, angles.sin(), sin)
        return cos, sin


def no_rotation(num_tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer without positions gets: cos and sin of no dimensions."""
    nothing = torch.empty(num_tokens, 0, dtype=dtype, device=device)
    return nothing, nothing


def inverse_frequencies(config: RopeConfig, length: int = 0) -> torch.Tensor:
    """Radians per position of each rotated pair in a sequence of `length` tokens, float32 [rotary_dim / 2].

    As in Hugging Face transformers: "linear" (Chen et al. 2023, https://arxiv.org/abs/2306.15595), "llama3"
    (Llama 3.1 release), "dynamic" (NTK by length), "yarn" (Peng et al. 2023, https://arxiv.org/abs/2309.00071),
    "longrope" (Ding et al. 2024, https://arxiv.org/abs/2402.13753).
    """
    if config.scaling == "dynamic":
        return dynamic_frequencies(config, torch.tensor([length])).squeeze(0)
    tokens_per_radian = config.base ** _exponents(config)
    if config.scaling == "longrope":
        factors = config.long_factors if length > config.original_max_position else config.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * tokens_per_radian)
    frequencies = 1.0 / tokens_per_radian
    if config.scaling == "linear":
        return frequencies / config.factor
    if config.scaling == "llama3":
        return _llama3(config, frequencies)
    if config.scaling == "yarn":
        return _yarn(config, frequencies, 1.0 / (config.factor * tokens_per_radian))
    return frequencies


def dynamic_frequencies(config: RopeConfig, lengths: torch.Tensor) -> torch.Tensor:
    """As `inverse_frequencies` of "dynamic", for lengths int64 [num_tokens] on any device: [num_tokens, dim / 2].

    Nothing waits for the device, so that a CUDA graph may hold it.
    """
    longer = lengths.double().clamp_min(config.original_max_position) / config.original_max_position
    stretch = (config.factor * longer - (config.factor - 1)) ** (config.dim / (config.dim - 2))
    base = (config.base * stretch).float().unsqueeze(1)
    return 1.0 / base ** _exponents(config, lengths.device)


def _exponents(config: RopeConfig, device: torch.device | None = None) -> torch.Tensor:
    return torch.arange(0, config.dim, 2, dtype=torch.int64, device=device).float() / config.dim


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    longest = config.original_max_position / config.low_freq_factor
    shortest = config.original_max_position / config.high_freq_factor
    smooth = (config.original_max_position / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    between = (1 - smooth) * frequencies / config.factor + smooth * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / config.factor, between)
    return torch.where(wavelengths < shortest, frequencies, scaled)


def _yarn(config: RopeConfig, extrapolated: torch.Tensor, interpolated: torch.Tensor) -> torch.Tensor:
    """Fast pairs stay, slow ones are interpolated, with a ramp between those of `beta_fast` and `beta_slow` turns."""

    def pair_that_turns(times: float) -> float:
        ratio = config.original_max_position / (times * 2 * math.pi)
        return config.dim * math.log(ratio) / (2 * math.log(config.base))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return interpolated * (1 - keep) + extrapolated * keep
