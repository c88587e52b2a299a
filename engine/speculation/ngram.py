"""Prompt lookup: what followed the last few tokens when they occurred before. Torch-free.

After "prompt lookup decoding" (Saxena 2023), with an index like the hash chains of LZ77 compressors,
so that a step costs the same however long the text is.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence

from engine.request import Request

MIN_MATCH = 2
"""The tokens of a pair, which is what the index finds; a single token says too little."""
MAX_MATCH = 8
"""Matches of this length are as good as any longer one."""
MAX_CANDIDATES = 16
"""Earlier occurrences that are looked at, latest first."""
_NONE = -1


class NgramIndex:
    """Where each pair of tokens of a growing text occurred: 4 bytes a token, one dictionary entry a different pair.

    `token_ids` is the caller's list, which only ever grows.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens = token_ids
        self._latest: dict[int, int] = {}
        # By the position of a pair's second token: the occurrence of the same pair before.
        self._previous = array("i", [_NONE])

    def continuation(self, limit: int) -> list[int]:
        """What followed the longest earlier occurrence of the text's end; the latest of equally long ones.

        A continuation that runs into the end of the text goes on with itself, as repetitions do.
        """
        self._take_in()
        start = self._best_match()
        if start is None:
            return []
        period = len(self._tokens) - start
        return [self._tokens[start + offset % period] for offset in range(limit)]

    def _take_in(self) -> None:
        tokens = self._tokens
        # The last pair has no token after it yet, so it would be no help.
        for end in range(len(self._previous), len(tokens) - 1):
            pair = tokens[end - 1] << 32 | tokens[end]
            self._previous.append(self._latest.get(pair, _NONE))
            self._latest[pair] = end

    def _best_match(self) -> int | None:
        """The position after the best earlier occurrence."""
        tokens = self._tokens
        last = len(tokens) - 1
        if last < MIN_MATCH:
            return None
        candidate = self._latest.get(tokens[last - 1] << 32 | tokens[last], _NONE)
        best, best_length = None, 0
        for _ in range(MAX_CANDIDATES):
            if candidate == _NONE or best_length == MAX_MATCH:
                break
            length = self._match_length(candidate, last)
            if length > best_length:
                best, best_length = candidate + 1, length
            candidate = self._previous[candidate]
        return best

    def _match_length(self, end: int, last: int) -> int:
        tokens = self._tokens
        length = MIN_MATCH
        while length < MAX_MATCH and length <= end and tokens[end - length] == tokens[last - length]:
            length += 1
        return length


class NgramDrafter:
    """Drafts from the request's own prompt and output."""

    def __init__(self) -> None:
        self._indexes: dict[Request, NgramIndex] = {}

    def follow(self, requests: Sequence[Request], wanted: Collection[Request]) -> None:
        self._indexes = {request: self._indexes.get(request) or NgramIndex(request.token_ids) for request in requests}

    def forget(self, request: Request) -> None:
        self._indexes.pop(request, None)

    def available(self, request: Request, limit: int) -> int:
        return len(self._indexes[request].continuation(limit))

    def draft(self, counts: Mapping[Request, int]) -> None:
        for request, count in counts.items():
            request.draft_token_ids = self._indexes[request].continuation(count)

    def check_integrity(self) -> None:
        assert all(not request.is_finished for request in self._indexes)

    def probabilities(self, request: Request) -> None:
        """None: given the text, there is no chance in the drafts."""
        return
