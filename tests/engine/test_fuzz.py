"""Model files that are damaged or lie: never a crash, never memory that the file is not large enough for.

Each is described for the catalog, loaded and asked for an answer. It ends in an error for people that names the
file, unless what it says can be computed after all.
"""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import catalog
from engine.client import LocalEngineClient
from engine.failures import MAX_MESSAGE_CHARS, explain_load_failure
from engine.llm import LLM
from engine.loading.gguf import GGUFError
from engine.models.config import ModelError
from engine.parameters import SamplingParams
from engine.protocol import EngineConfig, Finished, LoadFailed, LoadModel, ModelLoaded
from engine.text import chat_template
from engine.text.tokenizer import TokenizerError
from kernels import ops
from tests.engine.families import FAMILIES, save_family, save_tokenizer
from tests.engine.gguf_writer import write_gguf_model
from tests.engine.test_quantized_checkpoints import LAYOUTS, tiny_model
from tests.engine.test_worker import Engine as Worker

HOSTILE: list[Any] = [
    None,
    True,
    *(-1, 0, 3, 1 << 24, 1 << 31, 1 << 40, 1 << 63, 10**30),
    *(-5.5, 0.5, float("nan"), float("inf"), 1e-320),
    *("", "x" * 3000, [], [1, "a", None], [[]] * 3, {}, {"a": {"b": 1}}),
]
SPARE_BYTES = 64 << 20
"""Of resident memory beside a multiple of the file's size: libraries that are loaded on the way, and the heap."""
SECONDS = 4.0


class Attempt:
    """Describes, loads and uses models, under limits on what that takes."""

    def __init__(self) -> None:
        self.kernels = random.Random(0)
        self.refused = self.loaded = 0

    def __call__(self, label: str, path: Path, chat: bool = False, **options: Any) -> None:
        files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files)
        forget_peak()
        before, started = resident("VmRSS"), time.thread_time()
        described = catalog.describe_path(path)
        assert described.error is None or 0 < len(described.error) <= MAX_MESSAGE_CHARS, label
        f"{described}".encode()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(ops.BACKEND_VARIABLE, self.kernels.choice(["reference", ops.kernel_backend()]))
                self.use(path, chat, options)
            self.loaded += 1
        except (ModelError, TokenizerError, GGUFError, catalog.CatalogError) as error:
            self.refused += 1
            assert str(path) in str(error), (label, error)
            assert 0 < len(explain_load_failure(error).encode()) <= 4 * MAX_MESSAGE_CHARS, label
        except Exception as error:
            raise AssertionError(f"{label}: {type(error).__name__}: {str(error)[:500]}") from error
        assert time.thread_time() - started < SECONDS, label
        assert resident("VmHWM") - before < SPARE_BYTES + 8 * size, label

    @staticmethod
    def use(path: Path, chat: bool, options: dict[str, Any]) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        with LLM(path, num_kv_blocks=4, **options) as llm:
            if llm.info.max_context > 4:
                answer = llm.generate([[3, 4]], params)[0]
                assert answer.finish_reason == "length" or "no probabilities" in (answer.error or "")
            if chat:
                for ask in (lambda: llm.generate("a b", params), lambda: llm.chat([{"role": "user", "content": "a"}])):
                    try:
                        ask()
                    except ValueError as error:
                        assert str(error)


def resident(figure: str) -> int:
    """Bytes of resident memory, now (VmRSS) or at most (VmHWM); 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    return int(re.findall(rf"{figure}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def forget_peak() -> None:
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    """A good folder and a good file, which have been loaded once."""
    root = tmp_path_factory.mktemp("originals")
    model = save_family("llama", root / "llama")
    write_gguf_model(root / "llama.gguf", model)
    for path in (root / "llama", root / "llama.gguf"):
        for kernels in {"reference", ops.kernel_backend()}:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(ops.BACKEND_VARIABLE, kernels)
                Attempt.use(path, False, {})
    return root


@pytest.fixture
def folder(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals / "llama", tmp_path / "model"))


@pytest.fixture
def attempt(originals) -> Attempt:
    return Attempt()


# ---------------------------------------------------------------- headers


def mutated(data: bytes, header_size: int, rng: random.Random) -> bytes:
    """A few bits, bytes and numbers of the header changed, left out or put in; now and then cut off."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(header_size)
        match rng.randrange(6):
            case 0:
                changed[position] ^= 1 << rng.randrange(8)
            case 1:
                del changed[position : position + rng.randint(1, 30)]
            case 2:
                changed[position:position] = rng.randbytes(rng.randint(1, 20))
            case 3:
                number = rng.choice([0, 1, 2**31, 2**32, 2**63, 2**64 - 1, rng.getrandbits(64)])
                changed[position : position + 8] = struct.pack("<Q", number)
            case 4:
                changed[position : position + 1] = rng.choice([b"0", b"9", b"-", b"[", b'"', b"99999"])
            case _:
                if rng.random() < 0.3:
                    del changed[rng.randrange(len(changed)) :]
                    changed += bytes(max(0, 8 - len(changed)))
                    header_size = min(header_size, len(changed))
    return bytes(changed)


def test_safetensors_headers_with_changed_bytes(folder, attempt):
    path, rng = folder / "model.safetensors", random.Random(1)
    data = path.read_bytes()
    header_size = 8 + struct.unpack("<Q", data[:8])[0]
    for number in range(120):
        path.write_bytes(mutated(data, header_size, rng))
        attempt(f"number {number}", folder, backend="native")
    assert attempt.refused > 60


def test_gguf_headers_with_changed_bytes(originals, tmp_path, attempt):
    path, rng = tmp_path / "model.gguf", random.Random(2)
    data = (originals / "llama.gguf").read_bytes()
    header_size = data.index(b"blk.2.ffn_norm.weight")
    for number in range(120):
        path.write_bytes(mutated(data, header_size, rng))
        attempt(f"number {number}", path, chat=True)
    assert attempt.refused > 60


ENTRIES = {
    "shape": [[], [-1], [2**63], [2**63, 2**63], [2**64], [0], [1.5], ["a"], None, "x", [10**30], [1] * 5000],
    "dtype": ["F4", "BOOL", "C64", "X", None, 5, "F64", "\ud800"],
    "data_offsets": [[0, 0], [5, 1], [-1, 3], [0, 2**63], [2**63, 2**64 - 1], [0], [], None, "a", [0, 1.5]],
}


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_safetensors_headers_that_lie(folder, attempt, backend):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    name = next(name for name in header if "q_proj" in name)

    def put(label: str, content: bytes) -> None:
        path.write_bytes(struct.pack("<Q", len(content)) + content + data[8 + size :])
        attempt(label, folder, backend=backend)

    for field, values in ENTRIES.items():
        for value in values:
            put(f"{field} {value!r}"[:80], json.dumps(header | {name: header[name] | {field: value}}).encode())
    other = next(other for other in header if "k_proj" in other)
    offsets = {"data_offsets": header[other]["data_offsets"]}
    put("overlapping", json.dumps(header | {name: header[name] | offsets}).encode())
    put("twice", json.dumps(header).encode()[:-1] + b"," + json.dumps({name: header[name]}).encode()[1:])
    put("deep", b'{"a":' * 10_000)
    put("deep list", b"[" * 100_000)
    put("no text", b'{"\\ud800": 1}')
    assert attempt.loaded < 3


# ---------------------------------------------------------------- configurations and metadata

CONFIGS: list[dict[str, Any]] = [
    {"max_position_embeddings": 1 << 23},
    {"num_hidden_layers": 4096},
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 10**9, "model_type": "gemma2"},
    {"num_hidden_layers": 1e12, "model_type": "qwen3"},
    {"num_layers": 10**9, "model_type": "gpt_neo"},
    {"text_config": {"num_hidden_layers": 10**9}, "model_type": "gemma3"},
    {"num_labels": 10**9},
    {"head_dim": 1 << 33},
    {"vocab_size": 1 << 38},
    {"model_type": "qwen3_moe", "num_experts": 1 << 24},
    {"model_type": "deepseek_v3", "n_routed_experts": 1 << 22},
    {"model_type": "mistral", "sliding_window": 1 << 40},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 1e20, "rope_theta": 1e29}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.718281828459045, "mscale": 1.0, "mscale_all_dim": -10.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e-300, "rope_theta": 1e-300}},
    {"eos_token_id": [10**30, -1, "a"]},
    {"head_dim": [1, "a", None]},
    {"model_type": ["llama"]},
    {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "novel"},
]


@pytest.mark.parametrize("backend", ["auto", "native", "transformers"])
def test_configurations_that_ask_for_the_impossible(folder, attempt, backend):
    values = json.loads((folder / "config.json").read_text())
    for changes in CONFIGS:
        (folder / "config.json").write_text(json.dumps(values | changes))
        attempt(f"{changes}", folder, backend=backend)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "phi3", "qwen3_moe"])
def test_configurations_with_hostile_settings(tmp_path, attempt, family):
    save_family(family, tmp_path)
    values, rng = json.loads((tmp_path / "config.json").read_text()), random.Random(family)
    spots = [(name,) for name in values] + [("rope_parameters", name) for name in values["rope_parameters"]]
    for *section, name in rng.sample(spots, 24):
        changed = copy.deepcopy(values)
        inner = changed[section[0]] if section else changed
        inner[name] = rng.choice(HOSTILE)
        (tmp_path / "config.json").write_text(json.dumps(changed))
        attempt(f"{section} {name} {inner[name]!r}"[:120], tmp_path, backend="native")
    assert attempt.refused > 3


METADATA: list[dict[str, Any]] = [
    {"gemma2.embedding_length": -1},
    {"gemma2.context_length": 1 << 23},
    {"gemma2.attention.head_count": 0},
    {"gemma2.attention.sliding_window": (1 << 32) - 1},
    {"gemma2.attention.layer_norm_rms_epsilon": float("nan")},
    {"gemma2.rope.scaling.type": "yarn", "gemma2.rope.scaling.factor": 1e-45},
    {"tokenizer.ggml.token_type": 7},
    {"tokenizer.ggml.token_type": ["a", "b"]},
    {"tokenizer.ggml.merges": [1, 2]},
    {"tokenizer.ggml.merges": ["a b c"]},
    {"tokenizer.ggml.tokens": [0.5]},
    {"tokenizer.ggml.tokens": ["a", "b"]},
    {"tokenizer.ggml.eos_token_id": 1 << 31},
    {"tokenizer.ggml.eot_token_id": -1.0},
    {"tokenizer.ggml.pre": "x" * 5000},
    {"tokenizer.ggml.model": "llama"},
    {"tokenizer.chat_templates": 5},
    {"tokenizer.chat_template": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"},
    {"split.count": 65535},
    {"general.alignment": 3},
    {"general.file_type": "big"},
]


def test_gguf_metadata_that_lies(tmp_path, attempt):
    model, path, rng = FAMILIES["gemma2"](), tmp_path / "model.gguf", random.Random(4)
    keys = ["block_count", "feed_forward_length", "attention.head_count_kv", "attention.key_length"]
    keys += ["attention.sliding_window_pattern", "expert_count", "final_logit_softcapping"]
    numbers = [-1, 0, 3, (1 << 32) - 1, 2.5, float("inf"), True, "x", [1, 2, 3], ["a"]]
    for changes in METADATA + [{f"gemma2.{key}": value} for key in keys for value in rng.sample(numbers, 2)]:
        write_gguf_model(path, model, extra=changes)
        attempt(f"{changes}"[:120], path, chat=True)
    assert attempt.refused > 20


@pytest.mark.parametrize("layout", ["gptq_desc_act", "awq", "packed_4_group_zeros", "fp8_blocks"])
def test_quantised_checkpoints_that_lie(tmp_path, attempt, layout):
    quantised, rng = LAYOUTS[layout](), random.Random(layout)
    quantised.save(tiny_model(num_hidden_layers=1), tmp_path)
    save_tokenizer(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())

    def sections(section: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        for name, value in section.items():
            yield section, name
            if isinstance(value, dict):
                yield from sections(value)

    for section, name in sections(values["quantization_config"]):
        kept = section[name]
        for value in rng.sample(HOSTILE, 3):
            section[name] = value
            (tmp_path / "config.json").write_text(json.dumps(values))
            attempt(f"{name} {value!r}"[:80], tmp_path, backend="native")
        section[name] = kept
    (tmp_path / "config.json").write_text(json.dumps(values))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if "q_proj" in name]:
        stored = tensors[name]
        faults = [None, stored.reshape(-1), torch.cat([stored, stored]), limits_of(stored)]
        for changed in (stored[:0], *rng.sample(faults, 2)):
            rest = {other: tensor for other, tensor in tensors.items() if other != name}
            save_file(rest if changed is None else rest | {name: changed.contiguous()}, path)
            shape = "gone" if changed is None else list(changed.shape)
            attempt(f"{name} {shape}", tmp_path, backend="native", quantization=rng.choice([None, "int8", "int4"]))
    assert attempt.refused > 4


def limits_of(stored: torch.Tensor) -> torch.Tensor:
    """The same shape and type, all of the lowest value there is; NaN for floats of more than 8 bits."""
    if not stored.is_floating_point():
        return torch.full_like(stored, torch.iinfo(stored.dtype).min)
    return torch.full_like(stored, torch.finfo(stored.dtype).min if stored.element_size() == 1 else float("nan"))


# ---------------------------------------------------------------- the other files of a folder

GARBAGE: dict[str, list[bytes]] = {
    "any": [b"", b"\xff\xfe{", b"[" * 10_000, b'{"a":' * 10_000, b"null", b'"x"', b'{"a": ' + b"9" * 5000 + b"}"],
    "model.safetensors.index.json": [
        *(
            b'{"weight_map": {"x": %s}}' % name
            for name in (b'"../x"', b'"/etc/passwd"', b'".."', b'""', b"5", b'["a"]')
        ),
        *(b'{"weight_map": {"x": %s}}' % name for name in (b'"a\\u0000b"', b'"\\ud800"', b'"config.json"', b"null")),
        b'{"weight_map": []}',
    ],
    "tokenizer_config.json": [
        b'{"eos_token": "\\ud800"}',
        b'{"eos_token": 5, "bos_token": []}',
        b'{"chat_template": [1, 2]}',
        b'{"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}',
        b'{"chat_template": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"}',
        b'{"tokenizer_class": "os.system"}',
        b'{"auto_map": {"AutoTokenizer": ["a.B", null]}}',
        b'{"added_tokens_decoder": {"-5": {"content": 3}}}',
        b'{"added_tokens_decoder": {"99999999": {"content": "a"}}}',
    ],
    "generation_config.json": [b'{"eos_token_id": {"a": 1}}', b'{"eos_token_id": [1e300, null]}'],
    "config.json": [b"{}"],
    "tokenizer.json": [b"{}"],
}


@pytest.mark.parametrize("name", [name for name in GARBAGE if name != "any"])
def test_files_that_hold_something_else(folder, attempt, name, monkeypatch):
    monkeypatch.setattr(chat_template, "TIME_LIMIT", 0.1)
    for content in GARBAGE["any"] + GARBAGE[name]:
        (folder / name).write_bytes(content)
        attempt(f"{name} {content[:60]}", folder, chat=True)
    assert attempt.refused > 3


ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
TOKENIZERS: dict[str, dict[str, Any]] = {
    "a normalizer that panics": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "texts filled up to gigabytes": {"padding": PADDING | {"strategy": {"Fixed": 1 << 36}}},
    "an expression": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+"}, "behavior": "Isolated"}},
    "no such id": {"model": {"type": "Unigram", "unk_id": 99, "vocab": [["a", 0.0]]}},
    "NaN": {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", float("nan")]]}},
    "the largest id": {"model": {"type": "BPE", "vocab": {"a": (1 << 32) - 1}, "merges": []}},
    "one id for all": {"model": {"type": "BPE", "vocab": {"a": 0, "b": 0, "ab": 0}, "merges": [["a", "b"]]}},
    "an added token of no text": {"added_tokens": [ADDED | {"id": 3, "content": ""}]},
    "an added token far away": {"added_tokens": [ADDED | {"id": 1 << 31, "content": "zz"}]},
    "a decoder of nothing": {"decoder": {"type": "Sequence", "decoders": []}},
    "a decoder that strips": {"decoder": {"type": "Strip", "content": " ", "start": 1 << 60, "stop": 1 << 60}},
    "a template of tokens that are not there": {
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "q", "type_id": 0}}]}
    },
}


def change_tokenizer(folder: Path, changes: dict[str, Any]) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(values | changes))


@pytest.mark.parametrize("fault", TOKENIZERS)
def test_tokenizers_of_strange_parts(folder, attempt, fault):
    change_tokenizer(folder, TOKENIZERS[fault])
    attempt(fault, folder, chat=True)


def test_a_tokenizer_that_was_saved_in_training_does_not_cut_prompts(folder):
    truncation = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    with LLM(folder, num_kv_blocks=4) as llm:
        expected = llm.engine.tokenizer.encode("a prompt of some length")
    change_tokenizer(folder, {"truncation": truncation, "padding": PADDING | {"strategy": {"Fixed": 50}}})
    with LLM(folder, num_kv_blocks=4) as llm:
        assert llm.engine.tokenizer.encode("a prompt of some length") == expected
    assert len(expected) > 5


# ---------------------------------------------------------------- beside good models


def test_the_catalog_shows_good_models_beside_hostile_ones(originals, tmp_path, monkeypatch):
    monkeypatch.setenv("KVASIR_MODELS", str(tmp_path))
    shutil.copytree(originals / "llama", tmp_path / "good")
    config = json.loads((tmp_path / "good" / "config.json").read_text())
    hostile = [b"[" * 10_000, *(json.dumps(config | changes).encode() for changes in CONFIGS)]
    for number, content in enumerate(hostile):
        (tmp_path / f"bad {number}").mkdir()
        (tmp_path / f"bad {number}" / "model.safetensors").symlink_to(originals / "llama" / "model.safetensors")
        (tmp_path / f"bad {number}" / "config.json").write_bytes(content)
    (tmp_path / "bad.gguf").write_bytes((originals / "llama.gguf").read_bytes()[:3000])
    found = {entry.name: entry for entry in catalog.find_models() if entry.path.is_relative_to(tmp_path)}
    assert len(found) == len(hostile) + 2
    assert found["good"].error is None and found["good"].num_parameters > 0
    assert "truncated" in (found["bad"].error or "")


def test_a_worker_survives_hostile_files_and_loads_a_good_one(originals, tmp_path):
    hostile = {
        "panics": ("tokenizer.json", json.dumps(TOKENIZERS["a normalizer that panics"]).encode()),
        "no text": ("model.safetensors.index.json", b'{"weight_map": {"x": "\\ud800"}}'),
        "deep": ("config.json", b"[" * 10_000),
        "many layers": ("config.json", b'{"model_type": "gemma2", "num_hidden_layers": 1000000000}'),
    }
    client = LocalEngineClient()
    client.start()
    worker = Worker(client)
    try:
        for name, (file, content) in hostile.items():
            folder = Path(shutil.copytree(originals / "llama", tmp_path / name))
            if file == "tokenizer.json":
                change_tokenizer(folder, json.loads(content))
            else:
                (folder / file).write_bytes(content)
            client.send(LoadModel(config=EngineConfig(model=str(folder))))
            assert str(folder) in worker.until_type(LoadFailed).message
        client.send(LoadModel(config=EngineConfig(model=str(originals / "llama.gguf"), num_kv_blocks=8)))
        assert worker.until_type(ModelLoaded).info.architecture == "llama"
        request_id = worker.ask(prompt="a b", max_tokens=3, ignore_eos=True)
        assert worker.until_type(Finished, request_id).finish_reason == "length"
    finally:
        client.close()
