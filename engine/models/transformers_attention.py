"""Our paged attention as an implementation that any transformers model can be told to use.

Two are registered in transformers' `AttentionInterface`. PAGED is the one that serves: no mask function
goes with it, so models build no masks. PROBE computes what the model's own attention function would,
with the masks transformers builds, and compares ours with it; it says of each layer what it is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from engine.layers.attention import AttentionContext
from engine.models.config import ModelError, UnsupportedModelError
from kernels import ops
from kernels.kv import KVLayer
from kernels.metadata import AttentionMetadata

PAGED = "kvasir_paged"
PROBE = "kvasir_probe"
_PAGED_LAYER = "kvasir_layer"
_PROBE_STATE = "kvasir_probe_state"
_PROBED_KEYS = 1 << 20
"""Keys of a mask looked at together: contexts go up to millions."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer passes to its attention function; `window` is None for full attention."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass(slots=True, eq=False)
class CurrentStep:
    """The batch that a model's attention layers compute now, shared by all of them."""

    context: AttentionContext | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayer:
    """An attention layer's place in the KV cache."""

    index: int
    shape: LayerShape
    step: CurrentStep

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[1, heads, tokens, dim] each -> [1, tokens, heads, value dim]; keys and values are written to the cache."""
        context = self.step.context
        if context is None:
            raise RuntimeError("attention over a paged cache was called outside of a step")
        kv_layer = context.kv_layers[self.index]
        attended = paged_attention(
            query[0], key[0], value[0], kv_layer, context.metadata, scale, self.shape.window, soft_cap, sinks
        )
        return attended.unsqueeze(0)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: KVLayer,
    metadata: AttentionMetadata,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Writes keys and values to the cache and attends: [heads, tokens, dim] each -> [tokens, heads, value dim].

    A cache of more heads or wider ones than this layer has is filled up with zeros: they add nothing to a
    score, and what comes of them is cut off.
    """
    num_heads, key_dim = query.shape[0], query.shape[2]
    num_kv_heads, value_dim = key.shape[0], value.shape[2]
    cache_heads, cache_dim = kv_layer.num_kv_heads, kv_layer.head_dim
    padded_heads = num_heads // num_kv_heads * cache_heads
    kv = torch.cat((_padded(key, cache_heads, cache_dim), _padded(value, cache_heads, cache_dim)))
    kv_layer.write(metadata.slot_mapping, kv.transpose(0, 1))
    q = _padded(query, padded_heads, cache_dim).transpose(0, 1).contiguous()
    if sinks is not None:
        sinks = F.pad(sinks, (0, padded_heads - num_heads))
    if scale is None:
        scale = 1 / math.sqrt(key_dim)
    attended = ops.paged_attention(q, kv_layer, metadata, scale, window, soft_cap, sinks)
    return attended[:, :num_heads, :value_dim]


def _padded(x: torch.Tensor, num_heads: int, head_dim: int) -> torch.Tensor:
    heads, _, size = x.shape
    if (heads, size) == (num_heads, head_dim):
        return x
    return F.pad(x, (0, head_dim - size, 0, 0, 0, num_heads - heads))


def attach(modules: list[torch.nn.Module], shapes: list[LayerShape]) -> CurrentStep:
    """Gives each attention module its layer of the cache, in the order they are called."""
    step = CurrentStep()
    for index, (module, shape) in enumerate(zip(modules, shapes, strict=True)):
        setattr(module, _PAGED_LAYER, PagedLayer(index, shape, step))
    return step


def _attend_paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    if attention_mask is not None:
        raise UnsupportedModelError("it builds an attention mask of its own")
    layer: PagedLayer = getattr(module, _PAGED_LAYER)
    return layer(query, key, value, scaling, softcap, s_aux), None


# ------------------------------------------------------------ finding out what the layers are

Allows = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""A mask function of transformers: (batch, head, query positions, key positions) -> whether the key is seen."""


@dataclass(slots=True, eq=False)
class AttentionProbe:
    """What the attention layers of a model turned out to be in one forward pass over one short sequence."""

    max_context: int
    tolerance: float
    modules: list[torch.nn.Module] = field(default_factory=list)
    shapes: list[LayerShape] = field(default_factory=list)
    windows: dict[Hashable, int | None] = field(default_factory=dict)

    def watch(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            setattr(module, _PROBE_STATE, self)

    def unwatch(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            delattr(module, _PROBE_STATE)

    def window(self, allows: Allows, device: torch.device) -> int | None:
        # The same function serves many layers; it is kept, so that its id stays its own.
        if allows not in self.windows:
            self.windows[allows] = window_of(allows, self.max_context, device)
        return self.windows[allows]


def _probe_mask(*, mask_function: Allows, **arguments: Any) -> torch.Tensor | None:
    mask = eager_mask(mask_function=mask_function, **arguments)
    if mask is not None:
        setattr(mask, _PROBE_STATE, mask_function)
    return mask


def _attend_probing(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, object]:
    probe: AttentionProbe = getattr(module, _PROBE_STATE)
    if module in probe.modules:
        raise UnsupportedModelError("a layer of it attends more than once")
    if attention_mask is None:
        raise UnsupportedModelError("its tokens see those after them: it is no decoder")
    allows: Allows | None = getattr(attention_mask, _PROBE_STATE, None)
    if allows is None:
        raise UnsupportedModelError("it does not use the masks of transformers, so that they cannot be replaced")
    shape = LayerShape(query.shape[1], key.shape[1], key.shape[3], value.shape[3], probe.window(allows, query.device))
    if shape.num_heads % shape.num_kv_heads or key.shape[2] != query.shape[2]:
        raise UnsupportedModelError("its queries and keys are not those of causal self-attention")
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward)
    optional = {"softcap": softcap, "s_aux": s_aux}
    arguments |= {name: given for name, given in optional.items() if given is not None}
    expected, weights = own(module, query, key, value, attention_mask, scaling=scaling, **arguments)
    metadata, kv_layer = _one_sequence(query, shape)
    computed = paged_attention(query[0], key[0], value[0], kv_layer, metadata, scaling, shape.window, softcap, s_aux)
    if not bool(expected.isfinite().all()):
        raise ModelError("it computes no numbers (NaN or infinity); its weights are damaged, or fp16 is too narrow")
    error = (computed - expected.view_as(computed)).abs().max().item()
    size = expected.abs().max().item()
    if not error <= probe.tolerance * max(size, 1e-6):
        raise UnsupportedModelError("its attention is not the softmax of scaled products that Kvasir computes")
    probe.modules.append(module)
    probe.shapes.append(shape)
    return expected, weights


def _one_sequence(query: torch.Tensor, shape: LayerShape) -> tuple[AttentionMetadata, KVLayer]:
    num_tokens, device = query.shape[2], query.device
    metadata = AttentionMetadata.build([[0]], [num_tokens], [num_tokens], num_tokens, device)
    kv = torch.zeros(
        1, num_tokens, 2, shape.num_kv_heads, max(shape.key_dim, shape.value_dim), dtype=query.dtype, device=device
    )
    return metadata, KVLayer(kv)


def window_of(allows: Allows, max_context: int, device: torch.device) -> int | None:
    """How many of the latest keys a query sees, itself included; None where it sees all before it.

    Raises UnsupportedModelError for a mask that is neither: chunks, blocks, or keys after the query.
    """
    zero = torch.zeros((), dtype=torch.int64, device=device)

    def seen(query: int) -> int:
        pieces = []
        for first in range(0, query + 2, _PROBED_KEYS):
            keys = torch.arange(first, min(first + _PROBED_KEYS, query + 2), device=device)
            mask = allows(zero, zero, torch.full_like(keys, query), keys)
            pieces.append(torch.as_tensor(mask, device=device).expand(keys.shape))
        mask = torch.cat(pieces)
        count = int(mask.count_nonzero())
        if count == 0 or bool(mask[query + 1]) or not bool(mask[query + 1 - count : query + 1].all()):
            raise UnsupportedModelError("its attention sees other keys than those just before the query")
        return count

    last = max_context - 1
    window = seen(last)
    if window > last:
        window = max_context
    for query in sorted({0, 1, last // 3, last // 2, last - 1, min(window, last), last}):
        if query >= 0 and seen(query) != min(window, query + 1):
            raise UnsupportedModelError("its attention window changes along the sequence (chunked attention)")
    return None if window >= max_context else window


AttentionInterface.register(PAGED, _attend_paged)
AttentionInterface.register(PROBE, _attend_probing)
AttentionMaskInterface.register(PROBE, _probe_mask)
