"""The bytes a vocabulary entry stands for.

Byte-level vocabularies (GPT-2's) spell each byte as one printable character; sentencepiece
ones write a space as U+2581 and single bytes as `<0xNN>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

SENTENCEPIECE_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Character -> byte, as in GPT-2's `bytes_to_unicode`: printable Latin-1 stands for itself,
    the other 68 bytes follow from U+0100 on in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


def byte_level_bytes(token: str) -> bytes:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # an added token, stored as plain text
        return token.encode("utf-8")


def names_a_byte(token: str) -> bool:
    return _BYTE_TOKEN.fullmatch(token) is not None


def sentencepiece_bytes(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(SENTENCEPIECE_SPACE, " ").encode("utf-8")


TokenSpelling = Callable[[str], bytes]
