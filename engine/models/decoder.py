"""One decoder for all Llama-shaped families, driven by `ModelConfig`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.layers.attention import Attention, AttentionContext
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rope import RotaryTable
from engine.loading.names import EMBEDDING, FINAL_NORM, HEAD, ROPE_FACTORS, layer_prefix
from engine.loading.reader import WeightReader
from engine.loading.weights import WeightSource
from engine.models.config import ModelConfig, UnsupportedModelError
from engine.quantization import QuantWeight


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    @property
    def nbytes(self) -> int:
        return self.attention_norm.nbytes + self.attention.nbytes + self.mlp_norm.nbytes + self.mlp.nbytes


class Decoder:
    """Token ids in, hidden states out; `compute_logits` turns the rows that are wanted into logits."""

    def __init__(
        self,
        embedding: QuantWeight,
        layers: list[DecoderLayer],
        final_norm: RMSNorm,
        head: Linear,
        rotary: RotaryTable,
    ) -> None:
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        self.rotary = rotary

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention_context: AttentionContext
    ) -> torch.Tensor:
        """int64 [num_tokens] each -> hidden states [num_tokens, hidden_size], final norm applied.

        Writes the tokens' keys and values to the cache. Raises IndexError for a token id or position out of range.
        """
        metadata = attention_context.metadata
        residual = self.embedding.rows(input_ids)
        cos, sin = self.rotary(positions, residual.dtype)
        update: torch.Tensor | None = None
        for layer, kv_cache in zip(self.layers, attention_context.kv_layers, strict=True):
            # `residual` grows in place; each norm first adds the update of the half layer before it.
            hidden = _norm(layer.attention_norm, residual, update)
            update = layer.attention(hidden, cos, sin, kv_cache, metadata)
            hidden = layer.mlp_norm(update, residual)
            update = layer.mlp(hidden)
        return _norm(self.final_norm, residual, update)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_rows, hidden_size] -> logits float32 [num_rows, vocab_size]."""
        return self.head(hidden).float()

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and tables; a tied head counts once."""
        head = 0 if self.head.weight is self.embedding else self.head.nbytes
        layers = sum(layer.nbytes for layer in self.layers)
        return self.embedding.nbytes + layers + self.final_norm.nbytes + head + self.rotary.nbytes


def _norm(norm: RMSNorm, residual: torch.Tensor, update: torch.Tensor | None) -> torch.Tensor:
    return norm(residual) if update is None else norm(update, residual)


def check_supported(config: ModelConfig) -> None:
    """Raises UnsupportedModelError for a variant the configuration can name and the decoder does not compute."""
    unsupported = {
        f"the activation {config.activation}": config.activation != "silu",
        "norms of queries and keys": config.qk_norm != "none",
        f"norms {config.norm_placement} the layers": config.norm_placement != "before",
        "rope that differs from layer to layer": config.local_rope is not None,
        f"rope scaling {config.rope.scaling}": config.rope.scaling not in (None, "linear", "llama3"),
        "a soft cap on the logits": config.logits_soft_cap is not None,
        "scaled embeddings, residuals or logits": (
            (config.embedding_scale, config.residual_scale, config.logits_scale) != (1.0, 1.0, 1.0)
        ),
        "mixtures of experts": config.num_experts > 0,
    }
    for feature, present in unsupported.items():
        if present:
            raise UnsupportedModelError(f"{feature} ({config.architecture}) cannot be computed yet")


def build_decoder(
    config: ModelConfig,
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype,
    native: bool,
    on_tensor: Callable[[str], None],
) -> Decoder:
    """Reads all weights from `source` into a new decoder. Calls `on_tensor(name)` before each tensor is read.

    Matrices become dense numbers of `dtype` on `device`, or with `native` stay packed for the native
    CPU kernels; q, k, v and gate, up are fused row-wise.
    """
    reader = WeightReader(source, device, dtype, native, config.norm_weight_offset, on_tensor)
    embedding = reader.matrix([EMBEDDING])
    layers = [_build_layer(config, reader, index) for index in range(config.num_layers)]
    final_norm = RMSNorm(reader.norm_weight(FINAL_NORM), config.norm_eps)
    head = embedding if config.tie_word_embeddings else reader.matrix([HEAD])
    factors = reader.vector(ROPE_FACTORS, torch.float32) if ROPE_FACTORS in source.tensors else None
    rotary = RotaryTable(config.rope, config.max_context, device, factors)
    return Decoder(embedding, layers, final_norm, Linear(head), rotary)


def _build_layer(config: ModelConfig, reader: WeightReader, index: int) -> DecoderLayer:
    prefix = layer_prefix(index)
    attention = Attention(
        qkv=reader.linear([f"{prefix}self_attn.{name}_proj" for name in "qkv"], config.qkv_bias),
        output=reader.linear([f"{prefix}self_attn.o_proj"], config.attention_output_bias),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.scale,
        window=config.window(index),
        soft_cap=config.attention_soft_cap,
    )
    mlp = GatedMLP(
        gate_up=reader.linear([f"{prefix}mlp.{name}_proj" for name in ("gate", "up")], config.mlp_bias),
        down=reader.linear([f"{prefix}mlp.down_proj"], config.mlp_bias),
    )
    return DecoderLayer(
        attention_norm=RMSNorm(reader.norm_weight(f"{prefix}input_layernorm.weight"), config.norm_eps),
        attention=attention,
        mlp_norm=RMSNorm(reader.norm_weight(f"{prefix}post_attention_layernorm.weight"), config.norm_eps),
        mlp=mlp,
    )
