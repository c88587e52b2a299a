"""Reads sentencepiece's `tokenizer.model`, for folders that have nothing newer.

Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto, a protocol buffer
(https://protobuf.dev/programming-guides/encoding). Only the few fields that matter here are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.text.sentencepiece import BYTE, CONTROL, NORMAL
from engine.text.token_bytes import names_a_byte
from engine.text.tokenizer import TokenizerError

_BPE = 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_Value = int | bytes


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    pieces: list[str]
    scores: list[float]
    types: list[int]
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    bos_token_id: int | None
    eos_token_id: int | None


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Raises `TokenizerError` for a damaged file and for kinds of models that are not supported."""
    try:
        return _read(path)
    except (IndexError, UnicodeDecodeError, struct.error, AttributeError, TypeError) as error:
        raise TokenizerError(f"{path}: is no sentencepiece model, or damaged ({error}); download it again") from error


def _read(path: Path) -> SentencePieceModel:
    pieces, scores, types = [], [], []
    trainer: dict[int, _Value] = {}
    normalizer: dict[int, _Value] = {}
    for field, value in _fields(path.read_bytes()):
        if field == 1:
            piece = dict(_fields(_message(value)))
            pieces.append(_message(piece.get(1, b"")).decode("utf-8"))
            scores.append(struct.unpack("<f", _message(piece.get(2, b"\0\0\0\0")))[0])
            types.append(piece.get(3, NORMAL))
        elif field == 2:
            trainer = dict(_fields(_message(value)))
        elif field == 3:
            normalizer = dict(_fields(_message(value)))
    if not pieces:
        raise IndexError("it has no pieces")
    for piece, kind in zip(pieces, types):
        if kind == BYTE and not names_a_byte(piece):
            raise IndexError(f"its byte piece {piece!r} names no byte")
    variants = {
        "a model other than BPE": trainer.get(3, 1) != _BPE,
        "a normalisation of text": bool(normalizer.get(2)),
        "spaces behind words": bool(trainer.get(24, 0)),
        "spaces that are not marked": not normalizer.get(5, 1),
    }
    for variant, present in variants.items():
        if present:
            raise TokenizerError(
                f"{path}: {variant} is not supported; use a version of the model with a tokenizer.json"
            )

    def control(field: int, default: int) -> int | None:
        index = trainer.get(field, default)
        return index if isinstance(index, int) and index < len(pieces) and types[index] == CONTROL else None

    return SentencePieceModel(
        pieces,
        scores,
        types,
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        bos_token_id=control(41, 1),
        eos_token_id=control(42, 2),
    )


def _message(value: _Value) -> bytes:
    if isinstance(value, int):
        raise TypeError("a field is of the wrong kind")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """Field number and value of each entry of a message, undecoded where it is no integer."""
    position = 0

    def varint() -> int:
        nonlocal position
        result = shift = 0
        while True:
            byte = data[position]
            position += 1
            result |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return result
            if shift > 63:
                raise IndexError("a number is too long")

    while position < len(data):
        tag = varint()
        kind = tag & 7
        if kind == _VARINT:
            yield tag >> 3, varint()
            continue
        if kind not in (_FIXED64, _BYTES, _FIXED32):
            raise IndexError(f"a field is of the unknown kind {kind}")
        length = varint() if kind == _BYTES else 8 if kind == _FIXED64 else 4
        if length > len(data) - position:
            raise IndexError("a field is longer than the file")
        yield tag >> 3, data[position : position + length]
        position += length
