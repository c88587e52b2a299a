"""GGUF files are read whole or refused by name."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.loading.gguf import TENSOR_TYPES, GGUFError, GGUFFile
from tests.engine.tiny_gguf import header, string, tensor, write_model

U32, ARRAY, STRING = 4, 9, 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_metadata_and_tensors_equal_the_gguf_package(tiny: Path) -> None:
    reader = gguf.GGUFReader(tiny)
    with GGUFFile(tiny) as file:
        theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        assert dict(file.metadata) == theirs
        assert list(file.tensors) == [entry.name for entry in reader.tensors]
        for entry in reader.tensors:
            ours = file.tensors[entry.name]
            assert ours.shape == tuple(reversed([int(dim) for dim in entry.shape]))
            assert (ours.type, ours.offset, ours.nbytes) == (
                entry.tensor_type.name,
                int(entry.data_offset),
                int(entry.n_bytes),
            )
            np.testing.assert_array_equal(file.read(entry.name), entry.data.view(np.uint8).reshape(-1))


def test_every_type_has_the_block_size_of_the_gguf_package() -> None:
    for type_id, (name, elements, nbytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(type_id)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (elements, nbytes))


def test_the_starter_header_is_read_quickly_and_without_the_weights(starter_model: Path) -> None:
    best = float("inf")
    for _ in range(3):
        start = time.thread_time()
        with GGUFFile(starter_model) as file:
            num_tokens = file.metadata.array_length("tokenizer.ggml.tokens")
        best = min(best, time.thread_time() - start)
    assert num_tokens == 49152
    assert len(file.tensors) == 272
    assert best < 0.3
    tracemalloc.start()
    with GGUFFile(starter_model) as file:
        assert file.metadata["llama.block_count"] == 30
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_views_outlive_the_file_object(tiny: Path) -> None:
    with GGUFFile(tiny) as file:
        view = file.read("blk.0.attn_q.weight")
    view_before, on_disk = view.copy(), tiny.read_bytes()
    view[:] = 0
    assert tiny.read_bytes() == on_disk, "views are private copies as soon as they are written to"
    view[:] = view_before
    np.testing.assert_array_equal(view.view(np.float16), np.arange(1024, dtype=np.float16))


def test_arrays_asked_for_after_close_say_so(tiny: Path) -> None:
    with GGUFFile(tiny) as file:
        file.metadata["tokenizer.ggml.tokens"]
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 261
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.merges.*closed"):
        file.metadata["tokenizer.ggml.merges"]


def test_a_file_larger_than_memory_is_described(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    path.write_bytes(tiny.read_bytes())
    os.truncate(path, 2 * psutil.virtual_memory().total + psutil.swap_memory().total)  # of which no byte is stored
    with GGUFFile(path) as file, GGUFFile(tiny) as small:
        assert file.tensors == small.tensors
        np.testing.assert_array_equal(file.read("blk.0.attn_q.weight"), small.read("blk.0.attn_q.weight"))


def test_a_shared_file_stays_open_until_its_last_user_closes_it(tiny: Path) -> None:
    file = GGUFFile(tiny)
    with file.share():
        file.close()
        assert len(file.metadata["tokenizer.ggml.merges"]) > 0
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.tokens.*closed"):
        file.metadata["tokenizer.ggml.tokens"]


def test_strings_with_zero_bytes_and_none_at_all_are_read_as_they_are(tmp_path: Path) -> None:
    words = [f"{'Ġ' * (i % 7)}{i}" for i in range(9000)]
    for name, strings in (
        ("zeros", ["a\0", "", "\0\0", "ü"]),
        ("empty", []),
        ("one", [""]),
        ("words", words),
        ("long", [*words, "long " * 60, "end"]),
        ("like a length", [*words, "b\x05\0\0\0\0\0\0\0c", "end"]),
        ("a length within a length", ["a", "\0" + "x" * 260, "b"]),  # 261 and the zero: 5, then 1 in eight bytes
        ("all zeros", ["a", "\0" * 8, "\0" * 16, "b"]),
        ("256 bytes", [*words, "x" * 256, *words]),
        ("pairs", [f"{word} ü" for word in words]),
        ("pairs of one word", [f"{word} " for word in words]),
        ("pairs of 32 bytes", [f"{word:_>29} ü" for word in words]),  # whose length is a space
        ("a pair of three", [*(f"{word} a" for word in words), "a b c"]),
        ("none after three", [*(f"{word} a" for word in words), "a b c", "ab"]),
        ("three and none", [*(f"{word} a" for word in words), "ab", "a b c"]),
        ("few pairs", ["a b", "c d"]),
    ):
        path = tmp_path / f"{name}.gguf"
        values = b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in strings)
        path.write_bytes(
            struct.pack("<4sIQQ", b"GGUF", 3, 0, 2)
            + entry("texts", 9, struct.pack("<IQ", 8, len(strings)) + values)
            + entry("more", 9, struct.pack("<IQ", 8, 1) + string(b"more"))
            + bytes(64)
        )
        pairs = [tuple(text.split(" ")) for text in strings]
        expected = pairs if all(len(pair) == 2 for pair in pairs) else None
        with GGUFFile(path) as file:
            assert file.metadata["more"] == ["more"]
            assert file.metadata.word_pairs("texts") == expected, name
            assert file.metadata["texts"] == strings
            assert file.metadata.word_pairs("texts") == expected
            assert file.metadata.word_pairs("nothing") is None


def test_reading_gguf_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, engine.loading.gguf; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def entry(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "no magic": (b"PK\x03\x04" + bytes(60), "no GGUF file"),
    "only the magic": (b"GGUF", "truncated"),
    "version 1": (header(version=1), "version 1 is not supported"),
    "version 4": (header(version=4), "version 4 is not supported"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "absurd tensor count": (header(num_tensors=2**63), r"claims 9223372036854775808 tensors"),
    "tensor count beyond the file": (header(num_tensors=1000), "1000 tensors, more than fit"),
    "absurd entry count": (header(num_entries=2**40), "metadata entries"),
    "entry count beyond the file": (header(num_entries=60_000), "more than fit"),
    "absurd key length": (header(struct.pack("<Q", 2**60) + bytes(32), num_entries=1), "key claims"),
    "key beyond the file": (header(struct.pack("<Q", 500) + bytes(32), num_entries=1), "truncated"),
    "string beyond the file": (header(entry("a", STRING, struct.pack("<Q", 10**6)), num_entries=1), "'a'.*truncated"),
    "absurd string": (header(entry("a", STRING, struct.pack("<Q", 2**50)), num_entries=1), "'a' claims"),
    "string of no text": (header(entry("a", STRING, string(b"\xff\xfe")), num_entries=1), "not valid UTF-8"),
    "unknown value type": (header(entry("a", 99, bytes(16)), num_entries=1), "unknown value type 99"),
    "same key twice": (header(2 * entry("a", U32, bytes(4)), num_entries=2), "'a' appears twice"),
    "absurd array": (header(entry("a", ARRAY, struct.pack("<IQ", U32, 2**62)), num_entries=1), "claims"),
    "array beyond the file": (header(entry("a", ARRAY, struct.pack("<IQ", U32, 5000)), num_entries=1), "more than fit"),
    "nested array": (header(entry("a", ARRAY, struct.pack("<IQ", ARRAY, 0)), num_entries=1), "unsupported type 9"),
    "strings beyond the file": (
        header(entry("a", ARRAY, struct.pack("<IQQ", STRING, 1, 700)), num_entries=1),
        "beyond the end",
    ),
    "absurd string in an array": (
        header(entry("a", ARRAY, struct.pack("<IQQ", STRING, 1, 2**63)), num_entries=1),
        "metadata 'a' runs beyond the end of the file",
    ),
    "alignment of 0": (header(entry("general.alignment", U32, bytes(4)), num_entries=1), "alignment is 0"),
    "alignment of 24": (
        header(entry("general.alignment", U32, struct.pack("<I", 24)), num_entries=1),
        "alignment is 24, not a power of two",
    ),
    "unknown tensor type": (header(tensors=tensor("w", [32], 77), num_tensors=1) + bytes(256), "unknown type 77"),
    "five dimensions": (header(tensors=tensor("w", [1] * 5), num_tensors=1) + bytes(256), "5 dimensions"),
    "a dimension of 0": (header(tensors=tensor("w", [4, 0]), num_tensors=1) + bytes(256), "dimension of 0"),
    "rows that are no whole blocks": (
        header(tensors=tensor("w", [33], 3), num_tensors=1) + bytes(256),
        "33 elements, no multiple of Q4_1's 32",
    ),
    "sizes that overflow": (
        header(tensors=tensor("w", [2**62, 2**62]), num_tensors=1) + bytes(256),
        r"'w' ends at byte \d{30,}, but the file has",
    ),
    "data beyond the file": (header(tensors=tensor("w", [1024]), num_tensors=1) + bytes(256), "truncated"),
    "offset beyond the file": (
        header(tensors=tensor("w", [8], offset=1 << 40), num_tensors=1) + bytes(256),
        "truncated",
    ),
    "misaligned offset": (header(tensors=tensor("w", [8], offset=20), num_tensors=1) + bytes(256), "alignment 32"),
    "same tensor twice": (
        header(tensors=tensor("w", [8]) + tensor("w", [8], offset=32), num_tensors=2) + bytes(256),
        "'w' appears twice",
    ),
    "overlapping tensors": (
        header(tensors=tensor("v", [16]) + tensor("w", [8], offset=32), num_tensors=2) + bytes(256),
        "'v' and 'w' overlap",
    ),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_bad_file_is_refused_by_name_before_memory_is_spent(fault: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[fault]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(GGUFError, match=message) as caught:
        GGUFFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ")
    assert "; " in str(caught.value), "says what to do"
    assert peak < 200_000


def test_strings_as_long_as_a_model_are_refused_before_anybody_asks_for_them(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    with path.open("wb") as file:
        file.write(header(entry("a", ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 28)), num_entries=1))
        file.truncate(1 << 29)  # a hole, which takes no room
    with pytest.raises(GGUFError, match="'a' claims 268435464 bytes"):
        GGUFFile(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"nothing\.gguf: cannot be opened \(No such file"):
        GGUFFile(tmp_path / "nothing.gguf")


def test_a_file_cut_anywhere_is_refused(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(400), *range(400, len(whole) - 64, 997)]:
        cut.write_bytes(whole[:length])
        with pytest.raises(GGUFError):
            GGUFFile(cut)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_never_does_worse_than_gguf_error(data: st.DataObject, tiny: Path, tmp_path: Path) -> None:
    content = bytearray(tiny.read_bytes())
    header_size = 6000
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header_size))
        kind = data.draw(st.sampled_from(["bit", "u32", "u64", "insert", "delete"]))
        if kind == "bit":
            content[position] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "u32":
            content[position : position + 4] = struct.pack("<I", data.draw(st.integers(0, 2**32 - 1)))
        elif kind == "u64":
            content[position : position + 8] = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1)))
        elif kind == "insert":
            content[position:position] = data.draw(st.binary(min_size=1, max_size=40))
        else:
            del content[position : position + data.draw(st.integers(1, 40))]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        with GGUFFile(path) as file:
            dict(file.metadata)
            for name, entry in file.tensors.items():
                assert len(file.read(name)) == entry.nbytes
    except GGUFError as error:
        assert str(path) in str(error)
