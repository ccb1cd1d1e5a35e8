"""Templates rendered along known paths, each admitted only when it equals the reference.

A `TracedTemplate` stands between the reference and the tracer: a row whose path is known is
rendered by the program; one whose path is not is rendered by the reference, traced, and its path is
admitted when the program then prints exactly the reference's text. One difference and all paths
are forgotten, and rows may only be rendered so that are compared with the reference. What cannot
be traced is `NotTraced`, with the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tokenmill.chat.program import (
    Beyond,
    Inconsistent,
    Memo,
    NullPrinted,
    Refused,
    Run,
    Unlearned,
)
from tokenmill.chat.symbols import Untraceable
from tokenmill.chat.template import ReferenceTemplate, alias_reasoning
from tokenmill.chat.trace import Tracer
from tokenmill.errors import RowError

MOST_OPERATIONS = 200_000  # in a program; real templates with all their rows take a few thousand

MOST_TOOLS = 256  # lists of tools that are remembered; data sets have a few, or one per row


class NotTraced(Exception):
    """The program cannot say what the template prints for this row.

    Args:
        cause: Why, the same words for every row of the kind.
        line: The line of the template, 0 where it is not one line.
    """

    def __init__(self, cause: str, line: int = 0) -> None:
        super().__init__(cause)
        self.cause = cause
        self.line = line

    def __str__(self) -> str:
        """Cause and line."""
        return f"{self.cause} (line {self.line} of the template)" if self.line else self.cause


class TracedTemplate:
    """One template and what is known of its paths.

    Args:
        reference: The template in jinja2.
        add_generation_prompt: Whether every render ends with it.
    """

    def __init__(
        self, reference: ReferenceTemplate, *, add_generation_prompt: bool = False
    ) -> None:
        self.reference = reference
        self.add_generation_prompt = add_generation_prompt
        self.learned = 0
        """Rows from which something was learned."""
        self.differed = ""
        """What was seen the first time the program differed from the reference."""
        self._tools: dict[bytes, tuple[list[Any], Memo]] = {}
        self._last_tools: tuple[list[Any] | None, bytes, tuple[list[Any], Memo]] = (
            None,
            b"",
            ([], {}),
        )
        self._tracer: Tracer | None = None
        self._untraceable: NotTraced | None = None
        self._start()

    def _start(self) -> None:
        try:
            self._tracer = self.reference.tracer(
                Tracer, add_generation_prompt=self.add_generation_prompt
            )
        except Untraceable as error:
            self._untraceable = NotTraced(error.cause, error.line)

    def ban(self, what: str) -> NotTraced:
        """Forget every path: from now on each row must be compared with the reference."""
        self.differed = self.differed or what
        self._start()
        return NotTraced("the traced template differed from the reference")

    def follow(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, *, nulls: bool = True
    ) -> Run:
        """Render a conversation, learning its path where it is new.

        Args:
            messages: The conversation.
            tools: Its tools.
            nulls: Whether a null may be printed as a word.

        Raises:
            NullPrinted: One is, and may not be.
            NotTraced: It cannot be rendered so.
            RowError: Its path is new, and the reference refuses it.
            TemplateError: The same, for a date that is not pinned.
        """
        if self._tracer is None:
            assert self._untraceable is not None
            raise self._untraceable
        given = alias_reasoning(messages)
        memo: Memo | None = None
        if tools:
            tools, memo = self.interned(tools)
        try:
            return self._tracer.program.run(given, tools, memo, nulls=nulls)
        except Unlearned:
            return self._learn(messages, given, tools)
        except NullPrinted:
            raise
        except Exception as error:
            raise _not_traced(error) from error

    def interned(self, tools: list[Any]) -> tuple[list[Any], Memo | None]:
        """The same list for equal tools, with what is known of it."""
        last, last_key, known = self._last_tools
        if tools is last:  # one row may be rendered in two forms
            return known
        try:
            key = msgspec.json.encode(tools)
        except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError):
            return tools, None  # not of JSON: a caller's own objects
        if key != last_key:  # data sets with one list of tools: not even hashed
            found = self._tools.get(key)
            if found is None:
                if len(self._tools) >= MOST_TOOLS:
                    self._tools.clear()
                found = self._tools[key] = (tools, {})
            known = found
        self._last_tools = tools, key, known
        return known

    def loop_over_tools(self, loop: tuple[Any, ...]) -> Callable[..., Any]:
        """The body of a loop over the tools, by the first part of its block's name.

        Raises:
            Unlearned: No row has come to it.
        """
        assert self._tracer is not None
        for stands in (False, True):
            name = (*loop, stands, 0)  # tools are nobody's words
            if name in self._tracer.program.blocks:
                return self._tracer.program.compiled(name)
        raise Unlearned

    def _learn(
        self, messages: list[dict[str, Any]], given: list[dict[str, Any]], tools: list[Any] | None
    ) -> Run:
        assert self._tracer is not None
        try:
            expected = self.reference.render(
                messages, tools, add_generation_prompt=self.add_generation_prompt
            )
        except RowError as error:
            if error.reason == "template_error":
                self._learn_refusal(given, tools)
            raise
        if self._tracer.program.size() > MOST_OPERATIONS:
            self._start()
        try:
            self._tracer.learn(given, tools)
            run = self._tracer.program.run(given, tools)
        except Exception as error:
            if isinstance(error, (Inconsistent, Unlearned)):
                raise self.ban(f"one path led to two places: {error}") from error
            raise _not_traced(error) from error
        self.learned += 1
        if run.text != expected:
            raise self.ban("a path that was just learned gave another text")
        return run

    def _learn_refusal(self, given: list[dict[str, Any]], tools: list[Any] | None) -> None:
        """Remember where the template refuses a row, so that the next such row is not traced."""
        assert self._tracer is not None
        try:
            self._tracer.learn(given, tools)
        except Inconsistent as error:
            self.ban(f"one path led to two places: {error}")
        except Exception:  # it fails, as it should
            return
        else:
            self.ban("a row that the reference refuses")


def _not_traced(error: Exception) -> NotTraced:
    if isinstance(error, Untraceable):
        return NotTraced(error.cause, error.line)
    if isinstance(error, Refused):
        return NotTraced("the template fails on the row")
    if isinstance(error, Beyond):
        return NotTraced("a row near the limits of a render")
    return NotTraced(f"{type(error).__name__} on the path")
