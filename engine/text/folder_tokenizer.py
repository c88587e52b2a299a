"""Loads the tokenizer of a Hugging Face model folder through transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.loading.folder import FolderError, read_json
from engine.text.chat_template import ChatTemplate
from engine.text.end_tokens import known_end_tokens, token_ids
from engine.text.token_bytes import TokenSpelling, byte_level_bytes, sentencepiece_bytes
from engine.text.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    import tokenizers

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load_folder_tokenizer(folder: Path) -> Tokenizer:
    """Reads only the folder: no network, no code from it. Raises `TokenizerError`."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise TokenizerError(f"{folder}: holds no tokenizer ({', '.join(_TOKENIZER_FILES)}); download the whole model")
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds, bare Exceptions among them
        raise TokenizerError(f"{folder}: its tokenizer cannot be loaded ({error})") from error
    if not loaded.is_fast:
        raise TokenizerError(
            f"{folder}: its tokenizer ({type(loaded).__name__}) exists only in Python; "
            "use a version of the model with a tokenizer.json"
        )
    backend: tokenizers.Tokenizer = loaded.backend_tokenizer
    spelling, strips_leading_space = _spelling(folder, backend)
    added = backend.get_added_tokens_decoder()
    special = [(token_id, token.content) for token_id, token in added.items() if token.special]
    eos_token_ids = known_end_tokens(special) | token_ids(loaded.eos_token_id)
    for name in ("generation_config.json", "config.json"):
        config = _optional_json(folder / name)
        eos_token_ids |= token_ids(config.get("eos_token_id"))
        if isinstance(text_config := config.get("text_config"), dict):
            eos_token_ids |= token_ids(text_config.get("eos_token_id"))
    bos_token_id = loaded.bos_token_id
    return Tokenizer(
        backend,
        spelling=spelling,
        strips_leading_space=strips_leading_space,
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
        add_bos=bos_token_id is not None and loaded("a").input_ids[:1] == [bos_token_id],
        chat_template=_chat_template(loaded),
    )


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


def _chat_template(loaded: Any) -> ChatTemplate | None:
    source = loaded.chat_template
    if isinstance(source, dict):
        source = source.get("default")
    if not source:
        return None
    special_tokens = {
        name: str(text) for name, text in loaded.special_tokens_map.items() if isinstance(name, str) and text
    }
    return ChatTemplate(source, special_tokens)


def _optional_json(path: Path) -> dict[str, Any]:
    """A configuration file that need not be there. Raises `TokenizerError` where it is there but unreadable."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except FolderError as error:
        raise TokenizerError(f"{path.parent}: {error}") from error
