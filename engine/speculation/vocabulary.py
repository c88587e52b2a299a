"""Whether two models speak of the same tokens. Torch-free."""

from __future__ import annotations

from engine.text.tokenizer import Tokenizer


def check_same_tokens(tokenizer: Tokenizer, draft: Tokenizer, draft_name: str) -> None:
    """Raises `ValueError` naming the first token that two vocabularies spell differently.

    Ids that only one of them has, or that are padding of either (`[PAD151936]`, as llama.cpp names it), do
    not matter: the draft model cannot draft them, or what it drafts is never accepted.
    """
    for token_id in range(min(tokenizer.vocab_size, draft.vocab_size)):
        ours, theirs = tokenizer.token_bytes(token_id), draft.token_bytes(token_id)
        if ours != theirs and not {ours, theirs} & {b"", b"[PAD%d]" % token_id}:
            raise ValueError(
                f"{draft_name} cannot draft for this model, because it has another tokenizer: token {token_id} is "
                f"{draft.token_text(token_id)!r} to it and {tokenizer.token_text(token_id)!r} to the model. "
                "Choose a draft model of the same family."
            )
