"""Cuts an array of strings, of which vocabularies have some 100,000: each is a length of 8 bytes, then UTF-8."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmap import mmap

    import numpy as np

_LENGTH = struct.Struct("<Q")
_BYTES_AT_ONCE = 1 << 16


def cut_strings(data: bytes, count: int) -> list[bytes]:
    """The strings of an array that ends with the data."""
    unpack, size, position = _LENGTH.unpack_from, _LENGTH.size, 0
    strings: list[bytes] = []
    for _ in range(count):
        end = position + size + unpack(data, position)[0]
        strings.append(data[position + size : end])
        position = end
    return strings


def skip_short(data: mmap, position: int, count: int) -> int | None:
    """Where an array of strings that begins at `position` ends. None unless each has 1 to 255 bytes."""
    end: int | None = position
    for first in range(position, len(data), _BYTES_AT_ONCE):
        starts = _find_short(data, first, _BYTES_AT_ONCE)[:count]
        count -= len(starts)
        end = _end_of_chain(data, starts, end)
        if end is None or count == 0:
            return end
    return None


def cut_short_texts(data: bytes, count: int) -> list[str] | None:
    """As `cut_strings`, decoded, all at once and in half the time.

    None unless each has 1 to 255 bytes, none of them zero, and all of it is UTF-8.
    """
    return _cut_short(data, count, in_pairs=False)


def cut_short_pairs(data: bytes, count: int) -> list[tuple[str, str]] | None:
    """As `cut_short_texts`, each cut at its space too. None unless each has one."""
    words = _cut_short(data, count, in_pairs=True)
    return None if words is None else list(zip(words[::2], words[1::2]))


def _cut_short(data: bytes, count: int, in_pairs: bool) -> list[str] | None:
    import numpy as np

    windows = [_find_short(data, first, _BYTES_AT_ONCE) for first in range(0, len(data), _BYTES_AT_ONCE)]
    starts = np.concatenate([np.empty(0, dtype=np.int64), *windows])
    if len(starts) != count or _end_of_chain(data, starts, 0) != len(data):
        return None
    joined, kept = np.frombuffer(data, dtype=np.uint8).copy(), np.ones(len(data), dtype=bool)
    joined[starts] = 0
    for byte in range(1, _LENGTH.size):
        kept[starts + byte] = False
    if in_pairs:
        spaces = np.flatnonzero(joined == ord(" "))
        if len(spaces) != count or not np.all(spaces > starts) or not np.all(spaces[:-1] < starts[1:]):
            return None
        joined[spaces] = 0
    try:
        texts = joined[kept].tobytes().decode("utf-8").split("\0")[1:]
    except UnicodeDecodeError:
        return None
    return texts if len(texts) == (2 * count if in_pairs else count) else None


def _end_of_chain(data: bytes | mmap, starts: np.ndarray, position: int) -> int | None:
    """Where strings of 1 to 255 bytes that follow each other from `position` on end; None where they do not.

    Any eight bytes may look like a length, but only those of an array lead from one to the next.
    """
    import numpy as np

    if len(starts) == 0 or starts[0] != position:
        return None
    ends = starts + (_LENGTH.size + np.frombuffer(data, dtype=np.uint8)[starts].astype(np.int64))
    return int(ends[-1]) if np.array_equal(starts[1:], ends[:-1]) else None


def _find_short(data: bytes | mmap, first: int, num_bytes: int) -> np.ndarray:
    """Where eight bytes from one of `num_bytes` on would be a length of 1 to 255: int64 [num_found]."""
    import numpy as np

    view = np.frombuffer(data, dtype=np.uint8)[first : first + num_bytes + _LENGTH.size - 1]
    zeros = view == 0
    two = zeros[:-1] & zeros[1:]
    four = two[:-2] & two[2:]
    seven = (four[:-3] & four[3:])[1:]
    return np.flatnonzero(seven & ~zeros[: len(seven)]) + first
