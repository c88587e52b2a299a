"""Builds a tokenizer from the metadata of a GGUF file.

The vocabulary and the merges lie in the file; how text is cut before merging is only
named there (`tokenizer.ggml.pre`), with llama.cpp's names. The rules are those of the
original tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.loading.gguf import GGUFFile, GGUFMetadata
from engine.text.chat_template import ChatTemplate
from engine.text.end_tokens import known_end_tokens, token_ids
from engine.text.token_bytes import byte_level_bytes
from engine.text.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    import tokenizers

# Values of tokenizer.ggml.token_type.
_CONTROL = 3
_USER_DEFINED = 4

_LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_REGEX = _LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_REGEX = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before merging. `regex` None is GPT-2's own pattern.

    `whole_words`: a piece that is itself a vocabulary entry is taken whole, merges or not.
    """

    regex: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2 = _PreTokenizer()
_DIGITS = _PreTokenizer(single_digits=True)
_LLAMA3 = _PreTokenizer(_LLAMA3_REGEX, whole_words=True, add_bos=True)
_QWEN2 = _PreTokenizer(_QWEN2_REGEX, nfc=True)

PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": _PreTokenizer(_LLAMA3_REGEX),
    "smaug-bpe": _PreTokenizer(_LLAMA3_REGEX),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _PreTokenizer(_TEKKEN_REGEX, whole_words=True, add_bos=True),
}


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Raises `TokenizerError` for a tokenizer that is missing, inconsistent or of an unknown kind."""
    with GGUFFile(path) as file:
        return _GGUFTokenizerBuilder(path, file.metadata).build()


class _GGUFTokenizerBuilder:
    def __init__(self, path: Path, metadata: GGUFMetadata) -> None:
        self.path = path
        self.metadata = metadata

    def build(self) -> Tokenizer:
        model = self.value("model", str)
        if model != "gpt2":
            raise self.error(
                f"its tokenizer is of the kind {model!r}, which cannot be read from GGUF yet",
                "use the model's Hugging Face folder, or a model with a byte-level BPE tokenizer ('gpt2')",
            )
        pre_name = self.value("pre", str)
        rules = PRE_TOKENIZERS.get(pre_name)
        if rules is None:
            raise self.error(
                f"its pre-tokenizer {pre_name!r} is not known (known: {', '.join(sorted(PRE_TOKENIZERS))})",
                "use the model's Hugging Face folder",
            )
        # Like llama.cpp, an entry without text keeps its id under a name of its own.
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(self.value("tokens", list))]
        types = self.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        if len(types) != len(tokens):
            raise self.error(f"it lists {len(tokens)} tokens but {len(types)} token types")
        control = [(index, token) for index, token in enumerate(tokens) if types[index] == _CONTROL]
        user_defined = [token for index, token in enumerate(tokens) if types[index] == _USER_DEFINED]
        backend = self.backend(tokens, rules, [text for _, text in control], user_defined)

        eos_token_ids = known_end_tokens(control)
        for name in ("eos", "eot", "eom"):
            eos_token_ids |= token_ids(self.special_token_id(name, len(tokens)))
        bos_token_id = self.special_token_id("bos", len(tokens))
        return Tokenizer(
            backend,
            spelling=byte_level_bytes,
            strips_leading_space=False,
            bos_token_id=bos_token_id,
            eos_token_ids=eos_token_ids,
            add_bos=bool(self.metadata.get("tokenizer.ggml.add_bos_token", rules.add_bos)),
            chat_template=self.chat_template(tokens),
        )

    def backend(
        self, tokens: list[str], rules: _PreTokenizer, control: list[str], user_defined: list[str]
    ) -> tokenizers.Tokenizer:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
        from tokenizers.models import BPE

        vocab = {token: index for index, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            raise self.error(f"{len(tokens) - len(vocab)} of its tokens appear twice in the vocabulary")
        merges = [tuple(merge.split(" ")) for merge in self.value("merges", list)]
        if any(len(merge) != 2 for merge in merges):
            raise self.error("its merges are not pairs of tokens")
        try:
            model = BPE(vocab=vocab, merges=merges, ignore_merges=rules.whole_words)  # pyright: ignore[reportArgumentType]
        except Exception as error:  # tokenizers raises bare Exceptions
            raise self.error(f"its vocabulary and merges do not fit together ({error})") from error
        backend = Tokenizer(model)
        if rules.nfc:
            backend.normalizer = normalizers.NFC()
        steps: list[Any] = []
        if rules.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if rules.regex is not None:
            steps.append(pre_tokenizers.Split(Regex(rules.regex), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.regex is None))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
        backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in user_defined])
        return backend

    def chat_template(self, tokens: list[str]) -> ChatTemplate | None:
        source = self.metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        special_tokens = {}
        for template_name, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = self.special_token_id(name, len(tokens))
            if token_id is not None:
                special_tokens[f"{template_name}_token"] = tokens[token_id]
        return ChatTemplate(source, special_tokens)

    def special_token_id(self, name: str, num_tokens: int) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = self.metadata.get(key)
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
            raise self.error(f"{key} is {token_id!r}, but the vocabulary has {num_tokens} tokens")
        return token_id

    def value(self, name: str, kind: type) -> Any:
        key = f"tokenizer.ggml.{name}"
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            fault = "is missing" if value is None else f"is of the wrong kind ({type(value).__name__})"
            raise self.error(f"its metadata {key} {fault}", "convert the model to GGUF again")
        return value

    def error(self, fault: str, advice: str = "the file is damaged: download it again") -> TokenizerError:
        return TokenizerError(f"{self.path}: {fault}; {advice}")
