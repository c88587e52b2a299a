"""What a source of drafts has to do. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from engine.request import Request

MAX_DRAFT_TOKENS = 16


class Drafter(Protocol):
    """Guesses how requests go on.

    In each step the engine calls `follow`, then `available` for requests that have room for drafts, then
    `draft` for those where it is worth it, and `probabilities` for what was drafted.
    """

    def follow(self, requests: Sequence[Request], wanted: Collection[Request]) -> None:
        """Takes in the tokens of these running requests, oldest first, and forgets all others.

        What it costs to be ready to draft is spent on the `wanted` ones only.
        """
        ...

    def forget(self, request: Request) -> None:
        """Drops what it holds for a request that is over."""
        ...

    def available(self, request: Request, limit: int) -> int:
        """How many tokens it could draft for a request that it follows, at most `limit`."""
        ...

    def draft(self, counts: Mapping[Request, int]) -> None:
        """Writes at most so many tokens into each request's `draft_token_ids`."""
        ...

    def check_integrity(self) -> None:
        """Asserts what must hold between two steps."""
        ...

    def probabilities(self, request: Request) -> Any | None:
        """Float32 tensor [num_drafts, vocab_size] of what each draft was drawn from; None if they were not drawn."""
        ...
