"""Models that run through transformers answer as transformers does, or are refused with the reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine import memory
from engine.kv_cache import kv_bytes_per_token
from engine.llm import LLM
from engine.loading.describe import describe
from engine.models import LoadCancelled, LoadedModel, load_model
from engine.models.config import ModelError, UnsupportedModelError
from engine.models.transformers_attention import window_of
from engine.protocol import EngineConfig, SamplingParams
from engine.quantization.rounding import Rounding
from engine.runner import make_runner
from engine.scheduler import ScheduledRequest, StepPlan
from kernels import ops
from tests.engine.families import (
    FAMILIES,
    MAX_POSITIONS,
    ORIGINAL_POSITIONS,
    VOCAB_SIZE,
    expected_logits,
    randomised,
    save_tokenizer,
)
from tests.engine.tiny_llama import CPU, Harness, load, random_tokens

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GPT2_SHAPE = {"vocab_size": VOCAB_SIZE, "n_embd": 96, "n_head": 6, "n_layer": 3, "n_positions": MAX_POSITIONS}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT_ATTENTION = {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Cohere2": ("Cohere2ForCausalLM", SHAPE | {"sliding_window": 20, "num_hidden_layers": 4}),
    "CodeGen": ("CodeGenForCausalLM", GPT2_SHAPE | {"n_head": 4, "rotary_dim": 8}),
    "DeepseekV3": ("DeepseekV3ForCausalLM", SHAPE | LATENT_ATTENTION),
    "GPT2": ("GPT2LMHeadModel", GPT2_SHAPE),
    "GPTBigCode": ("GPTBigCodeForCausalLM", GPT2_SHAPE),
    "GPTNeoX": ("GPTNeoXForCausalLM", SHAPE),
    "Gemma4Text": (
        "Gemma4ForCausalLM",
        SHAPE
        | {"num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 20}
        | {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16},
    ),
    "Glm4": ("Glm4ForCausalLM", SHAPE | {"head_dim": 16}),
    "Nemotron": ("NemotronForCausalLM", SHAPE),
    "Olmo": ("OlmoForCausalLM", SHAPE | {"clip_qkv": 1.0}),
    "OPT": ("OPTForCausalLM", SHAPE | {"ffn_dim": 64, "word_embed_proj_dim": 96}),
    "Qwen2Moe": ("Qwen2MoeForCausalLM", SHAPE | EXPERTS | {"shared_expert_intermediate_size": 48}),
    "StableLm": ("StableLmForCausalLM", SHAPE | {"partial_rotary_factor": 0.5}),
    "Starcoder2": ("Starcoder2ForCausalLM", SHAPE | {"sliding_window": 20}),
}


def make_other(name: str) -> PreTrainedModel:
    model_class, values = OTHERS[name]
    config = getattr(transformers, f"{name}Config")(**values, attn_implementation="eager")
    return randomised(getattr(transformers, model_class)(config))


MAKERS: dict[str, Callable[[], PreTrainedModel]] = FAMILIES | {
    name: (lambda name=name: make_other(name)) for name in OTHERS
}


def load_through_transformers(folder: Path, **changes: Any) -> LoadedModel:
    loaded = load(folder, backend="transformers", **changes)
    assert loaded.backend == "transformers"
    return loaded


@pytest.mark.parametrize("name", MAKERS)
def test_logits_are_those_of_transformers_alone_chunked_and_in_a_ragged_batch(name, tmp_path):
    oracle = MAKERS[name]()
    oracle.save_pretrained(tmp_path)
    loaded = load_through_transformers(tmp_path)
    length = min(70, loaded.config.max_context)
    token_ids = [random_tokens(count, VOCAB_SIZE, seed=count) for count in (length, length - 9, 5)]
    expected = [expected_logits(oracle, tokens) for tokens in token_ids]
    for chunk, block_size in ((None, 16), (7, 5)):
        found = Harness(loaded, block_size).logits(token_ids[0], chunk)
        torch.testing.assert_close(found, expected[0], atol=1e-3, rtol=1e-4)

    harness = Harness(loaded)
    requests = [harness.request(tokens) for tokens in token_ids]
    harness.runner.execute(StepPlan([ScheduledRequest(requests[0], 0, length - 1, False)], []))
    harness.runner.execute(StepPlan([ScheduledRequest(requests[1], 0, 20, False)], []))
    entries = [(0, length - 1, 1), (1, 20, length - 29), (2, 0, 5)]
    logits = harness.runner.execute(
        StepPlan([ScheduledRequest(requests[index], start, count, True) for index, start, count in entries], [])
    )
    torch.testing.assert_close(logits, torch.stack([each[-1] for each in expected]), atol=1e-3, rtol=1e-4)


# ---------------------------------------------------------------- which backend


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    make_other("GPT2").save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    FAMILIES["mixtral"]().save_pretrained(folder)
    return folder


def test_a_family_without_a_decoder_of_ours_is_served_through_transformers(gpt2):
    with LLM(gpt2, device="cpu", num_kv_blocks=64) as llm:
        assert llm.info.backend == "transformers"
        assert llm.info.architecture == "gpt2"
        assert llm.info.num_parameters == 363360
        assert (llm.info.num_layers, llm.info.max_context, llm.info.vocab_size) == (3, MAX_POSITIONS, VOCAB_SIZE)
        assert "".join(output.text for output in llm.stream("Once", SamplingParams(max_tokens=5, ignore_eos=True)))
        assert llm.engine.memory_parts().kv_cache == 64 * 16 * llm.info.kv_bytes_per_token


def test_our_own_decoder_goes_first_and_the_choice_can_be_forced(mixtral, gpt2):
    assert load(mixtral).backend == "native"
    assert load(mixtral, backend="native").backend == "native"
    assert load(mixtral, backend="transformers").backend == "transformers"
    with pytest.raises(UnsupportedModelError, match="'gpt2' is not supported"):
        load(gpt2, backend="native")


def test_what_neither_can_serve_is_refused_with_both_reasons(tmp_path):
    save("Mamba", "MambaForCausalLM", tmp_path, vocab_size=64, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match=r"'mamba' is not supported.*; and transformers.*0 of its 2 layers"):
        load(tmp_path)


def test_only_a_folder_can_be_forced_through_transformers(starter_model):
    with pytest.raises(UnsupportedModelError, match="needs a model folder"):
        load(starter_model, backend="transformers")


# ---------------------------------------------------------------- what is refused


def save(name: str, model_class: str, folder: Path, **values: Any) -> PreTrainedModel:
    model = randomised(getattr(transformers, model_class)(getattr(transformers, f"{name}Config")(**values)))
    model.save_pretrained(folder)
    return model


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Bert": ("BertLMHeadModel", SMALL, "tokens see those after them"),
    "Bloom": ("BloomForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_head": 4}, "AttentionInterface"),
    "DiffLlama": ("DiffLlamaForCausalLM", SMALL | {"num_key_value_heads": 2}, "attends more than once"),
    "Doge": ("DogeForCausalLM", SMALL | {"num_key_value_heads": 2}, "does not use the masks of transformers"),
    "Falcon": ("FalconForCausalLM", SMALL, "AttentionInterface"),
    "Llama4Text": (
        "Llama4ForCausalLM",
        SHAPE | {"head_dim": 16, "intermediate_size_mlp": 32, "num_local_experts": 2, "attention_chunk_size": 32},
        "chunked attention",
    ),
    "Mamba": ("MambaForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, "0 of its 2 layers"),
    "RecurrentGemma": (
        "RecurrentGemmaForCausalLM",
        SMALL | {"num_hidden_layers": 3, "lru_width": 32, "num_key_value_heads": 1},
        "1 of its 3 layers",
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4},
        "an encoder and a decoder",
    ),
    "ViT": ("ViTModel", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}, "no decoder of text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(name, tmp_path):
    model_class, values, reason = REFUSED[name]
    save(name, model_class, tmp_path, **values)
    with pytest.raises(UnsupportedModelError, match=f"transformers cannot serve it: .*{reason}"):
        load(tmp_path, backend="transformers")


def test_tokens_that_change_their_neighbours_answer_are_noticed(gpt2, monkeypatch):
    """As where a model counts positions by itself although it takes them."""
    own = transformers.GPT2Model.forward

    def deaf(self, *arguments, position_ids=None, **named):
        return own(self, *arguments, **named)

    monkeypatch.setattr(transformers.GPT2Model, "forward", deaf)
    with pytest.raises(UnsupportedModelError, match="does not go by position_ids"):
        load(gpt2, backend="transformers")


def test_attention_that_is_not_ours_is_noticed(gpt2, monkeypatch):
    """As with a bias on the scores, which only the model's own attention function adds."""
    module = sys.modules[transformers.GPT2Model.__module__]
    own = module.eager_attention_forward

    def biased(layer, query, key, value, attention_mask, **named):
        distances = torch.arange(key.shape[2])[None] - torch.arange(query.shape[2])[:, None]
        return own(layer, query, key, value, attention_mask + 0.1 * distances, **named)

    monkeypatch.setattr(module, "eager_attention_forward", biased)
    with pytest.raises(UnsupportedModelError, match="not the softmax of scaled products"):
        load(gpt2, backend="transformers")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def broken(gpt2, tmp_path) -> Path:
    folder = tmp_path / "broken"
    shutil.copytree(gpt2, folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "novel"}, "transformers does not know 'novel'"),
        ({"model_type": "novel", "auto_map": {"AutoConfig": "code.Config"}}, "comes with code of its own"),
        ({"quantization_config": {"quant_method": "quip"}}, "weights quantised as 'quip'"),
        ({"n_layer": 4000000}, "4000000 layers are claimed"),
        ({"n_positions": 1 << 40}, "a context of 1099511627776 tokens is claimed"),
        ({"n_embd": 6 << 20}, "asks for .* weights and the files hold 363360"),
        ({"n_inner": 100}, "of another shape"),
        ({"n_embd": "wide"}, "transformers"),
        ({"n_head": 0}, "transformers"),
        ({"n_head": 7}, "transformers cannot make this model"),
    ],
)
def test_a_damaged_or_foreign_configuration_is_refused(broken, changes, reason):
    change_config(broken, **changes)
    with pytest.raises(ModelError, match=reason):
        load(broken, backend="transformers")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_that_do_not_fit_the_model_are_refused_by_name(broken, quantization):
    name = "transformer.h.1.mlp.c_proj.weight"
    rewrite(broken, lambda tensors: tensors.update(extra=torch.zeros(3)))
    with pytest.raises(ModelError, match=r"'extra' .* not used by this model"):
        load(broken, backend="transformers", quantization=quantization)
    rewrite(broken, lambda tensors: (tensors.pop("extra"), tensors.update({name: torch.zeros(100, 400)})))
    with pytest.raises(ModelError, match=r"mlp.c_proj.weight' are of another shape|cannot load"):
        load(broken, backend="transformers", quantization=quantization)
    rewrite(broken, lambda tensors: (tensors.pop(name), tensors.update(padding=torch.zeros(100, 400))))
    with pytest.raises(ModelError, match=r"mlp.c_proj.weight' .* missing"):
        load(broken, backend="transformers", quantization=quantization)


def test_a_truncated_or_pickled_checkpoint_is_refused(broken):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read"):
        load(broken, backend="transformers")
    weights.rename(broken / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        load(broken, backend="transformers")


# ---------------------------------------------------------------- windows, contexts, caches


def causal(batch, head, query, key):
    return key <= query


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (causal, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 20), 20),
        (lambda b, h, q, k: (k <= q) & (k > q - 1), 1),
        (lambda b, h, q, k: (k <= q) & (k > q - 100000), 100000),
        (lambda b, h, q, k: (k <= q) & (k > q - 131072), None),
        (lambda b, h, q, k: (k <= q) & (k > q - 131071), 131071),
        (lambda b, h, q, k: (k <= q) & (k // 8192 == q // 8192), "window changes"),
        (lambda b, h, q, k: torch.ones_like(k, dtype=torch.bool), "other keys"),
        (lambda b, h, q, k: (k <= q) & ((k > q - 20) | (k == 0)), "other keys"),
        (lambda b, h, q, k: k < q, "other keys"),
    ],
)
def test_a_window_is_read_off_the_mask_at_any_length(mask, window):
    if isinstance(window, str):
        with pytest.raises(UnsupportedModelError, match=window):
            window_of(mask, 131072, CPU)
    else:
        assert window_of(mask, 131072, CPU) == window


def test_rope_that_depends_on_the_longest_request_is_served_as_far_as_it_does_not(tmp_path):
    FAMILIES["phi3"]().save_pretrained(tmp_path)
    assert load_through_transformers(tmp_path).config.max_context == ORIGINAL_POSITIONS
    assert load_through_transformers(tmp_path, max_context=30).config.max_context == 30
    with pytest.raises(ModelError, match=rf"1 to {ORIGINAL_POSITIONS} \(rope scaling 'longrope'"):
        load_through_transformers(tmp_path, max_context=MAX_POSITIONS)


def test_a_cut_context_shortens_windows_that_do_not_matter_any_more(mixtral):
    assert load_through_transformers(mixtral, max_context=20).config.sliding_windows == (None,) * 3
    assert load_through_transformers(mixtral, max_context=21).config.sliding_windows == (20,) * 3


@pytest.mark.parametrize("name", ["Gemma4Text", "GPTBigCode"])
def test_keys_and_values_can_be_kept_in_eight_bits(name, tmp_path):
    oracle = make_other(name)
    oracle.save_pretrained(tmp_path)
    harness = Harness(load_through_transformers(tmp_path))
    harness.runner = make_runner(harness.loaded, harness.num_blocks, 16, torch.int8, budget=2048)
    token_ids = random_tokens(50, VOCAB_SIZE)
    expected = expected_logits(oracle, token_ids)
    difference = (harness.logits(token_ids, chunk=16) - expected).norm() / expected.norm()
    assert 1e-5 < difference < 0.05


@pytest.mark.parametrize("name", ["DeepseekV3", "GPT2", "GPTBigCode", "Gemma4Text", "Starcoder2"])
def test_the_catalog_knows_the_size_of_weights_and_cache_beforehand(name, tmp_path):
    make_other(name).save_pretrained(tmp_path)
    loaded, shape = load_through_transformers(tmp_path), describe(tmp_path).shape
    assert memory.kv_bytes_per_token(shape, "fp32") == kv_bytes_per_token(loaded.config, torch.float32)
    assert 4 * shape.num_parameters == pytest.approx(loaded.weight_bytes, rel=0.05)


# ---------------------------------------------------------------- packed weights, memory


def _rounded(model: Any, rounding: Rounding) -> PreTrainedModel:
    """The same model with every matrix that is packed replaced by what its codes stand for."""
    tied = model.all_tied_weights_keys
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, Conv1D):
                if name.endswith(".weight"):
                    parameter.copy_(rounding(name, parameter.t().contiguous()).dequantize().t())
            elif isinstance(module, torch.nn.Linear) and name not in tied and name.endswith(".weight"):
                if not name.endswith(".gate.weight"):
                    parameter.copy_(rounding(name, parameter).dequantize())
            elif parameter.ndim == 3:
                transposed = getattr(module, "is_transposed", False)
                for each in parameter:
                    matrix = each.t() if transposed else each
                    matrix.copy_(rounding(name, matrix.contiguous()).dequantize())
    return model


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["GPT2", "Qwen2Moe", "gpt_oss", "DeepseekV3"])
def test_matrices_and_experts_are_packed_while_loading(name, quantization, tmp_path):
    oracle = MAKERS[name]()
    oracle.save_pretrained(tmp_path)
    loaded = load_through_transformers(tmp_path, quantization=quantization)
    assert loaded.quantization == quantization
    assert loaded.weight_bytes < loaded.num_parameters * (2 if quantization == "int8" else 1.3)
    token_ids = random_tokens(40, VOCAB_SIZE)
    expected = expected_logits(_rounded(oracle, Rounding(quantization, 32)), token_ids)
    torch.testing.assert_close(Harness(loaded).logits(token_ids), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.skipif(ops.why_no_cpu_kernels() is not None, reason="the native CPU kernels are not built")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_with_the_native_cpu_kernels_weights_stored_in_halves_stay_so(dtype, tmp_path, monkeypatch):
    oracle = make_other("GPTNeoX").to(dtype)
    oracle.save_pretrained(tmp_path)
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "cpu")
    loaded = load_model(tmp_path, EngineConfig(model="x", backend="transformers"), CPU)
    embedding = VOCAB_SIZE * 96
    assert 2 * loaded.num_parameters < loaded.weight_bytes < 2.1 * loaded.num_parameters + 2 * embedding
    token_ids = random_tokens(40, VOCAB_SIZE)
    expected = expected_logits(oracle.float(), token_ids)
    torch.testing.assert_close(Harness(loaded).logits(token_ids), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_loading_reports_progress_by_bytes_and_can_be_cancelled(mixtral, quantization):
    config = EngineConfig(model="x", backend="transformers", quantization=quantization)
    calls: list[tuple[str, int, int]] = []
    load_model(mixtral, config, CPU, lambda *call: calls.append(call))
    done, totals = [call[1] for call in calls], {call[2] for call in calls}
    size = (mixtral / "model.safetensors").stat().st_size
    assert done == sorted(done) and done[0] == 0 and totals == {size}
    assert 0.9 * size < done[-1] <= size
    calls.clear()
    with pytest.raises(LoadCancelled):
        load_model(mixtral, config, CPU, lambda *call: calls.append(call), cancelled=lambda: len(calls) >= 15)
    assert len(calls) == 15


MEMORY_SCRIPT = """
import re, sys
from pathlib import Path
import torch
from engine.models import load_model, release_memory
from engine.models.transformers_backend import load_transformers_model
from engine.protocol import EngineConfig

def held():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(1)
before = held()
for quantization in (None, "int8", None):
    config = EngineConfig(model="x", backend="transformers", quantization=quantization)
    peak = []
    loaded = load_model(Path(sys.argv[1]), config, torch.device("cpu"), lambda *_: peak.append(held() - before))
    weights, full = loaded.weight_bytes, held() - before
    loaded = None
    release_memory()
    print(weights, full, max(peak), held() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's figures")
def test_loading_needs_little_more_than_the_weights_and_unloading_gives_them_back(tmp_path):
    config = transformers.GPT2Config(vocab_size=2000, n_embd=512, n_head=8, n_layer=8, n_positions=64)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    for parameter in model.to_empty(device="cpu").parameters():
        parameter.data.fill_(0.01)
    model.save_pretrained(tmp_path, max_shard_size="20MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    matrix = 4 * 512 * 2048
    env = os.environ | {ops.BACKEND_VARIABLE: "reference"}
    arguments = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True, env=env)
    lines = result.stdout.splitlines()
    for line, expected in zip(lines, (105e6, 29e6, 105e6), strict=True):
        weights, held, peak, left = map(int, line.split())
        assert weights == pytest.approx(expected, rel=0.05)
        assert held < weights + 20e6
        assert peak < weights + 4 * matrix + 10e6
        assert left < 25e6
