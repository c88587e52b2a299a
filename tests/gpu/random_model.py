"""Models of real shapes and random weights, made in place on the device; on the disk there are only headers."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from engine.assembly import assemble
from engine.engine import Engine
from engine.llm import LLM
from engine.loading.folder import read_model_config
from engine.loading.names import EMBEDDING, HEAD, expected_tensors
from engine.loading.weights import StoredTensor
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, build_decoder
from engine.models.hf_config import config_from_hf
from engine.models.loader import LoadedModel, compute_dtype
from engine.protocol import EngineConfig
from engine.quantization.affine import AffineMatrix
from engine.text.load import load_tokenizer

Quantization = Literal["int8", "int4"]

_TABLE_GROUP = 32
_INT8_MIDDLE = 128
# Standard deviations of what the random codes of a matrix stand for, in steps.
_STEPS = {8: 256 / math.sqrt(12), 4: 16 / math.sqrt(12)}


def llama_8b(**changes: Any) -> LlamaConfig:
    """The shape of Llama 3.1 8B."""
    values: dict[str, Any] = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(values | changes))


def qwen3_06b(**changes: Any) -> Qwen3Config:
    """The shape of Qwen3 0.6B: its steps are bound by what starts the kernels, not by the kernels."""
    values: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    }
    return Qwen3Config(**(values | changes))


@contextmanager
def random_model(hf_config: PretrainedConfig, device: str, max_context: int) -> Iterator[RandomModel]:
    """A `RandomModel` in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        yield RandomModel(hf_config, Path(folder), device, max_context)


class RandomWeights:
    """A `WeightSource` of random numbers, each tensor always the same ones; norms are about 1.

    With `quantization`, matrices are given in codes of the form that `EngineConfig.quantization` rounds to.
    """

    def __init__(self, config: ModelConfig, device: torch.device, quantization: Quantization | None = None) -> None:
        self.label = "random weights"
        self.format = "random"
        self._device = device
        self._quantization = quantization
        self.tensors = {
            name: StoredTensor(name, shape, "BF16", 2 * math.prod(shape))
            for name, shape in expected_tensors(config).items()
        }

    def read_into(self, name: str, out: torch.Tensor) -> None:
        if out.dim() == 1:
            out.normal_(1.0, 0.1, generator=self._generator(name))
        else:
            # Sums over the inputs, and so logits, are then about as large as the inputs.
            out.normal_(0.0, out.shape[1] ** -0.5, generator=self._generator(name))

    def stored_rows(self, name: str) -> torch.Tensor:
        rows = torch.empty(self.tensors[name].shape, dtype=torch.bfloat16, device=self._device)
        self.read_into(name, rows)
        return rows

    def quantized(self, name: str) -> AffineMatrix | None:
        if self._quantization is None:
            return None
        rows, columns = self.tensors[name].shape
        is_table = name in (EMBEDDING, HEAD)
        bits = 8 if is_table or self._quantization == "int8" else 4
        group = _TABLE_GROUP if is_table or bits == 4 else columns
        generator = self._generator(name)
        codes = torch.empty(rows, columns * bits // 8, dtype=torch.uint8, device=self._device)
        codes.random_(0, 256, generator=generator)
        scales = torch.empty(rows, columns // group, device=self._device)
        scales.uniform_(0.9, 1.1, generator=generator).mul_(columns**-0.5 / _STEPS[bits])
        zeros = torch.full_like(scales, _INT8_MIDDLE)
        if bits == 4:
            scales = scales.half()
            zeros = zeros.uniform_(7.0, 8.0, generator=generator).half()
        return AffineMatrix(codes, scales, zeros, bits, group)

    def close(self) -> None: ...

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))


class RandomModel:
    """The folder of such a model in `folder`, with a tokenizer of its size, and engines over random weights for it.

    `max_context` bounds prompt and answer together.
    """

    def __init__(self, hf_config: PretrainedConfig, folder: Path, device: str, max_context: int) -> None:
        self.hf_config = hf_config
        self.folder = folder
        self.device = torch.device(device)
        hf_config.architectures = [f"{type(hf_config).__name__.removesuffix('Config')}ForCausalLM"]
        hf_config.save_pretrained(folder)
        config = config_from_hf(read_model_config(folder))
        self.config = dataclasses.replace(config, max_context=max_context)
        _save_headers(config, folder / "model.safetensors")
        _save_tokenizer(config.vocab_size, folder)
        self._tokenizer = load_tokenizer(folder)

    def load(self, dtype: str = "auto", quantization: Quantization | None = None) -> LoadedModel:
        source = RandomWeights(self.config, self.device, quantization)
        compute = compute_dtype(dtype, self.device)
        model = build_decoder(self.config, source, self.device, compute, False, lambda name: None)
        parameters = sum(math.prod(stored.shape) for stored in source.tensors.values())
        return LoadedModel(
            model,
            self.config,
            source.format,
            parameters,
            compute,
            self.device,
            native=False,
            quantization=quantization,
        )

    def llm(self, loaded: LoadedModel, looks_ahead: bool | None = None, **options: Any) -> LLM:
        """An engine of its own over weights that others may share; `options` are those of `EngineConfig`.

        `looks_ahead`: whether it queues a step before it knows the tokens of the one before; None leaves it as it is.
        """
        config = EngineConfig(model=str(self.folder), device=str(self.device), **options)
        engine = Engine(assemble(config, self.folder, loaded, self._tokenizer))
        if looks_ahead is not None:
            engine.looks_ahead = looks_ahead
        return LLM.over(engine)

    def prompt(self, num_tokens: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.config.vocab_size, (num_tokens,), generator=generator).tolist()

    def hugging_face(self, loaded: LoadedModel) -> LlamaForCausalLM:
        """The same model in transformers, its parameters being views of the decoder's."""
        assert isinstance(self.hf_config, LlamaConfig) and isinstance(loaded.model, Decoder)
        with torch.device("meta"):
            model = LlamaForCausalLM(self.hf_config)
        model.load_state_dict(_hugging_face_state(loaded.model, self.config), assign=True)
        # Its frequencies are computed, not loaded, and so were left on the meta device.
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(self.hf_config)
        model.model.rotary_emb = rotary.to(self.device)
        return model.eval()


def _hugging_face_state(model: Decoder, config: ModelConfig) -> dict[str, torch.Tensor]:
    widths = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    state = {
        "model.embed_tokens.weight": model.embedding.dequantize(),
        "model.norm.weight": model.final_norm.weight,
        "lm_head.weight": model.head.weight.dequantize(),
    }
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        mlp: Any = layer.mlp
        matrices = {
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): layer.attention.qkv.weight.dequantize().split(
                widths
            ),
            ("self_attn.o_proj",): (layer.attention.output.weight.dequantize(),),
            ("mlp.gate_proj", "mlp.up_proj"): mlp.gate_up.weight.dequantize().chunk(2),
            ("mlp.down_proj",): (mlp.down.weight.dequantize(),),
        }
        for names, parts in matrices.items():
            state |= {f"{prefix}{name}.weight": part for name, part in zip(names, parts, strict=True)}
        assert layer.attention_norm is not None and layer.mlp_norm is not None
        state[f"{prefix}input_layernorm.weight"] = layer.attention_norm.weight
        state[f"{prefix}post_attention_layernorm.weight"] = layer.mlp_norm.weight
    return state


def _save_headers(config: ModelConfig, path: Path) -> None:
    """A weight file that tells what the model consists of; its bytes are a hole that takes no room on the disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in expected_tensors(config).items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _save_tokenizer(vocab_size: int, folder: Path) -> None:
    """A token for each id of the model, so that sampling chooses among as many as with a real one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(f"w{index}" for index in range(vocab_size - len(letters)))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=tokens[0]).save_pretrained(folder)
