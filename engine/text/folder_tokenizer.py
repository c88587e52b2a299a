"""Loads the tokenizer of a Hugging Face model folder, through transformers where it has a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.loading.folder import CONFIG_FILE, FolderError, read_json, read_model_config
from engine.text.chat_template import ChatTemplate
from engine.text.end_tokens import END_TOKEN_TEXTS, known_end_tokens, token_ids
from engine.text.sentencepiece import CONTROL, UNKNOWN, UNUSED, USER_DEFINED, SentencePieceVocabulary
from engine.text.sentencepiece_model import read_sentencepiece_model
from engine.text.token_bytes import TokenSpelling, byte_level_bytes, sentencepiece_bytes
from engine.text.tokenizer import Tokenizer, TokenizerError
from engine.text.vocabulary import FastVocabulary, panics_raised

if TYPE_CHECKING:
    import tokenizers

_MAX_ADDED_TOKENS = 1 << 16
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load_folder_tokenizer(folder: Path) -> Tokenizer:
    """Reads only the folder: no network, no code from it. Raises `TokenizerError`."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise TokenizerError(f"{folder}: holds no tokenizer ({', '.join(_TOKENIZER_FILES)}); download the whole model")
    if (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file():
        return _sentencepiece_tokenizer(folder)
    from transformers import AutoTokenizer

    if (folder / CONFIG_FILE).is_file():
        try:
            read_model_config(folder)  # which transformers would believe
        except FolderError as error:
            raise TokenizerError(f"{folder}: {error}") from error
    try:
        with panics_raised():
            loaded: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds, bare Exceptions among them
        raise TokenizerError(f"{folder}: its tokenizer or configuration cannot be loaded ({error})") from error
    if not loaded.is_fast:
        raise TokenizerError(
            f"{folder}: its tokenizer ({type(loaded).__name__}) exists only in Python; "
            "use a version of the model with a tokenizer.json"
        )
    backend: tokenizers.Tokenizer = loaded.backend_tokenizer
    # What its training cut and filled up every text to.
    backend.no_truncation()
    backend.no_padding()
    spelling, strips_leading_space = _spelling(folder, backend)
    added = backend.get_added_tokens_decoder()
    special = [(token_id, token.content) for token_id, token in added.items() if token.special]
    bos_token_id = loaded.bos_token_id
    return Tokenizer(
        FastVocabulary(backend, spelling),
        strips_leading_space=strips_leading_space,
        bos_token_id=bos_token_id,
        eos_token_ids=known_end_tokens(special) | token_ids(loaded.eos_token_id) | _configured_end_tokens(folder),
        add_bos=bos_token_id is not None and loaded("a").input_ids[:1] == [bos_token_id],
        chat_template=_chat_template(loaded.chat_template, loaded.special_tokens_map),
    )


def _sentencepiece_tokenizer(folder: Path) -> Tokenizer:
    """A folder with sentencepiece's own model, and beside it the tokens that were added later."""
    model = read_sentencepiece_model(folder / "tokenizer.model")
    config = _optional_json(folder / "tokenizer_config.json")
    pieces, scores, types = model.pieces, model.scores, model.types
    strip_after = set()
    for token_id, token in sorted(_added_tokens(folder, config).items()):
        if not 0 <= token_id < len(pieces) + _MAX_ADDED_TOKENS:
            raise TokenizerError(f"{folder}: its added token {token_id} is out of range; download it again")
        while token_id >= len(pieces):
            pieces.append(f"[PAD{len(pieces)}]")
            scores.append(0.0)
            types.append(UNUSED)
        pieces[token_id] = str(token.get("content"))
        if types[token_id] != UNKNOWN:
            types[token_id] = (
                CONTROL if token.get("special") or token.get("content") in END_TOKEN_TEXTS else USER_DEFINED
            )
        if token.get("rstrip"):
            strip_after.add(token_id)
    add_space_prefix = model.add_dummy_prefix and config.get("add_prefix_space") is not False
    vocabulary = SentencePieceVocabulary(
        pieces, scores, types, add_space_prefix, model.remove_extra_whitespaces, frozenset(strip_after)
    )
    texts = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    by_text = {token.text: token_id for token_id, token in vocabulary.added_tokens.items()}
    bos_token_id = by_text.get(texts["bos_token"] or "", model.bos_token_id)
    eos_token_id = by_text.get(texts["eos_token"] or "", model.eos_token_id)
    known = known_end_tokens((token_id, token.text) for token_id, token in vocabulary.added_tokens.items())
    return Tokenizer(
        vocabulary,
        strips_leading_space=add_space_prefix,
        bos_token_id=bos_token_id,
        eos_token_ids=known | token_ids(eos_token_id) | _configured_end_tokens(folder),
        add_bos=bool(config.get("add_bos_token", True)),
        chat_template=_chat_template(_stored_template(folder, config), texts),
    )


def _added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    added = {index: {"content": text} for text, index in _optional_json(folder / "added_tokens.json").items()}
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        added |= {
            int(index): token for index, token in decoder.items() if index.isdecimal() and isinstance(token, dict)
        }
    return {index: token for index, token in added.items() if isinstance(index, int)}


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _stored_template(folder: Path, config: dict[str, Any]) -> Any:
    """The chat template, or templates by name, as transformers looks for them."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    stored = config.get("chat_template")
    if isinstance(stored, list):
        return {item.get("name"): item.get("template") for item in stored if isinstance(item, dict)}
    return stored


def _configured_end_tokens(folder: Path) -> set[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        config = _optional_json(folder / name)
        found |= token_ids(config.get("eos_token_id"))
        if isinstance(text_config := config.get("text_config"), dict):
            found |= token_ids(text_config.get("eos_token_id"))
    return found


def _spelling(folder: Path, backend: tokenizers.Tokenizer) -> tuple[TokenSpelling, bool]:
    """How the vocabulary spells bytes and whether decoding strips a leading space: what its decoder says."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return byte_level_bytes, False
    if "Metaspace" in kinds:
        metaspace = next(step for step in steps if step.get("type") == "Metaspace")
        return sentencepiece_bytes, metaspace.get("prepend_scheme", "always") != "never"
    if kinds & {"Replace", "ByteFallback"}:
        strips = any(
            step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0 for step in steps
        )
        return sentencepiece_bytes, strips
    raise TokenizerError(
        f"{folder}: its tokenizer decodes in a way that is not supported ({', '.join(map(str, kinds))}); "
        "byte-level and sentencepiece vocabularies are"
    )


def _chat_template(source: Any, special_tokens: Mapping[str, Any]) -> ChatTemplate | None:
    """Of templates by name the default one, or the only one."""
    if isinstance(source, dict):
        source = source.get("default", next(iter(source.values())) if len(source) == 1 else None)
    if not source:
        return None
    return ChatTemplate(
        str(source), {name: str(text) for name, text in special_tokens.items() if isinstance(name, str) and text}
    )


def _optional_json(path: Path) -> dict[str, Any]:
    """A configuration file that need not be there. Raises `TokenizerError` where it is there but unreadable."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except FolderError as error:
        raise TokenizerError(f"{path.parent}: {error}") from error
