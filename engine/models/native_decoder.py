"""A decoder compiled for the native CPU kernels: its layers as one list of operations a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from engine.kv_cache import NativeKVCache
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP, MixtureOfExperts
from engine.layers.norm import RMSNorm
from engine.layers.rope import RotaryTable
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderLayer
from engine.quantization import QuantWeight, StackedWeight
from engine.quantization.native import NativeWeight
from kernels.cpu.library import AttentionSpec, CacheKind, Epilogue, WeightFormat
from kernels.cpu.packing import PackedWeight, can_pack, pack
from kernels.cpu.program import Activation, ExpertRouting, Program, StepBatch
from kernels.cpu.sampling import describe
from kernels.sampling import SamplingBatch

MAX_HIDDEN_SIZE = 16384
HEAD_ROWS = 32
"""Rows of logits computed at once: their buffer is the largest of all, and few are wanted in a step."""

_CACHE_KINDS = {torch.float32: CacheKind.F32, torch.float16: CacheKind.F16, torch.int8: CacheKind.INT8}


def unpackable(config: ModelConfig) -> str | None:
    """The columns of the matrices that the native kernels have no tiles for; None when they have them for all."""
    widths = {config.hidden_size, config.num_heads * config.head_dim}
    widths |= {_mlp_width(config, index) for index in range(config.num_layers)}
    columns = sorted(width for width in widths if not can_pack(width))
    return f"matrices of {', '.join(map(str, columns))} columns" if columns else None


def _mlp_width(config: ModelConfig, layer: int) -> int:
    return config.expert_intermediate_size if config.has_experts(layer) else config.intermediate_size


def why_not_native(config: ModelConfig, block_size: int) -> str | None:
    """What about a model the native kernels cannot compute as one list of operations; None when they can."""
    columns = unpackable(config)
    obstacles = {
        f"{columns}": columns is not None,
        f"a hidden size of {config.hidden_size}": config.hidden_size > MAX_HIDDEN_SIZE,
        f"heads of {config.head_dim} dimensions": config.head_dim % 8 != 0 or config.head_dim > 256,
        f"{config.num_heads} query heads over {config.num_kv_heads}": config.num_heads > 32 * config.num_kv_heads,
        f"KV blocks of {block_size} tokens": block_size not in (8, 16, 32, 64),
        "experts with a norm after them": config.num_experts > 0 and config.norm_placement != "before",
    }
    return next((obstacle for obstacle, present in obstacles.items() if present), None)


def is_packed(decoder: Decoder) -> bool:
    """Whether the weights that a `NativeDecoder` streams are all in the native kernels' tiles, as it takes them."""
    return all(_read_one_activation(weights) for weights in _streamed(decoder))


def _streamed(decoder: Decoder) -> Iterator[Sequence[QuantWeight]]:
    """The weights of each matrix product: one, or those of all experts."""
    yield [decoder.embedding]
    yield [decoder.head.weight]
    for layer in decoder.layers:
        yield from ([part] for part in _parts(layer.attention.qkv.weight))
        yield [layer.attention.output.weight]
        experts = layer.mlp.experts if isinstance(layer.mlp, MixtureOfExperts) else [layer.mlp]
        yield [expert.gate_up.weight for expert in experts]
        yield [expert.down.weight for expert in experts]


def _read_one_activation(weights: Sequence[QuantWeight]) -> bool:
    packed = [weight.packed for weight in weights if isinstance(weight, NativeWeight)]
    return len(packed) == len(weights) and len({weight.activation() for weight in packed}) == 1


class NativeDecoder:
    """Runs a decoder's layers over the native cache; the same numbers as its eager form up to rounding.

    The operations of `program` from `first_of_head` on are those for the logits. Buffers are allocated once for
    `max_rows` rows, those of the logits for `HEAD_ROWS`. A row's result is the same bits whatever else is in the batch.
    """

    def __init__(self, decoder: Decoder, config: ModelConfig, kv_cache: NativeKVCache, max_rows: int) -> None:
        self._decoder = decoder
        self._config = config
        self._kv_cache = kv_cache
        self.program = Program(max_rows)
        self._activations: dict[tuple[int, int, int], Activation] = {}
        self._floats: dict[str, torch.Tensor] = {}
        self._routing: ExpertRouting | None = None
        self._angles: dict[RotaryTable, tuple[torch.Tensor, torch.Tensor]] = {}
        self._hidden = self.program.floats(config.hidden_size)
        self.program.embed(_packed(decoder.embedding), self._hidden, config.embedding_scale)
        for index, layer in enumerate(decoder.layers):
            self._add_layer(layer, self._attention_spec(index, layer))

        self.first_of_head = len(self.program.ops)
        selected = self.program.floats(config.hidden_size, HEAD_ROWS)
        self._logits = self.program.floats(config.vocab_size, HEAD_ROWS)
        self._first_logits = [self._logits[:count] for count in range(HEAD_ROWS + 1)]
        head = _packed(decoder.head.weight)
        normed = self.program.activation(head.activation(), config.hidden_size, HEAD_ROWS)
        self.program.select(self._hidden, selected)
        self.program.norm(selected, decoder.final_norm.weight, decoder.final_norm.eps, normed, selected=True)
        self.program.matmul(
            normed, head, self._logits, factor=config.logits_scale, soft_cap=config.logits_soft_cap, selected=True
        )

    def logits(self, batch: StepBatch, rows: list[int], rope_lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Computes a step and writes its keys and values: logits of `rows`, float32 [len(rows), vocab_size].

        The batch selects these rows if they are not more than `HEAD_ROWS`, and none otherwise. The next step may
        write over what is returned. `rope_lengths` as in `engine.layers.attention.AttentionContext`.
        """
        if self._angles:
            self._fill_angles(batch, rope_lengths)
        if batch.num_selected:
            self.program.run(batch)
            return self._first_logits[batch.num_selected]
        self.program.run(batch, end=self.first_of_head)
        logits = torch.empty(len(rows), self._config.vocab_size)
        for first in range(0, len(rows), HEAD_ROWS):
            chunk = rows[first : first + HEAD_ROWS]
            self.program.run(StepBatch.selecting(chunk), self.first_of_head)
            logits[first : first + len(chunk)] = self._logits[: len(chunk)]
        return logits

    @property
    def needs_host(self) -> bool:
        """Whether the host has to prepare something for each step."""
        return bool(self._angles)

    def decode(
        self, batch: StepBatch, sampling: SamplingBatch, vocab_size: int, num_steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decodes that many tokens of each sequence, one after another, with one row of each, which is selected.

        `sampling` is for all steps, as `kernels.cpu.sampling.describe` takes it; ids from `vocab_size` on are never
        drawn. Returns token ids and whether their logits were healthy, [num_steps * num_rows], step by step.
        """
        assert not self.needs_host
        logits = self._first_logits[batch.num_selected][:, :vocab_size]
        described, token_ids, healthy = describe(logits, sampling, num_steps)
        self.program.run_steps(batch, described, num_steps, self._kv_cache.block_size)
        return token_ids, healthy

    def _fill_angles(self, batch: StepBatch, rope_lengths: torch.Tensor | None) -> None:
        positions = torch.tensor(batch.positions)
        lengths = positions + 1 if rope_lengths is None else rope_lengths
        for rotary, (cos, sin) in self._angles.items():
            both = rotary(positions, lengths, torch.float32)
            for buffer, values in zip((cos, sin), both):  # the second halves: there sin is not negated
                buffer[: positions.shape[0]] = values[:, buffer.shape[1] :]

    @property
    def workspace_bytes(self) -> int:
        return self.program.buffer_bytes

    def _attention_spec(self, index: int, layer: DecoderLayer) -> AttentionSpec:
        config, cache, attention = self._config, self._kv_cache, layer.attention
        cos, sin = self._rope_tables(index, layer.rotary)
        return AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=0 if cos is None else 2 * cos.shape[1],
            block_size=cache.block_size,
            cache_kind=_CACHE_KINDS[cache.dtype],
            window=attention.window or 0,
            rope_by_row=layer.rotary in self._angles,
            full_width_norm=config.qk_norm == "full_width",
            scale=attention.scale,
            soft_cap=attention.soft_cap or 0.0,
            norm_eps=config.norm_eps,
            cos=_address(cos),
            sin=_address(sin),
            q_norm=_address(attention.q_norm),
            k_norm=_address(attention.k_norm),
            sinks=_address(attention.sinks),
            keys=_address(cache.keys[index]),
            values=_address(cache.values[index]),
            key_scales=_address(cache.key_scales[index] if cache.key_scales else None),
            value_scales=_address(cache.value_scales[index] if cache.value_scales else None),
        )

    def _rope_tables(
        self, index: int, rotary: RotaryTable | None
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """A layer's cosines and sines: of every position, or where that is not all they depend on, of each row."""
        rope = self._config.layer_rope(index)
        if rotary is None or rope is None:
            return None, None
        if not rope.depends_on_length:
            return rotary.cos, rotary.sin
        if rotary not in self._angles:
            self._angles[rotary] = (self.program.floats(rope.dim // 2), self.program.floats(rope.dim // 2))
        return self._angles[rotary]

    def _add_layer(self, layer: DecoderLayer, spec: AttentionSpec) -> None:
        config, body, attention = self._config, self.program, layer.attention
        qkv = self._buffer("qkv", (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        attended = self._buffer("attended", config.num_heads * config.head_dim)
        first, normed = 0, {}  # a part of another format may read its input in another form
        for part in map(_packed, _parts(attention.qkv.weight)):
            kind = part.activation()
            if kind not in normed:
                normed[kind] = self._read_hidden(part, layer.attention_norm, precise=True)
            bias = attention.qkv.bias
            columns = slice(first, first + part.rows)
            body.matmul(normed[kind], part, qkv[:, columns], bias=None if bias is None else bias[columns])
            first += part.rows
        body.rope_kv(qkv, spec)
        body.attention(qkv, spec, attended)
        self._add_to_hidden(attended, attention.output, layer.attention_output_norm, precise=False)
        if isinstance(layer.mlp, MixtureOfExperts):
            self._add_experts(layer.mlp, layer.mlp_norm)
        else:
            self._add_mlp(layer.mlp, layer.mlp_norm, layer.mlp_output_norm)

    def _add_mlp(self, mlp: GatedMLP, norm: RMSNorm | None, output_norm: RMSNorm | None) -> None:
        gated = self._buffer("gated", mlp.down.weight.shape[1])
        normed = self._read_hidden(_packed(mlp.gate_up.weight), norm, precise=False)
        self.program.matmul(normed, _packed(mlp.gate_up.weight), gated, bias=mlp.gate_up.bias, **self._gate())
        self._add_to_hidden(gated, mlp.down, output_norm, precise=True)

    def _add_experts(self, mlp: MixtureOfExperts, norm: RMSNorm | None) -> None:
        config, body = self._config, self.program
        assert norm is not None, "why_not_native lets only such experts through"
        gate_ups = [_packed(expert.gate_up.weight) for expert in mlp.experts]
        downs = [_packed(expert.down.weight) for expert in mlp.experts]
        normed = self._buffer("normed", config.hidden_size)
        body.plain_norm(self._hidden, norm.weight, norm.eps, normed)

        router = _router(mlp.router)
        read = self._activation(router, precise=True)
        logits = self._buffer("router", len(mlp.experts))
        body.quantize(normed, read)
        body.matmul(read, router, logits, bias=mlp.router.bias)
        if self._routing is None:
            self._routing = body.routing(len(mlp.experts), mlp.num_chosen, mlp.normalize)
        routing = self._routing
        body.route(logits, routing)

        rows = routing.max_shares
        gathered = self._activation(gate_ups[0], precise=False, rows=rows)
        gated = self._buffer("gated shares", downs[0].columns, rows)
        quantized = self._activation(downs[0], precise=True, rows=rows)
        shares = self._buffer("shares", config.hidden_size, rows)
        body.gather(normed, routing, gathered)
        body.expert_matmul(
            gathered, gate_ups, routing, gated, bias=_stacked([e.gate_up.bias for e in mlp.experts]), **self._gate()
        )
        body.quantize(gated, quantized, routing)
        body.expert_matmul(quantized, downs, routing, shares, bias=_stacked([e.down.bias for e in mlp.experts]))
        body.combine(shares, routing, self._hidden, config.residual_scale)

    def _read_hidden(self, weight: PackedWeight, norm: RMSNorm | None, precise: bool) -> Activation:
        activation = self._activation(weight, precise)
        if norm is None:
            self.program.quantize(self._hidden, activation)
        else:
            self.program.norm(self._hidden, norm.weight, norm.eps, activation)
        return activation

    def _add_to_hidden(self, source: torch.Tensor, linear: Linear, norm: RMSNorm | None, precise: bool) -> None:
        scale, weight = self._config.residual_scale, _packed(linear.weight)
        quantized = self._activation(weight, precise)
        self.program.quantize(source, quantized)
        if norm is None:
            self.program.matmul(quantized, weight, self._hidden, Epilogue.ADD, linear.bias, factor=scale)
            return
        update = self._buffer("update", self._config.hidden_size)
        self.program.matmul(quantized, weight, update, bias=linear.bias)
        gain = norm.weight if scale == 1.0 else norm.weight * scale
        self.program.plain_norm(update, gain, norm.eps, self._hidden, add=True)

    def _gate(self) -> dict[str, Any]:
        config = self._config
        if config.activation == "clamped_swiglu":
            return {
                "epilogue": Epilogue.CLAMPED_SWIGLU,
                "factor": config.swiglu_alpha,
                "soft_cap": config.swiglu_limit,
            }
        return {"epilogue": {"silu": Epilogue.SWIGLU, "gelu_tanh": Epilogue.GEGLU}[config.activation]}

    def _buffer(self, name: str, columns: int, rows: int | None = None) -> torch.Tensor:
        """A buffer that all layers take turns with."""
        key = f"{name} {columns}"
        if key not in self._floats:
            self._floats[key] = self.program.floats(columns, rows)
        return self._floats[key]

    def _activation(self, weight: PackedWeight, precise: bool, rows: int | None = None) -> Activation:
        """The buffer that a matrix product reads; those of the same shape take turns with one."""
        key = (weight.activation(precise), weight.columns, rows or self.program.max_rows)
        if key not in self._activations:
            self._activations[key] = self.program.activation(*key)
        return self._activations[key]


def _parts(weight: QuantWeight) -> Sequence[QuantWeight]:
    """Matrices on top of each other, which differ in format."""
    return weight.parts if isinstance(weight, StackedWeight) else [weight]


def _packed(weight: object) -> PackedWeight:
    assert isinstance(weight, NativeWeight)
    return weight.packed


def _router(linear: Linear) -> PackedWeight:
    """A router's few weights, in floats as its choices are all or nothing, in the layout of the native kernels."""
    weight = linear.weight
    if isinstance(weight, NativeWeight):
        return weight.packed
    return pack([weight.dequantize().float().contiguous()], WeightFormat.F32, weight.shape[1])


def _stacked(biases: list[torch.Tensor | None]) -> torch.Tensor | None:
    present = [bias for bias in biases if bias is not None]
    return torch.stack(present) if present else None


def _address(values: torch.Tensor | RMSNorm | None) -> int | None:
    tensor = values.weight if isinstance(values, RMSNorm) else values
    return None if tensor is None else tensor.data_ptr()
