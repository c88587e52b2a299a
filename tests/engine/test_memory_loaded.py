"""What was estimated from metadata alone is what loading takes, within a tenth."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.client import LocalEngineClient
from engine.kv_cache import kv_bytes_per_token
from engine.loading.describe import describe
from engine.memory import Hardware, cpu_hardware, estimate, precision_of
from engine.memory import kv_bytes_per_token as estimated_kv_bytes_per_token
from engine.models import LoadedModel, load_model
from engine.protocol import EngineConfig, LoadFailed, LoadModel, MemoryBreakdown, ModelLoaded, Telemetry
from engine.runner import make_runner, runner_kv_dtype
from kernels import ops
from tests.engine.families import FAMILIES, save_family
from tests.engine.gguf_writer import write_gguf_model

CPU = torch.device("cpu")
PRECISIONS: list[dict[str, Any]] = [
    {},
    {"quantization": "int8"},
    {"quantization": "int4", "quantization_group_size": 32},
    {"kv_dtype": "int8", "max_context": 64},
]


@pytest.fixture(params=["reference", "cpu"])
def hardware(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    monkeypatch.setenv(ops.BACKEND_VARIABLE, request.param)
    hardware = cpu_hardware()
    assert hardware.native == (request.param == "cpu")
    return hardware


def check(path: Path, hardware: Hardware, tolerance: float, **changes: Any) -> LoadedModel:
    """Loads a model and compares weights, KV cache and workspace with their estimate."""
    config = EngineConfig(model=str(path), **changes)
    shape = describe(path).shape
    wanted = estimate(shape, config, hardware)
    loaded = load_model(path, config, CPU)
    assert loaded.weight_bytes == pytest.approx(wanted.weights, rel=tolerance)
    dtype = runner_kv_dtype(loaded, config.kv_dtype)
    per_token = estimated_kv_bytes_per_token(shape, precision_of(config, hardware).kv)
    assert per_token == kv_bytes_per_token(loaded.config, dtype)
    runner = make_runner(loaded, wanted.num_blocks, config.block_size, dtype, 128)
    assert runner.kv_bytes == wanted.kv_cache
    if runner.workspace_bytes is not None:
        assert runner.workspace_bytes == pytest.approx(wanted.workspace, rel=0.1)
    return loaded


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        save_family(family, root / family)
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_what_was_estimated_in_every_precision(
    folders: Path, family: str, hardware: Hardware
) -> None:
    for changes in PRECISIONS:
        loaded = check(folders / family, hardware, 0.01, **changes)
        assert loaded.backend == "native" and loaded.native == hardware.native


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_model_that_transformers_runs_takes_what_was_estimated(
    folders: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "reference")
    for changes in PRECISIONS[:3]:
        assert check(folders / family, cpu_hardware(), 0.02, backend="transformers", **changes)


def test_a_head_that_is_stored_although_it_is_tied_counts_once(
    folders: Path, tmp_path: Path, hardware: Hardware
) -> None:
    save_family("gemma2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    before = describe(tmp_path).shape
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shape = describe(tmp_path).shape
    assert shape.stored_bytes > before.stored_bytes
    assert (shape.num_parameters, shape.weights) == (before.num_parameters, before.weights)
    check(tmp_path, hardware, 0.01)


@pytest.mark.parametrize("tensor_type", ["F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_files_take_what_was_estimated(tmp_path: Path, hardware: Hardware, tensor_type: str) -> None:
    path = write_gguf_model(tmp_path / "model.gguf", FAMILIES["llama"](), tensor_type)
    check(path, hardware, 0.01)
    check(path, hardware, 0.01, quantization="int4")


def packed_checkpoint(folder: Path, source: Path, quantization: dict[str, Any], pack: Any) -> Path:
    """The model in `source` with each matrix of its layers replaced by the tensors that `pack(out, in)` makes."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        module, (out, columns) = name.removesuffix(".weight"), tensors.pop(name).shape
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in pack(out, columns).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def words(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0x11111111, dtype=torch.int32)


def scales(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.01, dtype=torch.float16)


def gptq(bits: int) -> tuple[dict[str, Any], Any]:
    each = 32 // bits

    def pack(out: int, columns: int) -> dict[str, torch.Tensor]:
        return {
            "qweight": words(columns // each, out),
            "qzeros": words(columns // 32, out // each),
            "scales": scales(columns // 32, out),
        }

    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, "desc_act": False}, pack


def awq() -> tuple[dict[str, Any], Any]:
    def pack(out: int, columns: int) -> dict[str, torch.Tensor]:
        return {
            "qweight": words(columns, out // 8),
            "qzeros": words(columns // 32, out // 8),
            "scales": scales(columns // 32, out),
        }

    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, pack


def compressed(bits: int) -> tuple[dict[str, Any], Any]:
    scheme = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
        "ignore": ["lm_head"],
    }

    def pack(out: int, columns: int) -> dict[str, torch.Tensor]:
        return {
            "weight_packed": words(out, columns * bits // 32),
            "weight_scale": scales(out, columns // 32),
            "weight_shape": torch.tensor([out, columns]),
        }

    return quantization, pack


@pytest.mark.parametrize(
    ("method", "title"),
    [
        (gptq(4), "gptq 4-bit"),
        (gptq(8), "gptq 8-bit"),
        (awq(), "awq 4-bit"),
        (compressed(4), "compressed-tensors 4-bit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_quantised_checkpoints_take_what_was_estimated(
    folders: Path, tmp_path: Path, hardware: Hardware, method: tuple[dict[str, Any], Any], title: str
) -> None:
    folder = packed_checkpoint(tmp_path / "packed", folders / "llama", *method)
    described, plain = describe(folder), describe(folders / "llama")
    assert described.quantisation == title
    assert described.shape.num_parameters == plain.shape.num_parameters, "words hold several weights each"
    check(folder, hardware, 0.1)


# ---------------------------------------------------------------- the starter model in a worker


@pytest.fixture
def client() -> Iterator[LocalEngineClient]:
    client = LocalEngineClient()
    client.start()
    yield client
    client.close(2.0)


def measured(client: LocalEngineClient, config: EngineConfig) -> MemoryBreakdown:
    """Where the memory is right after loading."""
    client.send(LoadModel(config=config))
    deadline = time.monotonic() + 60
    loaded = False
    while time.monotonic() < deadline:
        for event in client.wait_events(0.2):
            assert not isinstance(event, LoadFailed), event
            loaded = loaded or isinstance(event, ModelLoaded)
            if isinstance(event, Telemetry) and loaded:
                return event.memory
    raise AssertionError("the model was not loaded in time")


def test_the_starter_model_takes_what_was_estimated(client: LocalEngineClient, starter_model: Path) -> None:
    shape = describe(starter_model).shape
    drafting: dict[str, Any] = {"kv_dtype": "int8", "speculation": "draft", "draft_model": str(starter_model)}
    options: list[dict[str, Any]] = [{}, drafting]
    for changes in options:
        config = EngineConfig(model=str(starter_model), **changes)
        wanted = estimate(shape, config, cpu_hardware(), shape)
        memory = measured(client, config)
        told = f"{changes}: {memory} for {wanted}"
        draft_weights = wanted.weights if wanted.draft else 0
        assert memory.weights == pytest.approx(wanted.weights + draft_weights, rel=0.1), told
        assert memory.kv_cache == pytest.approx(wanted.kv_cache + wanted.draft_kv_cache, rel=0.1), told
        held = memory.weights + memory.kv_cache + memory.workspace + memory.runtime
        assert held == pytest.approx(wanted.total, rel=0.1), told
