"""Self-attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.linear import Linear
from kernels import ops
from kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What attention needs besides its input: where this batch's tokens lie, and each layer's cache."""

    metadata: AttentionMetadata
    kv_layers: list[torch.Tensor]


class Attention:
    """Fused query, key and value projection, rope, cache write, attention, output projection."""

    __slots__ = ("head_dim", "num_fused_heads", "output", "qkv", "scale", "soft_cap", "window")

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
    ) -> None:
        self.qkv = qkv
        self.output = output
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
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """hidden [num_tokens, hidden_size] -> the same shape; keys and values are written to kv_cache."""
        qkv = self.qkv(hidden).view(-1, self.num_fused_heads, self.head_dim)
        q = ops.rope_and_write_kv(qkv, cos, sin, kv_cache, metadata.slot_mapping)
        attended = ops.paged_attention(q, kv_cache, metadata, self.scale, self.window, self.soft_cap)
        return self.output(attended.view(attended.shape[0], -1))

    @property
    def nbytes(self) -> int:
        return self.qkv.nbytes + self.output.nbytes
