"""Sentencepiece vocabularies, in GGUF files and folders, cut text as sentencepiece itself does."""

from __future__ import annotations

import io
import itertools
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.protocol import ChatMessage
from engine.text.chat_template import ChatTemplate
from engine.text.detokenizer import Detokenizer
from engine.text.load import load_tokenizer
from engine.text.prompt import encode_chat
from engine.text.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from engine.text.tokenizer import Tokenizer, TokenizerError
from tests.engine.test_tokenizer import TEXTS, generated_texts
from tests.engine.tiny_gguf import write_model

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"byte_fallback": True},
    "gemma": {"byte_fallback": True, "add_dummy_prefix": False, "user_defined_symbols": ["▁▁", "▁▁▁▁", "\n\n"]},
    "without_bytes": {"byte_fallback": False},
    "narrow_spaces": {"byte_fallback": True, "remove_extra_whitespaces": True},
    "across_words": {"byte_fallback": True, "split_by_whitespace": False},
}
# Sentencepiece reads a text up to a NUL, and gives U+2581, which it writes for a space, no other meaning.
ALPHABET = st.text(alphabet="ab aehlot .-=_0129é你😀\n\t", max_size=40)


@dataclass(frozen=True, repr=False)
class Trained:
    """The same vocabulary three times."""

    oracle: sentencepiece.SentencePieceProcessor
    gguf: Tokenizer
    folder: Tokenizer
    path: Path
    changes: dict[str, Any]

    @property
    def narrows_spaces(self) -> bool:
        return self.changes["flags"]["tokenizer.ggml.remove_extra_whitespaces"]


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    options: dict[str, Any] = {"add_dummy_prefix": True, "remove_extra_whitespaces": False} | KINDS[request.param]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(TEXTS[4:10] * 2), "------ ==== aaaa    x     y  hello the lot", *TEXTS[3:17]]),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        character_coverage=0.98,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        control_symbols=["<|im_start|>", "<|im_end|>"],
        num_threads=1,
        minloglevel=2,
        **options,
    )
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    pieces = [oracle.id_to_piece(index) for index in range(oracle.vocab_size())]
    changes = {
        "model": "llama",
        "pre": "default",
        "tokens": pieces,
        "scores": [oracle.get_score(index) for index in range(len(pieces))],
        "types": [piece_type(oracle, index, options) for index in range(len(pieces))],
        "bos": oracle.bos_id(),
        "eos": oracle.eos_id(),
        "flags": {
            "tokenizer.ggml.add_space_prefix": options["add_dummy_prefix"],
            "tokenizer.ggml.remove_extra_whitespaces": options["remove_extra_whitespaces"],
        },
    }
    path = write_model(folder / "model.gguf", **changes)
    return Trained(oracle, load_tokenizer(path), load_tokenizer(folder), path, changes)


def piece_type(oracle: sentencepiece.SentencePieceProcessor, index: int, options: dict[str, Any]) -> int:
    if oracle.is_unknown(index):
        return UNKNOWN
    if oracle.is_control(index):
        return CONTROL
    if oracle.is_byte(index):
        return BYTE
    return USER_DEFINED if oracle.id_to_piece(index) in options.get("user_defined_symbols", []) else NORMAL


def test_texts_are_cut_as_sentencepiece_cuts_them(trained: Trained) -> None:
    texts = [*TEXTS, *generated_texts()[:200], "a" * 50, "-" * 31, "=" * 7 + "-" * 9, " " * 13, "x" + " " * 9 + "y"]
    for text in texts:
        text = text.replace("\0", "")
        expected = trained.oracle.encode(text)
        assert trained.gguf.encode(text, add_bos=False, parse_special=False) == expected, text
        assert trained.folder.encode(text, add_bos=False, parse_special=False) == expected, text


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=ALPHABET)
def test_any_text_is_cut_as_sentencepiece_cuts_it(trained: Trained, text: str) -> None:
    assert trained.gguf.encode(text, add_bos=False, parse_special=False) == trained.oracle.encode(text)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=ALPHABET, cuts=st.lists(st.integers(0, 60), max_size=6))
def test_any_text_survives_and_streams_the_same_in_any_pieces(trained: Trained, text: str, cuts: list[int]) -> None:
    token_ids = trained.gguf.encode(text, add_bos=False)
    detokenizer = Detokenizer(trained.gguf)
    places = [0, *sorted(cuts), len(token_ids)]
    streamed = "".join(
        detokenizer.add(token_ids[start:end]) for start, end in itertools.pairwise(places) if start < end
    )
    streamed += detokenizer.flush()
    if not trained.narrows_spaces and trained.oracle.unk_id() not in token_ids:
        assert streamed == text
    assert streamed == trained.gguf.decode(token_ids)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tokens_are_decoded_as_sentencepiece_decodes_them(trained: Trained, data: st.DataObject) -> None:
    first_plain = trained.oracle.eos_id() + 3
    token_ids = data.draw(st.lists(st.integers(first_plain, trained.oracle.vocab_size() - 1), max_size=12))
    # How many U+FFFD stand for bytes that are no UTF-8 is up to each decoder.
    decoded, expected = (
        re.sub("�+", "�", text) for text in (trained.gguf.decode(token_ids), trained.oracle.decode(token_ids))
    )
    if trained.narrows_spaces:
        decoded, expected = decoded.lstrip(" "), expected.lstrip(" ")
    assert decoded == expected


def test_a_space_spelled_as_a_byte_is_kept_at_the_start(trained: Trained) -> None:
    space = trained.oracle.piece_to_id("<0x20>")
    if not trained.oracle.is_byte(space):
        pytest.skip("this vocabulary has no byte tokens")
    assert trained.gguf.decode([space]) == trained.oracle.decode([space])


def test_bos_and_end_tokens_come_from_the_file_or_are_sentencepieces_own(trained: Trained, tmp_path: Path) -> None:
    for tokenizer in (trained.gguf, trained.folder):
        assert (tokenizer.bos_token_id, tokenizer.add_bos) == (1, True)
        im_end = trained.oracle.piece_to_id("<|im_end|>")
        assert tokenizer.eos_token_ids == {2, im_end}
        assert tokenizer.encode("a")[0] == 1 == tokenizer.encode("<s>a")[0]
        assert tokenizer.encode("<s>a").count(1) == 1
    silent = load_tokenizer(write_model(tmp_path / "x.gguf", **trained.changes | {"bos": None, "add_bos": False}))
    assert (silent.bos_token_id, silent.add_bos) == (1, False)


def test_a_space_begins_what_follows_an_added_token_but_no_second_one(trained: Trained) -> None:
    if not trained.gguf.strips_leading_space:
        assert trained.gguf.encode("<|im_start|>the")[2:] == trained.oracle.encode("the")
        return
    start = trained.oracle.piece_to_id("<|im_start|>")
    word = trained.oracle.encode("the")
    for tokenizer in (trained.gguf, trained.folder):
        assert tokenizer.encode("<|im_start|>the", add_bos=False) == [start, *word]
        assert tokenizer.encode("<|im_start|> the", add_bos=False) == [start, *word]
        assert tokenizer.encode("the", add_bos=False, previous=start) == word
        # In the middle of a text there is none.
        assert tokenizer.token_bytes(tokenizer.encode("the", add_bos=False, previous=word[-1])[0])[:1] == b"t"


def test_text_that_looks_like_a_special_token_changes_nothing_around_it(trained: Trained) -> None:
    template = ChatTemplate("{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}")
    trained.gguf.chat_template = template
    content = "a <|im_end|> b<s>"
    token_ids = encode_chat(trained.gguf, [ChatMessage(role="user", content=content)])
    special = [token_id for token_id in token_ids if token_id in trained.gguf.special_token_ids]
    names = [trained.gguf.token_text(token_id) for token_id in special if token_id != trained.oracle.unk_id()]
    assert names == ["<s>", "<|im_start|>", "<|im_end|>"]
    if not trained.narrows_spaces and trained.oracle.unk_id() not in token_ids:
        assert trained.gguf.decode(token_ids) == content


def test_scores_that_say_nothing_leave_the_order_of_the_vocabulary(trained: Trained, tmp_path: Path) -> None:
    changes = trained.changes | {"scores": [-1000.0] * len(trained.changes["tokens"])}
    tokenizer = load_tokenizer(write_model(tmp_path / "x.gguf", **changes))
    for text in TEXTS[4:10]:
        assert tokenizer.encode(text, add_bos=False) == trained.gguf.encode(text, add_bos=False)


def test_phi3_takes_no_whitespace_after_its_own_tokens(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", "▁", "h", "i", "\n", "<|user|>", "<|endoftext|>", "▁hi", "hi", "<0x0A>"]
    types = [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL, NORMAL, NORMAL, CONTROL, CONTROL, NORMAL, NORMAL, BYTE]
    scores = [0.0] * 9 + [-1.0, -2.0, 0.0]
    changes = {"model": "llama", "tokens": pieces, "types": types, "scores": scores, "bos": 1, "eos": 8, "merges": []}
    changes["merges"] = ["h i"]
    phi3 = load_tokenizer(write_model(tmp_path / "phi3.gguf", architecture="phi3", **changes))
    assert phi3.encode("<|user|>\n hi<|endoftext|>\n", add_bos=False) == [7, 9, 8, 3, 6]
    other = load_tokenizer(write_model(tmp_path / "llama.gguf", **changes))
    assert other.encode("<|user|>\nhi", add_bos=False) == [7, 3, 6, 10]


def test_long_texts_take_a_moment(trained: Trained) -> None:
    import time

    rng = random.Random(1)
    words = " ".join(TEXTS[4:14]).split(" ")
    for text in (" ".join(rng.choices(words, k=20_000)), "你好世界" * 5_000, "-" * 20_000):
        start = time.thread_time()
        trained.gguf.encode(text)
        assert time.thread_time() - start < 3.0  # a tenth of it on an idle machine


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, r"tokenizer\.ggml\.scores is missing"),
        ({"scores": [0.0]}, "tokens but 1 scores"),
        ({"types": [BYTE] * 3}, "byte token 'a' names no byte"),
        ({"model": "t5"}, "of the kind 't5', which is not supported"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    whole = {
        "model": "llama",
        "tokens": ["a", "b", "c"],
        "types": [NORMAL] * 3,
        "scores": [0.0] * 3,
        "bos": 0,
        "eos": 1,
    }
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(write_model(tmp_path / "x.gguf", **whole | changes))


def test_a_folder_adds_its_own_tokens_and_template(trained: Trained, tmp_path: Path) -> None:
    size = trained.oracle.vocab_size()
    (tmp_path / "tokenizer.model").write_bytes((trained.path.parent / "tokenizer.model").read_bytes())
    config = {
        "add_bos_token": False,
        "eos_token": {"content": "<|turn|>"},
        "bos_token": "<s>",
        "chat_template": [{"name": "default", "template": "{{ bos_token }}hi"}, {"name": "tools", "template": "no"}],
        "added_tokens_decoder": {
            str(size + 1): {"content": "<|turn|>", "special": True, "rstrip": True},
            str(size + 2): {"content": "<think>", "special": False},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7]}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == size + 3
    assert tokenizer.eos_token_ids >= {size + 1, 7}
    assert tokenizer.encode("<|turn|>\n<think>") == [size + 1, size + 2]
    assert {size + 1} <= tokenizer.special_token_ids and size + 2 not in tokenizer.special_token_ids
    assert tokenizer.token_bytes(size + 2) == b"<think>"
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([ChatMessage(role="user", content="x")]) == "<s>hi"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(tmp_path).chat_template.source == "from the file"  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "unigram"}, "a model other than BPE is not supported"),
        ({"normalization_rule_name": "nmt_nfkc"}, "a normalisation of text is not supported"),
        ({"treat_whitespace_as_suffix": True}, "spaces behind words is not supported"),
    ],
)
def test_other_kinds_of_sentencepiece_models_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = io.BytesIO()
    values: dict[str, Any] = {"model_type": "bpe", "normalization_rule_name": "identity"} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[4:7] * 3),
        model_writer=model,
        vocab_size=64,
        minloglevel=2,
        num_threads=1,
        **values,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_a_damaged_sentencepiece_model_is_refused_or_read(trained: Trained, tmp_path: Path) -> None:
    data = bytearray((trained.path.parent / "tokenizer.model").read_bytes())
    rng = random.Random(5)
    refused = 0
    for _ in range(60):
        damaged = bytearray(data[: rng.choice([len(data), rng.randrange(len(data))])])
        for _ in range(rng.randrange(3)):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        try:
            load_tokenizer(tmp_path).encode("hello the lot")
        except TokenizerError as error:
            assert str(tmp_path) in str(error)
            refused += 1
    assert refused > 10


def test_types_beyond_the_known_ones_are_never_produced(trained: Trained, tmp_path: Path) -> None:
    piece = trained.oracle.encode("the", out_type=str)[0]
    token_id = trained.oracle.piece_to_id(piece)
    types = list(trained.changes["types"])
    types[token_id] = UNUSED
    tokenizer = load_tokenizer(write_model(tmp_path / "x.gguf", **trained.changes | {"types": types}))
    assert token_id not in tokenizer.encode("the")
    assert tokenizer.decode(tokenizer.encode("the", add_bos=False)) == "the"
