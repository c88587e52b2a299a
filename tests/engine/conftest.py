"""What all engine tests share: the starter model, loaded once, and a collector that passes over what was imported."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.assembly import assemble
from engine.engine import Engine
from engine.llm import LLM
from engine.models import LoadedModel
from engine.protocol import EngineConfig
from engine.text.load import load_tokenizer
from engine.text.tokenizer import Tokenizer
from kernels import ops
from tests.engine.tiny_llama import load


@pytest.fixture(scope="module", autouse=True)
def _settled_imports() -> None:
    """Each model that is let go of has garbage collected: all of torch and transformers need not be looked through."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Starter:
    """Weights and tokenizer of the starter model, for the kernels that are the default here."""

    path: Path
    loaded: LoadedModel
    tokenizer: Tokenizer

    def engine(self, **config) -> Engine:
        """A fresh engine over the shared weights, with 64 KV blocks if not told otherwise."""
        config = {"device": "cpu", "num_kv_blocks": 64, **config}
        return Engine(assemble(EngineConfig(model=str(self.path), **config), self.path, self.loaded, self.tokenizer))

    def llm(self, **config) -> LLM:
        return LLM.over(self.engine(**config))


@pytest.fixture(scope="session")
def starter(starter_model: Path) -> Starter:
    return Starter(starter_model, load(starter_model, kernels=ops.kernel_backend()), load_tokenizer(starter_model))


@pytest.fixture
def check_after_each_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], None]:
    """Makes an engine check its blocks after each step."""

    def install(engine: Engine) -> None:
        step = engine.step

        def checked():
            outputs = step()
            engine.check_integrity()
            return outputs

        monkeypatch.setattr(engine, "step", checked)

    return install
