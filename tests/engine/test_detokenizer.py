"""Text comes out as its tokens come in, the same however they are split."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers import decoders as backend_decoders
from tokenizers.models import BPE

from engine.text.detokenizer import Detokenizer
from engine.text.load import load_tokenizer
from engine.text.token_bytes import sentencepiece_bytes
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import FastVocabulary


@pytest.fixture(scope="module")
def starter(starter_model: Path) -> Tokenizer:
    return load_tokenizer(starter_model)


@pytest.fixture(scope="module")
def sentencepiece() -> tuple[Tokenizer, Backend]:
    """A sentencepiece vocabulary with byte tokens, and its backend as the oracle of whole decoding."""
    tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "llo", "é", "▁▁"]
    backend = Backend(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[], byte_fallback=True))
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.decoder = backend_decoders.Sequence(
        [
            backend_decoders.Replace("▁", " "),
            backend_decoders.ByteFallback(),
            backend_decoders.Fuse(),
            backend_decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer = Tokenizer(
        FastVocabulary(backend, sentencepiece_bytes),
        strips_leading_space=True,
        bos_token_id=0,
        eos_token_ids={1},
        add_bos=True,
        chat_template=None,
    )
    return tokenizer, backend


def decode_in_pieces(tokenizer: Tokenizer, ids: list[int], places: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    cuts = sorted(min(place, len(ids)) for place in places)
    pieces = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)])]
    return "".join(detokenizer.add(piece) for piece in pieces) + detokenizer.flush()


PLACES = st.lists(st.integers(0, 40), max_size=15)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), places=PLACES)
def test_any_tokens_in_any_pieces_give_the_whole_text(starter: Tokenizer, ids: list[int], places: list[int]) -> None:
    whole = b"".join(starter.token_bytes(token) for token in ids if token > 16).decode("utf-8", "replace")
    assert decode_in_pieces(starter, ids, places) == whole


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="a é你😀👨‍👩‍👧 \n", max_size=30), places=PLACES)
def test_emoji_and_chinese_split_over_tokens_come_out_whole(starter: Tokenizer, text: str, places: list[int]) -> None:
    assert decode_in_pieces(starter, starter.encode(text), places) == text


def test_no_piece_ever_shows_half_a_character(starter: Tokenizer) -> None:
    text = "Ωmega 你好 😀🎉 ﷽ e\u0301"
    detokenizer = Detokenizer(starter)
    shown = ""
    for token in starter.encode(text):
        shown += detokenizer.add([token])
        assert text.startswith(shown)
        pending = text[len(shown) :].encode()
        assert len(detokenizer._decoder.getstate()[0]) <= 3, "held bytes are bounded"
        assert pending or shown == text


def test_an_incomplete_character_is_held_until_the_end(starter: Tokenizer) -> None:
    *most, last = starter.encode("𓀀")
    detokenizer = Detokenizer(starter)
    assert "".join(detokenizer.add([token]) for token in most) == ""
    assert detokenizer.flush() == "�"
    assert decode_in_pieces(starter, [*most, last], [1, 2]) == "𓀀"


def test_a_replacement_character_the_model_wrote_is_not_held(starter: Tokenizer) -> None:
    detokenizer = Detokenizer(starter)
    assert detokenizer.add(starter.encode("a�")) == "a�"


def test_bytes_that_are_no_utf8_are_shown_at_once_not_gathered(starter: Tokenizer) -> None:
    lone = next(token for token in range(17, 300) if starter.token_bytes(token) == b"\x80")
    detokenizer = Detokenizer(starter)
    assert [detokenizer.add([lone]) for _ in range(4)] == ["�"] * 4


def test_special_tokens_give_no_text_unless_asked_for(starter: Tokenizer) -> None:
    ids = starter.encode("<|im_start|>hi<|im_end|>")
    assert decode_in_pieces(starter, ids, [1]) == "hi"
    assert Detokenizer(starter, skip_special=False).add(ids) == "<|im_start|>hi<|im_end|>"


def ids_of(tokenizer: tuple[Tokenizer, Backend], *tokens: str) -> list[int]:
    ids = [tokenizer[1].token_to_id(token) for token in tokens]
    return [token for token in ids if token is not None]


def test_sentencepiece_strips_a_space_only_at_the_very_start(sentencepiece: tuple[Tokenizer, Backend]) -> None:
    tokenizer = sentencepiece[0]
    ids = ids_of(sentencepiece, "<s>", "▁Hello", "▁world", "▁▁", "▁Hello")
    for places in ([], [0, 0], [1], [2], [1, 2, 3, 4]):
        assert decode_in_pieces(tokenizer, ids, places) == "Hello world   Hello"
    assert decode_in_pieces(tokenizer, ids_of(sentencepiece, "▁▁", "llo"), [1]) == " llo"
    assert decode_in_pieces(tokenizer, ids_of(sentencepiece, "llo", "▁Hello"), [1]) == "llo Hello"


def test_sentencepiece_byte_tokens_join_to_characters(sentencepiece: tuple[Tokenizer, Backend]) -> None:
    tokenizer = sentencepiece[0]
    ids = ids_of(sentencepiece, "▁Hello", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0x0A>", "é")
    for places in ([], [1, 2, 3], [4], [2, 5]):
        assert decode_in_pieces(tokenizer, ids, places) == "Hello😀\né"


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(
        st.sampled_from(["▁", "▁Hello", "▁world", "llo", "é", "▁▁", "<s>", "<0x41>", "<0x20>"]), max_size=12
    ),
    places=PLACES,
)
def test_sentencepiece_decoding_equals_the_tokenizers_library(
    sentencepiece: tuple[Tokenizer, Backend], words: list[str], places: list[int]
) -> None:
    tokenizer, backend = sentencepiece
    ids = ids_of(sentencepiece, *words)
    assert decode_in_pieces(tokenizer, ids, places) == backend.decode(ids, skip_special_tokens=True)
