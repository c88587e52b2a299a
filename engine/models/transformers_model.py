"""A model of transformers, run over our paged KV cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.kv_cache import KVCache
from engine.layers.attention import AttentionContext
from engine.models.config import ModelConfig, RopeConfig, UnsupportedModelError
from engine.models.transformers_attention import PAGED, PROBE, AttentionProbe, LayerShape, attach
from engine.models.transformers_quantization import packed_bytes
from kernels.metadata import AttentionMetadata

_PROBE_LENGTHS = (13, 9)
_PROBE_BLOCK = 4


class TransformersModel:
    """Token ids in, logits out, as with `Decoder`; what lies between is the model's own code.

    Made for a model whose layers all attend as Kvasir does, which is tried out on a few tokens: raises
    UnsupportedModelError saying what stands in the way otherwise. `config` is what scheduler, cache and
    window ask about; its fields for the decoder's arithmetic mean nothing here.
    """

    def __init__(self, model: PreTrainedModel, num_layers: int, max_context: int, num_parameters: int) -> None:
        self._model = model
        self.num_parameters = num_parameters
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._keeps_rows = "logits_to_keep" in parameters
        modules, shapes, alone = self._find_layers(num_layers, max_context)
        self.config = _model_config(model, shapes, max_context, vocab_size=alone[0].shape[1])
        self._step = attach(modules, shapes)
        self._use(PAGED)
        self._check_packed(alone)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and tables; shared ones count once."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        plain = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.nbytes}
        return sum(plain.values()) + packed_bytes(self._model)

    @torch.inference_mode()
    def logits(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """int64 [num_tokens] each -> logits float32 [num_rows, vocab_size] of the rows named, or of all.

        Writes the tokens' keys and values to the cache. Raises IndexError for a token id or position out of range.
        """
        self._step.context = context
        try:
            return self._forward(input_ids, positions, rows)
        finally:
            self._step.context = None

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        arguments: dict[str, torch.Tensor] = {}
        if self._takes_positions:
            arguments["position_ids"] = positions[None]
        if rows is not None and self._keeps_rows:
            arguments["logits_to_keep"] = rows
        outputs: Any = self._model(input_ids=input_ids[None], use_cache=False, return_dict=True, **arguments)
        logits = outputs.logits[0]
        if rows is not None and not self._keeps_rows:
            logits = logits[rows]
        return logits.float()

    def _use(self, implementation: str) -> None:
        self._model.set_attn_implementation(implementation)
        if self._model.config.get_text_config(decoder=True)._attn_implementation != implementation:
            raise UnsupportedModelError("its attention cannot be replaced: it does not use AttentionInterface")

    # ------------------------------------------------------------ the probe

    @property
    def _tolerance(self) -> float:
        return 1e-3 if self._model.dtype == torch.float32 else 0.1

    def _probe_tokens(self) -> list[torch.Tensor]:
        embedding: Any = self._model.get_input_embeddings()
        vocab_size = int(embedding.weight.shape[0])
        generator = torch.Generator().manual_seed(0)
        tokens = [torch.randint(vocab_size, (length,), generator=generator) for length in _PROBE_LENGTHS]
        return [each.to(self._model.device) for each in tokens]

    @torch.inference_mode()
    def _find_layers(
        self, num_layers: int, max_context: int
    ) -> tuple[list[torch.nn.Module], list[LayerShape], list[torch.Tensor]]:
        """The attention modules in the order they are called, what they are, and the logits of each probe sequence."""
        self._use(PROBE)
        logits: list[torch.Tensor] = []
        probe = AttentionProbe(max_context, self._tolerance)
        for tokens in self._probe_tokens():
            probe = AttentionProbe(max_context, self._tolerance)
            probe.watch(self._model)
            try:
                logits.append(self._forward(tokens, torch.arange(len(tokens), device=tokens.device), None))
            finally:
                probe.unwatch(self._model)
        if len(probe.modules) != num_layers:
            raise UnsupportedModelError(
                f"{len(probe.modules)} of its {num_layers} layers attend through AttentionInterface; "
                "the others keep a state Kvasir has no cache for, or compute attention by themselves"
            )
        if not self._takes_positions:
            raise UnsupportedModelError("it counts positions itself: it takes no position_ids")
        return probe.modules, probe.shapes, logits

    def _check_packed(self, alone: list[torch.Tensor]) -> None:
        """Two sequences side by side, each in two parts, must give what each gives alone and whole."""
        tokens = self._probe_tokens()
        cuts = [len(tokens[0]) // 2 + 1, len(tokens[1]) // 2 - 1]
        tables = [[3, 1, 5, 0], [2, 6, 4]]
        cache = KVCache(self.config, 7, _PROBE_BLOCK, self._model.dtype, tokens[0].device)
        found: list[list[torch.Tensor]] = [[], []]
        for order, first_part in (((0, 1), True), ((1, 0), False)):
            spans = [(0, cuts[each]) if first_part else (cuts[each], len(tokens[each])) for each in order]
            metadata = AttentionMetadata.build(
                [tables[each] for each in order],
                [end - start for start, end in spans],
                [end for _, end in spans],
                _PROBE_BLOCK,
                tokens[0].device,
            )
            logits = self.logits(
                torch.cat([tokens[each][start:end] for each, (start, end) in zip(order, spans)]),
                torch.cat([torch.arange(start, end, device=tokens[0].device) for start, end in spans]),
                AttentionContext(metadata, cache.layers),
            )
            for each, part in zip(order, logits.split(metadata.query_lens)):
                found[each].append(part)
        for expected, parts in zip(alone, found):
            error = (torch.cat(parts) - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)
            # In halves rounding may send a row to another expert, which changes all of it.
            allowed = 0 if self._model.dtype == torch.float32 else len(error) // 4
            if int((~(error <= self._tolerance)).sum()) > allowed:
                raise UnsupportedModelError(
                    "tokens of one request change the answer to another beside it, or depend on how a prompt is cut: "
                    "it keeps something else than keys and values, or does not go by position_ids"
                )


def _model_config(model: PreTrainedModel, shapes: list[LayerShape], max_context: int, vocab_size: int) -> ModelConfig:
    config = model.config.get_text_config(decoder=True)
    num_kv_heads = max(shape.num_kv_heads for shape in shapes)
    head_dim = max(max(shape.key_dim, shape.value_dim) for shape in shapes)
    group = max(shape.num_heads // shape.num_kv_heads for shape in shapes)
    return ModelConfig(
        architecture=str(model.config.model_type),
        vocab_size=vocab_size,
        hidden_size=int(config.hidden_size),
        intermediate_size=1,
        num_layers=len(shapes),
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context=max_context,
        norm_eps=1.0,
        rope=RopeConfig(1.0, 2),
        sliding_windows=tuple(shape.window for shape in shapes),
    )
