"""One small random transformers model for each family: the oracle that Kvasir's decoders are compared with.

Every parameter is random, norms, biases and sinks included, and each model has all kinds of layers of its
family, so that nothing can be left out or mixed up unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 128
MAX_POSITIONS = 160
END_TOKEN = "<|endoftext|>"

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
ORIGINAL_POSITIONS = 40
"""Up to here the longrope models use their short factors."""


def _shape(**changes: Any) -> dict[str, Any]:
    """Six query heads over two KV heads, matrices of whole groups of 32 columns."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    return values | changes


def _model(name: str, **values: Any) -> PreTrainedModel:
    """`name` + "Config" and `name` + "ForCausalLM" of transformers, random from end to end."""
    return randomised(getattr(transformers, f"{name}ForCausalLM")(make_config(f"{name}Config", **values)))


def make_config(name: str, **values: Any) -> Any:
    """A configuration whose model attends by plain matrix products, which caps and sinks need."""
    return getattr(transformers, name)(**values, attn_implementation="eager")


def randomised(model: PreTrainedModel, seed: int = 11) -> PreTrainedModel:
    """Weights large enough that every layer, bias and position shows in the logits; norms centre on what is neutral."""
    neutral_norm = 0.0 if model.config.model_type.startswith("gemma") else 1.0
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and "vision" not in name:
                parameter.copy_(neutral_norm + 0.3 * noise)
            else:
                parameter.copy_(noise if "sinks" in name else 0.2 * noise)
    return model.eval()


def llama() -> PreTrainedModel:
    return _model("Llama", **_shape(rope_parameters=LLAMA3_ROPE))


def llama2() -> PreTrainedModel:
    """Multi-head, biases everywhere, linear rope."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    biases = {"attention_bias": True, "mlp_bias": True}
    return _model("Llama", **_shape(num_attention_heads=4, num_key_value_heads=4, rope_parameters=rope, **biases))


def mistral() -> PreTrainedModel:
    return _model("Mistral", **_shape(sliding_window=20))


def smollm3() -> PreTrainedModel:
    return _model("SmolLM3", **_shape(num_hidden_layers=4, tie_word_embeddings=True, no_rope_layer_interval=2))


def qwen2() -> PreTrainedModel:
    """Its first layer alone sees everything."""
    return _model("Qwen2", **_shape(use_sliding_window=True, sliding_window=20, max_window_layers=1))


def qwen3() -> PreTrainedModel:
    return _model("Qwen3", **_shape(head_dim=32, attention_bias=True, rope_parameters=YARN_ROPE))


def phi3() -> PreTrainedModel:
    """As Phi-4-mini: fused projections, longrope over three quarters of each head, a window."""
    values = _shape(sliding_window=64, original_max_position_embeddings=ORIGINAL_POSITIONS)
    del values["head_dim"]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.05 * j for j in range(6)],
        "long_factor": [1.5 + 0.8 * j for j in range(6)],
        "original_max_position_embeddings": ORIGINAL_POSITIONS,
    }
    return _model("Phi3", **values, rope_parameters=rope)


def gemma2() -> PreTrainedModel:
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}
    return _model("Gemma2", **_shape(head_dim=32, tie_word_embeddings=True, sliding_window=20, **caps))


def gemma3() -> PreTrainedModel:
    return randomised(transformers.Gemma3ForCausalLM(make_config("Gemma3TextConfig", **gemma3_values())))


def gemma3_values() -> dict[str, Any]:
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return _shape(
        head_dim=32,
        tie_word_embeddings=True,
        sliding_window=20,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=rope,
    )


def granite() -> PreTrainedModel:
    scales = {
        "embedding_multiplier": 3.0,
        "logits_scaling": 1.7,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
    }
    return _model("Granite", **_shape(tie_word_embeddings=True, **scales))


def olmo2() -> PreTrainedModel:
    return _model("Olmo2", **_shape())


def mixtral() -> PreTrainedModel:
    return _model("Mixtral", **_shape(num_local_experts=4, num_experts_per_tok=2, sliding_window=20))


def qwen3_moe() -> PreTrainedModel:
    """The second of its layers is dense."""
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return _model("Qwen3Moe", **_shape(mlp_only_layers=[1], **experts))


def gpt_oss() -> PreTrainedModel:
    rope = YARN_ROPE | {"rope_theta": 150000.0, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 2.0}
    return _model("GptOss", **_shape(sliding_window=20, rope_parameters=rope, **experts))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama2": llama2,
    "mistral": mistral,
    "smollm3": smollm3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "phi3": phi3,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "granite": granite,
    "olmo2": olmo2,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
}
"""Family -> what makes its model, in float32 and always the same."""


def save_family(family: str, folder: Path) -> PreTrainedModel:
    """Writes the family's model and a tokenizer that fits it into `folder`, and returns the model."""
    return save_model(FAMILIES[family](), folder)


def save_model(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """A byte-level vocabulary of VOCAB_SIZE tokens: printable ASCII and some pairs of it; id 1 ends a text."""
    letters = ["Ġ" if code == 32 else chr(code) for code in range(32, 127)]
    pairs = [(first, second) for first in "thaeinoĠ" for second in "aeio"][: VOCAB_SIZE - 3 - len(letters)]
    tokens = ["<|startoftext|>", END_TOKEN, "Ċ", *letters, *(first + second for first, second in pairs)]
    assert len(tokens) == VOCAB_SIZE
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_TOKEN).save_pretrained(folder)


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """What transformers computes in one pass: float32 [num_tokens, vocab_size]."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
