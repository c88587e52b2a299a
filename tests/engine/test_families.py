"""Every family computes what transformers computes: alone, in chunks, and in a batch through the scheduler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP, MixtureOfExperts
from engine.llm import LLM
from engine.models.config import ModelError
from engine.protocol import SamplingParams
from engine.quantization import DenseWeight
from kernels import ops
from tests.engine.families import (
    FAMILIES,
    ORIGINAL_POSITIONS,
    VOCAB_SIZE,
    expected_logits,
    gemma3_values,
    gpt_oss,
    make_config,
    mixtral,
    phi3,
    qwen3_moe,
    randomised,
    save_family,
)
from tests.engine.quantized_folders import Quantised, gptq, known
from tests.engine.tiny_llama import Harness, load, random_tokens

TOLERANCE = 1e-3
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)


@dataclass(frozen=True)
class Saved:
    family: str
    folder: Path
    model: PreTrainedModel


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    return Saved(request.param, folder, save_family(request.param, folder))


@pytest.fixture
def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "reference")
    yield


def assert_same_logits(folder: Path, model: PreTrainedModel, length: int = 90) -> None:
    token_ids = random_tokens(length, VOCAB_SIZE)
    logits = Harness(load(folder)).logits(token_ids, chunk=37)
    assert (logits - expected_logits(model, token_ids)).abs().max() < TOLERANCE


# ---------------------------------------------------------------- every family


@pytest.mark.parametrize("kernels", [name for name in ops.available_backends() if name != "triton"])
def test_logits_of_every_position_are_those_of_transformers(saved, kernels):
    loaded = load(saved.folder, kernels)
    token_ids = random_tokens(100, VOCAB_SIZE)
    expected = expected_logits(saved.model, token_ids)
    for chunk in (None, 23):
        logits = Harness(loaded).logits(token_ids, chunk)
        assert (logits - expected).abs().max() < TOLERANCE
    assert loaded.num_parameters == saved.model.num_parameters()


def test_a_ragged_batch_with_chunked_prefill_gives_each_request_what_transformers_gives_it_alone(
    saved, reference_kernels
):
    """Lengths on both sides of windows and trained contexts, one of which a request crosses while it answers."""
    prompts = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (3, 52, ORIGINAL_POSITIONS - 3, 88, 21)]
    with LLM(saved.folder, device="cpu", max_batched_tokens=32, max_num_seqs=5, num_kv_blocks=64, block_size=8) as llm:
        completions = llm.generate(prompts, GREEDY)
        steps = llm.engine.metrics.take_step_records()
    assert max(len(step.entries) for step in steps) == 5
    assert all(entry.prefill_tokens <= 32 for step in steps for entry in step.entries)
    for prompt, completion in zip(prompts, completions):
        assert completion.logprobs is not None
        expected = next_token_logits(saved.model, prompt, completion.token_ids)
        assert completion.token_ids == expected.argmax(-1).tolist()
        logprobs = expected.log_softmax(-1).max(-1).values
        reported = torch.tensor([each.logprob for each in completion.logprobs])
        assert (reported - logprobs).abs().max() < TOLERANCE


def next_token_logits(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """What transformers computes for each token of the answer: [len(answer), vocab_size]."""
    if model.config.model_type != "phi3":
        return expected_logits(model, prompt + answer[:-1])[len(prompt) - 1 :]
    # Its frequencies depend on the length: every token is the last of a sequence of its own.
    return torch.stack([expected_logits(model, prompt + answer[:end])[-1] for end in range(len(answer))])


# ---------------------------------------------------------------- layouts of the same weights


def test_experts_stacked_in_one_tensor_are_read_like_single_ones(tmp_path):
    """As transformers 5 holds Mixtral and Qwen3-MoE in memory."""
    for make in (mixtral, qwen3_moe):
        folder = tmp_path / make.__name__
        model = make()
        model.save_pretrained(folder)
        save_file(
            {name: values.contiguous() for name, values in model.state_dict().items()}, folder / "model.safetensors"
        )
        assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(folder / "model.safetensors")
        assert_same_logits(folder, model)


def test_gpt_oss_experts_in_mxfp4_compute_what_transformers_unpacks_from_them(tmp_path):
    model = gpt_oss()
    state = dict(model.state_dict())
    generator = torch.Generator().manual_seed(5)
    stored: dict[str, torch.Tensor] = {}
    for name, values in list(state.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = values.contiguous()
            continue
        num_experts, columns, rows = values.shape
        shape = (num_experts, rows, columns // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model.load_state_dict(state)
    model.save_pretrained(tmp_path)
    save_file(stored, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert_same_logits(tmp_path, model)


def test_fused_projections_are_cut_apart_in_their_integer_codes(tmp_path):
    def pack(rng: np.random.Generator, out: int, columns: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        matrix = known(rng, out, columns, bits=4, group_size=32)
        return gptq(matrix, bits=4), matrix.values

    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    dequantised = Quantised(config, pack).save(phi3(), tmp_path)
    assert_same_logits(tmp_path, dequantised)


def test_a_stack_of_another_number_of_experts_is_refused(tmp_path):
    model = gpt_oss()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    save_file(stored | {name: stored[name][:3].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"4 tensors .*layers\.1\.mlp\.experts\.0\.down_proj.* are missing"):
        load(tmp_path)


def test_the_same_tensor_under_two_names_is_refused(tmp_path):
    model = mixtral()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.0.mlp.gate.weight"] = stored["model.layers.0.block_sparse_moe.gate.weight"].clone()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model\.layers\.0\..*gate\.weight' are the same one"):
        load(tmp_path)


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_a_mixture_of_experts_sums_what_each_token_chooses(num_tokens, normalize):
    generator = torch.Generator().manual_seed(num_tokens)

    def linear(out: int, columns: int) -> Linear:
        return Linear(DenseWeight(torch.randn(out, columns, generator=generator)))

    experts = [GatedMLP(linear(24, 16), linear(16, 12), ops.silu_and_mul) for _ in range(7)]
    mixture = MixtureOfExperts(linear(7, 16), experts, num_chosen=3, normalize=normalize)
    hidden = torch.randn(num_tokens, 16, generator=generator)
    out = mixture(hidden)
    for token, row in zip(hidden, out):
        shares = mixture.router(token[None])[0].softmax(-1)
        best = shares.topk(3)
        weights = best.values / best.values.sum() if normalize else best.values
        expected = sum(weight * experts[int(expert)](token[None])[0] for weight, expert in zip(weights, best.indices))
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- a decoder within a larger model


@pytest.fixture(scope="module")
def gemma3_with_images(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = make_config(
        "Gemma3Config",
        text_config=transformers.Gemma3TextConfig(**gemma3_values()),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=VOCAB_SIZE - 1,
    )
    model = randomised(transformers.Gemma3ForConditionalGeneration(config))
    folder = tmp_path_factory.mktemp("gemma3_with_images")
    model.save_pretrained(folder)
    return Saved("gemma3", folder, model)


@pytest.mark.parametrize("transformers_version", [4, 5])
def test_the_text_part_of_a_model_for_images_is_served_under_either_prefix(
    gemma3_with_images, tmp_path, transformers_version
):
    stored = load_file(gemma3_with_images.folder / "model.safetensors")
    prefixes = {
        "language_model.model.": ("language_model.model.", "model.language_model."),
        "model.language_model.": ("language_model.model.", "model.language_model."),
        "vision_tower.": ("vision_tower.", "model.vision_tower."),
        "multi_modal_projector.": ("multi_modal_projector.", "model.multi_modal_projector."),
    }
    renamed = {}
    for name, values in stored.items():
        prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
        renamed[prefixes[prefix][transformers_version - 4] + name.removeprefix(prefix)] = values
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((gemma3_with_images.folder / "config.json").read_text())
    token_ids = random_tokens(60, VOCAB_SIZE - 1)
    logits = Harness(load(tmp_path)).logits(token_ids)
    assert (logits - expected_logits(gemma3_with_images.model, token_ids)).abs().max() < TOLERANCE
