"""Self-attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from kernels import ops
from kernels.kv import KVLayer
from kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What attention needs besides its input: where this batch's tokens lie, and each layer's cache.

    `rope_lengths` int64 [num_tokens] is how long each token's sequence counts as, see `engine.layers.rope`;
    None where the model's rope does not depend on it.
    """

    metadata: AttentionMetadata
    kv_layers: list[KVLayer]
    rope_lengths: torch.Tensor | None = None


class Attention:
    """Fused query, key and value projection, their norms, rope, cache write, attention, output projection.

    `q_norm` and `k_norm`, of one eps, span one head each, or with weights of that length all heads together.
    `sinks` float32 [num_heads], see `kernels.ops.paged_attention`.
    """

    __slots__ = (
        "head_dim",
        "k_norm",
        "num_fused_heads",
        "num_heads",
        "num_kv_heads",
        "output",
        "q_norm",
        "qkv",
        "scale",
        "sinks",
        "soft_cap",
        "window",
    )

    def __init__(
        self,
        qkv: Linear,
        output: Linear,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.qkv = qkv
        self.output = output
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.sinks = sinks
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.num_fused_heads = num_heads + 2 * num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.soft_cap = soft_cap

    def __call__(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: KVLayer,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """hidden [num_tokens, hidden_size] -> the same shape; keys and values are written to kv_cache."""
        qkv = self.qkv(hidden)
        q_norm, k_norm, eps = None, None, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            if self.q_norm.weight.shape[0] == self.k_norm.weight.shape[0] == self.head_dim:
                q_norm, k_norm, eps = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
            else:
                self._normalise(qkv, self.q_norm, self.k_norm)
        qkv = qkv.view(-1, self.num_fused_heads, self.head_dim)
        q = ops.rope_and_write_kv(qkv, cos, sin, kv_cache, metadata.slot_mapping, q_norm, k_norm, eps)
        attended = ops.paged_attention(q, kv_cache, metadata, self.scale, self.window, self.soft_cap, self.sinks)
        return self.output(attended.view(attended.shape[0], -1))

    def _normalise(self, qkv: torch.Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> None:
        """In place, norms that span all heads together."""
        widths = [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        queries, keys, _ = qkv.split(widths, dim=-1)
        for part, norm in ((queries, q_norm), (keys, k_norm)):
            part.copy_(norm(part))

    @property
    def nbytes(self) -> int:
        norms = sum(norm.nbytes for norm in (self.q_norm, self.k_norm) if norm is not None)
        sinks = 0 if self.sinks is None else self.sinks.nbytes
        return self.qkv.nbytes + self.output.nbytes + norms + sinks
