"""Text to token ids and back, for GGUF files and Hugging Face folders alike."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from engine.text.vocabulary import Vocabulary, any_of

if TYPE_CHECKING:
    from engine.text.chat_template import ChatTemplate


class TokenizerError(ValueError):
    """A model's tokenizer cannot be used. The message names the model, the fault and what to do."""


class Tokenizer:
    """A model's vocabulary and the rules that go with it. Safe to use from several threads.

    `vocab_size` is one more than the largest id; a model's logits may be padded beyond it.
    End tokens of all sources (generation config, config, tokenizer, GGUF) are united
    in `eos_token_ids`. `add_bos` says whether the model wants its BOS in front of a text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        strips_leading_space: bool,
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
        add_bos: bool,
        chat_template: ChatTemplate | None,
    ) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self.add_bos = add_bos and bos_token_id is not None
        self.chat_template = chat_template
        self.strips_leading_space = strips_leading_space
        self.byte_token_ids = vocabulary.byte_token_ids
        self.vocab_size = vocabulary.size
        added = vocabulary.added_tokens
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_token_pattern = any_of(token.text for token in added.values() if token.special)
        self._added_bytes = {token_id: token.text.encode("utf-8") for token_id, token in added.items()}

    def encode(
        self, text: str, add_bos: bool | None = None, parse_special: bool = True, previous: int | None = None
    ) -> list[int]:
        """Token ids of `text`, which stands at the very start or goes on after the token `previous`.

        `add_bos` None does what the model wants; a BOS the text already starts with is never
        doubled. With `parse_special` false, text that looks like a special token is plain text.
        """
        with self._lock:
            token_ids = self._vocabulary.encode(text, parse_special, previous)
        wants_bos = self.add_bos if add_bos is None else add_bos
        if wants_bos and self.bos_token_id is not None and token_ids[:1] != [self.bos_token_id]:
            token_ids.insert(0, self.bos_token_id)
        return token_ids

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of an answer; invalid UTF-8 becomes U+FFFD. Equals any incremental decoding of it."""
        from engine.text.detokenizer import Detokenizer

        detokenizer = Detokenizer(self, skip_special)
        return detokenizer.add(token_ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for, special tokens included; empty for ids beyond the vocabulary."""
        added = self._added_bytes.get(token_id)
        if added is not None:
            return added
        return self._vocabulary.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """The token for people: its text, or its bytes as `<0xNN>` each where they are no valid text."""
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in data)
