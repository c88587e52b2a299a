"""The starter model as Hugging Face computes it: the oracle for logits and greedy tokens."""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.loading.gguf import GGUFFile


class _WeightsReader(gguf.GGUFReader):
    """Passes over lists such as the vocabulary: the package makes an array for each item, half of a load's time."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data: Any = self.data
        item_type, count = struct.unpack_from("<IQ", data, orig_offs)
        end = orig_offs + struct.calcsize("<IQ")
        if item_type == gguf.GGUFValueType.STRING:
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", data, end)[0]
        else:
            end += count * np.dtype(self.gguf_scalar_to_np[gguf.GGUFValueType(item_type)]).itemsize
        return end - orig_offs, [data[orig_offs:end]], [], [gguf.GGUFValueType.ARRAY]


@functools.cache
def hugging_face_llama(path: Path) -> LlamaForCausalLM:
    """Reads a llama GGUF with transformers' own reader, in float32. Takes seconds; kept for the session."""
    with GGUFFile(path) as file:
        num_layers = file.metadata["llama.block_count"]
    # The reader wants a model for its tensor names only; one pass over the file then gives both halves.
    with torch.device("meta"):
        names_only = LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", _WeightsReader)
        # transformers makes the same map of names for every module of the model.
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        options = {"return_tensors": True, "torch_dtype": torch.float32}
        checkpoint = load_gguf_checkpoint(path, model_to_load=names_only, **options)
    config, state = LlamaConfig(**checkpoint["config"]), checkpoint["tensors"]
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()
