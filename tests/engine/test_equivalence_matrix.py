"""No shortcut changes an answer: every family, on our decoder and through transformers, with every kind of KV cache.

Tiny random models on the reference kernels, greedy. What each request gives alone, prefilled whole and
without a prefix cache, is what every other way of computing it has to give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.assembly import assemble
from engine.engine import Engine
from engine.llm import LLM
from engine.models import LoadedModel
from engine.protocol import EngineConfig, SamplingParams
from engine.speculation.ngram import NgramIndex
from engine.text.load import load_tokenizer
from engine.text.tokenizer import Tokenizer
from kernels import ops
from tests.engine.families import FAMILIES, VOCAB_SIZE, save_family, save_tokenizer
from tests.engine.test_transformers_backend import OTHERS, make_other
from tests.engine.tiny_llama import load, random_tokens

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [
    random_tokens(38, VOCAB_SIZE, seed=1),  # beyond every window and the shorter of the contexts that rope knows
    random_tokens(21, VOCAB_SIZE, seed=2),
    random_tokens(7, VOCAB_SIZE, seed=3),
]
THROUGH_TRANSFORMERS = ["DeepseekV3", "GPT2", "Gemma4Text", "GPTBigCode", "Qwen2Moe", "Starcoder2"]
CASES = [
    *((family, "native", kv_dtype) for family in FAMILIES for kv_dtype in ("fp32", "int8")),
    *((name, "transformers", "int8") for name in THROUGH_TRANSFORMERS),
    ("GPT2", "transformers", "fp32"),
    ("qwen3", "transformers", "bf16"),
    ("qwen3", "native", "fp16"),
]


@dataclass(frozen=True)
class Case:
    """A loaded model from which any number of engines can be made."""

    path: Path
    loaded: LoadedModel
    tokenizer: Tokenizer
    kv_dtype: Any

    def answers(self, prompts: list[list[int]], **config: Any) -> tuple[list[list[int]], LLM]:
        values = {"device": "cpu", "num_kv_blocks": 64, "block_size": 4, "prefix_caching": False, **config}
        options = EngineConfig(model=str(self.path), kv_dtype=self.kv_dtype, **values)
        llm = LLM.over(Engine(assemble(options, self.path, self.loaded, self.tokenizer)))
        return generate(llm, prompts), llm


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    completions = llm.generate(prompts, GREEDY)
    llm.engine.check_integrity()
    assert all(len(completion.token_ids) == NUM_TOKENS for completion in completions)
    return [completion.token_ids for completion in completions]


def draft_from(monkeypatch: pytest.MonkeyPatch, texts: list[list[int]]) -> None:
    """Has the n-gram drafter find the answers, as in a text it repeats, but for a wrong last token of each draft."""

    def continuation(self: NgramIndex, limit: int) -> list[int]:
        known = list(self._tokens)
        text = next(text for text in texts if text[: len(known)] == known)
        draft = text[len(known) : len(known) + limit]
        return [*draft[:-1], (draft[-1] + 1) % VOCAB_SIZE] if draft else []

    monkeypatch.setattr(NgramIndex, "continuation", continuation)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[Callable[[str, str], tuple[Path, LoadedModel, Tokenizer]]]:
    """Makes and loads a model, once for all its KV dtypes."""
    made: dict[tuple[str, str], tuple[Path, LoadedModel, Tokenizer]] = {}

    def get(name: str, backend: str) -> tuple[Path, LoadedModel, Tokenizer]:
        if (name, backend) not in made:
            folder = tmp_path_factory.mktemp(name)
            if name in OTHERS:
                make_other(name).save_pretrained(folder)
                save_tokenizer(folder)
            else:
                save_family(name, folder)
            made.clear()
            made[name, backend] = (folder, load(folder, backend=backend), load_tokenizer(folder))
        return made[name, backend]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ops.BACKEND_VARIABLE, "reference")
        yield get


@pytest.mark.parametrize(("name", "backend", "kv_dtype"), CASES)
def test_no_shortcut_changes_an_answer(name, backend, kv_dtype, model, monkeypatch):
    path, loaded, tokenizer = model(name, backend)
    case = Case(path, loaded, tokenizer, kv_dtype)
    assert case.loaded.backend == backend
    _, alone = case.answers([PROMPTS[2]])
    expected = [generate(alone, [prompt])[0] for prompt in PROMPTS]
    assert alone.info.kv_dtype == kv_dtype

    together, _ = case.answers(PROMPTS)
    assert together == expected, "batch is not alone"

    chunked, _ = case.answers(PROMPTS, max_batched_tokens=7, max_num_seqs=3, block_size=5)
    assert chunked == expected, "chunked is not whole"

    missed, cached = case.answers(PROMPTS, prefix_caching=True)
    longer = [prompt + answer[:3] for prompt, answer in zip(PROMPTS, missed)]
    hit = [answer[:3] for answer in generate(cached, longer)]
    assert missed == expected and hit == [answer[3:] for answer in expected], "hit is not miss"
    assert cached.stats()["prefix_hit_tokens"] >= sum(len(prompt) // 4 * 4 for prompt in longer) - 8

    preempted, crowded = case.answers(PROMPTS, num_kv_blocks=20)
    assert preempted == expected, "preempted is not undisturbed"
    assert crowded.stats()["preemptions"] > 0

    draft_from(monkeypatch, [prompt + answer for prompt, answer in zip(PROMPTS, expected)])
    speculative, drafting = case.answers(PROMPTS, speculation="ngram", num_draft_tokens=3)
    assert speculative == expected, "speculative is not plain"
    stats = drafting.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
