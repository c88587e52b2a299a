"""The sandbox that chat templates run in: the filters, globals and tags of transformers', with guarded operators.

It is made here, because importing transformers takes longer than loading a small model; a test holds the two
against each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Guard = Callable[[str, Any, Any], None]
"""Called with an operator, what stands left of it and what stands right."""


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}: marks, for training, what the model said. A prompt shows its content like any other."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` without names that lead into Python."""

    def __init__(*args: Any, **values: Any) -> None:  # "self" may be one of the values
        self, *mappings = args
        named = dict(*mappings, **values)
        for name in named:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not hold a name with an underscore in front: {name!r}")


class _DictMaker:
    """`dict(...)`, of which a template sees nothing but how it is called."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


class _GuardedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, guard: Guard) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
        self._guard = guard
        filters: Mapping[str, Callable[..., Any]] = {"tojson": _to_json}
        self.filters.update(filters)
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_DictMaker(), namespace=_Namespace
        )

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._guard(operator, left, right)
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=1)
def environment(guard: Guard) -> ImmutableSandboxedEnvironment:
    """Compiles chat templates, whose operators * ** + % are shown to `guard` first, which may raise."""
    return _GuardedEnvironment(guard)
