"""One model, computed in every way the engine has: the same greedy tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from transformers import PretrainedConfig

from engine.llm import LLM
from engine.models.loader import LoadedModel
from engine.protocol import SamplingParams
from tests.gpu.backends import using
from tests.gpu.random_model import Quantization, RandomModel, llama_8b, qwen3_06b, random_model
from tests.gpu.report import Report

PROMPT_LENGTHS = (1, 15, 16, 17, 100, 300)
SMALL = {"vocab_size": 4000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
# Heads whose kernels other sections compile too.
SMALL_MODELS = {
    "llama": llama_8b(**SMALL),
    "qwen3": qwen3_06b(**SMALL, num_attention_heads=9, num_key_value_heads=3, head_dim=64),
}

KINDS: dict[str, tuple[Quantization | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "int8": ("int8", {}),
    "int4": ("int4", {}),
    "int8 cache": (None, {"kv_dtype": "int8"}),
}
"""Weights and options that both backends are asked for."""

WAYS: dict[str, dict[str, Any]] = {
    "without CUDA graphs": {"cuda_graphs": False},
    "without looking ahead": {"looks_ahead": False},
    "looking ahead without graphs": {"looks_ahead": True, "cuda_graphs": False},
    "with cached prefixes": {"prefix_caching": True, "max_num_seqs": 2},
    "with n-gram drafts": {"speculation": "ngram"},
    "in chunks of 64 tokens": {"max_batched_tokens": 64},
    "two at a time": {"max_num_seqs": 2},
}
"""How else the Triton kernels compute; usually it is under CUDA graphs, looking ahead, all prompts in one step."""

TIE = 0.2
"""Where two answers part, their tokens' logits may be this far apart, in standard deviations of all logits. Both
round to bf16 in each layer; of a hundred likely tokens the first two are rarely as near, and wrong ones never."""


def compare(
    report: Report,
    device: str = "cuda",
    models: Mapping[str, PretrainedConfig] = SMALL_MODELS,
    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS,
    num_tokens: int = 48,
    kernels: str = "triton",
    cuda_graphs: bool = True,
) -> None:
    """Triton's tokens against the reference's, and against those of every other way."""
    for name, hf_config in models.items():
        with random_model(hf_config, device, max(prompt_lengths) + num_tokens + 16) as model:
            # Each begins as the longer ones do.
            text = model.prompt(max(prompt_lengths))
            prompts = [[*text[: length - 1], index] for index, length in enumerate(prompt_lengths)]
            for kind, (quantization, options) in KINDS.items():
                options = {"cuda_graphs": cuda_graphs} | options
                with closing(_Runs(model, quantization, prompts, num_tokens, options)) as runs:
                    usual = runs.answers(kernels)
                    _check(report, f"{name} {kind}: the reference's tokens", runs, usual, "reference")
                    for way, others in WAYS.items() if kind == "plain" else ():
                        _check(report, f"{name}: the same {way}", runs, usual, kernels, **others)


class _Runs:
    """Engines over one set of weights, each backend's loaded once."""

    def __init__(
        self,
        model: RandomModel,
        quantization: Quantization | None,
        prompts: list[list[int]],
        num_tokens: int,
        options: dict[str, Any],
    ) -> None:
        self.prompts = prompts
        self._model = model
        self._quantization: Quantization | None = quantization
        self._params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
        self._options = {"num_kv_blocks": 512, "prefix_caching": False} | options
        self._loaded: dict[str, LoadedModel] = {}
        self._reference: LLM | None = None

    def answers(self, kernels: str, **options: Any) -> list[list[int]]:
        with using(kernels), self._model.llm(self._load(kernels), **(self._options | options)) as llm:
            completions = llm.generate(self.prompts, self._params)
            assert all(completion.error is None for completion in completions), completions[0].error
            return [completion.token_ids for completion in completions]

    def reference_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """What follows the tokens, float32 [vocab_size]."""
        with using("reference"):
            if self._reference is None:
                self._reference = self._model.llm(self._load("reference"), **self._options)
            return self._reference.logits(token_ids)[-1]

    def close(self) -> None:
        if self._reference is not None:
            self._reference.close()

    def _load(self, kernels: str) -> LoadedModel:
        if kernels not in self._loaded:
            self._loaded[kernels] = self._model.load(quantization=self._quantization)
        return self._loaded[kernels]


def _check(report: Report, name: str, runs: _Runs, usual: list[list[int]], kernels: str, **options: Any) -> None:
    try:
        pairs = list(zip(runs.prompts, usual, runs.answers(kernels, **options), strict=True))
        gap = max(gap_where_they_part(*pair, runs.reference_logits) for pair in pairs)
    except Exception as error:  # the other ways may still work
        report.failed(name, error)
        return
    same = sum(own == its for _, own, its in pairs)
    report.check(name, gap <= TIE, gap, TIE, f"{same} of {len(pairs)} answers the same to their end")


def gap_where_they_part(
    prompt: Sequence[int], own: Sequence[int], other: Sequence[int], logits: Callable[[Sequence[int]], torch.Tensor]
) -> float:
    """How far apart the first two tokens that differ are, in standard deviations of the logits; 0 if none do."""
    if len(own) != len(other):
        return float("inf")
    for index, (token, another) in enumerate(zip(own, other)):
        if token != another:
            row = logits([*prompt, *own[:index]])
            return float((row[token] - row[another]).abs() / row.std())
    return 0.0
