"""Where one layer's keys and values lie, and how they are rounded to eight bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class KVLayer:
    """The KV blocks of one layer.

    data [num_blocks, block_size, 2, num_kv_heads, head_dim]: a block's keys and values lie together, so
    that one copy moves both. For int8 data, scales float32 [num_blocks, block_size, 2, num_kv_heads] hold
    what one step of each token's and head's vector is worth; otherwise there are none.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.data.shape[3]

    @property
    def head_dim(self) -> int:
        return self.data.shape[4]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Puts kv [num_tokens, 2 * num_kv_heads, head_dim], keys first, into the rows `slots` names."""
        heads = 2 * self.num_kv_heads
        if self.scales is not None:
            kv, scales = quantize_int8(kv)
            self.scales.view(-1, heads).index_copy_(0, slots, scales)
        self.data.view(-1, heads, self.head_dim).index_copy_(0, slots, kv.to(self.data.dtype))

    def read(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows `slots` names, as numbers: [num_slots, 2, num_kv_heads, head_dim]."""
        shape = (-1, 2, self.num_kv_heads)
        kv = self.data.view(*shape, self.head_dim)[slots].to(dtype)
        if self.scales is None:
            return kv
        return kv.mul_(self.scales.view(shape)[slots].to(dtype).unsqueeze(-1))


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds the last dimension to int8 [..., n] with a float32 scale [...]: x is about values * scale.

    Symmetric, the largest magnitude becoming 127: no error exceeds scale / 2. Zeros keep a scale of 0.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    inverse = torch.where(largest > 0, 127.0 / largest, 0.0)
    return (x * inverse.unsqueeze(-1)).round_().to(torch.int8), largest / 127.0
