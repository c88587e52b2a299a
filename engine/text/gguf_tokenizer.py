"""Builds a tokenizer from the metadata of a GGUF file.

The vocabulary and the merges or scores lie in the file; how text is cut before merging is only
named there. The rules are those of the original tokenizers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from engine.heap import collector_paused
from engine.loading.gguf import GGUFFile, GGUFMetadata
from engine.loading.gguf_split import open_gguf
from engine.text.chat_template import ChatTemplate
from engine.text.end_tokens import END_TOKEN_TEXTS, known_end_tokens, token_ids
from engine.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from engine.text.sentencepiece import BYTE, CONTROL, NORMAL, USER_DEFINED, SentencePieceVocabulary
from engine.text.token_bytes import byte_level_bytes, names_a_byte
from engine.text.tokenizer import Tokenizer, TokenizerError
from engine.text.vocabulary import FastVocabulary, Vocabulary


def load_gguf_tokenizer(path: Path, file: GGUFFile | None = None) -> Tokenizer:
    """`file` is the file at `path` where that is open already.

    Raises `TokenizerError` for a tokenizer that is missing, inconsistent or of an unknown kind.
    """
    # A vocabulary is some hundred thousand objects without a cycle.
    with collector_paused(), open_gguf(path) if file is None else file.share() as opened:
        return _GGUFTokenizerBuilder(path, opened.metadata).build()


class _GGUFTokenizerBuilder:
    def __init__(self, path: Path, metadata: GGUFMetadata) -> None:
        self.path = path
        self.metadata = metadata

    def build(self) -> Tokenizer:
        model = self.value("model", str)
        if model not in ("gpt2", "llama"):
            raise self.error(
                f"its tokenizer is of the kind {model!r}, which is not supported",
                "use a model with a byte-level BPE ('gpt2') or sentencepiece ('llama') tokenizer",
            )
        # Like llama.cpp, an entry without text keeps its id under a name of its own.
        tokens = self.list_of("tokens", str)
        if "" in tokens:
            tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        ids = dict(zip(tokens, range(len(tokens))))
        if len(ids) != len(tokens):
            raise self.error(f"{len(tokens) - len(ids)} of its tokens appear twice in the vocabulary")
        types = self.token_types(ids)
        if model == "llama":
            vocabulary: Vocabulary = self.sentencepiece(tokens, types)
            bos_token_id = self.special_token_id("bos", len(tokens), 1)
            strips_leading_space, add_bos = self.flag("add_space_prefix", True), True
        else:
            rules = self.pre_tokenizer()
            vocabulary = FastVocabulary(self.backend(ids, types, rules), byte_level_bytes)
            bos_token_id = self.special_token_id("bos", len(tokens))
            strips_leading_space, add_bos = False, rules.add_bos
        added = [(index, tokens[index]) for index, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)]
        eos_token_ids = known_end_tokens(added)
        for name in ("eos", "eot", "eom"):
            eos_token_ids |= token_ids(self.special_token_id(name, len(tokens)))
        return Tokenizer(
            vocabulary,
            strips_leading_space=strips_leading_space,
            bos_token_id=bos_token_id,
            eos_token_ids=eos_token_ids,
            add_bos=self.flag("add_bos_token", add_bos),
            chat_template=self.chat_template(tokens),
        )

    def token_types(self, ids: dict[str, int]) -> list[int]:
        given = "tokenizer.ggml.token_type" in self.metadata
        types = list(self.list_of("token_type", int)) if given else [NORMAL] * len(ids)
        if len(types) != len(ids):
            raise self.error(f"it lists {len(ids)} tokens but {len(types)} token types")
        # Some converters take the tokens that end a turn for ordinary added ones.
        for token_id in token_ids([ids.get(text) for text in END_TOKEN_TEXTS]):
            if types[token_id] == USER_DEFINED:
                types[token_id] = CONTROL
        return types

    def sentencepiece(self, tokens: list[str], types: list[int]) -> SentencePieceVocabulary:
        scores = self.list_of("scores", (int, float))
        if len(scores) != len(tokens):
            raise self.error(f"it lists {len(tokens)} tokens but {len(scores)} scores")
        if self.metadata.get("tokenizer.ggml.token_type") is None:
            raise self.error("its metadata tokenizer.ggml.token_type is missing", "convert the model to GGUF again")
        for token, kind in zip(tokens, types):
            if kind == BYTE and not names_a_byte(token):
                raise self.error(f"its byte token {token!r} names no byte")
        strip_after = frozenset[int]()
        if self.metadata.get("general.architecture") == "phi3":
            # A property of Phi-3's added tokens that GGUF has no place for.
            kept = ("<unk>", "<s>", "<|endoftext|>")
            strip_after = frozenset(
                index
                for index, (token, kind) in enumerate(zip(tokens, types))
                if kind in (CONTROL, USER_DEFINED) and token not in kept
            )
        return SentencePieceVocabulary(
            tokens,
            scores,
            types,
            add_space_prefix=self.flag("add_space_prefix", True),
            remove_extra_whitespaces=self.flag("remove_extra_whitespaces", False),
            strip_after=strip_after,
        )

    def pre_tokenizer(self) -> PreTokenizer:
        name = self.value("pre", str)
        if name not in PRE_TOKENIZERS:
            raise self.error(
                f"its pre-tokenizer {name!r} is not known (known: {', '.join(sorted(PRE_TOKENIZERS))})",
                "use the model's Hugging Face folder",
            )
        return PRE_TOKENIZERS[name]

    def backend(self, ids: dict[str, int], types: list[int], rules: PreTokenizer) -> tokenizers.Tokenizer:
        merges = self.metadata.word_pairs("tokenizer.ggml.merges")
        if merges is None:
            self.list_of("merges", str)  # says what is wrong with the list itself
            raise self.error("its merges are not pairs of tokens")
        try:
            model = BPE(vocab=ids, merges=merges, ignore_merges=rules.whole_words)  # pyright: ignore[reportArgumentType]
        except Exception as error:  # tokenizers raises bare Exceptions
            raise self.error(f"its vocabulary and merges do not fit together ({error})") from error
        backend = tokenizers.Tokenizer(model)
        if rules.nfc:
            backend.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rules.splits]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        backend.decoder = decoders.ByteLevel()
        added = [(token, kind) for token, kind in zip(ids, types) if kind in (CONTROL, USER_DEFINED)]
        control = [AddedToken(text, normalized=False, special=True) for text, kind in added if kind == CONTROL]
        user_defined = [AddedToken(text, normalized=False, special=False) for text, kind in added if kind != CONTROL]
        backend.add_special_tokens(control)
        backend.add_tokens(user_defined)
        return backend

    def chat_template(self, tokens: list[str]) -> ChatTemplate | None:
        source = self.metadata.get("tokenizer.chat_template")
        if source is None:
            # A file may have templates by name; without one for all purposes, a single one is meant for all.
            named = self.metadata.get("tokenizer.chat_templates")
            names = named if isinstance(named, list) else []
            sources = [self.metadata.get(f"tokenizer.chat_template.{name}") for name in names]
            source = sources[0] if len(sources) == 1 else None
        if not isinstance(source, str):
            return None
        special_tokens = {}
        for template_name, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = self.special_token_id(name, len(tokens))
            if token_id is not None:
                special_tokens[f"{template_name}_token"] = tokens[token_id]
        return ChatTemplate(source, special_tokens)

    def special_token_id(self, name: str, num_tokens: int, default: int | None = None) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = self.metadata.get(key)
        if token_id is None:
            return default if default is not None and default < num_tokens else None
        if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
            raise self.error(f"{key} is {token_id!r}, but the vocabulary has {num_tokens} tokens")
        return token_id

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{name}", default))

    def value(self, name: str, kind: type) -> Any:
        key = f"tokenizer.ggml.{name}"
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            fault = "is missing" if value is None else f"is of the wrong kind ({type(value).__name__})"
            raise self.error(f"its metadata {key} {fault}", "convert the model to GGUF again")
        return value

    def list_of(self, name: str, kind: type | tuple[type, ...]) -> list[Any]:
        values = self.value(name, list)
        # By the kinds there are, not value by value: a vocabulary has 100,000 of them.
        if not all(issubclass(found, kind) for found in set(map(type, values))):
            raise self.error(f"its metadata tokenizer.ggml.{name} holds values of the wrong kind")
        return values

    def error(self, fault: str, advice: str = "the file is damaged: download it again") -> TokenizerError:
        return TokenizerError(f"{self.path}: {fault}; {advice}")
