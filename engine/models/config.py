"""The shape of a decoder, whatever file it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engine.loading.limits import MAX_CONTEXT, MAX_EXPERTS, MAX_LAYERS

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""What the gate passes through before it multiplies `up`; clamped_swiglu is gpt-oss', see `kernels.ops`."""
QKNorm = Literal["none", "per_head", "full_width"]
NormPlacement = Literal["before", "after", "before_and_after"]
"""Where a layer's two halves, attention and feed-forward, are normalised: their input, what they add, or both."""
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
    """Rotary embedding of the first `dim` dimensions of each head.

    `original_max_position`, what the model was trained on first, and the factors belong to the scaling
    methods that use them: `low_freq_factor` and `high_freq_factor` to llama3; `beta_fast`, `beta_slow` and
    `truncate` to yarn; `short_factors` and `long_factors`, one for each of `dim / 2` frequencies, to longrope.
    `attention_factor` multiplies cosine and sine (yarn, longrope).
    """

    base: float
    dim: int
    scaling: RopeScaling | None = None
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's rotation depends on how long its sequence is, besides its position."""
        return self.scaling in ("dynamic", "longrope")

    def length_floor(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """How long a sequence counts as at least for each of its tokens; 0 where only the token's position matters.

        A token at position p counts as one of a sequence of max(p + 1, floor) tokens. As transformers
        generates: with "dynamic" a prompt beyond the trained context is one piece and each later token has its
        own length; with "longrope" a sequence that grows beyond it is computed anew.
        """
        if self.scaling == "longrope" and num_tokens > self.original_max_position:
            return self.original_max_position + 1
        if self.scaling == "dynamic" and num_prompt_tokens > self.original_max_position:
            return num_prompt_tokens
        return 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that tells one decoder from another.

    Settings by layer have one entry for each; empty means the same in all. `sliding_windows`: None for
    full attention. `rope_layers`: False for a layer without positions (NoPE). `expert_layers`: False for
    a dense feed-forward layer in a mixture of experts. `local_rope` replaces `rope` in the layers with a
    window. `norm_weight_offset` is added to norm weights as stored. Scales multiply; soft caps are None
    where the model has none. `attention_sinks`: each head has one more score, which takes its share of
    the softmax and gives nothing.

    Mixture of experts (`num_experts` > 0): the `num_experts_per_token` with the highest router logits are
    weighted by a softmax over their logits, or with `normalize_expert_weights` false over all experts'.
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
    rope_layers: tuple[bool, ...] = ()
    activation: Activation = "silu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = "none"
    norm_placement: NormPlacement = "before"
    norm_weight_offset: float = 0.0
    attention_scale: float | None = None
    """None is 1 / sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    attention_sinks: bool = False
    logits_soft_cap: float | None = None
    sliding_windows: tuple[int | None, ...] = ()
    tie_word_embeddings: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_intermediate_size: int = 0
    expert_layers: tuple[bool, ...] = ()
    normalize_expert_weights: bool = True
    router_bias: bool = False
    expert_bias: bool = False

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
            self._check_positive(name)
        checked_layers(self.num_layers)
        if self.max_context > MAX_CONTEXT:
            raise ModelError(f"a context of {self.max_context} tokens is claimed; the model's metadata is damaged")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        if not math.isfinite(self.norm_eps) or self.norm_eps <= 0:
            raise ModelError(f"norm_eps is {self.norm_eps!r}, not a positive number; the model's metadata is damaged")
        for rope in (self.rope, self.local_rope):
            if rope is not None:
                _check_rope(rope, self.head_dim)
        for name in ("attention_soft_cap", "logits_soft_cap", "attention_scale"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ModelError(f"{name} is {value!r}, not a positive number; the model's metadata is damaged")
        for name in ("embedding_scale", "residual_scale", "logits_scale", "swiglu_alpha", "swiglu_limit"):
            value = getattr(self, name)
            if not math.isfinite(value) or value == 0:
                raise ModelError(f"{name} is {value!r}, not a number other than 0; the model's metadata is damaged")
        for name in ("sliding_windows", "rope_layers", "expert_layers"):
            count = len(getattr(self, name))
            if count not in (0, self.num_layers):
                raise ModelError(f"{name} is given for {count} layers of {self.num_layers}")
        for window in self.sliding_windows:
            if window is not None and window < 1:
                raise ModelError(f"a window of {window} tokens sees nothing; the model's metadata is damaged")
        if self.num_experts:
            for name in ("num_experts", "num_experts_per_token", "expert_intermediate_size"):
                self._check_positive(name)
            if self.num_experts * self.num_layers > MAX_EXPERTS:
                raise ModelError(f"{self.num_experts} experts a layer are claimed; the model's metadata is damaged")
            if self.num_experts_per_token > self.num_experts:
                raise ModelError(f"{self.num_experts_per_token} experts a token are asked for of {self.num_experts}")

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{name} is {value!r}, not a positive whole number; the model's metadata is damaged")

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """None where the layer's queries and keys are not rotated."""
        if self.rope_layers and not self.rope_layers[layer]:
            return None
        return self.local_rope if self.local_rope is not None and self.window(layer) is not None else self.rope

    @property
    def depends_on_length(self) -> bool:
        """Whether keys depend on more than the tokens before them: on the length of the sequence."""
        return any(rope is not None and rope.depends_on_length for rope in (self.rope, self.local_rope))

    def length_floor(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """As `RopeConfig.length_floor`, for all layers."""
        ropes = (self.rope, self.local_rope)
        return max(rope.length_floor(num_prompt_tokens, num_tokens) for rope in ropes if rope is not None)

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and (not self.expert_layers or self.expert_layers[layer])


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    if not 0 < rope.dim <= head_dim or rope.dim % 2:
        raise ModelError(f"rope covers {rope.dim} of {head_dim} dimensions of a head; it must be even")
    for name in ("base", "factor", "attention_factor", "beta_fast", "beta_slow"):
        value = getattr(rope, name)
        if not math.isfinite(value) or value <= 0:
            raise ModelError(f"rope {name} is {value!r}, not a positive number; the model's metadata is damaged")
    if rope.scaling in ("llama3", "dynamic", "yarn", "longrope") and rope.original_max_position < 1:
        raise ModelError(f"rope scaling {rope.scaling} lacks the context the model was trained on first")
    if rope.scaling == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor < math.inf:
        raise ModelError(f"rope factors from {rope.low_freq_factor} to {rope.high_freq_factor} are no rising range")
    if rope.scaling == "dynamic" and rope.dim <= 2:
        raise ModelError("dynamic rope scaling needs more than 2 dimensions of a head")
    if rope.scaling == "yarn" and rope.base <= 1:
        raise ModelError(f"rope base is {rope.base!r}; yarn needs more than 1")
    if rope.scaling == "longrope":
        for factors in (rope.short_factors, rope.long_factors):
            if len(factors) != rope.dim // 2 or not all(math.isfinite(value) and value > 0 for value in factors):
                raise ModelError(f"longrope needs {rope.dim // 2} positive factors, {len(factors)} are given")
