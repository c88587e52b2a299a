"""What loading a model will take, and whether it fits: arithmetic from metadata alone. All sizes are bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from msgspec.structs import replace

from engine.memory.measure import DeviceMemory, MemoryKind
from engine.memory.precision import Hardware, kv_bytes_per_token, precision_of, weight_bytes
from engine.memory.shape import ModelShape
from engine.memory.text import format_bytes
from engine.protocol import EngineConfig

# What a worker holds besides its tensors. RAM: interpreter, torch and transformers, measured at 280 MiB on the
# starter model, rounded up. VRAM: driver context and libraries, a usual figure, not measured here.
RUNTIME_BYTES: dict[MemoryKind, int] = {"RAM": 320 << 20, "VRAM": 600 << 20}

MIN_POOL_TOKENS = 16384
# Of what is free once the weights are there, for the KV cache. RAM is somebody's desktop; of VRAM, the rest is for
# activations.
KV_CACHE_SHARE: dict[MemoryKind, float] = {"RAM": 0.25, "VRAM": 0.85}
# Tokens a step computes at most. A CPU needs about a millisecond for each even with a small model, and all
# running answers wait for the step.
BATCHED_TOKENS: dict[MemoryKind, int] = {"RAM": 128, "VRAM": 2048}
# Rows of logits that the native decoder computes at once.
_NATIVE_HEAD_ROWS = 32


def planned_kv_tokens(max_context: int, max_num_seqs: int) -> int:
    """Tokens the KV cache is made for where memory allows: one full context and several usual chats."""
    return min(max_num_seqs * max_context, max(max_context, MIN_POOL_TOKENS))


def affordable_kv_bytes(kind: MemoryKind, free: int) -> int:
    """The most a KV cache may take of the `free` bytes there are once the weights are loaded."""
    return int(KV_CACHE_SHARE[kind] * max(0, free))


def default_batched_tokens(kind: MemoryKind, max_num_seqs: int) -> int:
    """Tokens a step computes at most, where nothing else was asked for; every running answer has its place."""
    return max(BATCHED_TOKENS[kind], max_num_seqs)


def workspace_bytes(shape: ModelShape, max_batched_tokens: int, max_num_seqs: int) -> int:
    """Activations of one step in float32: residual, norm, q/k/v, attention output and both MLP halves for each
    token, and logits, probabilities and a sorted copy for each sequence."""
    attention = 2 * max(shape.kv_heads, default=0) * (shape.key_dim + shape.value_dim)
    per_token = 4 * shape.hidden_size + attention + 3 * shape.intermediate_size
    return 4 * (max_batched_tokens * per_token + 3 * max_num_seqs * shape.vocab_size)


def native_workspace_bytes(shape: ModelShape, max_batched_tokens: int, four_bit: bool, eight_bit: bool) -> int:
    """Buffers of the native decoder: residual, q/k/v, attention output and MLP in float32 and once more as inputs of
    matrix products, for each token; logits for a few rows.

    Inputs of plain matrices stay float32; of `eight_bit` ones they have 16 bits, of `four_bit` ones 8 or 16, and a
    scale and a sum for each 32.
    """
    kv_heads = max(shape.kv_heads, default=0)
    attended = shape.num_heads * shape.value_dim
    qkv = (shape.num_heads + kv_heads) * shape.key_dim + kv_heads * shape.value_dim
    floats = 4 * (shape.hidden_size + qkv + attended + shape.intermediate_size)
    widths = shape.hidden_size + (0 if attended == shape.hidden_size else attended) + shape.intermediate_size
    inputs = 2.25 * widths if four_bit or eight_bit else 4 * widths
    if four_bit:
        inputs += 1.25 * shape.hidden_size
    if shape.has_norms_after:
        floats += 4 * shape.hidden_size
    if shape.experts_per_token:  # the router's input twice, and a row in and one out for each expert's share
        a_share = 4 + (2.25 if four_bit or eight_bit else 4)
        floats += int(shape.hidden_size * (2 * 4 + shape.experts_per_token * a_share))
    head = _NATIVE_HEAD_ROWS * 4 * (2 * shape.hidden_size + shape.vocab_size)
    return int(max_batched_tokens * (floats + inputs)) + head


@dataclass(frozen=True)
class MemoryEstimate:
    """What loading a model takes.

    `context` is what one chat can hold, in tokens; the KV cache holds `num_blocks` of `block_size` tokens for all
    chats together. `draft` is what a draft model takes besides, weights, workspace and `draft_kv_cache` together.
    """

    weights: int
    kv_cache: int
    workspace: int
    runtime: int
    context: int
    num_blocks: int
    block_size: int
    draft: int = 0
    draft_kv_cache: int = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens the KV cache holds, for all chats together."""
        return self.num_blocks * self.block_size

    @property
    def block_bytes(self) -> int:
        """K and V of one block, those of the draft model included."""
        return (self.kv_cache + self.draft_kv_cache) // self.num_blocks

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.workspace + self.runtime + self.draft

    def with_blocks(self, num_blocks: int) -> MemoryEstimate:
        """The same with a KV cache of another size."""
        draft_kv_cache = self.draft_kv_cache // self.num_blocks * num_blocks
        return dataclasses.replace(
            self,
            num_blocks=num_blocks,
            kv_cache=self.kv_cache // self.num_blocks * num_blocks,
            draft=self.draft - self.draft_kv_cache + draft_kv_cache,
            draft_kv_cache=draft_kv_cache,
        )


def estimate(
    shape: ModelShape, config: EngineConfig, hardware: Hardware, draft: ModelShape | None = None
) -> MemoryEstimate:
    """What the engine takes for a model loaded with `config`, where there is room; `config.model` is not looked at.

    `draft` is the draft model's shape where `config.speculation` is "draft": its weights and its own KV cache come
    on top. A `config.max_context` of None is the model's own.
    """
    context = min(shape.max_context, config.max_context or shape.max_context)
    tokens = planned_kv_tokens(context, config.max_num_seqs)
    num_blocks = config.num_kv_blocks or max(1, -(-tokens // config.block_size))
    tokens = num_blocks * config.block_size
    draft_kv_cache = draft_rest = 0
    if draft is not None and config.speculation == "draft":
        own = replace(config, quantization=None, backend="auto")
        draft_kv_cache = tokens * kv_bytes_per_token(draft, precision_of(own, hardware).kv)
        draft_rest = _weights(draft, own, hardware, min(context, draft.max_context))
        draft_rest += _workspace(draft, own, hardware)
    return MemoryEstimate(
        weights=_weights(shape, config, hardware, context),
        kv_cache=tokens * kv_bytes_per_token(shape, precision_of(config, hardware).kv),
        workspace=_workspace(shape, config, hardware),
        runtime=RUNTIME_BYTES[hardware.kind],
        context=context,
        num_blocks=num_blocks,
        block_size=config.block_size,
        draft=draft_kv_cache + draft_rest,
        draft_kv_cache=draft_kv_cache,
    )


def _weights(shape: ModelShape, config: EngineConfig, hardware: Hardware, context: int) -> int:
    """Weights and the tables of rotary angles: cos and sin of each pair, in float32, for every position."""
    tables = 4 * shape.rope_dims * context if config.backend != "transformers" else 0
    return weight_bytes(shape, precision_of(config, hardware)) + tables


def _workspace(shape: ModelShape, config: EngineConfig, hardware: Hardware) -> int:
    precision = precision_of(config, hardware)
    budget = config.max_batched_tokens or default_batched_tokens(hardware.kind, config.max_num_seqs)
    if precision.native and precision.own_decoder:
        bits = {_bits(group.stored, config) for group in shape.weights if group.role in ("layers", "experts")}
        return native_workspace_bytes(shape, budget, 4 in bits, 8 in bits)
    drafts = config.num_draft_tokens if config.speculation is not None else 0
    return workspace_bytes(shape, budget, config.max_num_seqs * (1 + drafts))


def _bits(stored: str, config: EngineConfig) -> int:
    """About how many bits a weight has in the native tiles: 4, 8, or 32 for plain numbers."""
    if config.quantization is not None:
        return 4 if config.quantization == "int4" else 8
    if stored in ("F32", "F16", "BF16", "F8"):
        return 32
    return 8 if stored in ("Q8_0", "INT8") else 4


@dataclass(frozen=True)
class Fit:
    """Whether a model can be loaded with the context asked for.

    `granted` is what it will take: as estimated, with a KV cache no larger than there is room for. `largest_context`
    is the longest chat that cache could hold, in tokens, 0 where the model does not fit at all.
    """

    fits: bool
    granted: MemoryEstimate
    available: int
    largest_context: int
    message: str

    @property
    def needed(self) -> int:
        return self.granted.total


def fits(wanted: MemoryEstimate, device: DeviceMemory) -> Fit:
    """Compares an estimate with what is free on a device.

    As at load, the KV cache takes no more than its share of what the weights leave free: a smaller one still
    fits as long as one chat's whole context has room in it.
    """
    available = device.free
    free = f"{format_bytes(available)} {device.kind} free"
    caches = wanted.kv_cache + wanted.draft_kv_cache
    without_caches = wanted.total - caches
    after_weights = available - (without_caches - wanted.workspace)
    left = min(affordable_kv_bytes(device.kind, after_weights), max(0, available - without_caches))
    num_blocks = left // wanted.block_bytes
    if num_blocks == 0:
        message = f"does not fit: needs {format_bytes(wanted.total)}, {free}"
        return Fit(False, wanted, available, 0, message)
    granted = wanted.with_blocks(min(num_blocks, wanted.num_blocks))
    largest = num_blocks * wanted.block_size
    if largest >= wanted.context:
        return Fit(True, granted, available, largest, f"fits: needs {format_bytes(granted.total)} of {free}")
    whole = -(-wanted.context // wanted.block_size) * wanted.block_bytes
    message = (
        f"fits with a context of {largest} tokens at most: of {free}, the KV cache may take {format_bytes(left)}, "
        f"and {wanted.context} tokens need {format_bytes(whole)}"
    )
    return Fit(False, granted, available, largest, message)
