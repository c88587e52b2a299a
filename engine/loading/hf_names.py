"""How Hugging Face folders of each family name and lay out their tensors.

Names: transformers, `models/*/modeling_*.py` and `conversion_mapping.py`. Differences from the canonical layout:
Phi-3 fuses projections, experts lie stacked in one tensor, gpt-oss has theirs transposed and gate and
up in turns, and a model for images too puts its decoder under a prefix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from engine.loading.names import HEAD, layer_prefix
from engine.loading.tensor_files import FLOAT_TYPES
from engine.loading.weights import StoredTensor, WeightSource
from engine.models.config import ModelConfig, ModelError, UnsupportedModelError
from engine.quantization.affine import AffineMatrix
from kernels import ops

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
# Transformers 4 and 5 differ in which side of "model" the decoder's prefix is.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_IMAGE_PREFIXES = ("vision_tower.", "multi_modal_projector.")
_NORMS_BEHIND = {
    "post_attention_layernorm.weight": "post_self_attn_layernorm.weight",
    "pre_feedforward_layernorm.weight": "post_attention_layernorm.weight",
    "post_feedforward_layernorm.weight": "post_mlp_layernorm.weight",
}
_ROUTERS = {"block_sparse_moe.gate": "mlp.gate", "mlp.router": "mlp.gate"}
_MIXTRAL_EXPERT = re.compile(r"block_sparse_moe\.experts\.(\d+)\.(w[123])\.(.+)")
_MIXTRAL_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_STACKED_EXPERTS = re.compile(r"mlp\.experts\.(gate_up|down)_proj(_bias)?")


@dataclass(frozen=True, slots=True)
class View:
    """A canonical tensor inside a stored one: of `expert`'s matrix, transposed or not, each `step`-th row."""

    name: str
    shape: tuple[int, ...]
    first: int = 0
    step: int = 1
    expert: int | None = None
    transposed: bool = False

    @property
    def end(self) -> int:
        return self.first + self.shape[0] * self.step

    def of(self, stored: torch.Tensor) -> torch.Tensor:
        part = stored if self.expert is None else stored[self.expert]
        return (part.t() if self.transposed else part)[self.first : self.end : self.step]


def canonical_views(stored: StoredTensor, config: ModelConfig) -> list[View]:
    """The canonical tensors that a stored one holds; empty for what belongs to images only.

    A tensor that no supported decoder has keeps its name.
    """
    name = stored.stored_name
    if config.architecture == "gemma3":
        if name.removeprefix("model.").startswith(_IMAGE_PREFIXES):
            return []
        for prefix, canonical in _TEXT_PREFIXES.items():
            if name.startswith(prefix):
                name = canonical + name.removeprefix(prefix)
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return [View(name, stored.shape)]
    prefix, rest = layer_prefix(int(match[1])), match[2]
    if expert := _STACKED_EXPERTS.fullmatch(rest):
        return list(_stacked_experts(f"{prefix}mlp.experts.", expert[1], expert[2] is not None, stored, config))
    if expert := _MIXTRAL_EXPERT.fullmatch(rest):
        projection = _MIXTRAL_PROJECTIONS[expert[2]]
        return [View(f"{prefix}mlp.experts.{expert[1]}.{projection}.{expert[3]}", stored.shape)]
    module, _, kind = rest.rpartition(".")
    if module == "self_attn.qkv_proj":
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return _fused(prefix, kind, stored, {f"self_attn.{n}_proj": q_rows if n == "q" else kv_rows for n in "qkv"})
    if module == "mlp.gate_up_proj":
        inner = config.intermediate_size
        return _fused(prefix, kind, stored, {"mlp.gate_proj": inner, "mlp.up_proj": inner})
    if module in _ROUTERS:
        return [View(f"{prefix}{_ROUTERS[module]}.{kind}", stored.shape)]
    if config.norm_placement != "before":
        rest = _NORMS_BEHIND.get(rest, rest)
    return [View(f"{prefix}{rest}", stored.shape)]


def _fused(prefix: str, kind: str, stored: StoredTensor, rows: dict[str, int]) -> list[View]:
    if stored.shape[:1] != (sum(rows.values()),):
        return [View(stored.stored_name, stored.shape)]
    views, start = [], 0
    for name, num_rows in rows.items():
        views.append(View(f"{prefix}{name}.{kind}", (num_rows, *stored.shape[1:]), start))
        start += num_rows
    return views


def _stacked_experts(
    prefix: str, projection: str, is_bias: bool, stored: StoredTensor, config: ModelConfig
) -> Iterable[View]:
    """`gate_up_proj` or `down_proj` [experts, out, in], or a bias [experts, out]."""
    if len(stored.shape) != (2 if is_bias else 3) or stored.shape[0] != config.num_experts:
        yield View(stored.stored_name, stored.shape)
        return
    kind = "bias" if is_bias else "weight"
    takes_turns = config.activation == "clamped_swiglu"
    transposed = takes_turns and not is_bias and stored.type in FLOAT_TYPES
    num_experts, *shape = stored.shape
    out, *columns = reversed(shape) if transposed else shape
    if projection == "down":
        names, num_rows = ["down_proj"], out
    else:
        names, num_rows = ["gate_proj", "up_proj"], out // 2
    for expert in range(num_experts):
        for index, name in enumerate(names):
            first, step = (index, len(names)) if takes_turns else (index * num_rows, 1)
            yield View(f"{prefix}{expert}.{name}.{kind}", (num_rows, *columns), first, step, expert, transposed)


class CanonicalWeights:
    """A `WeightSource` under canonical names over one under a family's own, which it closes.

    A stored copy of the embedding named lm_head is left out where the model ties them.
    Raises ModelError where two stored tensors mean the same one.
    """

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        self._source = source
        self._views: dict[str, tuple[str, View]] = {}
        self.label, self.format = source.label, source.format
        self.tensors: dict[str, StoredTensor] = {}
        # Unpacking a stack of experts for each of them anew would take hours: gate and up of one
        # layer, and down, are kept until others are asked for.
        self._recent: dict[str, torch.Tensor] = {}
        for key, stored in source.tensors.items():
            for view in canonical_views(stored, config):
                if view.name == HEAD and config.tie_word_embeddings:
                    continue
                if view.name in self.tensors:
                    other = self.tensors[view.name].stored_name
                    raise ModelError(f"{self.label}: tensors {other!r} and {stored.stored_name!r} are the same one")
                share = stored.nbytes * math.prod(view.shape) // max(1, math.prod(stored.shape))
                self.tensors[view.name] = StoredTensor(stored.stored_name, view.shape, stored.type, share)
                self._views[view.name] = (key, view)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        matrix = self.quantized(name)
        if matrix is not None:
            out.copy_(matrix.dequantize())
            return
        rows = self.stored_rows(name)
        if rows.dtype != torch.uint8:
            out.copy_(rows)
        else:
            ops.dequantize(rows.contiguous(), self.tensors[name].type, out)

    def stored_rows(self, name: str) -> torch.Tensor:
        key, view = self._views[name]
        if view.expert is None or self._source.tensors[key].type in FLOAT_TYPES:
            return view.of(self._source.stored_rows(key))  # plain numbers are mapped from the file, at no cost
        if key not in self._recent:
            while len(self._recent) > 1:
                self._recent.pop(next(iter(self._recent)))
            self._recent[key] = self._source.stored_rows(key)
        return view.of(self._recent[key])

    def quantized(self, name: str) -> AffineMatrix | None:
        key, view = self._views[name]
        matrix = self._source.quantized(key)
        if matrix is None or view.shape == matrix.shape:
            return matrix
        if view.expert is not None:
            raise UnsupportedModelError(f"{self.label}: tensor {key!r} is a stack of quantised matrices")
        return matrix.row_slice(view.first, view.end)

    def close(self) -> None:
        self._recent.clear()
        self._source.close()
