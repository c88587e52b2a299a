"""From a conversation to prompt tokens, and how much room they leave for an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.parameters import OverflowPolicy
from engine.protocol import ChatMessage
from engine.text.tokenizer import Tokenizer

# Private-use characters around text that only looks like a special token, as in transformers.
_LITERAL_START = "\U000f0000"
_LITERAL_END = "\U000f0001"
_LITERAL = re.compile(f"{_LITERAL_START}(.*?){_LITERAL_END}", re.DOTALL)


class PromptError(ValueError):
    """A prompt cannot be made. The message is for people and says what would help."""


@dataclass(frozen=True)
class PreparedPrompt:
    """`dropped` are the messages the overflow policy left out, oldest first."""

    token_ids: list[int]
    dropped: tuple[ChatMessage, ...] = ()

    @property
    def dropped_messages(self) -> int:
        return len(self.dropped)


def build_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    token_limit: int,
    max_tokens: int | None,
    policy: OverflowPolicy,
) -> PreparedPrompt:
    """Renders and tokenises a conversation.

    With "drop_oldest", one that leaves an answer less than `answer_room` of `token_limit` tokens loses whole
    turns (a question with its answers), oldest first; system messages and the last question always stay.
    Whether what comes out fits, and how long the answer may be, is up to `fit_tokens`.

    Raises `PromptError` for an empty conversation, `ChatTemplateError` where the template fails.
    """
    if not messages:
        raise PromptError("The conversation is empty: write a message first.")
    turns = _droppable_turns(messages) if policy == "drop_oldest" else []
    limit = token_limit - answer_room(token_limit, max_tokens)
    num_dropped = 0
    token_ids = encode_chat(tokenizer, messages)
    if len(token_ids) > limit and turns:
        # Fewer turns never take more tokens, so the fewest that must go are found by bisection.
        low, high = 1, len(turns)
        while low < high:
            middle = (low + high) // 2
            fits = len(encode_chat(tokenizer, _without(messages, turns[:middle]))) <= limit
            low, high = (low, middle) if fits else (middle + 1, high)
        num_dropped = low
        token_ids = encode_chat(tokenizer, _without(messages, turns[:num_dropped]))
    dropped = tuple(messages[index] for turn in turns[:num_dropped] for index in turn)
    return PreparedPrompt(token_ids, dropped)


def encode_chat(tokenizer: Tokenizer, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> list[int]:
    """Token ids of a conversation after the chat template.

    Special tokens come from the template alone: text in a message that looks like one stays text,
    so no message can end its own turn or speak for another role.
    """
    if tokenizer.chat_template is None:
        raise PromptError(
            "This model has no chat template, so it cannot hold a conversation: "
            "choose an instruction-tuned model, or give it a plain prompt to continue."
        )
    marked = [_mark_literals(tokenizer, message) for message in messages]
    rendered = tokenizer.chat_template.render(marked, add_generation_prompt)
    token_ids: list[int] = []
    for index, part in enumerate(_LITERAL.split(rendered)):
        if part:
            literal = index % 2 == 1
            previous = token_ids[-1] if token_ids else None
            token_ids += tokenizer.encode(part, add_bos=False, parse_special=not literal, previous=previous)
    # Templates usually write the BOS themselves; only one that does not gets it here.
    if tokenizer.add_bos and tokenizer.bos_token_id is not None and token_ids[:1] != [tokenizer.bos_token_id]:
        token_ids.insert(0, tokenizer.bos_token_id)
    return token_ids


def answer_room(max_context: int, max_tokens: int | None) -> int:
    """How many tokens an answer must at least have room for: `max_tokens` up to a quarter of the context."""
    quarter = max(1, max_context // 4)
    return quarter if max_tokens is None else min(max_tokens, quarter)


def fit_tokens(num_prompt_tokens: int, max_context: int, max_tokens: int | None, policy: OverflowPolicy) -> int:
    """The most tokens an answer to a prompt of that length can have in the context.

    refuse                      raises unless the answer has `answer_room`
    drop_oldest, stop_at_limit  let the answer end where the context does

    Raises `PromptError` if the prompt does not fit.
    """
    left = max_context - num_prompt_tokens
    needed = answer_room(max_context, max_tokens) if policy == "refuse" else 1
    if left < needed:
        remedies = {
            "refuse": "Shorten it, start a new chat, load the model with a larger context, or choose another "
            "overflow policy.",
            "drop_oldest": "Older turns are left out already and the last message alone is too long: shorten it, or "
            "load the model with a larger context.",
            "stop_at_limit": "Shorten it, start a new chat, or load the model with a larger context.",
        }
        raise PromptError(
            f"The prompt takes {num_prompt_tokens} tokens and the answer needs room for {needed}, but the context "
            f"holds {max_context}. {remedies[policy]}"
        )
    return left if max_tokens is None else min(max_tokens, left)


def _droppable_turns(messages: Sequence[ChatMessage]) -> list[list[int]]:
    """Indices of each question with its answers, oldest first; without system messages and the last question."""
    spoken = [index for index, message in enumerate(messages) if message.role != "system"]
    last_question = max((index for index in spoken if messages[index].role == "user"), default=None)
    turns: list[list[int]] = []
    for index in spoken:
        if index == last_question:
            break
        if not turns or messages[index].role == "user":
            turns.append([])
        turns[-1].append(index)
    return turns


def _without(messages: Sequence[ChatMessage], turns: Sequence[Sequence[int]]) -> list[ChatMessage]:
    gone = {index for turn in turns for index in turn}
    return [message for index, message in enumerate(messages) if index not in gone]


def _mark_literals(tokenizer: Tokenizer, message: ChatMessage) -> ChatMessage:
    content = message.content.replace(_LITERAL_START, "").replace(_LITERAL_END, "")
    pattern = tokenizer.special_token_pattern
    if pattern is not None:
        content = pattern.sub(lambda match: f"{_LITERAL_START}{match[0]}{_LITERAL_END}", content)
    return message if content == message.content else ChatMessage(role=message.role, content=content)
