"""The starter model as Hugging Face computes it: the oracle for logits and greedy tokens."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.loading.gguf import GGUFFile


@functools.cache
def hugging_face_llama(path: Path) -> LlamaForCausalLM:
    """Reads a llama GGUF with transformers' own reader, in float32. Takes seconds; kept for the session."""
    with GGUFFile(path) as file:
        num_layers = file.metadata["llama.block_count"]
    # The reader wants a model for its tensor names only; one pass over the file then gives both halves.
    with torch.device("meta"):
        names_only = LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers))
    checkpoint = load_gguf_checkpoint(path, return_tensors=True, model_to_load=names_only, torch_dtype=torch.float32)
    config, state = LlamaConfig(**checkpoint["config"]), checkpoint["tensors"]
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()
