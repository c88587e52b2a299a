"""Vocabularies of sentencepiece's BPE kind, as Llama 2, Mistral, Phi-3 and Gemma have them.

Kudo and Richardson 2018, https://arxiv.org/abs/1808.06226; the order of merges is that of
`bpe_model.cc`: the pair whose piece has the best score first, the leftmost of equals.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence

from engine.text.token_bytes import SENTENCEPIECE_SPACE, sentencepiece_bytes
from engine.text.vocabulary import AddedToken, any_of

# Types of pieces, the same in a sentencepiece model and in GGUF's tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_MAX_CACHED_WORDS = 1 << 16
_MAX_CACHED_LENGTH = 32
# No piece reaches across the start of a word, so each word is cut by itself.
_WORD = re.compile(f"{SENTENCEPIECE_SPACE}*[^{SENTENCEPIECE_SPACE}]+|{SENTENCEPIECE_SPACE}+")


class SentencePieceVocabulary:
    """A `Vocabulary` of pieces with a score and a type each. Not safe to use from several threads at once.

    `add_space_prefix`: a text, and what comes after an added token, begins a word: with a space in
    front of it, unless after an added token it has one. `remove_extra_whitespaces`: runs of
    spaces count as one, at both ends as none. After the tokens in `strip_after` whitespace is left out.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        scores: Sequence[float],
        types: Sequence[int],
        add_space_prefix: bool,
        remove_extra_whitespaces: bool = False,
        strip_after: frozenset[int] = frozenset(),
    ) -> None:
        self.size = len(pieces)
        self._pieces = pieces
        self._types = types
        self._add_space_prefix = add_space_prefix
        self._remove_extra_whitespaces = remove_extra_whitespaces
        self._strip_after = strip_after
        self.byte_token_ids = frozenset(index for index, kind in enumerate(types) if kind == BYTE)
        normal = [index for index, kind in enumerate(types) if kind == NORMAL]
        self._ids = {pieces[index]: index for index in normal}
        # Converters that have no scores write the same for all; their pieces stand in the order of their merges.
        ranked = len({scores[index] for index in normal}) < 2
        self._scores = {pieces[index]: float(-index) if ranked else scores[index] for index in normal}
        self._bytes = {sentencepiece_bytes(pieces[index])[0]: index for index, kind in enumerate(types) if kind == BYTE}
        self._unknown = types.index(UNKNOWN) if UNKNOWN in types else None
        self.added_tokens = {
            index: AddedToken(pieces[index].replace(SENTENCEPIECE_SPACE, " "), kind != USER_DEFINED)
            for index, kind in enumerate(types)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED) and pieces[index]
        }
        self._added_ids = {token.text: index for index, token in self.added_tokens.items()}
        self._all_added = any_of(token.text for token in self.added_tokens.values())
        self._plain_added = any_of(token.text for token in self.added_tokens.values() if not token.special)
        self._by_words = not any(SENTENCEPIECE_SPACE in piece.lstrip(SENTENCEPIECE_SPACE) for piece in self._ids)
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str, parse_special: bool, previous: int | None) -> list[int]:
        pattern = self._all_added if parse_special else self._plain_added
        token_ids: list[int] = []
        end = 0
        for match in pattern.finditer(text) if pattern is not None else ():
            token_ids += self._encode_plain(text[end : match.start()], token_ids[-1] if token_ids else previous)
            token_ids.append(self._added_ids[match[0]])
            end = match.end()
        return token_ids + self._encode_plain(text[end:], token_ids[-1] if token_ids else previous)

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.size:
            return b""
        piece = self._pieces[token_id]
        if self._types[token_id] == BYTE:
            return sentencepiece_bytes(piece)
        return piece.replace(SENTENCEPIECE_SPACE, " ").encode("utf-8", "replace")

    def _encode_plain(self, text: str, previous: int | None) -> list[int]:
        """Text between added tokens."""
        if previous in self._strip_after:
            text = text.lstrip()
        if self._remove_extra_whitespaces:
            text = re.sub(" +", " ", text).strip(" ")
        if not text:
            return []
        if self._add_space_prefix and (previous is None or (previous in self.added_tokens and text[0] != " ")):
            text = " " + text
        text = text.replace(" ", SENTENCEPIECE_SPACE)
        token_ids: list[int] = []
        for word in _WORD.findall(text) if self._by_words else (text,):
            token_ids += self._encode_word(word)
        if self._unknown is None:
            return token_ids
        # Characters without a token count as one unknown piece where they are neighbours.
        unknown = self._unknown
        return [token for token, before in zip(token_ids, [None, *token_ids]) if token != unknown or before != unknown]

    def _encode_word(self, word: str) -> list[int]:
        cached = self._cache.get(word)
        if cached is not None:
            return cached
        token_ids: list[int] = []
        for piece in self._merged(word):
            token_id = self._ids.get(piece)
            token_ids += self._spelled_out(piece) if token_id is None else [token_id]
        if len(word) <= _MAX_CACHED_LENGTH:
            if len(self._cache) >= _MAX_CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = token_ids
        return token_ids

    def _spelled_out(self, piece: str) -> list[int]:
        """A character without a token: its bytes', or the unknown one; nothing where the vocabulary has neither."""
        token_ids = [self._bytes.get(byte) for byte in piece.encode("utf-8", "replace")]
        known = [token_id for token_id in token_ids if token_id is not None]
        if len(known) == len(token_ids):
            return known
        return [] if self._unknown is None else [self._unknown]

    def _merged(self, word: str) -> list[str]:
        """The word's characters, joined to pieces as long as any two neighbours make one."""
        parts: list[str] = list(word)
        after = list(range(1, len(parts) + 1))
        before = list(range(-1, len(parts) - 1))
        candidates: list[tuple[float, int, int, str]] = []

        def consider(left: int, right: int) -> None:
            if left >= 0 and right < len(parts):
                joined = parts[left] + parts[right]
                score = self._scores.get(joined)
                if score is not None:
                    heapq.heappush(candidates, (-score, left, right, joined))

        for index in range(len(parts) - 1):
            consider(index, index + 1)
        while candidates:
            _, left, right, joined = heapq.heappop(candidates)
            if not parts[left] or not parts[right] or len(parts[left]) + len(parts[right]) != len(joined):
                continue  # one of them is part of another piece by now
            parts[left], parts[right] = joined, ""
            after[left] = after[right]
            if after[left] < len(parts):
                before[after[left]] = left
            consider(before[left], left)
            consider(left, after[left])
        return [part for part in parts if part]
