"""Token ids to text as they arrive, one answer at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one answer's tokens into text; however they are split over calls, the text is the same.

    Bytes are kept: only the up to three bytes of a character still incomplete are held back,
    so neither a real U+FFFD nor endless invalid output can hold more. Special tokens give no
    text unless `skip_special` is false.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Sentencepiece marks a word's start with a space; the one in front of the whole answer is none.
        self._at_start = tokenizer.strips_leading_space

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with these tokens; may be empty."""
        kept = [token for token in token_ids if token not in self._skipped]
        data = b"".join(map(self._tokenizer.token_bytes, kept))
        if self._at_start and data:
            self._at_start = False
            first = next(token for token in kept if self._tokenizer.token_bytes(token))
            if first not in self._tokenizer.byte_token_ids:
                data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The rest at the end of the answer: an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
