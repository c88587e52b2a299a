"""Which steps are recorded as CUDA graphs: sizes that others are padded to. Torch-free."""

from __future__ import annotations

MAX_TOKENS = 256
"""Larger steps take a GPU longer than the host needs to ask for them."""
SMALLEST_VERIFICATION = 8
LENGTH_BOUNDS = (256, 2048)
"""Attention splits no keys up to the first, see `kernels.triton.attention`, and up to the second into few parts.
Parts beyond the end of a sequence cost little, each bound a recording of every size."""


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, 40 ... up to `most`, at most a quarter apart."""
    sizes = [size for size in (1, 2, 4) if size < most]
    size = 8
    while size < most:
        sizes.append(size)
        size += max(8, (1 << (size.bit_length() - 1)) // 4)
    return [*sizes, most]


def length_bounds(longest: int) -> list[int]:
    """Upper bounds of sequence lengths, the last being that of the longest there can be."""
    return [*(bound for bound in LENGTH_BOUNDS if bound < longest), longest]


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Tokens of steps in which every sequence computes its latest one."""
    return batch_sizes(min(max_num_seqs, MAX_TOKENS))


def verification_sizes(max_num_seqs: int, num_draft_tokens: int) -> list[int]:
    """Tokens of steps in which sequences also verify up to so many drafts each; none without drafts."""
    if num_draft_tokens == 0:
        return []
    most = min(max_num_seqs * (1 + num_draft_tokens), MAX_TOKENS)
    return [size for size in batch_sizes(most) if size >= min(SMALLEST_VERIFICATION, most)]


def num_graphs(max_num_seqs: int, num_draft_tokens: int, longest: int) -> int:
    """How many graphs there are: each size with each bound of the lengths. `longest` is the most tokens of one."""
    sizes = len(decode_sizes(max_num_seqs)) + len(verification_sizes(max_num_seqs, num_draft_tokens))
    return sizes * len(length_bounds(longest))


def most_tokens(max_num_seqs: int, num_draft_tokens: int) -> int:
    """Tokens of the largest step that is recorded."""
    return max(*decode_sizes(max_num_seqs), *verification_sizes(max_num_seqs, num_draft_tokens), 1)
