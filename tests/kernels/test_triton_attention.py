"""The Triton attention kernel, in the interpreter, against plain attention over each sequence's own keys."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.kv import KVLayer, quantize_int8
from kernels.metadata import AttentionMetadata
from tests.kernels.oracle import PagedBatch, attention_by_hand, paged_batch

pytest.importorskip("triton", reason="triton is made for Linux only")
from kernels.triton import attention


def attend(batch: PagedBatch, scale: float, **options: object) -> torch.Tensor:
    return attention.paged_attention(batch.q, batch.kv_cache, batch.metadata, scale, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_decodes_and_chunks_in_one_batch_see_exactly_their_own_past(head_dim):
    batch = paged_batch([1, 15, 1, 17, 3, 1], [1, 15, 16, 17, 40, 33], 6, 2, head_dim)
    expected = attention_by_hand(batch, head_dim**-0.5)
    torch.testing.assert_close(attend(batch, head_dim**-0.5), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (15, 3), (7, 1), (4, 4), (8, 1)])
def test_any_number_of_query_heads_share_the_keys_of_one(num_heads, num_kv_heads):
    batch = paged_batch([1, 2, 20], [17, 40, 20], num_heads, num_kv_heads, 64)
    torch.testing.assert_close(attend(batch, 0.125), attention_by_hand(batch, 0.125), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("query_lens", [[1, 1], [4, 1], [17, 1]])
def test_long_contexts_give_the_same_in_splits_and_whole(query_lens):
    lengths = [attention.LEAST_SPLIT_KEYS + 1, 3]
    lengths[1] = max(lengths[1], query_lens[1])
    batch = paged_batch(query_lens, lengths, 4, 2, 64)
    torch.testing.assert_close(attend(batch, 0.125), attention_by_hand(batch, 0.125), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 16, 100, 600])
def test_a_window_hides_keys_at_its_far_edge_and_beyond(window):
    batch = paged_batch([1, 5, 4], [2 * attention.LEAST_SPLIT_KEYS + 5, 33, 4], 4, 2, 64)
    expected = attention_by_hand(batch, 0.125, window=window)
    torch.testing.assert_close(attend(batch, 0.125, window=window), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_a_soft_cap_bounds_scores_before_the_mask(window):
    batch = paged_batch([1, 18], [17, 30], 4, 2, 96)
    batch.q *= 20
    expected = attention_by_hand(batch, 0.1, window=window, soft_cap=5.0)
    torch.testing.assert_close(attend(batch, 0.1, window=window, soft_cap=5.0), expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("seq_len", [20, attention.LEAST_SPLIT_KEYS + 20])
def test_a_sink_takes_its_share_once(seq_len):
    batch = paged_batch([1, 3], [seq_len, 9], 6, 2, 64)
    sinks = torch.tensor([3.0, -2.0, 0.0, 5.0, 1.0, -30.0])
    expected = reference.paged_attention(batch.q, batch.kv_cache, batch.metadata, 0.125, sinks=sinks)
    torch.testing.assert_close(attend(batch, 0.125, sinks=sinks), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("query_lens", [[1, 4], [18, 1]])
def test_int8_keys_and_values_are_read_with_their_scales(query_lens):
    batch = paged_batch(query_lens, [33, 20], 9, 3, 64)
    data = batch.kv_cache.data.nan_to_num()
    codes, scales = quantize_int8(data)
    rounded = codes.float() * scales.unsqueeze(-1)
    expected = reference.paged_attention(batch.q, KVLayer(rounded), batch.metadata, 0.125)
    batch.kv_cache = KVLayer(codes, scales)
    torch.testing.assert_close(attend(batch, 0.125), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_half_precision_is_as_exact_as_its_numbers(head_dim):
    batch = paged_batch([1, 18], [33, 20], 9, 3, head_dim)
    half = PagedBatch(batch.q.half(), KVLayer(batch.kv_cache.data.half()), batch.metadata, batch.keys, batch.values)
    out = attend(half, 0.125)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), attention_by_hand(batch, 0.125), atol=4e-3, rtol=1e-2)


def test_a_row_does_not_depend_on_its_company(monkeypatch):
    """A decode, the verification of drafts and prefill chunks in one batch, with and without splits, bit by bit."""
    monkeypatch.setattr(attention, "LEAST_SPLIT_KEYS", 64)
    query_lens, seq_lens = [1, 18, 1, 4, 3], [150, 40, 17, 100, 20]
    batch = paged_batch(query_lens, seq_lens, 2, 1, 64)
    together = attend(batch, 0.125)
    torch.testing.assert_close(together, attention_by_hand(batch, 0.125), atol=2e-6, rtol=1e-5)
    row = 0
    for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens)):
        table = batch.metadata.block_tables[seq]
        metadata = AttentionMetadata.build([table], [query_len], [seq_len], 16)
        rows = slice(row, row + query_len)
        alone = PagedBatch(batch.q[rows], batch.kv_cache, metadata, [], [])
        assert torch.equal(attend(alone, 0.125), together[rows])
        row += query_len


@pytest.mark.parametrize("window", [None, 500])
def test_very_long_contexts_have_longer_splits_rather_than_more(window, monkeypatch):
    monkeypatch.setattr(attention, "LEAST_SPLIT_KEYS", 64)
    monkeypatch.setattr(attention, "MOST_SPLITS", 2)
    batch = paged_batch([1], [900], 2, 2, 64)
    expected = attention_by_hand(batch, 0.125, window=window)
    torch.testing.assert_close(attend(batch, 0.125, window=window), expected, atol=2e-6, rtol=1e-5)


def test_a_captured_step_computes_any_sequences_within_its_bounds():
    """The bounds alone decide what is launched; a sequence may compute no token."""
    batch = paged_batch([3, 1], [20, 33], 4, 2, 64)
    plain = batch.metadata
    static = AttentionMetadata(
        [3, 3, 3],
        [9, 9, 9],
        [],
        16,
        plain.slot_mapping,
        torch.cat((plain.block_table, torch.zeros_like(plain.block_table[:1]))),
        torch.tensor([0, 3, 4, 4], dtype=torch.int32),
        torch.tensor([20, 33, 0], dtype=torch.int32),
        query_len_bound=3,
        seq_len_bound=600,
    )
    expected = attend(batch, 0.125)
    batch.metadata = static
    assert torch.equal(attend(batch, 0.125), expected)
