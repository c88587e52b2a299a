"""What a tokenizer is made of: tokens by id, and the rules by which text is cut into them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from engine.text.token_bytes import TokenSpelling

if TYPE_CHECKING:
    import tokenizers


@contextmanager
def panics_raised() -> Iterator[None]:
    """Makes a ValueError of a panic of the `tokenizers` library, which is no Exception and would end the process."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer failed: {error}") from error


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found whole in a text before the rest is cut; a `special` one is no text but a sign."""

    text: str
    special: bool


class Vocabulary(Protocol):
    """`size` is one more than the largest id."""

    @property
    def size(self) -> int: ...

    @property
    def added_tokens(self) -> Mapping[int, AddedToken]: ...

    @property
    def byte_token_ids(self) -> frozenset[int]:
        """Tokens that are one byte as it is: a space among them marks no word and is never stripped."""
        ...

    def encode(self, text: str, parse_special: bool, previous: int | None) -> list[int]:
        """Token ids of `text`, which comes after the token `previous`, or at the very start.

        With `parse_special` false, text that looks like a special token is plain text.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What a token that is not added stands for; empty for ids beyond the vocabulary."""
        ...


class FastVocabulary:
    """A vocabulary of the `tokenizers` library. Not safe to use from several threads at once."""

    byte_token_ids: frozenset[int] = frozenset()  # the library's own decoders strip a space of either kind

    def __init__(self, backend: tokenizers.Tokenizer, spelling: TokenSpelling) -> None:
        self._backend = backend
        self._spelling = spelling
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {token_id: AddedToken(token.content, token.special) for token_id, token in added.items()}
        self.size = max(backend.get_vocab_size(with_added_tokens=True), *(token_id + 1 for token_id in added), 0)

    def encode(self, text: str, parse_special: bool, previous: int | None) -> list[int]:
        backend = self._backend
        if previous is not None and (previous not in self.added_tokens or self._prefixes_only_the_start):
            backend = self._unprefixed
        backend.encode_special_tokens = not parse_special
        with panics_raised():
            return backend.encode(text, add_special_tokens=False).ids

    def token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return b"" if token is None else self._spelling(token)

    @cached_property
    def _state(self) -> dict[str, Any]:
        """The library's own description, without the vocabulary."""
        return {
            name: json.loads(part.__getstate__()) if (part := getattr(self._backend, name)) is not None else None
            for name in ("normalizer", "pre_tokenizer")
        }

    @cached_property
    def _prefixes_only_the_start(self) -> bool:
        return any(step.get("prepend_scheme") == "first" for step in _steps(self._state["pre_tokenizer"]))

    @cached_property
    def _unprefixed(self) -> tokenizers.Tokenizer:
        """The same without the space that sentencepiece vocabularies put in front of a text."""
        prefixes = any(step["type"] == "Prepend" for step in _steps(self._state["normalizer"])) or any(
            step.get("prepend_scheme", "never") != "never" or step.get("add_prefix_space")
            for step in _steps(self._state["pre_tokenizer"])
        )
        if not prefixes:
            return self._backend
        state = json.loads(self._backend.to_str())
        for step in _steps(state["normalizer"]):
            if step["type"] == "Prepend":
                step["prepend"] = ""
        for step in _steps(state["pre_tokenizer"]):
            step |= {
                key: value for key, value in (("prepend_scheme", "never"), ("add_prefix_space", False)) if key in step
            }
        return type(self._backend).from_str(json.dumps(state))


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The single steps of a normalizer or pre-tokenizer, which may be a sequence of them."""
    if part is None:
        return []
    inner = part.get("normalizers") or part.get("pretokenizers")
    return [part] if inner is None else [step for item in inner for step in _steps(item)]


def any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of the texts, the longest where several fit; None for no texts.

    Vocabularies have thousands of special tokens, so common beginnings are tried only once.
    """
    texts = [text for text in texts if text]
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    if not tree:
        return None
    try:
        return re.compile(_expression(tree))
    except RecursionError:  # hundreds of texts, each the beginning of the next
        return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))


def _expression(node: dict[str, Any]) -> str:
    branches = []
    for char, child in node.items():
        if not char:
            continue
        run = char
        while len(child) == 1 and "" not in child:
            (char, child), *_ = child.items()
            run += char
        branches.append(re.escape(run) + ("" if child == {"": {}} else _expression(child)))
    alternatives = "|".join(branches)
    return f"(?:{alternatives})?" if "" in node else f"(?:{alternatives})"
