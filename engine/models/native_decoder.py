"""A decoder compiled for the native CPU kernels: its layers as one list of operations a step."""

from __future__ import annotations

import torch

from engine.kv_cache import NativeKVCache
from engine.layers.linear import Linear
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderLayer
from engine.quantization.native import NativeWeight
from kernels.cpu.library import AttentionSpec, Epilogue
from kernels.cpu.packing import PackedWeight, can_pack
from kernels.cpu.program import Activation, Program, StepBatch

MAX_COLUMNS = 16384
HEAD_ROWS = 32
"""Rows of logits computed at once: their buffer is the largest of all, and few are wanted in a step."""


def why_not_native(config: ModelConfig, block_size: int) -> str | None:
    """What about a model the native kernels cannot compute; None when they can."""
    columns = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    obstacles = {
        f"matrices of {', '.join(map(str, columns))} columns": not all(can_pack(width) for width in columns),
        f"a hidden size of {max(columns)}": max(columns) > MAX_COLUMNS,
        f"heads of {config.head_dim} dimensions": config.head_dim % 8 != 0 or config.head_dim > 256,
        f"{config.num_heads} query heads over {config.num_kv_heads}": config.num_heads > 32 * config.num_kv_heads,
        "biases in the feed-forward layer": config.mlp_bias,
        f"KV blocks of {block_size} tokens": block_size not in (8, 16, 32, 64),
    }
    return next((obstacle for obstacle, present in obstacles.items() if present), None)


class NativeDecoder:
    """Runs a decoder's layers over the native cache; the same numbers as its eager form up to rounding.

    Buffers are allocated once for `max_rows` rows. A row's result is the same bits whatever else
    is in the batch.
    """

    def __init__(self, decoder: Decoder, config: ModelConfig, kv_cache: NativeKVCache, max_rows: int) -> None:
        self._decoder = decoder
        self._config = config
        self._body = Program(max_rows)
        self._activations: dict[tuple[int, int], Activation] = {}
        hidden = self._body.floats(config.hidden_size)
        self._body.embed(_packed(decoder.embedding), hidden)
        qkv = self._body.floats((config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        attended = self._body.floats(config.num_heads * config.head_dim)
        gated = self._body.floats(config.intermediate_size)
        for index, layer in enumerate(decoder.layers):
            spec = self._attention_spec(index, kv_cache)
            self._add_layer(layer, spec, hidden, qkv, attended, gated)

        self._head = Program(HEAD_ROWS)
        selected = self._head.floats(config.hidden_size)
        self._logits = self._head.floats(config.vocab_size)
        head = _packed(decoder.head.weight)
        normed = self._head.activation(head.activation(), config.hidden_size)
        self._head.select(hidden, selected)
        self._head.norm(selected, decoder.final_norm.weight, decoder.final_norm.eps, normed, selected=True)
        self._head.matmul(normed, head, self._logits, selected=True)

    def forward(self, batch: StepBatch) -> None:
        """Computes a step and writes its keys and values; `logits` then reads the rows that are wanted."""
        self._body.run(batch)

    def logits(self, rows: list[int]) -> torch.Tensor:
        """Float32 [len(rows), vocab_size] of the last step's rows."""
        logits = torch.empty(len(rows), self._config.vocab_size)
        for first in range(0, len(rows), HEAD_ROWS):
            chunk = rows[first : first + HEAD_ROWS]
            self._head.run(StepBatch.selecting(chunk))
            logits[first : first + len(chunk)] = self._logits[: len(chunk)]
        return logits

    def profile(self, batch: StepBatch, rows: list[int]) -> dict[str, float]:
        """Seconds by kind of operation for one step; "head" is the logits."""
        seconds = self._body.profile(batch)
        seconds["head"] = sum(self._head.profile(StepBatch.selecting(rows[:HEAD_ROWS])).values())
        return seconds

    @property
    def workspace_bytes(self) -> int:
        return self._body.buffer_bytes + self._head.buffer_bytes

    def _attention_spec(self, index: int, kv_cache: NativeKVCache) -> AttentionSpec:
        config, rotary = self._config, self._decoder.rotary
        return AttentionSpec(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rope.dim,
            kv_cache.block_size,
            int(kv_cache.dtype == torch.float16),
            config.window(index) or 0,
            0,
            config.scale,
            config.attention_soft_cap or 0.0,
            config.norm_eps,
            0.0,
            rotary.cos.data_ptr(),
            rotary.sin.data_ptr(),
            None,
            None,
            kv_cache.keys[index].data_ptr(),
            kv_cache.values[index].data_ptr(),
        )

    def _add_layer(
        self,
        layer: DecoderLayer,
        spec: AttentionSpec,
        hidden: torch.Tensor,
        qkv: torch.Tensor,
        attended: torch.Tensor,
        gated: torch.Tensor,
    ) -> None:
        body = self._body
        normed = self._activation(layer.attention.qkv, precise=True)
        body.norm(hidden, layer.attention_norm.weight, layer.attention_norm.eps, normed)
        body.matmul(normed, _packed(layer.attention.qkv.weight), qkv, bias=layer.attention.qkv.bias)
        body.rope_kv(qkv, spec)
        body.attention(qkv, spec, attended)
        self._add_to_residual(attended, layer.attention.output, hidden, precise=False)
        normed = self._activation(layer.mlp.gate_up, precise=False)
        body.norm(hidden, layer.mlp_norm.weight, layer.mlp_norm.eps, normed)
        body.matmul(normed, _packed(layer.mlp.gate_up.weight), gated, Epilogue.SWIGLU)
        self._add_to_residual(gated, layer.mlp.down, hidden, precise=True)

    def _add_to_residual(self, source: torch.Tensor, linear: Linear, hidden: torch.Tensor, precise: bool) -> None:
        quantized = self._activation(linear, precise)
        self._body.quantize(source, quantized)
        self._body.matmul(quantized, _packed(linear.weight), hidden, Epilogue.ADD, linear.bias)

    def _activation(self, linear: Linear, precise: bool) -> Activation:
        """The buffer that a linear layer reads; layers of the same shape take turns with one."""
        packed = _packed(linear.weight)
        key = (packed.activation(precise), packed.columns)
        if key not in self._activations:
            self._activations[key] = self._body.activation(*key)
        return self._activations[key]


def _packed(weight: object) -> PackedWeight:
    assert isinstance(weight, NativeWeight)
    return weight.packed
