"""Which tokens end an answer."""

from __future__ import annotations

from collections.abc import Iterable

# End-of-turn and end-of-text tokens of published models, by their text. Files often name
# only one of the several tokens a model ends its turns with (Llama 3 has three).
END_TOKEN_TEXTS = frozenset(
    {
        "</s>",
        "<eos>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<|return|>",
        "<|call|>",
        "<｜end▁of▁sentence｜>",
    }
)


def token_ids(value: object) -> set[int]:
    """The ids in a configuration value that may be missing, one id or a list of them."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0}


def known_end_tokens(control_tokens: Iterable[tuple[int, str]]) -> set[int]:
    """Those of the model's control tokens that end an answer by their text."""
    found = {text: token_id for token_id, text in control_tokens if text in END_TOKEN_TEXTS}
    if "<|return|>" in found:  # Harmony (gpt-oss): <|end|> only ends one of several messages of an answer
        found.pop("<|end|>", None)
    return set(found.values())
