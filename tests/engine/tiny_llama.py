"""Tiny random models saved by transformers, and a runner over one: a fast, independent oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine.models import LoadedModel, load_model
from engine.models.decoder import Decoder
from engine.protocol import EngineConfig
from engine.request import Request
from engine.runner import Runner, make_runner
from engine.scheduler import ScheduledRequest, StepPlan
from kernels import ops

CPU = torch.device("cpu")
Model = TypeVar("Model", bound=PreTrainedModel)


def tiny_config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    return LlamaConfig(**(values | changes))


def random_llama(config: LlamaConfig) -> LlamaForCausalLM:
    """Weights large enough that every layer, bias and position shows in the logits."""
    return randomised(LlamaForCausalLM(config))


def randomised(model: Model) -> Model:
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.25 * noise)
    return model.eval()


def load(path: Path, kernels: str = "reference", **changes: Any) -> LoadedModel:
    """Loads for the reference kernels, whatever is the default here, or for the ones named."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ops.BACKEND_VARIABLE, kernels)
        loaded = load_model(path, EngineConfig(model=str(path), **changes), CPU, lambda *_: None, lambda: False)
    assert loaded.native == loaded.whole_step(16) == (kernels == "cpu")
    return loaded


def decoder_of(loaded: LoadedModel) -> Any:
    """Our own decoder, untyped since tests look into layers of every kind."""
    assert isinstance(loaded.model, Decoder)
    return loaded.model


@dataclass
class Harness:
    """Runs plans by hand; blocks are handed out in a scattered order."""

    loaded: LoadedModel
    block_size: int = 16
    num_blocks: int = 64
    kv_dtype: torch.dtype = torch.float32
    runner: Runner = field(init=False)
    free_blocks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.runner = make_runner(self.loaded, self.num_blocks, self.block_size, self.kv_dtype, budget=2048)
        generator = torch.Generator().manual_seed(2)
        self.free_blocks = torch.randperm(self.num_blocks, generator=generator).tolist()

    def request(self, token_ids: list[int], room: int = 0) -> Request:
        num_blocks = -(-(len(token_ids) + room) // self.block_size)
        table, self.free_blocks = self.free_blocks[:num_blocks], self.free_blocks[num_blocks:]
        assert len(table) == num_blocks
        return Request(f"r{len(self.free_blocks)}", list(token_ids), block_table=table)

    def logits(self, token_ids: list[int], chunk: int | None = None) -> torch.Tensor:
        """Logits of every position, prefilled in chunks."""
        request = self.request(token_ids)
        step = chunk or len(token_ids)
        parts = []
        for start in range(0, len(token_ids), step):
            entry = ScheduledRequest(request, start, min(step, len(token_ids) - start), False)
            # A copy, because the next step may write over what this one returns.
            parts.append(self.runner.execute(StepPlan([entry], []), all_logits=True).clone())
        return torch.cat(parts)

    def greedy(self, prompts: list[list[int]], num_tokens: int, chunk: int = 1000) -> list[list[int]]:
        """All prompts in one batch, each prefilled in chunks beside the others' decodes."""
        requests = [self.request(prompt, room=num_tokens) for prompt in prompts]
        ends = [len(prompt) + num_tokens for prompt in prompts]
        while True:
            scheduled = []
            for request, end in zip(requests, ends):
                if request.num_tokens < end:
                    start = request.num_computed_tokens
                    count = min(chunk, request.num_tokens - start)
                    scheduled.append(ScheduledRequest(request, start, count, start + count == request.num_tokens))
            if not scheduled:
                return [request.token_ids[len(prompt) :] for request, prompt in zip(requests, prompts)]
            logits = self.runner.execute(StepPlan(scheduled, []))
            tokens = iter(logits.argmax(-1).tolist())
            for entry in scheduled:
                entry.request.num_computed_tokens += entry.num_new_tokens
                if entry.samples:
                    entry.request.token_ids.append(next(tokens))


def random_tokens(count: int, vocab_size: int = 97, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def oracle_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0].float()


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_cpp_permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """As `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """The model's tensors under GGUF names, q and k permuted; a tied head left out."""
    config: Any = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for name, parameter in model.named_parameters():
        stem, kind = name.rsplit(".", 1)
        layer = ""
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            layer = f"blk.{index}."
        gguf_name = _GGUF_NAMES[stem]
        values = parameter.detach().numpy()
        if gguf_name in heads:
            values = llama_cpp_permute(values, heads[gguf_name])
        tensors[f"{layer}{gguf_name}.{kind}"] = values
    return tensors


def write_gguf(
    path: Path,
    config: Any,
    tensors: dict[str, np.ndarray],
    tensor_type: str = "F32",
    architecture: str = "llama",
    extra: dict[str, int] | None = None,
) -> Path:
    """Matrices are stored as `tensor_type`, vectors as F32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    for key, value in (extra or {}).items():
        writer.add_uint32(key, value)
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType[tensor_type if values.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
