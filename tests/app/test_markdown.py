"""Markdown becomes blocks: what a model writes, nothing that could run, and the same whether whole or growing."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.chat.markdown import (
    Block,
    CodeBlock,
    IncrementalMarkdown,
    ProseBlock,
    Span,
    TableBlock,
    parse_markdown,
    parse_plain,
    plain_text,
)

ANSWER = """# Title **bold**

Prose with *it*, `code` and ~~gone~~.
A second line.

1. one
   - deep
     ```python
     x = 1
     ```
2. two

- [ ] open
- [x] done

> quoted
>
> - inside

| a | b |
|---|:-:|
| 1 | **2** |

```js
let x
```

---
See [the end][end].

[end]: https://example.org
"""


def prose(block: Block) -> ProseBlock:
    assert isinstance(block, ProseBlock)
    return block


def test_raw_html_stays_text() -> None:
    blocks = parse_markdown("<script>alert(1)</script>\n\nA <b>bold</b> <img src='http://x/y.png'> word")
    assert plain_text(blocks) == "<script>alert(1)</script>\nA <b>bold</b> <img src='http://x/y.png'> word"
    assert not any(span.bold or span.href.endswith(".png'") for block in blocks for span in prose(block).spans)


def test_an_image_is_a_link_to_its_source() -> None:
    (block,) = parse_markdown("![a cat](https://example.org/cat.png)")
    assert prose(block).spans == (Span("[a cat]", href="https://example.org/cat.png"),)


@pytest.mark.parametrize("address", ["javascript:alert(1)", "data:text/html,x", "vbscript:x"])
def test_addresses_that_could_run_are_no_links(address: str) -> None:
    (block,) = parse_markdown(f"[click]({address})")
    assert not any(span.href for span in prose(block).spans)


def test_bare_addresses_are_links_without_the_punctuation_behind_them() -> None:
    (block,) = parse_markdown("See https://a.org/b_(c), or (https://d.org/e).")
    assert [span.href for span in prose(block).spans if span.href] == ["https://a.org/b_(c)", "https://d.org/e"]


def test_lists_keep_their_numbers_markers_and_depth() -> None:
    blocks = [prose(b) for b in parse_markdown("7. seven\n8. eight\n   - dash\n     * star\n- [x] done")]
    assert [(b.marker, b.indent) for b in blocks] == [("7.", 1), ("8.", 1), ("•", 2), ("◦", 3), ("☑", 1)]


def test_code_inside_a_list_is_a_code_block_and_the_list_goes_on() -> None:
    blocks = parse_markdown("1. do\n\n   ```sh\n   ls\n   ```\n\n2. done")
    assert isinstance(blocks[1], CodeBlock)
    assert (blocks[1].language, blocks[1].text, blocks[1].indent) == ("sh", "ls", 1)
    assert prose(blocks[2]).marker == "2."


def test_a_table_keeps_cells_and_alignment() -> None:
    (table,) = parse_markdown("| a | b | c |\n|:--|:-:|--:|\n| 1 | **2** | 3 |")
    assert isinstance(table, TableBlock)
    assert table.align == ("left", "center", "right")
    assert table.rows == (((Span("1"),), (Span("2", bold=True),), (Span("3"),)),)


def test_what_a_person_typed_is_verbatim_but_fenced_code_is_code() -> None:
    blocks = parse_plain("# no *markup*  here\n  indented\n```py\na = 1\n```\nafter\n")
    assert plain_text(blocks) == "# no *markup*  here\n  indented\na = 1\nafter"
    assert isinstance(blocks[1], CodeBlock)
    assert prose(blocks[0]).heading == 0


def test_growing_a_character_at_a_time_ends_in_the_same_blocks() -> None:
    growing = IncrementalMarkdown()
    for end in range(len(ANSWER)):
        growing.update(ANSWER[:end], complete=False)
    assert growing.update(ANSWER, complete=True) == parse_markdown(ANSWER)


_PIECES = st.sampled_from(
    ["word ", "\n", "\n\n", "- item\n", "1. one\n", "```py\n", "```\n", "    four", "> q\n", "| a |\n", "|---|\n"]
    + ["# h\n", "---\n", "**b** ", "`c` ", "===\n", "  ", "~~~\n", "* x\n", "\r\n", "<b>", "é😀中", "[a]: b\n"]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_PIECES, max_size=25))
def test_any_text_grown_in_pieces_ends_in_the_blocks_of_the_whole(pieces: list[str]) -> None:
    growing = IncrementalMarkdown()
    text = ""
    for piece in pieces:
        text += piece
        growing.update(text, complete=False)
    whole = text.replace("\r\n", "\n").replace("\r", "\n")
    assert growing.update(text, complete=True) == parse_markdown(whole)


def test_committed_blocks_are_the_same_objects_while_the_text_grows() -> None:
    growing = IncrementalMarkdown()
    first = growing.update("# One\n\ntwo\n\nthree", complete=False)
    second = growing.update("# One\n\ntwo\n\nthree and more", complete=False)
    assert second[0] is first[0]
    assert second[1] is first[1]


def test_a_line_that_may_become_markup_is_held_back_while_growing() -> None:
    growing = IncrementalMarkdown()
    assert plain_text(growing.update("Items:\n-", complete=False)) == "Items:"  # and no heading
    assert growing.update("Items:\n-", complete=True) == parse_markdown("Items:\n-")


def test_an_open_fence_is_code_at_once_and_closed_when_it_is() -> None:
    growing = IncrementalMarkdown()
    (block,) = growing.update("```python\nx = 1\n", complete=False)
    assert block == CodeBlock("python", "x = 1", closed=False)
    (block,) = growing.update("```python\nx = 1\ny = 2\n``", complete=False)
    assert block == CodeBlock("python", "x = 1\ny = 2", closed=False)
    code, after = growing.update("```python\nx = 1\ny = 2\n```\nend", complete=False)
    assert code == CodeBlock("python", "x = 1\ny = 2")
    assert plain_text([after]) == "end"


def test_the_cost_of_an_update_does_not_grow_with_the_text() -> None:
    """Parsing 100k characters anew takes hundreds of milliseconds; an update may take a few."""
    text = ANSWER * 300
    assert len(text) > 80_000
    growing = IncrementalMarkdown()
    for end in range(0, len(text) - 2000, 2000):
        growing.update(text[:end], complete=False)
    started = time.perf_counter()
    for end in range(len(text) - 2000, len(text), 20):
        growing.update(text[:end], complete=False)
    each_ms = (time.perf_counter() - started) * 1000 / 100
    started = time.perf_counter()
    parse_markdown(text)
    whole_ms = (time.perf_counter() - started) * 1000
    assert each_ms * 20 < whole_ms, f"an update took {each_ms:.2f} ms, the whole text {whole_ms:.0f} ms"
