"""Models in several GGUF files, as `gguf` splits them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from engine.catalog import describe_path, find_models
from engine.loading.gguf import GGUFError, GGUFFile
from engine.loading.gguf_split import open_gguf, parts_of
from engine.models.config import ModelError
from engine.text.load import load_tokenizer
from tests.engine.families import FAMILIES
from tests.engine.gguf_writer import write_gguf_model
from tests.engine.tiny_gguf import header, set_metadata
from tests.engine.tiny_llama import Harness, load, random_tokens


@pytest.fixture(scope="module")
def whole_and_split(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One model as one file and as several."""
    folder, model = tmp_path_factory.mktemp("split"), FAMILIES["llama"]()
    whole = write_gguf_model(folder / "whole.gguf", model, "Q8_0")
    return whole, write_gguf_model(folder / "tiny.gguf", model, "Q8_0", tensors_per_file=12)


@pytest.fixture
def split(whole_and_split: tuple[Path, Path], tmp_path: Path) -> Path:
    """The first part, of copies to be spoiled."""
    for part in parts_of(whole_and_split[1]):
        shutil.copy(part, tmp_path)
    return tmp_path / whole_and_split[1].name


def part(first: Path, number: int) -> Path:
    return parts_of(first)[number - 1]


def test_all_parts_together_are_the_model(whole_and_split: tuple[Path, Path]) -> None:
    whole, first = whole_and_split
    assert len(parts_of(first)) == 3
    with GGUFFile(whole) as one, open_gguf(first) as several:
        assert {name: (t.shape, t.type, t.nbytes) for name, t in one.tensors.items()} == {
            name: (t.shape, t.type, t.nbytes) for name, t in several.tensors.items()
        }
        for name in one.tensors:
            assert (one.read(name) == several.read(name)).all(), name
        assert several.size == sum(path.stat().st_size for path in parts_of(first))
        assert several.metadata["llama.block_count"] == 3
        with pytest.raises(GGUFError, match="has no tensor 'nothing'"):
            several.read("nothing")


def test_any_part_opens_loads_and_answers_like_the_whole_file(whole_and_split: tuple[Path, Path]) -> None:
    whole, first = whole_and_split
    prompt = random_tokens(20)
    expected = Harness(load(whole)).logits(prompt)
    for number in (1, 3):
        path = part(first, number)
        loaded = load(path)
        assert torch.equal(Harness(loaded).logits(prompt), expected)
        assert loaded.format == "GGUF Q8_0"
        assert load_tokenizer(path).vocab_size == load_tokenizer(whole).vocab_size


def test_the_catalog_shows_one_model_with_the_size_of_all_parts(whole_and_split: tuple[Path, Path]) -> None:
    first = whole_and_split[1]
    entries = {entry.name: entry for entry in find_models([first.parent]) if entry.path.parent == first.parent}
    assert set(entries) == {"whole", "tiny-00001-of-00003"}
    entry = entries["tiny-00001-of-00003"]
    assert entry.error is None
    assert entry.size_bytes == sum(path.stat().st_size for path in parts_of(first))
    assert entry.num_parameters == entries["whole"].num_parameters > 0
    assert describe_path(part(first, 2)).num_parameters == entry.num_parameters


def test_missing_parts_are_named(split: Path) -> None:
    part(split, 3).unlink()
    for path in (split, split.with_name("tiny-00002-of-00003.gguf")):
        with pytest.raises(GGUFError, match=r"1 of its 3 parts are missing \(tiny-00003-of-00003.gguf\)"):
            open_gguf(path)
    with pytest.raises(ModelError, match=r"tiny-00003-of-00003\.gguf"):
        load(split)
    assert "tiny-00003-of-00003.gguf" in (describe_path(split).error or "")


def test_a_damaged_part_is_named(split: Path) -> None:
    second = part(split, 2)
    second.write_bytes(second.read_bytes()[:-40])
    with pytest.raises(GGUFError, match=r"tiny-00002-of-00003.gguf: tensor .*truncated"):
        open_gguf(split)


@pytest.mark.parametrize(
    ("key", "code", "value", "message"),
    [
        ("split.no", "<H", 2, "split.no is 2, but its name makes it 1"),
        ("split.count", "<H", 0xFFFF, "split.count is 65535, but its name makes it 3"),
        ("split.tensors.count", "<i", 5, "tells of 5 tensors in all parts, the first part of 31"),
        ("split.tensors.count", "<i", -1, "tells of -1 tensors"),
    ],
)
def test_parts_that_do_not_belong_together_are_named(
    split: Path, key: str, code: str, value: int, message: str
) -> None:
    set_metadata(part(split, 2), key, code, value)
    with pytest.raises(GGUFError, match=f"tiny-00002-of-00003.gguf: .*{message}"):
        open_gguf(split)


def test_tensors_that_are_in_no_part_or_in_two_are_noticed(split: Path) -> None:
    for number in (1, 2, 3):
        set_metadata(part(split, number), "split.tensors.count", "<i", 32)
    with pytest.raises(GGUFError, match="tells of 32 tensors, but its 3 parts have 31"):
        open_gguf(split)
    shutil.copy(part(split, 2), part(split, 3))
    set_metadata(part(split, 3), "split.no", "<H", 2)
    with pytest.raises(GGUFError, match=r"tiny-00003-of-00003.gguf: tensor .* lies in another part too"):
        open_gguf(split)


def test_a_part_under_a_strange_name_says_how_it_should_be_called(split: Path) -> None:
    renamed = part(split, 1).rename(split.with_name("mine.gguf"))
    with pytest.raises(GGUFError, match=r"is one of 3 parts .* -00001-of-00003.gguf or the like"):
        open_gguf(renamed)


@pytest.mark.parametrize("name", ["a-00000-of-00003.gguf", "a-00004-of-00003.gguf", "a-00001-of-99999.gguf"])
def test_impossible_part_numbers_are_refused_before_anything_is_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(header())
    with pytest.raises(GGUFError, match="its name calls it part"):
        open_gguf(tmp_path / name)


def test_a_file_called_the_only_part_of_one_is_a_whole_model(
    whole_and_split: tuple[Path, Path], tmp_path: Path
) -> None:
    path = tmp_path / "only-00001-of-00001.gguf"
    shutil.copy(whole_and_split[0], path)
    with open_gguf(path) as file:
        assert len(file.tensors) == 31
