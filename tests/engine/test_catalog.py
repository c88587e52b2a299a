"""Models on disk are found, named and described without being loaded."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import catalog
from engine.catalog import CatalogEntry, CatalogError, find_models, resolve, starter_model
from tests.engine.tiny_gguf import write_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def no_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVASIR_DATA", "KVASIR_MODELS", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]], item_bytes: int = 2) -> Path:
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = item_bytes
        for dim in shape:
            size *= dim
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))
    return path


def write_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    write_safetensors(folder / "model.safetensors", {"a": ("BF16", [100, 64]), "b": ("BF16", [64])})
    return folder


def one(entries: list[CatalogEntry], name: str) -> CatalogEntry:
    found = [entry for entry in entries if entry.name == name]
    assert len(found) == 1, [entry.name for entry in entries]
    return found[0]


def test_the_starter_model_is_found_and_described(starter_model: Path) -> None:
    entry = find_models()[0]
    assert entry.path == starter_model
    assert (entry.name, entry.format, entry.architecture) == ("SmolLM2-135M-Instruct.Q4_1", "gguf", "llama")
    assert (entry.num_parameters, entry.quantisation, entry.max_context) == (134_515_008, "Q4_1", 8192)
    assert entry.size_bytes == starter_model.stat().st_size
    assert entry.error is None
    assert entry.shape is not None
    assert entry.shape.kv_heads == (3,) * 30
    assert (entry.shape.key_dim, entry.shape.hidden_size, entry.shape.vocab_size) == (64, 576, 49152)


def test_gguf_files_and_folders_are_found_in_all_places(
    tmp_path: Path, private_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "given.gguf")
    (tmp_path / "listed" / "publisher" / "repo").mkdir(parents=True)
    write_model(tmp_path / "listed" / "publisher" / "repo" / "deep.GGUF")
    write_folder(tmp_path / "listed" / "folder-model")
    monkeypatch.setenv("KVASIR_MODELS", os.pathsep.join([str(tmp_path / "listed"), str(tmp_path / "missing")]))
    own = catalog.user_models_folder()
    assert private_folders in own.parents
    own.mkdir(parents=True)
    write_model(own / "own.gguf")
    snapshot = catalog.hugging_face_cache() / "models--org--name" / "snapshots" / "abc"
    write_folder(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    entries = find_models([tmp_path])
    assert {entry.name for entry in entries} == {
        "SmolLM2-135M-Instruct.Q4_1", "given", "deep", "folder-model", "own", "org/name",
    }  # fmt: skip
    assert all(entry.error is None for entry in entries), [entry.error for entry in entries]
    described = one(entries, "folder-model")
    assert (described.format, described.architecture, described.quantisation) == (
        "safetensors",
        "LlamaForCausalLM",
        "BF16",
    )
    assert (described.num_parameters, described.max_context) == (6464, 512)
    assert described.shape is not None
    assert (described.shape.kv_heads, described.shape.key_dim) == ((2, 2, 2), 16)
    assert resolve("org/name") == snapshot


def test_one_variable_moves_the_users_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_DATA", str(tmp_path))
    (tmp_path / "models").mkdir()
    write_model(tmp_path / "models" / "moved.gguf")
    assert one(find_models(), "moved").path == resolve("moved") == tmp_path / "models" / "moved.gguf"


def test_a_model_is_described_wherever_it_lies(tmp_path: Path) -> None:
    write_model(tmp_path / "elsewhere.gguf")
    entry = catalog.describe_path(tmp_path / "elsewhere.gguf")
    assert (entry.name, entry.error) == ("elsewhere", None) and entry.max_context > 0
    assert catalog.describe_path(write_folder(tmp_path / "v1.2")).name == "v1.2"
    missing = catalog.describe_path(tmp_path / "missing.gguf")
    assert missing.error is not None and missing.max_context == 0


def test_a_path_that_is_no_text_is_an_entry_that_says_so(tmp_path: Path) -> None:
    try:
        write_model(tmp_path / "model-\udcff.gguf")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    (entry,) = (entry for entry in find_models([tmp_path]) if entry.path.parent == tmp_path)
    assert entry.error is not None and "not valid UTF-8" in entry.error


def test_names_are_unique_and_stay_the_same(tmp_path: Path) -> None:
    for folder in ("a", "b", "c/b"):
        (tmp_path / folder).mkdir(parents=True)
        write_model(tmp_path / folder / "model.gguf")
    names = [entry.name for entry in find_models([tmp_path])][1:]
    assert sorted(names) == ["a/model", "b/model", "b/model (2)"]
    assert [entry.name for entry in find_models([tmp_path])][1:] == names
    for name in names:
        assert one(find_models([tmp_path]), name).path == resolve(name, [tmp_path])


def test_a_model_reached_by_two_paths_is_shown_once(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "link.gguf").symlink_to(tmp_path / "model.gguf")
    assert [entry.name for entry in find_models([tmp_path, tmp_path / "sub", tmp_path / "model.gguf"])][1:] == ["model"]


def test_a_link_keeps_its_name_not_that_of_what_it_leads_to(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    write_model(blobs / "0123abc")
    (tmp_path / "linked.gguf").symlink_to(blobs / "0123abc")
    entry = one(find_models([tmp_path]), "linked")
    assert entry.path == tmp_path / "linked.gguf"
    assert entry.error is None


def test_broken_files_are_entries_that_say_what_is_wrong(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "text.gguf").write_text("this is no model at all")
    write_model(tmp_path / "split-00001-of-00003.gguf", extra={"split.count": 3})
    write_model(tmp_path / "split-00002-of-00003.gguf", extra={"split.count": 3})
    write_folder(tmp_path / "no-weights")
    (tmp_path / "no-weights" / "model.safetensors").unlink()
    write_folder(tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    write_folder(tmp_path / "cut-weights")
    weights = tmp_path / "cut-weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    write_folder(tmp_path / "bad-header")
    (tmp_path / "bad-header" / "model.safetensors").write_bytes(struct.pack("<Q", 20) + b"{not json".ljust(20))
    write_folder(tmp_path / "bad-config")
    (tmp_path / "bad-config" / "config.json").write_text("{")
    write_folder(tmp_path / "odd-config", num_attention_heads="many")
    write_folder(tmp_path / "shards")
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
    )
    entries = {entry.name: entry for entry in find_models([tmp_path])}
    expected = {
        "cut": "truncated",
        "empty": "the file is empty",
        "text": "is no GGUF file",
        "split-00001-of-00003": "1 of its 3 parts are missing (split-00003-of-00003.gguf",
        "no-weights": "holds no weights",
        "pickled": "pickled",
        "cut-weights": "truncated",
        "bad-header": "damaged header",
        "bad-config": "config.json is damaged",
        "odd-config": "num_attention_heads is 'many'",
        "shards": "1 of 2 weight files are missing (model-2.safetensors",
    }
    assert set(entries) == {"SmolLM2-135M-Instruct.Q4_1", "whole", *expected}
    for name, message in expected.items():
        error = entries[name].error
        assert error is not None and message in error, (name, error)
        assert ";" in error, "says what to do"
        assert str(tmp_path) not in error
        assert entries[name].shape is None
    with pytest.raises(CatalogError, match=r"cut .*cut\.gguf\) cannot be used: .*truncated"):
        resolve("cut", [tmp_path])


def test_a_repaired_file_is_described_anew(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(whole[:100])
    assert one(find_models([tmp_path]), "model").error is not None
    (tmp_path / "model.gguf").write_bytes(whole)
    assert one(find_models([tmp_path]), "model").error is None


def test_packed_weights_are_counted_as_what_they_hold(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "gptq", quantization_config={"quant_method": "gptq", "bits": 4})
    tensors = {
        "x.qweight": ("I32", [8, 64]),
        "x.qzeros": ("I32", [1, 8]),
        "x.scales": ("F16", [1, 64]),
        "n.weight": ("F16", [64]),
    }
    write_safetensors(folder / "model.safetensors", tensors, item_bytes=4)
    entry = one(find_models([tmp_path]), "gptq")
    assert (entry.quantisation, entry.num_parameters) == ("gptq 4-bit", 64 * 64 + 64)


def test_names_are_resolved_whatever_their_case_and_paths_as_they_are(tmp_path: Path, starter_model: Path) -> None:
    assert resolve("smollm2-135m-instruct.q4_1") == starter_model
    assert resolve(starter_model) == resolve(str(starter_model)) == starter_model
    folder = write_folder(tmp_path / "folder")
    assert resolve(folder) == folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SmolLM2", r"No model is called 'SmolLM2'\. Did you mean SmolLM2-135M-Instruct\.Q4_1\?"),
        ("smollm2-135m-instruct.q4_0", r"Did you mean SmolLM2-135M-Instruct\.Q4_1\?"),
        ("gpt-99", r"There are: SmolLM2-135M-Instruct\.Q4_1\."),
        ("", r"No model is called ''"),
        ("/nowhere/model.gguf", "no such file or folder"),
        ("nowhere.gguf", "no such file or folder"),
    ],
)
def test_an_unknown_name_lists_near_ones(name: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        resolve(name)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"holds no model \(no config\.json\)"):
        resolve(tmp_path)


def test_without_any_model_the_folder_to_put_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "STARTER_PACKAGE", "no_such_package")
    assert starter_model() is None
    assert find_models() == []
    with pytest.raises(CatalogError, match=r"put one into .*kvasir.models"):
        resolve("anything")


def test_the_light_side_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'tokenizers', 'jinja2', 'gguf'}"
    code = f"import sys, engine.catalog, engine.memory; engine.catalog.find_models(); print({heavy} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "set()\n"
