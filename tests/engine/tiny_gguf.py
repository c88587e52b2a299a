"""Small GGUF files for tests, written by the `gguf` package or byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

BYTE_ALPHABET = [chr(byte) for byte in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]]
BYTE_ALPHABET += [chr(0x100 + index) for index in range(68)]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_model(path: Path, **changes: Any) -> Path:
    """A whole, tiny llama file: 2 layers, 4 heads over 2 KV heads of 8, byte vocabulary, ChatML template.

    `changes` replace values: architecture, context, pre, model, bos, add_bos, template, templates, tokens, types,
    scores, merges, flags (booleans by key), extra (more integers by key).
    """
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(2)
    writer.add_context_length(changes.get("context", 256))
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    tokens = changes.get("tokens", [*BYTE_ALPHABET, "<|im_start|>", "<|im_end|>", "<s>", "<think>", "ab"])
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    if pre := changes.get("pre", "gpt-2"):
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(changes.get("types", [1] * 256 + [3, 3, 3, 4, 1]))
    writer.add_token_merges(changes.get("merges", ["a b"]))
    if scores := changes.get("scores"):
        writer.add_token_scores(scores)
    if (bos := changes.get("bos", 258)) is not None:
        writer.add_bos_token_id(bos)
    writer.add_eos_token_id(changes.get("eos", 257))
    if (add_bos := changes.get("add_bos")) is not None:
        writer.add_add_bos_token(add_bos)
    if template := changes.get("template", TEMPLATE):
        writer.add_chat_template(template)
    if templates := changes.get("templates"):
        writer.add_chat_template(templates)
    for key, value in changes.get("flags", {}).items():
        writer.add_bool(key, value)
    for key, value in changes.get("extra", {}).items():
        writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", np.ones((len(tokens), 32), dtype=np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.arange(32 * 32, dtype=np.float16).reshape(32, 32))
    quantised = gguf.quants.quantize(np.ones((16, 32), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_k.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def header(
    entries: bytes = b"", tensors: bytes = b"", num_entries: int = 0, num_tensors: int = 0, version: int = 3
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + entries + tensors


def tensor(name: str, dims: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def set_metadata(path: Path, key: str, code: str, value: int) -> None:
    """Overwrites a number in a file's metadata; `code` is struct's for its type."""
    data = bytearray(path.read_bytes())
    struct.pack_into(code, data, data.index(string(key)) + len(string(key)) + 4, value)
    path.write_bytes(data)
