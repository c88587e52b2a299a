"""Conversations are rendered as the model's template says, whatever state they are in."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import ChatMessage
from engine.text import chat_template as module
from engine.text.chat_template import ChatTemplate, ChatTemplateError
from engine.text.load import load_tokenizer
from engine.text.template_environment import environment

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# In the manner of Gemma 2: no system role, strict alternation.
STRICT = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}
{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{{- '<' + message['role'] + '>' + message['content'] | trim + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<model>' }}{% endif %}"""
# A system message first is allowed, then strict alternation; in the manner of Llama 2 and Mistral.
SYSTEM_THEN_STRICT = """{% if messages[0].role == 'system' %}[S]{{ messages[0].content }}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- for m in rest %}{% if (m.role == 'user') == (loop.index0 % 2) %}{{ raise_exception('must alternate') }}{% endif %}
[{{ m.role[0] }}]{{ m.content }}{% endfor %}"""
# Leaves system messages out without a word.
SILENT = "{% for m in messages if m.role != 'system' %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"


def chat(*turns: str) -> list[ChatMessage]:
    """chat("s: be brief", "u: hi", "a: hello")"""
    roles: dict[str, Any] = {"s": "system", "u": "user", "a": "assistant"}
    return [ChatMessage(role=roles[turn[0]], content=turn[3:]) for turn in turns]


def test_rendering_equals_transformers(starter_model: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = load_tokenizer(starter_model).chat_template
    assert template is not None
    for source in (template.source, CHATML, SILENT, "{% generation %}x{% endgeneration %}{{ messages | tojson }}"):
        for turns in (["u: hi"], ["s: be brief", "u: {{ 7 * 7 }} <b>&amp;</b> 'q'", "a: \u2028 é", "u: next"]):
            messages = chat(*turns)
            if source == SILENT and messages[0].role == "system":
                continue
            plain = [{"role": message.role, "content": message.content} for message in messages]
            for prompt in (True, False):
                rendered = render_jinja_template([plain], chat_template=source, add_generation_prompt=prompt)[0]
                assert ChatTemplate(source).render(messages, prompt) == rendered[0]


# What templates make use of, and what the sandbox refuses: everything that transformers adds to Jinja.
IN_TRANSFORMERS_WAY = (
    "{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': 'é<'} | tojson(sort_keys=true, separators=(',', ':')) }}",
    "{%- set ns = namespace(n=0, self=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% continue %}{% endfor %}end",
    "{% set a = 1 %}{% generation %}{% set a = 2 %}in{{ a }}{% endgeneration %}out{{ a }}",
    "  {% if true %}  \n  trimmed\n  {% endif %}\n{{ dict(a=1) }}{{ dict.fromkeys('ab', 1) }}",
    "{{ strftime_now('%Y') }}{{ messages[0].content.__class__ }}",
    "{{ namespace(_a=1)._a }}",
    "{{ namespace({'__class__': 1}) }}",
    "{{ dict.__class__.__mro__ }}{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception('no') }}",
    "{{ undefined_thing.attribute }}",
)


@pytest.mark.parametrize("source", IN_TRANSFORMERS_WAY)
def test_a_template_does_what_it_does_in_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    try:
        expected: Any = render_jinja_template([plain], chat_template=source)[0][0]
    except Exception as error:
        expected = type(error)
    try:
        found: Any = ChatTemplate(source).render(chat("u: hi", "a: yes"), False)
    except ChatTemplateError as error:
        found = type(error.__cause__)
    assert found == expected


def test_the_sandbox_has_the_names_of_that_in_transformers_and_no_others() -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    theirs = _compile_jinja_template("").environment
    ours = environment(module._guard)
    for names in ("filters", "tests", "globals"):
        assert getattr(ours, names).keys() == getattr(theirs, names).keys()
    tags = [{tag for each in env.extensions.values() for tag in each.tags} for env in (ours, theirs)]
    assert tags[0] == tags[1]


def test_special_tokens_are_known_to_the_template() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", {"bos_token": "<s>"})
    assert template.render(chat("u: hi")) == "<s>hi"


def test_a_template_without_a_system_role_gets_it_in_the_first_user_turn() -> None:
    template = ChatTemplate(STRICT, {"bos_token": "<bos>"})
    assert not template.supports_system_role
    assert template.render(chat("s: be brief", "u: hi")) == "<bos><user>be brief\n\nhi\n<model>"
    silent = ChatTemplate(SILENT)
    assert not silent.supports_system_role
    assert silent.render(chat("s: be brief", "u: hi", "a: yes", "u: so")) == "[u]be brief\n\nhi[a]yes[u]so"
    assert silent.render(chat("s: alone")) == "[u]alone"


def test_a_template_with_a_system_role_gets_it_as_it_is() -> None:
    template = ChatTemplate(CHATML)
    assert template.supports_system_role
    assert not template.insists_on_alternation
    assert template.render(chat("s: be brief", "u: a", "u: b", "s: now long"), False).count("<|im_start|>") == 4


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (["u: a", "u: b"], "<user>a\n\nb\n"),
        (["u: a", "a: half an ans", "u: b"], "<user>a\n<assistant>half an ans\n<user>b\n"),
        (["u: a", "a: ", "u: b"], "<user>a\n\nb\n"),
        (["u: a", "a: 1", "a: 2", "u: b", "u: c"], "<user>a\n<assistant>1\n\n2\n<user>b\n\nc\n"),
        (["a: welcome", "u: a"], "<user>\n<assistant>welcome\n<user>a\n"),
        (["s: s1", "u: a", "s: s2", "u: b"], "<user>s1\n\na\n\ns2\n\nb\n"),
        (["s: s1", "s: s2", "u: a", "a: "], "<user>s1\n\ns2\n\na\n"),
    ],
)
def test_an_alternation_insisting_template_survives_any_history(turns: list[str], expected: str) -> None:
    template = ChatTemplate(STRICT, {"bos_token": ""})
    assert template.insists_on_alternation
    assert template.render(chat(*turns), add_generation_prompt=False) == expected


def test_a_first_system_message_stays_one_where_the_template_takes_it() -> None:
    template = ChatTemplate(SYSTEM_THEN_STRICT)
    assert template.supports_system_role
    assert template.insists_on_alternation
    rendered = template.render(chat("s: s1", "u: a", "u: b", "a: c", "s: s2", "u: d"))
    assert rendered.replace("\n[", "[") == "[S]s1[u]a\n\nb[a]c[u]s2\n\nd"


def test_a_template_that_needs_a_system_message_is_probed_with_one() -> None:
    need = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    assert not ChatTemplate(need + CHATML).insists_on_alternation
    strict = ChatTemplate(need + SYSTEM_THEN_STRICT)
    assert strict.supports_system_role
    assert strict.insists_on_alternation


def test_a_broken_template_fails_when_it_is_used_not_when_it_is_asked_about() -> None:
    template = ChatTemplate("{% if %}")
    assert not template.supports_system_role
    assert not template.insists_on_alternation
    with pytest.raises(ChatTemplateError, match="is not valid"):
        template.render(chat("s: s", "u: hi"))


def test_the_given_messages_are_left_alone() -> None:
    messages = chat("s: s", "u: a", "u: b")
    ChatTemplate(STRICT, {"bos_token": ""}).render(messages)
    assert messages == chat("s: s", "u: a", "u: b")


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        ("a\n\n{{ raise_exception('only pirates') }}", 3, "failed: only pirates"),
        ("a\n{% for m in messages %}\n{{ m.content.no.such }}\n{% endfor %}", 3, "has no attribute"),
        ("{# x #}\n{% macro f(m) %}\n{{ m / 0 }}\n{% endmacro %}\n{{ f(1) }}", 3, "division by zero"),
        ("ok\n{% if %}", 2, "is not valid: Expected an expression"),
        ("ok\nok\n{{ 'a' | nofilter }}", 3, "is not valid: No filter named 'nofilter'"),
        ("{% endfor %}", 1, "is not valid"),
        ("x\n{{ messages.__class__.__mro__ }}", 2, "unsafe"),
        ("x\n{{ messages.append(1) }}", 2, "not safely callable|unsafe"),
    ],
)
def test_an_error_names_the_template_line(source: str, line: int, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        ChatTemplate(source).render(chat("u: hi"))
    assert caught.value.line == line
    assert f"(line {line} of the template)" in str(caught.value)


LOOP = "{% for i in range(90000) %}\n{% for j in range(90000) %}{% endfor %}\n{% endfor %}"
RUNAWAYS = {
    "empty loops": LOOP,
    "loops that write": LOOP.replace("{% endfor %}\n", "x{% endfor %}\n", 1),
    "loops in a macro": "{% macro f() %}" + LOOP + "{% endmacro %}\n{{ f() }}",
    "lazy filters": "{{ range(99999) | map('string') | map('length') | sum }}" * 200,
}


@pytest.mark.parametrize("kind", RUNAWAYS)
def test_a_runaway_template_is_stopped(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIME_LIMIT", 0.2)
    template = ChatTemplate(RUNAWAYS[kind])
    start = time.thread_time()
    with pytest.raises(ChatTemplateError, match=r"was stopped: it ran for more than 0\.2 s") as caught:
        template.render(chat("u: hi"))
    assert caught.value.over_limit
    assert time.thread_time() - start < 2.0


def test_a_runaway_template_is_stopped_in_any_thread_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIME_LIMIT", 0.2)
    honest = ChatTemplate(CHATML)
    honest.render(chat("u: hi"))
    errors: list[BaseException] = []

    def render() -> None:
        try:
            ChatTemplate(LOOP).render(chat("u: hi"))
        except ChatTemplateError as error:
            errors.append(error)
        assert sys.gettrace() is None

    tracer = sys.gettrace()
    thread = threading.Thread(target=render)
    thread.start()
    while thread.is_alive():
        assert honest.render(chat("u: hi"), False) == "<|im_start|>user\nhi<|im_end|>\n"
    thread.join()
    assert len(errors) == 1
    assert sys.gettrace() is tracer


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 9 * [1] }}",
        "{{ (9 ** 999999) ** 99 }}",
        "{{ '%0999999999d' % 1 }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    ],
)
def test_a_template_that_asks_for_gigabytes_is_stopped(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="was stopped: it builds too large a value"):
        ChatTemplate(source).render(chat("u: hi"))


def test_endless_output_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OUTPUT_CHARS", 10_000)
    source = "{% for i in range(2000) %}0123456789{% endfor %}"
    with pytest.raises(ChatTemplateError, match="writes more than 10000 characters"):
        ChatTemplate(source).render(chat("u: hi"))


def test_a_long_conversation_is_no_runaway() -> None:
    messages = chat(*["u: question", "a: answer"] * 5000)
    assert ChatTemplate(CHATML).render(messages).count("<|im_start|>") == 10_001
