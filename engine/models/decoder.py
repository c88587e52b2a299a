"""One decoder for all Llama-shaped families, driven by `ModelConfig`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.layers.attention import Attention, AttentionContext
from engine.layers.linear import Linear
from engine.layers.mlp import Gate, GatedMLP, MixtureOfExperts
from engine.layers.norm import RMSNorm
from engine.layers.rope import RotaryTable, no_rotation
from engine.loading.names import EMBEDDING, FINAL_NORM, HEAD, ROPE_FACTORS, layer_prefix
from engine.loading.reader import WeightReader
from engine.loading.weights import WeightSource
from engine.models.config import ModelConfig, ModelError, RopeConfig
from engine.quantization import DenseWeight, QuantWeight, StackedWeight
from engine.quantization.rounding import Rounding
from engine.quantization.triton_tiles import TritonWeight
from kernels import ops


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and a feed-forward layer; the norms that a family lacks are None, as is the rope of a layer without."""

    attention: Attention
    mlp: GatedMLP | MixtureOfExperts
    rotary: RotaryTable | None
    attention_norm: RMSNorm | None = None
    attention_output_norm: RMSNorm | None = None
    mlp_norm: RMSNorm | None = None
    mlp_output_norm: RMSNorm | None = None

    @property
    def nbytes(self) -> int:
        norms = (self.attention_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm)
        return self.attention.nbytes + self.mlp.nbytes + sum(norm.nbytes for norm in norms if norm is not None)


class Decoder:
    """Token ids in, hidden states out; `compute_logits` turns the rows that are wanted into logits."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: QuantWeight,
        layers: list[DecoderLayer],
        final_norm: RMSNorm,
        head: Linear,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.head = head

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention_context: AttentionContext
    ) -> torch.Tensor:
        """int64 [num_tokens] each -> hidden states [num_tokens, hidden_size], final norm applied.

        Writes the tokens' keys and values to the cache. Raises IndexError for a token id or position out of range.
        """
        metadata = attention_context.metadata
        residual = self.embedding.rows(input_ids)
        if self.config.embedding_scale != 1.0:
            residual = residual * self.config.embedding_scale
        rotations = self._rotations(positions, attention_context.rope_lengths, residual.dtype)
        update: torch.Tensor | None = None
        for layer, kv_cache in zip(self.layers, attention_context.kv_layers, strict=True):
            # `residual` grows in place; each norm first adds the update of the half layer before it.
            hidden = _norm_input(layer.attention_norm, residual, update)
            update = layer.attention(hidden, *rotations[layer.rotary], kv_cache, metadata)
            update = self._norm_output(layer.attention_output_norm, update)
            hidden = _norm_input(layer.mlp_norm, residual, update)
            update = self._norm_output(layer.mlp_output_norm, layer.mlp(hidden))
        return _norm_input(self.final_norm, residual, update)

    def logits(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention_context: AttentionContext,
        rows: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `forward`, and then the logits of the rows named (int64 [num_rows]), or of all: see `compute_logits`."""
        hidden = self.forward(input_ids, positions, attention_context)
        return self.compute_logits(hidden if rows is None else hidden[rows], out)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [num_rows, hidden_size] -> logits float32 [num_rows, vocab_size], in `out` if that is given."""
        logits = self.head(hidden)
        # Sampling reads row by row, and a product of few rows may come as a view of columns.
        logits = logits.float().contiguous() if out is None else out.copy_(logits)
        if self.config.logits_scale != 1.0:
            logits.mul_(self.config.logits_scale)
        soft_cap = self.config.logits_soft_cap
        return logits if soft_cap is None else logits.div_(soft_cap).tanh_().mul_(soft_cap)

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can hold a step: with the Triton kernels, nothing in it waits for the device."""
        weights = [self.embedding, self.head.weight]
        for layer in self.layers:
            weights += [layer.attention.qkv.weight, layer.attention.output.weight]
            if isinstance(layer.mlp, GatedMLP):
                weights += [layer.mlp.gate_up.weight, layer.mlp.down.weight]
            elif layer.mlp.is_capturable:
                weights.append(layer.mlp.router.weight)
            else:
                return False
        # The rows of such a table are unpacked by numbers that come from the host.
        has_float_codes = isinstance(self.embedding, TritonWeight) and self.embedding.tiled.is_float
        return not has_float_codes and all(map(_is_capturable, weights))

    @property
    def rotaries(self) -> list[RotaryTable]:
        """The tables that the layers share, each once."""
        return list(dict.fromkeys(layer.rotary for layer in self.layers if layer.rotary is not None))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and tables; a tied head counts once."""
        head = 0 if self.head.weight is self.embedding else self.head.nbytes
        layers = sum(layer.nbytes for layer in self.layers)
        rotaries = sum(rotary.nbytes for rotary in self.rotaries)
        return self.embedding.nbytes + layers + self.final_norm.nbytes + head + rotaries

    def _rotations(
        self, positions: torch.Tensor, lengths: torch.Tensor | None, dtype: torch.dtype
    ) -> dict[RotaryTable | None, tuple[torch.Tensor, torch.Tensor]]:
        lengths = positions + 1 if lengths is None else lengths
        rotations: dict[RotaryTable | None, tuple[torch.Tensor, torch.Tensor]] = {
            rotary: rotary(positions, lengths, dtype) for rotary in self.rotaries
        }
        rotations[None] = no_rotation(positions.shape[0], dtype, positions.device)
        return rotations

    def _norm_output(self, norm: RMSNorm | None, update: torch.Tensor) -> torch.Tensor:
        """What a half layer adds to the residual."""
        update = update if norm is None else norm(update)
        return update if self.config.residual_scale == 1.0 else update * self.config.residual_scale


def _is_capturable(weight: QuantWeight) -> bool:
    if isinstance(weight, StackedWeight):
        return all(map(_is_capturable, weight.parts))
    return isinstance(weight, (DenseWeight, TritonWeight))


def _norm_input(norm: RMSNorm | None, residual: torch.Tensor, update: torch.Tensor | None) -> torch.Tensor:
    """Adds `update` to the residual in place; the result, normalised, is what the next half layer reads."""
    if norm is not None:
        return norm(residual) if update is None else norm(update, residual)
    return residual if update is None else residual.add_(update)


def build_decoder(
    config: ModelConfig,
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype,
    native: bool,
    on_tensor: Callable[[str], None],
    rounding: Rounding | None = None,
) -> Decoder:
    """Reads all weights from `source` into a new decoder. Calls `on_tensor(name)` before each tensor is read.

    Matrices become dense numbers of `dtype` on `device`, or with `native` stay packed for the native
    CPU kernels; q, k, v and gate, up are fused row-wise. `rounding` quantises them on the way.
    """
    reader = WeightReader(source, device, dtype, native, config.norm_weight_offset, on_tensor, rounding)
    decoder = _Builder(config, source, reader, device, dtype).decoder()
    reader.finish()
    return decoder


class _Builder:
    def __init__(
        self, config: ModelConfig, source: WeightSource, reader: WeightReader, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.source = source
        self.reader = reader
        self.device = device
        self.dtype = dtype
        self.gated = _gate(config)
        self.rotaries: dict[RopeConfig, RotaryTable] = {}

    def decoder(self) -> Decoder:
        config, reader = self.config, self.reader
        embedding = reader.matrix([EMBEDDING])
        layers = [self.layer(index) for index in range(config.num_layers)]
        final_norm = RMSNorm(reader.norm_weight(FINAL_NORM), config.norm_eps)
        head = embedding if config.tie_word_embeddings else reader.matrix([HEAD])
        return Decoder(config, embedding, layers, final_norm, Linear(head))

    def layer(self, index: int) -> DecoderLayer:
        prefix, placement = layer_prefix(index), self.config.norm_placement
        before, after = placement != "after", placement != "before"
        return DecoderLayer(
            attention=self.attention(index),
            mlp=self.experts(prefix) if self.config.has_experts(index) else self.dense_mlp(f"{prefix}mlp."),
            rotary=self.rotary(self.config.layer_rope(index)),
            attention_norm=self.norm(f"{prefix}input_layernorm") if before else None,
            attention_output_norm=self.norm(f"{prefix}post_self_attn_layernorm") if after else None,
            mlp_norm=self.norm(f"{prefix}post_attention_layernorm") if before else None,
            mlp_output_norm=self.norm(f"{prefix}post_mlp_layernorm") if after else None,
        )

    def attention(self, index: int) -> Attention:
        config, reader, prefix = self.config, self.reader, layer_prefix(index)
        has_norms = config.qk_norm != "none"
        return Attention(
            qkv=reader.linear([f"{prefix}self_attn.{name}_proj" for name in "qkv"], config.qkv_bias),
            output=reader.linear([f"{prefix}self_attn.o_proj"], config.attention_output_bias),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.scale,
            window=config.window(index),
            soft_cap=config.attention_soft_cap,
            q_norm=self.norm(f"{prefix}self_attn.q_norm") if has_norms else None,
            k_norm=self.norm(f"{prefix}self_attn.k_norm") if has_norms else None,
            sinks=reader.vector(f"{prefix}self_attn.sinks", torch.float32) if config.attention_sinks else None,
        )

    def dense_mlp(self, prefix: str, is_expert: bool = False) -> GatedMLP:
        has_bias = self.config.expert_bias if is_expert else self.config.mlp_bias
        return GatedMLP(
            gate_up=self.reader.linear([f"{prefix}{name}_proj" for name in ("gate", "up")], has_bias),
            down=self.reader.linear([f"{prefix}down_proj"], has_bias),
            gated=self.gated,
        )

    def experts(self, prefix: str) -> MixtureOfExperts:
        config = self.config
        # A router is small and its choices are all or nothing: it is never packed.
        router = DenseWeight(self.reader.vector(f"{prefix}mlp.gate.weight", self.dtype))
        bias = self.reader.vector(f"{prefix}mlp.gate.bias", self.dtype) if config.router_bias else None
        return MixtureOfExperts(
            Linear(router, bias),
            [self.dense_mlp(f"{prefix}mlp.experts.{expert}.", is_expert=True) for expert in range(config.num_experts)],
            config.num_experts_per_token,
            config.normalize_expert_weights,
        )

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.reader.norm_weight(f"{name}.weight"), self.config.norm_eps)

    def rotary(self, rope: RopeConfig | None) -> RotaryTable | None:
        """One table for all layers with the same rope."""
        if rope is None:
            return None
        if rope not in self.rotaries:
            self.rotaries[rope] = self._rotary_table(rope)
        return self.rotaries[rope]

    def _rotary_table(self, rope: RopeConfig) -> RotaryTable:
        stored = self.source.tensors.get(ROPE_FACTORS) if rope is self.config.rope else None
        if stored is not None and stored.shape != (rope.dim // 2,):
            raise ModelError(
                f"{self.source.label}: tensor {stored.stored_name!r} has shape {list(stored.shape)}, "
                f"but the rope of {rope.dim} dimensions asks for {rope.dim // 2} factors"
            )
        factors = None if stored is None else self.reader.vector(ROPE_FACTORS, torch.float32)
        return RotaryTable(rope, self.config.max_context, self.device, factors)


def _gate(config: ModelConfig) -> Gate:
    if config.activation == "clamped_swiglu":
        return functools.partial(ops.clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    return {"silu": ops.silu_and_mul, "gelu_tanh": ops.gelu_tanh_and_mul}[config.activation]
