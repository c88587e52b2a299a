"""Paged attention against plain attention over each sequence's own keys."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels import ops
from kernels.kv import KVLayer
from kernels.metadata import AttentionMetadata
from tests.kernels.oracle import attention_by_hand, paged_batch

LENGTHS = [1, 15, 16, 17, 40]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (8, 1)])
def test_decodes_and_chunks_in_one_batch_see_exactly_their_own_past(head_dim, num_heads, num_kv_heads):
    query_lens = [1, 15, 1, 17, 3, 1, 16]
    seq_lens = [1, 15, 16, 17, 40, 33, 31]
    batch = paged_batch(query_lens, seq_lens, num_heads, num_kv_heads, head_dim)
    out = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, head_dim**-0.5)
    torch.testing.assert_close(out, attention_by_hand(batch, head_dim**-0.5), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_whole_prompt_matches_torchs_own_causal_attention(length):
    batch = paged_batch([length], [length], 9, 3, 64)
    out = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, 0.125)
    expected = F.scaled_dot_product_attention(
        batch.q.transpose(0, 1)[None],
        batch.keys[0].transpose(0, 1)[None],
        batch.values[0].transpose(0, 1)[None],
        is_causal=True,
        scale=0.125,
        enable_gqa=True,
    )
    torch.testing.assert_close(out, expected[0].transpose(0, 1), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 7, 16, 64])
def test_the_block_size_changes_nothing(block_size):
    batch = paged_batch([1, 5], [23, 37], 9, 3, 64, block_size=block_size)
    out = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, 0.125)
    torch.testing.assert_close(out, attention_by_hand(batch, 0.125), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 4, 16, 100])
def test_a_window_hides_keys_at_its_far_edge_and_beyond(window):
    batch = paged_batch([1, 17, 5, 20], [40, 17, 33, 20], 9, 3, 64)
    out = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, 0.125, window=window)
    torch.testing.assert_close(out, attention_by_hand(batch, 0.125, window=window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_a_soft_cap_bounds_scores_before_the_mask(window):
    batch = paged_batch([1, 16, 4], [17, 16, 30], 8, 2, 96)
    batch.q *= 20
    out = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, 0.1, window=window, soft_cap=5.0)
    expected = attention_by_hand(batch, 0.1, window=window, soft_cap=5.0)
    torch.testing.assert_close(out, expected, atol=5e-6, rtol=1e-5)
    uncapped = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, 0.1, window=window)
    assert (out - uncapped).abs().max() > 0.1


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (6, None), (6, 5.0)])
def test_a_sink_takes_its_share_of_each_heads_attention(window, soft_cap):
    batch = paged_batch([1, 16, 4], [17, 16, 30], 6, 2, 64)
    sinks = torch.tensor([3.0, -2.0, 0.0, 5.0, 1.0, -30.0])
    out = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, 0.1, window, soft_cap, sinks)
    expected = attention_by_hand(batch, 0.1, window, soft_cap, sinks)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    without = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, 0.1, window, soft_cap)
    torch.testing.assert_close(out[:, 5], without[:, 5], atol=2e-6, rtol=1e-5)
    assert (out[:, 3].abs() < without[:, 3].abs()).all()


def test_layers_with_and_without_a_window_share_one_batch():
    batch = paged_batch([3], [40], 4, 2, 64)
    full = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, 0.125)
    windowed = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, 0.125, window=8)
    torch.testing.assert_close(windowed, attention_by_hand(batch, 0.125, window=8), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(full, attention_by_hand(batch, 0.125), atol=2e-6, rtol=1e-5)


def test_a_sequences_decode_does_not_depend_on_its_company():
    batch = paged_batch([1, 1, 9, 1], [17, 64, 40, 300], 9, 3, 64)
    together = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, 0.125)
    alone = AttentionMetadata.build(batch.metadata.block_tables[1:2], [1], [64], 16)
    assert torch.equal(ops.paged_attention(batch.q[1:2], batch.kv_cache, alone, 0.125), together[1:2])


def test_keys_and_values_may_be_kept_in_half_precision():
    batch = paged_batch([1, 4], [33, 20], 9, 3, 64)
    out = ops.paged_attention(batch.q, KVLayer(batch.kv_cache.data.half()), batch.metadata, 0.125)
    torch.testing.assert_close(out, attention_by_hand(batch, 0.125), atol=3e-3, rtol=1e-2)


def test_metadata_says_where_each_new_token_is_written():
    metadata = AttentionMetadata.build([[4, 2], [7]], [3, 1], [18, 1], 16)
    assert metadata.slot_mapping.tolist() == [4 * 16 + 15, 2 * 16, 2 * 16 + 1, 7 * 16]
    assert metadata.cu_seqlens_q.tolist() == [0, 3, 4]
    assert metadata.seq_lens.tolist() == [18, 1]
    assert metadata.block_table.tolist() == [[4, 2], [7, 0]]
    assert (metadata.num_tokens, metadata.max_query_len, metadata.max_seq_len) == (4, 3, 18)


@pytest.mark.parametrize(("query_len", "seq_len"), [(0, 4), (5, 4), (1, 33)])
def test_metadata_refuses_lengths_that_cannot_be(query_len, seq_len):
    with pytest.raises(ValueError, match="tokens"):
        AttentionMetadata.build([[0, 1]], [query_len], [seq_len], 16)
