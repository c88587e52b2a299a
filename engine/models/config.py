"""The shape of a decoder, whatever file it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engine.loading.limits import MAX_CONTEXT, MAX_LAYERS

Activation = Literal["silu", "gelu_tanh"]
QKNorm = Literal["none", "per_head", "full_width"]
NormPlacement = Literal["before", "after", "before_and_after"]
RopeScaling = Literal["linear", "llama3", "dynamic", "yarn", "longrope"]


class ModelError(ValueError):
    """A model that cannot be loaded. The message says what is wrong, with the value, and what to do."""


class UnsupportedModelError(ModelError):
    """A sound model of a kind this engine does not compute (yet)."""


def checked_layers(num_layers: int) -> int:
    """`num_layers`, to be asked before anything is made for each layer. Raises ModelError for a number no model has."""
    if num_layers > MAX_LAYERS:
        raise ModelError(f"{num_layers} layers are claimed; the model's metadata is damaged, download it again")
    return num_layers


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of `dim` dimensions of each head.

    `original_max_position` and the factors are those of the scaling method that uses them.
    """

    base: float
    dim: int
    scaling: RopeScaling | None = None
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that tells one decoder from another.

    `sliding_windows` has one entry for each layer, None for full attention; empty means all are full.
    `local_rope` replaces `rope` in the layers with a window. `norm_weight_offset` is added to norm
    weights as stored. Scales multiply; soft caps are None where the model has none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    activation: Activation = "silu"
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = "none"
    norm_placement: NormPlacement = "before"
    norm_weight_offset: float = 0.0
    attention_scale: float | None = None
    """None is 1 / sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    sliding_windows: tuple[int | None, ...] = ()
    tie_word_embeddings: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_intermediate_size: int = 0

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_context",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"{name} is {value!r}, not a positive whole number; the model's metadata is damaged")
        checked_layers(self.num_layers)
        if self.max_context > MAX_CONTEXT:
            raise ModelError(f"a context of {self.max_context} tokens is claimed; the model's metadata is damaged")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        if not 0 < self.rope.dim <= self.head_dim or self.rope.dim % 2:
            raise ModelError(f"rope covers {self.rope.dim} of {self.head_dim} dimensions of a head; it must be even")
        for name, value in (("norm_eps", self.norm_eps), ("rope base", self.rope.base)):
            if not math.isfinite(value) or value <= 0:
                raise ModelError(f"{name} is {value!r}, not a positive number; the model's metadata is damaged")
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ModelError(f"{len(self.sliding_windows)} window sizes are given for {self.num_layers} layers")

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None
