"""Reads GGUF files through a memory map: the header is checked whole, tensors are views.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
Every length, count, type and offset is checked against the file before anything of that
size is read, so a damaged file costs no memory and ends in a `GGUFError`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine.loading.gguf_strings import cut_short_pairs, cut_short_texts, cut_strings, skip_short

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Far above anything published; a header that claims more is damaged, and refusing it here
# bounds time and memory on files of any size.
MAX_METADATA_ENTRIES = 1 << 16
MAX_TENSORS = 1 << 20
MAX_ARRAY_LENGTH = 1 << 24
MAX_STRING_BYTES = 1 << 24
MAX_STRINGS_BYTES = 1 << 28
MAX_NAME_BYTES = 1 << 16
MAX_DIMENSIONS = 4

# ggml type id -> (name, elements per block, bytes per block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALAR_STRUCTS = {type_id: struct.Struct("<" + code) for type_id, code in _SCALARS.items()}
_STRING = 8
_ARRAY = 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MANY_STRINGS = 1000
"""From here on it pays to look at many at once."""


class GGUFError(ValueError):
    """A GGUF file that cannot be used. The message names the file, the fault and what to do."""


# Python names it from 3.13 on.
_LINUX_MAP_NORESERVE = 0x4000


def _private_pages(fileno: int) -> mmap.mmap:
    """Maps a whole file: torch asks for memory it may write to, and a write must not reach the file."""
    if sys.platform != "linux":
        return mmap.mmap(fileno, 0, access=mmap.ACCESS_COPY)
    # A file that is larger than memory is refused if all of it is to be set aside for such writes.
    return mmap.mmap(fileno, 0, flags=mmap.MAP_PRIVATE | _LINUX_MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's entry. `shape` is row-major (torch's order, the reverse of the file's);
    `offset` counts bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int

    @property
    def num_elements(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count


@dataclass(frozen=True, slots=True)
class _Array:
    """Where an array lies in the file; decoded when asked for."""

    element_type: int
    length: int
    offset: int
    nbytes: int


class GGUFMetadata(Mapping[str, Any]):
    """The key-value section. Arrays become lists on first use, so that skipping a vocabulary costs little."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Array):
            value = self._values[key] = self._file._decode_array(key, value)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def array_length(self, key: str) -> int | None:
        """Number of elements of an array without decoding it; None where `key` is no array."""
        value = self._values.get(key)
        if isinstance(value, _Array):
            return value.length
        return len(value) if isinstance(value, list) else None

    def word_pairs(self, key: str) -> list[tuple[str, str]] | None:
        """An array of texts that are two words with a space between, as pairs. None for anything else."""
        value = self._values.get(key)
        if isinstance(value, _Array) and (pairs := self._file._decode_pairs(value)) is not None:
            return pairs
        texts = self.get(key)
        if not isinstance(texts, list) or not all(isinstance(text, str) and text.count(" ") == 1 for text in texts):
            return None
        return [(first, second) for first, second in (text.split(" ") for text in texts)]


class GGUFFile:
    """An open GGUF file. Use as a context manager; views from `read` stay valid after `close`.

    Raises `GGUFError` for anything that is not a whole, consistent GGUF file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._position = 0
        self._num_users = 1
        self._lock = threading.Lock()
        try:
            with self.path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    self._fail("the file is empty", "download it again")
                self._map = _private_pages(file.fileno())
        except OSError as error:
            self._fail(f"cannot be opened ({error.strerror or error})", "check the path and its permissions")
        self.metadata = GGUFMetadata(self)
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._parse()
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def share(self) -> GGUFFile:
        """The same open file for one more user, who closes it too."""
        with self._lock:
            self._num_users += 1
        return self

    def close(self) -> None:
        """For the last user unmaps the file, or leaves that to the last view from `read` still in use."""
        with self._lock:
            self._num_users -= 1
            if self._num_users > 0:
                return
        self._unmap()

    def _unmap(self) -> None:
        try:
            self._map.close()
        except BufferError:
            pass

    def read(self, name: str) -> np.ndarray:
        """The tensor's bytes as they lie in the file: a uint8 view [nbytes], copied only where it is written to."""
        import numpy as np

        tensor = self.tensors.get(name)
        if tensor is None:
            self._fail(f"has no tensor {name!r}", "the model may need another loader, or the file is incomplete")
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)

    # ------------------------------------------------------------ parsing

    def _fail(self, fault: str, advice: str = "the file is damaged: download it again") -> NoReturn:
        raise GGUFError(f"{self.path}: {fault}; {advice}")

    def _parse(self) -> None:
        if self._map[:4] != MAGIC:
            self._fail(f"is no GGUF file (starts with {self._map[:4]!r})", "choose a file in GGUF format")
        self._position = 4
        self.version = self._u32("version")
        if self.version not in SUPPORTED_VERSIONS:
            if int.from_bytes(_U32.pack(self.version), "big") in SUPPORTED_VERSIONS:
                self._fail("is a big-endian GGUF file", "convert the model again for little-endian machines")
            self._fail(f"GGUF version {self.version} is not supported (2 and 3 are)", "convert the model again")
        num_tensors = self._u64("tensor count")
        num_entries = self._u64("metadata count")
        # The shortest possible entries: an empty name, one byte of value; an empty name, no dimensions.
        self._check_count("metadata entries", num_entries, 8 + 4 + 1, MAX_METADATA_ENTRIES)
        self._check_count("tensors", num_tensors, 8 + 4 + 4 + 8, MAX_TENSORS)
        for _ in range(num_entries):
            self._parse_entry()
        self.alignment = self._read_alignment()
        entries = [self._parse_tensor() for _ in range(num_tensors)]
        self._place_tensors(entries)

    def _need(self, nbytes: int, what: str) -> int:
        """Moves past `nbytes` and returns where they start."""
        start = self._position
        if nbytes > self.size - start:
            self._fail(f"{what} needs {nbytes} bytes at offset {start}, but the file ends at {self.size} (truncated?)")
        self._position = start + nbytes
        return start

    def _u32(self, what: str) -> int:
        return _U32.unpack_from(self._map, self._need(4, what))[0]

    def _u64(self, what: str) -> int:
        return _U64.unpack_from(self._map, self._need(8, what))[0]

    def _string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        length = self._u64(f"length of {what}")
        if length > limit:
            self._fail(f"{what} claims {length} bytes (at most {limit} are plausible)")
        start = self._need(length, what)
        return self._text(self._map[start : start + length], what)

    def _text(self, data: bytes, what: str) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            self._fail(f"{what} is not valid UTF-8")

    def _check_count(self, what: str, count: int, entry_bytes: int, limit: int) -> None:
        if count > limit:
            self._fail(f"claims {count} {what} (at most {limit} are plausible)")
        if count * entry_bytes > self.size - self._position:
            self._fail(f"claims {count} {what}, more than fit into its {self.size} bytes (truncated?)")

    def _parse_entry(self) -> None:
        key = self._string("a metadata key", MAX_NAME_BYTES)
        what = f"metadata {key!r}"
        if key in self.metadata:
            self._fail(f"{what} appears twice")
        value_type = self._u32(f"type of {what}")
        if value_type == _STRING:
            value: Any = self._string(what)
        elif value_type == _ARRAY:
            value = self._skip_array(what)
        elif scalar := _SCALAR_STRUCTS.get(value_type):
            value = scalar.unpack_from(self._map, self._need(scalar.size, what))[0]
        else:
            self._fail(f"{what} has the unknown value type {value_type}")
        self.metadata._values[key] = value

    def _skip_array(self, what: str) -> _Array:
        element_type = self._u32(f"element type of {what}")
        length = self._u64(f"length of {what}")
        start = self._position
        if scalar := _SCALAR_STRUCTS.get(element_type):
            self._check_count(f"elements of {what}", length, scalar.size, MAX_ARRAY_LENGTH)
            self._need(length * scalar.size, what)
        elif element_type == _STRING:
            self._check_count(f"elements of {what}", length, 8, MAX_ARRAY_LENGTH)
            self._skip_strings(length, what)
        else:
            self._fail(f"{what} is an array of the unsupported type {element_type}")
        return _Array(element_type, length, start, self._position - start)

    def _skip_strings(self, count: int, what: str) -> None:
        # To import numpy for it would take ten times as long as the loop, as where models are only listed.
        can_skip = count >= _MANY_STRINGS and "numpy" in sys.modules
        position = skip_short(self._map, self._position, count) if can_skip else None
        if position is None:
            position = self._find_end_of_strings(count, what)
        if position > self.size:
            self._fail(f"{what} runs beyond the end of the file (truncated?)")
        if position - self._position > MAX_STRINGS_BYTES:
            nbytes = position - self._position
            self._fail(f"{what} claims {nbytes} bytes (at most {MAX_STRINGS_BYTES} are plausible)")
        self._position = position

    def _find_end_of_strings(self, count: int, what: str) -> int:
        # This loop runs once for each vocabulary entry, hence the local names and the bare arithmetic.
        unpack, data, position, index = _U64.unpack_from, self._map, self._position, 0
        try:
            for index in range(count):  # noqa: B007  the message names it
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError):
            self._fail(f"element {index} of {what} lies beyond the end of the file (truncated?)")
        return position

    def _decode_pairs(self, array: _Array) -> list[tuple[str, str]] | None:
        """None for what `_decode_array` has to look at."""
        if self._map.closed or array.element_type != _STRING:
            return None
        return cut_short_pairs(self._map[array.offset : array.offset + array.nbytes], array.length)

    def _decode_array(self, key: str, array: _Array) -> list[Any]:
        if self._map.closed:
            raise ValueError(f"metadata {key!r} of {self.path} was asked for after the file was closed")
        if array.element_type != _STRING:
            code = _SCALARS[array.element_type]
            return list(struct.unpack_from(f"<{array.length}{code}", self._map, array.offset))
        data = self._map[array.offset : array.offset + array.nbytes]
        texts = cut_short_texts(data, array.length)
        if texts is not None:
            return texts
        strings = cut_strings(data, array.length)
        return [self._text(string, f"element {index} of metadata {key!r}") for index, string in enumerate(strings)]

    def _read_alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20 or alignment & (alignment - 1):
            self._fail(f"general.alignment is {alignment!r}, not a power of two")
        return alignment

    def _parse_tensor(self) -> GGUFTensor:
        """Reads one entry; its offset is still relative to the data section."""
        name = self._string("a tensor name", MAX_NAME_BYTES)
        what = f"tensor {name!r}"
        num_dims = self._u32(f"dimension count of {what}")
        if num_dims > MAX_DIMENSIONS:
            self._fail(f"{what} claims {num_dims} dimensions (at most {MAX_DIMENSIONS} exist)")
        dims = [self._u64(f"dimension of {what}") for _ in range(num_dims)]
        type_id = self._u32(f"type of {what}")
        offset = self._u64(f"offset of {what}")
        if type_id not in TENSOR_TYPES:
            self._fail(f"{what} has the unknown type {type_id}", "update Kvasir, or choose another quantisation")
        type_name, block_elements, block_bytes = TENSOR_TYPES[type_id]
        if 0 in dims:
            self._fail(f"{what} has a dimension of 0: {dims}")
        row = dims[0] if dims else 1
        if row % block_elements:
            self._fail(f"rows of {what} have {row} elements, no multiple of {type_name}'s {block_elements}")
        tensor = GGUFTensor(name, tuple(reversed(dims)), type_name, offset, 0)
        nbytes = tensor.num_elements // block_elements * block_bytes
        if offset % self.alignment:
            self._fail(f"{what} starts at {offset}, no multiple of the alignment {self.alignment}")
        return GGUFTensor(name, tensor.shape, type_name, offset, nbytes)

    def _place_tensors(self, entries: list[GGUFTensor]) -> None:
        """Checks that every tensor lies in the file and on no other, and makes offsets absolute."""
        data_start = -(-self._position // self.alignment) * self.alignment
        for entry in entries:
            end = data_start + entry.offset + entry.nbytes
            if end > self.size:
                self._fail(
                    f"tensor {entry.name!r} ends at byte {end}, but the file has {self.size} (truncated?)",
                    "the download is incomplete or the file is damaged: download it again",
                )
            if entry.name in self.tensors:
                self._fail(f"tensor {entry.name!r} appears twice")
            self.tensors[entry.name] = GGUFTensor(
                entry.name, entry.shape, entry.type, data_start + entry.offset, entry.nbytes
            )
        in_order = sorted(self.tensors.values(), key=lambda tensor: tensor.offset)
        for before, after in itertools.pairwise(in_order):
            if before.offset + before.nbytes > after.offset:
                self._fail(f"tensors {before.name!r} and {after.name!r} overlap")
