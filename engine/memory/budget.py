"""What loading a model will take, and whether it fits: arithmetic from metadata alone. All sizes are bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from msgspec.structs import replace

from engine.graph_sizes import most_tokens, num_graphs
from engine.memory.measure import DeviceMemory, MemoryKind
from engine.memory.precision import PLAIN_BYTES, Hardware, kv_bytes_per_token, precision_of, weight_bytes
from engine.memory.shape import ModelShape
from engine.memory.text import format_bytes
from engine.memory.workspace import graph_bytes, native_workspace_bytes, workspace_bytes
from engine.protocol import EngineConfig

# What a worker holds besides its tensors. RAM: interpreter, torch and transformers, measured at 280 MiB on the
# starter model, rounded up. VRAM: driver context and libraries, a usual figure, not measured here.
RUNTIME_BYTES: dict[MemoryKind, int] = {"RAM": 320 << 20, "VRAM": 600 << 20}

MIN_POOL_TOKENS = 16384
# Of the RAM that is free once the weights are there, for the KV cache: it is somebody's desktop.
_RAM_SHARE = 0.25
# VRAM that is left alone besides: what the allocator loses to rounding, kernels that are loaded late, and what the
# driver takes for them.
RESERVE_BYTES = 128 << 20
# Tokens a step computes at most. A CPU needs about a millisecond for each even with a small model, and all
# running answers wait for the step.
BATCHED_TOKENS: dict[MemoryKind, int] = {"RAM": 128, "VRAM": 2048}


def planned_kv_tokens(kind: MemoryKind, max_context: int, max_num_seqs: int) -> int:
    """Tokens the KV cache is made for where memory allows: in VRAM, which is there for it, every chat that can run
    at once has its whole context; in RAM one has, or several usual chats."""
    every = max_num_seqs * max_context
    return every if kind == "VRAM" else min(every, max(max_context, MIN_POOL_TOKENS))


def affordable_kv_bytes(device: DeviceMemory, gpu_memory_share: float, needed: int) -> int:
    """The most a KV cache may take on a device that already holds the weights.

    In RAM that is a share of what is free. Of what is free in VRAM the `needed` bytes are for activations and graphs,
    a reserve for what nobody foresees, and of all there is the part beyond `gpu_memory_share` for other programs.
    """
    if device.kind == "RAM":
        return int(_RAM_SHARE * max(0, device.free))
    for_others = int((1.0 - gpu_memory_share) * device.total)
    return max(0, device.free - for_others - needed - RESERVE_BYTES)


def default_batched_tokens(kind: MemoryKind, max_num_seqs: int) -> int:
    """Tokens a step computes at most, where nothing else was asked for; every running answer has its place."""
    return max(BATCHED_TOKENS[kind], max_num_seqs)


def graph_allowance(shape: ModelShape, config: EngineConfig) -> int:
    """What CUDA graphs will take, which only our own decoder has: the cache is made before they are."""
    if config.backend == "transformers" or not config.cuda_graphs:
        return 0
    context = min(shape.max_context, config.max_context or shape.max_context)
    itemsize = PLAIN_BYTES[precision_of(config, Hardware("VRAM")).plain]
    count = num_graphs(config.max_num_seqs, config.most_drafts, context)
    return graph_bytes(shape, most_tokens(config.max_num_seqs, config.most_drafts), count, itemsize)


@dataclass(frozen=True)
class MemoryEstimate:
    """What loading a model takes.

    `context` is what one chat can hold, in tokens; the KV cache holds `num_blocks` of `block_size` tokens for all
    chats together. `draft` is what a draft model takes besides, weights, workspace and `draft_kv_cache` together.
    The KV cache is cut where a GPU would be in use beyond `gpu_memory_share`.
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
    gpu_memory_share: float = 1.0

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
    tokens = planned_kv_tokens(hardware.kind, context, config.max_num_seqs)
    num_blocks = config.num_kv_blocks or max(1, -(-tokens // config.block_size))
    tokens = num_blocks * config.block_size
    draft_kv_cache = draft_rest = 0
    if draft is not None and config.speculation == "draft":
        own = replace(config, quantization=None, backend="auto", speculation=None)
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
        gpu_memory_share=config.gpu_memory_share,
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
    num_rows = config.max_num_seqs * (1 + config.most_drafts)
    if hardware.kind == "RAM":
        return workspace_bytes(shape, budget, num_rows)
    return workspace_bytes(shape, budget, num_rows, PLAIN_BYTES[precision.plain]) + graph_allowance(shape, config)


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
    after_weights = dataclasses.replace(device, free=available - (without_caches - wanted.workspace))
    affordable = affordable_kv_bytes(after_weights, wanted.gpu_memory_share, wanted.workspace)
    left = min(affordable, max(0, available - without_caches))
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
