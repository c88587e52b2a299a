"""Rotary position embedding: the angles of every position, computed once at load."""

from __future__ import annotations

import math

import torch

from engine.models.config import RopeConfig


class RotaryTable:
    """`cos` and `sin` of all positions below `max_positions`: float32 [max_positions, rotary_dim / 2].

    `frequency_factors` [rotary_dim / 2] divide the frequencies (`rope_freqs` of a GGUF file).
    """

    __slots__ = ("cos", "sin")

    def __init__(
        self,
        config: RopeConfig,
        max_positions: int,
        device: torch.device,
        frequency_factors: torch.Tensor | None = None,
    ) -> None:
        frequencies = inverse_frequencies(config)
        if frequency_factors is not None:
            frequencies = frequencies / frequency_factors.to("cpu", torch.float32)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self.cos = angles.cos().to(device)
        self.sin = angles.sin_().to(device)

    @property
    def nbytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin as `kernels.ops.rope_and_write_kv` takes them: [num_tokens, rotary_dim] each."""
        cos, sin = self.cos[positions].to(dtype), self.sin[positions].to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """Radians per position of each rotated pair, float32 [rotary_dim / 2].

    Scaling "linear" (Chen et al. 2023) and "llama3" (Llama 3.1 release) as in Hugging Face transformers.
    """
    exponents = torch.arange(0, config.dim, 2, dtype=torch.int64).float() / config.dim
    frequencies = 1.0 / (config.base**exponents)
    if config.scaling is None:
        return frequencies
    if config.scaling == "linear":
        return frequencies / config.factor
    if config.scaling == "llama3":
        wavelengths = 2 * math.pi / frequencies
        longest = config.original_max_position / config.low_freq_factor
        shortest = config.original_max_position / config.high_freq_factor
        smooth = (config.original_max_position / wavelengths - config.low_freq_factor) / (
            config.high_freq_factor - config.low_freq_factor
        )
        between = (1 - smooth) * frequencies / config.factor + smooth * frequencies
        scaled = torch.where(wavelengths > longest, frequencies / config.factor, between)
        return torch.where(wavelengths < shortest, frequencies, scaled)
    raise ValueError(f"rope scaling {config.scaling!r} is not supported")
