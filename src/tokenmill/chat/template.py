"""The reference renderer: jinja2 set up as `apply_chat_template` of transformers sets it up.

It differs in three ways: steps and size are limited (`sandbox`), the recipe pins the date, and
randomness (`random`, `lipsum`) raises an error.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.utils

from tokenmill.chat.expressions import Names
from tokenmill.chat.sandbox import (
    CountingEnvironment,
    LimitReached,
    RaiseExceptionCalled,
    check_widths,
)
from tokenmill.errors import RowError, TemplateError

GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
PRINTS_DATE = "the template prints the date"
MAX_DATE_FORMAT = 1000  # characters
PYTHON_LIMITS = (RecursionError, MemoryError, OverflowError)
MAX_SOURCES = 16  # cached compiled templates
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip


class GenerationBlocks(jinja2.ext.Extension):
    """Parses ``{% generation %}`` into a call block, as transformers does."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own spelling

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_wrap")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _wrap(self, caller: Any) -> str:
        text: str = caller()
        return text


class GuardedNamespace(jinja2.utils.Namespace):
    """`namespace()` without underscore names, as in transformers."""

    def __init__(self, /, **attributes: Any) -> None:
        for name in attributes:
            _refuse_underscore(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, as transformers does."""
    if not (ensure_ascii or sort_keys) and indent is None and separators is None:
        return _encode(value)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


_encode = json.JSONEncoder(ensure_ascii=False).encode


def pinned_strftime(date: str | None) -> Any:
    """Return `strftime_now` of a fixed day, in the C locale and UTC.

    Conversions that depend on the locale (names, ``%c``, ``%x``, ``%X``, ``%r``) or the time zone
    (``%s``, ``%Z``, ``%z``) are computed here, and raise an error with a flag, width or modifier.
    The others are numbers, which are the same everywhere.
    """
    day = None if date is None else datetime.strptime(date, "%Y-%m-%d")

    def strftime_now(format: str) -> str:  # noqa: A002 - the name templates may use
        if day is None:
            raise TemplateError(f"{PRINTS_DATE}: set ", ("date", "2026-11-15"))
        check_widths(format)
        if len(format) > MAX_DATE_FORMAT:
            raise LimitReached("the template prints the date in a format that is too long")
        weekday, month = DAYS[day.weekday()], MONTHS[day.month - 1]
        words = {
            "a": weekday[:3],
            "A": weekday,
            "b": month[:3],
            "h": month[:3],
            "B": month,
            "p": "AM",
            "P": "am",
            "c": day.ctime(),
            "x": day.strftime("%m/%d/%y"),
            "X": "00:00:00",
            "r": "12:00:00 AM",
            "s": str((day - datetime(1970, 1, 1)).days * 86400),
            "Z": "",
            "z": "",
        }

        def word(match: re.Match[str]) -> str:
            options, modifier, conversion = match.groups()
            if modifier or (options and conversion in words):
                raise RaiseExceptionCalled(f"{match[0]} of a date depends on the locale")
            return words.get(conversion, match[0])

        return day.strftime(re.sub(r"%([-_0^#]*\d*)([EO]?)([A-Za-z%])", word, format))

    return strftime_now


def _dict(**items: Any) -> dict[str, Any]:
    return items


def _raise(message: Any) -> None:
    raise RaiseExceptionCalled(str(message))


def normalize_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as transformers passes them to a template.

    Keys with null are dropped, and reasoning is added under every name that templates read.
    """
    normalized = messages
    for index, message in enumerate(messages):
        if len(message) == 2 and message.get("content") is not None:
            continue
        changed = message
        if None in message.values():
            changed = {key: value for key, value in message.items() if value is not None}
        for key in REASONING_KEYS:
            if key in changed:
                changed = {"thinking": changed[key], **changed, "reasoning_content": changed[key]}
                break
        if changed is not message:
            if normalized is messages:
                normalized = list(messages)
            normalized[index] = changed
    return normalized


def characters(value: Any) -> int:
    """Return the number of characters and values inside a value."""
    if isinstance(value, str):
        return len(value) + 1
    if isinstance(value, dict):
        return 1 + sum(characters(key) + characters(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return 1 + sum(map(characters, value))
    return 1


def _environment(date: str | None) -> CountingEnvironment:
    environment = CountingEnvironment([GenerationBlocks, jinja2.ext.loopcontrols])
    environment.add_filter("tojson", tojson)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = pinned_strftime(date)
    environment.globals["dict"] = _dict
    environment.globals["namespace"] = GuardedNamespace
    return environment


class Compiled:
    """The parts of a template that depend on its source alone."""

    def __init__(self, source: str) -> None:
        environment = _environment(None)
        self.tree = environment.parse(source)
        self.code = environment.compile(self.tree)

    @cached_property
    def names(self) -> Names:
        return Names(self.tree)


compiled = functools.lru_cache(maxsize=MAX_SOURCES)(Compiled)


class ReferenceTemplate:
    """One compiled chat template.

    Args:
        source: Jinja source.
        variables: Special tokens and chat_template_kwargs.
        date: The pinned day, if any.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], date: str | None) -> None:
        self.source = source
        self.variables = {"documents": None, **variables}
        self.environment = _environment(date)
        self.has_generation = bool(GENERATION_TAG.search(source))
        try:
            self._compiled = compiled(source)
            self.tree = self._compiled.tree
            self._template = jinja2.Template.from_code(
                self.environment, self._compiled.code, self.environment.make_globals(None)
            )
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno} of the template: {error.message}") from error
        except (jinja2.TemplateError, SyntaxError, ValueError, *PYTHON_LIMITS) as error:
            raise TemplateError(f"the template cannot be compiled: {error}") from error

    @property
    def names(self) -> Names:
        return self._compiled.names

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of one conversation.

        Raises:
            RowError: The template raises an error (template_error) or exceeds a limit.
            TemplateError: It prints the date, and none is pinned.
        """
        try:
            self.environment.counter.start(characters(messages) + characters(tools or ()))
            return self._template.render(
                messages=normalize_messages(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except TemplateError:  # no date is pinned
            raise
        except LimitReached as error:
            rejection = RowError(str(error), reason="limit")
        except PYTHON_LIMITS as error:
            # Python's own message for a recursion depends on the caller.
            what = "recursion is too deep" if isinstance(error, RecursionError) else error
            rejection = RowError(f"the template exceeds a limit of Python: {what}", reason="limit")
        except RaiseExceptionCalled as error:
            rejection = RowError(f"the template raised an error: {error}", reason="template_error")
        except Exception as error:  # a template can raise whatever Python can
            rejection = RowError(
                f"the template failed ({type(error).__name__}: {error})", reason="template_error"
            )
        # Raised outside the handlers, it has no context that would keep the row alive.
        raise rejection
