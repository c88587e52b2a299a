"""What memory arithmetic needs to know of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["embedding", "head", "layers", "experts", "small"]


@dataclass(frozen=True)
class WeightGroup:
    """Tensors of one role that are stored alike: `rows` rows of `columns` weights in all.

    `stored` is the GGUF tensor type or safetensors dtype in capitals, "F8" for all kinds of 8-bit numbers; "INT4" and
    "INT8" are the integer codes of a quantised checkpoint with a scale and a zero point for each `group_size` columns
    (0: for each row). "small" are norms and biases, which stay plain numbers whatever else happens.
    """

    role: Role
    stored: str
    rows: int
    columns: int
    group_size: int = 0

    @property
    def num_weights(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes, from its metadata alone.

    `kv_heads` holds the number of KV heads of each layer; `stored_bytes` is the size of the tensors on disk;
    `weights` leaves out what loading leaves out, such as a head stored although it is tied to the embedding.
    `intermediate_size` is the widest feed-forward that a token passes, all its experts together; `rope_dims` the
    rotated dimensions of a head, of every table of angles there is; `has_norms_after` tells of norms of what a layer
    adds.
    """

    weights: tuple[WeightGroup, ...]
    stored_bytes: int
    kv_heads: tuple[int, ...]
    num_heads: int
    key_dim: int
    value_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    rope_dims: int = 0
    experts_per_token: int = 0
    has_norms_after: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.kv_heads)

    @property
    def num_parameters(self) -> int:
        return sum(group.num_weights for group in self.weights)
