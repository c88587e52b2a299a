"""Tokens from a GGUF file's metadata are the tokens Hugging Face makes of the same file."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import ChatMessage
from engine.text.end_tokens import known_end_tokens
from engine.text.folder_tokenizer import _spelling
from engine.text.load import load_tokenizer
from engine.text.pre_tokenizers import PRE_TOKENIZERS
from engine.text.token_bytes import byte_alphabet, byte_level_bytes, sentencepiece_bytes
from engine.text.tokenizer import Tokenizer, TokenizerError
from engine.text.vocabulary import FastVocabulary, any_of
from tests.engine.tiny_gguf import BYTE_ALPHABET, write_model

TEXTS = [
    "",
    " ",
    "\n\n\n",
    "\t\t  mixed \r\n whitespace\u00a0\u3000 here  ",
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they'll say we've won; it's DON'T, CAN'T and y'all'd've.",
    "3.14159, 1,000,000 and 2026-11-29T16:44:20Z; x=42*17-0xFF",
    "def f(x):\n    return [i ** 2 for i in range(x) if i % 2 == 0]\n\n\nclass A:\n\tpass\n",
    "<html><body class='a b'>&nbsp;</body></html>",
    'SELECT "name" FROM t WHERE a<>b AND c IN (1,2,3);',
    "北京是中国的首都。你好，世界！今天天气怎么样？",
    "日本語のテキストと、ひらがな・カタカナ。",
    "안녕하세요 세계",
    "Привет, мир! Ёлки-палки.",
    "مرحبا بالعالم ١٢٣",
    "हिन्दी में पाठ १२३",
    "😀 👨‍👩‍👧‍👦 🏳️‍🌈 e\u0301 é ½ Ⅷ ² ½½",
    "\u200b\ufeff\u2028 odd \x00\x01\x7f controls",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|endoftext|>  <|im_start|> <repo_name>x<file_sep>",
    "<|im_end<|im_end|>|> <| im_end |>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 3,
    "https://example.org/a/b?c=d&e=%20#frag",
    "math: ∑∞ ∂x/∂y ≤ √2 → ℝ",
]


@pytest.fixture(scope="module")
def starter(starter_model: Path) -> Tokenizer:
    return load_tokenizer(starter_model)


@pytest.fixture(scope="module")
def hugging_face(starter_model: Path) -> Any:
    """What AutoTokenizer.from_pretrained(..., gguf_file=...) builds, without the configuration it also reads."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, tokenizer_dict, _ = get_gguf_tokenizer(str(starter_model))
    return convert_gguf_tokenizer(architecture, tokenizer_dict)[0]


def generated_texts() -> list[str]:
    rng = random.Random(7)
    words = " ".join(TEXTS).split(" ")
    alphabets = [
        "abcdefghijklmnopqrstuvwxyzABCXYZ",
        "0123456789.,-+/",
        " \n\t",
        "你好世界天地人的是不了在有",
        "😀🎉👍🏽❤️é́ñß",
        "'\"()[]{}<>|_=*&^%$#@!~`;:?\\",
        "אבגדеёжзאकखग안녕",
    ]
    texts = []
    for _ in range(300):
        texts.append(" ".join(rng.choices(words, k=rng.randint(1, 12))))
        texts.append("".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 60))))
    return texts


def where_digits_do_not_matter(text: str) -> str:
    """Hugging Face cuts every GGUF vocabulary by GPT-2's rule, also where `tokenizer.ggml.pre` is smollm and digits
    are cut off one by one first, as in the model's own tokenizer. The two differ where several whitespace
    characters stand before a digit, and on digits other than 0 to 9."""
    text = "".join(char for char in text if not char.isnumeric() or char in "0123456789")
    return re.sub(r"\s+(?=\d)", " ", text)


def test_hundreds_of_texts_give_hugging_faces_tokens(starter: Tokenizer, hugging_face: Any) -> None:
    for text in map(where_digits_do_not_matter, [*TEXTS, *generated_texts()]):
        assert starter.encode(text) == hugging_face.encode(text, add_special_tokens=False).ids, text


def test_with_the_models_own_rule_for_digits_all_texts_are_equal(starter: Tokenizer, hugging_face: Any) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import pre_tokenizers

    oracle = Backend.from_str(hugging_face.to_str())
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*TEXTS, *generated_texts()]:
        assert starter.encode(text) == oracle.encode(text, add_special_tokens=False).ids, text


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_survives_encoding_and_decoding(starter: Tokenizer, text: str) -> None:
    data = text.encode("utf-8", "ignore")
    # Its vocabulary has no token for some control characters and bytes that no UTF-8 text contains.
    known = {starter.token_bytes(token)[0] for token in range(17, 300) if len(starter.token_bytes(token)) == 1}
    kept = bytes(byte for byte in data if byte in known)
    assert starter.decode(starter.encode(data.decode()), skip_special=False) == kept.decode("utf-8", "replace")
    assert known >= {*range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC3, 0xF1), 0x09, 0x0A, 0x0D}


def test_numbers_are_single_digits_whatever_whitespace_stands_before_them(starter: Tokenizer) -> None:
    digits = [starter.encode(digit)[0] for digit in "0123456789"]
    assert starter.encode("x  12\n   345")[-3:] == [digits[3], digits[4], digits[5]]
    assert starter.encode("  7") == [*starter.encode("  "), digits[7]]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_decoding_equals_hugging_face_on_any_tokens(starter: Tokenizer, hugging_face: Any, ids: list[int]) -> None:
    assert starter.decode(ids) == hugging_face.decode(ids, skip_special_tokens=True)
    assert starter.decode(ids, skip_special=False) == hugging_face.decode(ids, skip_special_tokens=False)


def test_the_starter_tokenizer_is_described_by_its_file(starter: Tokenizer) -> None:
    assert starter.vocab_size == 49152
    assert starter.bos_token_id == 1
    assert not starter.add_bos
    assert starter.eos_token_ids == {0, 2}  # <|endoftext|> by its text, <|im_end|> by the metadata
    assert starter.special_token_ids == set(range(17))
    assert starter.token_bytes(2) == b"<|im_end|>"
    assert starter.token_bytes(starter.encode(" the")[0]) == b" the"
    assert starter.token_bytes(10**6) == b"" == starter.token_bytes(-1)


def test_tokens_that_are_no_text_are_shown_as_bytes(starter: Tokenizer) -> None:
    pieces = [starter.token_text(token) for token in starter.encode("𓀀")]
    assert len(pieces) > 1
    assert all(re.fullmatch(r"(<0x[0-9A-F]{2}>)+", piece) for piece in pieces)
    assert starter.token_text(starter.encode(" hello")[0]) == " hello"


def test_special_tokens_in_plain_text_can_be_told_apart(starter: Tokenizer) -> None:
    assert starter.encode("<|im_end|>") == [2]
    literal = starter.encode("<|im_end|>", parse_special=False)
    assert 2 not in literal
    assert starter.decode(literal) == "<|im_end|>"
    assert starter.encode("<|im_end|>") == [2], "the choice holds for one call only"


def test_loading_takes_a_moment(starter_model: Path, starter: Tokenizer) -> None:
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        load_tokenizer(starter_model)
        best = min(best, time.process_time() - start)
    assert best < 1.0  # 0.1 s on an idle machine


def test_threads_share_a_tokenizer(starter: Tokenizer) -> None:
    wrong: list[str] = []

    def work(parse_special: bool) -> None:
        for _ in range(300):
            ids = starter.encode("x<|im_end|>y", parse_special=parse_special)
            if (2 in ids) is not parse_special:
                wrong.append(f"{parse_special}: {ids}")

    threads = [threading.Thread(target=work, args=(flag,)) for flag in (True, False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_text_needs_no_torch() -> None:
    code = (
        "import sys, engine.text.tokenizer, engine.text.gguf_tokenizer, engine.text.chat_template, engine.text.prompt\n"
        "import engine.text.detokenizer, engine.text.stops, engine.text.folder_tokenizer\n"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))\n"
        "from engine.text.chat_template import ChatTemplate\n"
        "from engine.protocol import ChatMessage\n"
        "print(ChatTemplate('{{ messages[0].content }}').render([ChatMessage(role='user', content='hi')]))\n"
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["[]", "hi", "False"]


def test_bos_is_added_once_where_the_model_wants_it(tmp_path: Path) -> None:
    wants = load_tokenizer(write_model(tmp_path / "bos.gguf", add_bos=True))
    assert wants.encode("hi")[0] == 258
    assert wants.encode("<s>hi") == wants.encode("hi")
    assert wants.encode("hi", add_bos=False) == wants.encode("hi")[1:]
    assert wants.encode("") == [258]
    does_not = load_tokenizer(write_model(tmp_path / "none.gguf", add_bos=False))
    assert does_not.encode("hi", add_bos=True) == wants.encode("hi")
    assert 258 not in does_not.encode("hi")


def test_a_rule_for_bos_that_the_file_leaves_out_comes_from_the_pre_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(write_model(tmp_path / "llama3.gguf", pre="llama-bpe")).add_bos
    assert not load_tokenizer(write_model(tmp_path / "gpt2.gguf", pre="gpt-2")).add_bos
    assert not load_tokenizer(write_model(tmp_path / "no_id.gguf", pre="llama-bpe", bos=None)).add_bos


def test_end_tokens_of_all_sources_are_united(tmp_path: Path) -> None:
    tokens = [
        *BYTE_ALPHABET,
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<odd>",
        "<|end|>",
        "ab",
    ]
    path = write_model(
        tmp_path / "llama3.gguf",
        tokens=tokens,
        types=[1] * 256 + [3] * 5 + [1, 1],
        bos=256,
        eos=257,
        extra={"tokenizer.ggml.eot_token_id": 260},
    )
    # By metadata 257 and 260; by their text 258 and 259; 261 reads like one but is no control token.
    assert load_tokenizer(path).eos_token_ids == {257, 258, 259, 260}


def test_in_harmony_the_end_of_a_message_does_not_end_the_answer_but_a_call_does() -> None:
    tokens = [(5, "<|end|>"), (6, "<|return|>"), (7, "<|call|>"), (8, "<|endoftext|>")]
    assert known_end_tokens(tokens) == {6, 7, 8}
    assert known_end_tokens(tokens[:1]) == {5}


@pytest.mark.parametrize(
    ("text", "gpt2", "llama3", "qwen2", "smollm"),
    [
        ("12345", ["12345"], ["123", "45"], list("12345"), list("12345")),
        ("  7", [" ", " 7"], [" ", " ", "7"], [" ", " ", "7"], ["  ", "7"]),
        ("I'M", ["I", "'", "M"], ["I", "'M"], ["I", "'M"], ["I", "'", "M"]),
        ("a\n\n b", ["a", "\n\n", " b"], ["a", "\n\n", " b"], ["a", "\n\n", " b"], ["a", "\n\n", " b"]),
        ("(word)", ["(", "word", ")"], ["(word", ")"], ["(word", ")"], ["(", "word", ")"]),
        ("!\nx", ["!", "\n", "x"], ["!\n", "x"], ["!\n", "x"], ["!", "\n", "x"]),
    ],
)
def test_text_is_cut_as_each_family_cuts_it(
    text: str, gpt2: list[str], llama3: list[str], qwen2: list[str], smollm: list[str]
) -> None:
    for pre, expected in {"gpt-2": gpt2, "llama-bpe": llama3, "qwen2": qwen2, "smollm": smollm}.items():
        assert cut(text, pre) == expected, pre


def cut(text: str, pre: str) -> list[str]:
    from tokenizers import Regex, pre_tokenizers

    pieces = [text]
    for split in PRE_TOKENIZERS[pre].splits:
        step = pre_tokenizers.Split(Regex(split), behavior="isolated")
        pieces = [part for piece in pieces for part, _ in step.pre_tokenize_str(piece)]
    return pieces


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("HelloWorld", {"gpt-4o": ["Hello", "World"], "tekken": ["Hello", "World"], "dbrx": ["HelloWorld"]}),
        ("it's 1234", {"gpt-4o": ["it's", " ", "123", "4"], "tekken": ["it", "'s", " ", "1", "2", "3", "4"]}),
        ("a/\n", {"gpt-4o": ["a", "/\n"], "seed-coder": ["a", "/", "\n"], "starcoder": ["a", "/", "\n"]}),
        ("12345", {"superbpe": ["12", "345"], "default": ["123", "45"], "viking": list("12345")}),
        ("=>x", {"default": ["=>", "x"], "deepseek-coder": ["=>", "x"], "deepseek-v3": ["=>", "x"]}),
        ("a\r\nb", {"deepseek-llm": ["a", "\r", "\n", "b"], "llama-bpe": ["a", "\r\n", "b"]}),
        ("我想 ok", {"deepseek-llm": ["我想", " ok"], "deepseek-v3": ["我想", " ok"], "qwen2": ["我想", " ok"]}),
    ],
)
def test_rarer_rules_cut_as_llama_cpp_cuts(text: str, expected: dict[str, list[str]]) -> None:
    assert {pre: cut(text, pre) for pre in expected} == expected


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_known_pre_tokenizer_can_be_built_and_loses_no_text(pre: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path / "model.gguf", pre=pre))
    for text in TEXTS:
        if text.isascii() or pre not in ("qwen2", "deepseek-r1-qwen"):  # these normalise to NFC
            assert tokenizer.decode(tokenizer.encode(text, add_bos=False), skip_special=False) == text


def test_split_rules_equal_those_of_transformers() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    compared = PRE_TOKENIZERS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert len(compared) > 10
    for name in compared:
        assert PRE_TOKENIZERS[name].splits == (GGUF_PRE_TOKENIZER_SPLITS[name],), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "viking-9"}, r"pre-tokenizer 'viking-9' is not known .*qwen2"),
        ({"pre": None}, r"tokenizer\.ggml\.pre is missing"),
        ({"model": "bert"}, r"of the kind 'bert', which is not supported"),
        (
            {"tokens": [*BYTE_ALPHABET, "ab", "ab"], "types": [1] * 258, "eos": 0, "bos": 0},
            "1 of its tokens appear twice",
        ),
        ({"types": [1, 3]}, "261 tokens but 2 token types"),
        ({"merges": ["! ! !"], "tokens": [*BYTE_ALPHABET, "ab"], "types": [1] * 257}, "merges are not pairs"),
        ({"bos": 9999}, r"bos_token_id is 9999, but the vocabulary has 261"),
        (
            {"merges": ["a zz"], "tokens": [*BYTE_ALPHABET, "ab"], "types": [1] * 257},
            "vocabulary and merges do not fit",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "odd.gguf"
    write_model(path, **changes)
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


def test_a_hugging_face_folder_gives_the_same_tokenizer(starter: Tokenizer, hugging_face: Any, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    assert starter.chat_template is not None
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=hugging_face,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=starter.chat_template.source,
    )
    wrapped.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 7}))
    folder = load_tokenizer(tmp_path)
    for text in TEXTS[2:12]:
        assert folder.encode(text) == hugging_face.encode(text, add_special_tokens=False).ids
        assert folder.decode(folder.encode(text), skip_special=False) == text
    assert folder.eos_token_ids == {0, 2, 5, 7}
    assert (folder.bos_token_id, folder.add_bos, folder.vocab_size) == (1, False, 49152)
    assert folder.special_token_ids == starter.special_token_ids
    messages = [ChatMessage(role="user", content="hi")]
    assert folder.chat_template is not None
    assert folder.chat_template.render(messages) == wrapped.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(TokenizerError, match=r"cannot be loaded"):
        load_tokenizer(tmp_path)


def test_the_byte_alphabet_is_gpt2s() -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert byte_alphabet() == {char: byte for byte, char in bytes_to_unicode().items()}


def test_how_a_vocabulary_is_spelled_is_read_off_its_decoder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders
    from tokenizers.models import BPE

    sentencepiece = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    cases = [
        (decoders.ByteLevel(), byte_level_bytes, False),
        (decoders.Sequence([decoders.ByteLevel()]), byte_level_bytes, False),
        (decoders.Sequence([*sentencepiece, decoders.Strip(content=" ", left=1)]), sentencepiece_bytes, True),
        (decoders.Sequence(sentencepiece), sentencepiece_bytes, False),
        (decoders.Metaspace(), sentencepiece_bytes, True),
        (decoders.Metaspace(prepend_scheme="never"), sentencepiece_bytes, False),
    ]
    backend = Backend(BPE(vocab={"▁a": 0, "▁": 1, "b": 2}, merges=[]))
    for decoder, spelling, strips in cases:
        backend.decoder = decoder
        assert _spelling(tmp_path, backend) == (spelling, strips)
        if spelling is sentencepiece_bytes:
            whole = b"".join(map(spelling, ["▁a", "▁a", "b"])).decode()
            assert (whole[1:] if strips else whole) == backend.decode([0, 0, 2])
    for decoder in (decoders.WordPiece(), None):
        backend.decoder = decoder
        with pytest.raises(TokenizerError, match="decodes in a way that is not supported"):
            _spelling(tmp_path, backend)


def test_a_template_by_name_serves_where_it_is_the_only_one(tmp_path: Path) -> None:
    def template_of(**changes: Any) -> str | None:
        template = load_tokenizer(write_model(tmp_path / "x.gguf", **changes)).chat_template
        return template and template.source

    tools, default = {"name": "tools", "template": "t"}, {"name": "default", "template": "d"}
    assert template_of(template=None, templates=[default, tools]) == "d"
    assert template_of(template=None, templates=[tools]) == "t"
    assert template_of(template=None, templates=[tools, {"name": "rag", "template": "r"}]) is None
    assert template_of(template="d") == "d"


def test_an_added_token_that_ends_turns_is_special_whatever_its_converter_thought(tmp_path: Path) -> None:
    tokens = [*BYTE_ALPHABET, "<end_of_turn>", "<|endoftext|>", "<think>", "</s>", "ab"]
    path = write_model(tmp_path / "x.gguf", tokens=tokens, types=[1] * 256 + [4, 3, 4, 1, 1], bos=None, eos=257)
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_token_ids == {256, 257}  # 259 is ordinary text
    assert tokenizer.special_token_ids == {256, 257}
    assert tokenizer.decode(tokenizer.encode("a<end_of_turn><think>")) == "a<think>"


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="<a|b>.", min_size=1, max_size=6), max_size=12),
    text=st.text("<a|b>.x", max_size=30),
)
def test_the_longest_of_many_texts_is_found_first_from_the_left(texts: list[str], text: str) -> None:
    pattern = any_of(texts)
    longest_first = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    if pattern is None:
        assert not texts
    else:
        assert pattern.findall(text) == re.findall(longest_first, text)


def test_thousands_of_special_tokens_are_found_in_a_moment() -> None:
    texts = [f"<unused{index}>" for index in range(6000)] + ["\n" * count for count in range(1, 32)]
    pattern = any_of(texts)
    assert pattern is not None
    start = time.thread_time()
    assert pattern.findall("a < b <unused5999> <unused60000> " * 3000) == ["<unused5999>"] * 3000
    assert time.thread_time() - start < 1.0


@pytest.mark.parametrize("scheme", ["always", "first", "prepend"])
def test_a_folders_tokenizer_puts_no_space_into_the_middle_of_a_text(scheme: str) -> None:
    from tokenizers import AddedToken, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    backend = Backend(BPE(vocab={"▁": 0, "a": 1, "▁a": 2, "<s>": 3}, merges=[("▁", "a")]))
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    if scheme == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    vocabulary = FastVocabulary(backend, sentencepiece_bytes)
    assert vocabulary.encode("a<s>a", True, None) == ([2, 3, 1] if scheme == "first" else [2, 3, 2])
    assert vocabulary.encode("a", True, 1) == [1]
    assert vocabulary.encode("a", True, 3) == ([1] if scheme == "first" else [2])
    assert vocabulary.encode("a", True, None) == [2]
