"""Cuts an array of strings, of which vocabularies have some 100,000: each is a length of 8 bytes, then UTF-8."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def cut_short_texts(data: bytes, count: int) -> list[str] | None:
    """As `cut_strings`, decoded, all at once and in half the time.

    None unless each has 1 to 255 bytes, none of them zero, and all of it is UTF-8.
    """
    import numpy as np

    starts = _find_short(data)
    if len(starts) != count or count == 0 or starts[0] != 0:
        return None
    view = np.frombuffer(data, dtype=np.uint8)
    ends = starts + (_LENGTH.size + view[starts].astype(np.int64))
    # Any eight bytes may look like a length; these follow each other.
    if not np.array_equal(starts[1:], ends[:-1]) or ends[-1] != len(data):
        return None
    joined, kept = view.copy(), np.ones(len(data), dtype=bool)
    joined[starts] = 0
    for byte in range(1, _LENGTH.size):
        kept[starts + byte] = False
    try:
        texts = joined[kept].tobytes().decode("utf-8").split("\0")
    except UnicodeDecodeError:
        return None
    return texts[1:] if len(texts) == count + 1 else None


def _find_short(data: bytes) -> np.ndarray:
    """Where eight bytes would be a length of 1 to 255: int64 [num_found]."""
    import numpy as np

    num_bytes = len(data) - _LENGTH.size + 1
    found = [np.empty(0, dtype=np.int64)]
    for first in range(0, num_bytes, _BYTES_AT_ONCE):
        lengths = np.ndarray(min(_BYTES_AT_ONCE, num_bytes - first), "<u8", data, first, (1,))  # from every byte on
        found.append(np.flatnonzero((lengths - 1) < 255) + first)
    return np.concatenate(found)
