"""Bounds on a template's work and output, counted, never timed (promises P6 and P15).

A chat template is a program that came with a model: it may be hostile. The sandbox keeps it from
touching Python; a `Budget` keeps it from eating the machine. Every step of a loop, every call and
every character of an intermediate value is charged to the budget of the render in progress, and
operations that could make something huge in one step (``'a' * 10**9``, ``'%999999999d'``,
``center(10**9)``) are priced before they run. Counts do not depend on the machine, so a row that is
refused here is refused everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

BASE_WORK = 1_000_000  # steps that any render may take: a second of jinja2 at most
CALL_WORK = 16  # a call of a macro, method or filter, in steps of a loop
WORK_PER_CHARACTER = 64  # plus this much per character that was put in
BASE_SIZE = 16 << 20  # characters of intermediate values and output that any render may make
SIZE_PER_CHARACTER = 256  # plus this many per character that was put in
WIDEST_FIELD = 1 << 16  # largest width, precision or indent in a format
LONGEST_NUMBER = 1 << 12  # bits of an integer

_DIGITS = re.compile(r"\d+")


def _members(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


class LimitReached(Exception):
    """The template took more than it may."""


class Budget:
    """What is left of one render's allowance."""

    __slots__ = ("size", "work")

    def __init__(self) -> None:
        self.work = 0
        self.size = 0

    def refill(self, characters: int) -> None:
        """Start a render whose input has this many characters."""
        self.work = BASE_WORK + WORK_PER_CHARACTER * characters
        self.size = BASE_SIZE + SIZE_PER_CHARACTER * characters

    def spend(self, work: int) -> None:
        """Charge steps."""
        self.work -= work
        if self.work < 0:
            raise LimitReached("the template takes too many steps")

    def make(self, characters: int) -> None:
        """Charge characters (or elements) before or after they are made."""
        self.size -= characters
        if self.size < 0:
            raise LimitReached("the template makes too much text")

    def walk(self, iterable: Any, printed: int = 0) -> Any:
        """Charge a loop: sized things at once and as they are, generators step by step.

        Args:
            iterable: What the loop runs over.
            printed: Characters of literal text that one step may print.
        """
        if isinstance(iterable, (list, tuple, str, dict, range, set, frozenset)):
            self.spend(len(iterable) + 1)
            self.make(printed * len(iterable))
            return iterable
        if not isinstance(iterable, Iterable):
            return iterable  # jinja2 words the error
        return self._steps(iterable, printed)

    def _steps(self, iterable: Iterable[Any], printed: int) -> Iterator[Any]:
        for value in iterable:
            self.spend(1)
            self.make(printed)
            yield value

    def show(self, value: Any) -> Any:
        """Charge a value that is about to become text; nested ones by all they hold."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, (list, tuple, dict)):
            pending = [value]
            while pending:
                for inner in _members(pending.pop()):
                    self.spend(1)
                    if isinstance(inner, str):
                        self.make(len(inner))
                    elif isinstance(inner, (list, tuple, dict)):
                        pending.append(inner)
        return value

    def measure(self, value: Any) -> Any:
        """Charge a call and what it returned."""
        self.spend(CALL_WORK)
        if isinstance(value, (str, list, tuple, dict)):
            self.make(len(value))
        elif isinstance(value, int) and value.bit_length() > LONGEST_NUMBER:
            raise LimitReached("the template makes an enormous number")
        return value


def price_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Charge what ``left operator right`` will make, before it is made."""
    if operator == "*":
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, (str, list, tuple)) and isinstance(times, int):
                budget.make(len(repeated) * max(times, 0))
                return
    elif operator == "**":
        whole = isinstance(left, int) and isinstance(right, int)
        if whole and left.bit_length() * max(right, 0) > LONGEST_NUMBER:
            raise LimitReached("the template makes an enormous number")
    elif operator == "%":
        if isinstance(left, str):
            price_format(left, right)
    elif isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        budget.make(len(left) + len(right))


def price_format(template: str, values: Any = ()) -> None:
    """Refuse a format string whose fields are wider than any text needs."""
    for digits in _DIGITS.findall(template):
        if len(digits) > 6 or int(digits) > WIDEST_FIELD:
            raise LimitReached("the template formats an enormously wide field")
    if "*" in template or "{" in template:
        refuse_wide(values if isinstance(values, tuple) else (values,))


def refuse_wide(values: Iterable[Any]) -> None:
    """Refuse widths given as arguments."""
    for value in values:
        if isinstance(value, int) and abs(value) > WIDEST_FIELD:
            raise LimitReached("the template asks for an enormous width")
        if isinstance(value, str):
            for digits in _DIGITS.findall(value[:64]):
                if len(digits) > 6:
                    raise LimitReached("the template asks for an enormous width")


def price_replace(budget: Budget, text: str, arguments: tuple[Any, ...]) -> None:
    """Charge ``replace`` by what it will make."""
    if len(arguments) >= 2 and isinstance(arguments[0], str) and isinstance(arguments[1], str):
        old, new = arguments[0], arguments[1]
        budget.make(len(text) + text.count(old) * max(len(new) - len(old), 0))


def price_join(budget: Budget, glue: str, values: Any) -> None:
    """Charge ``join`` by what it will make."""
    if isinstance(values, (list, tuple, dict, str)):
        budget.make(len(glue) * len(values))
        if not isinstance(values, str):
            budget.make(sum(len(value) for value in values if isinstance(value, str)))


PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap")


def price_text_method(budget: Budget, text: str, name: str, arguments: tuple[Any, ...]) -> None:
    """Charge a method of a string before it runs."""
    if name in PADDING:
        refuse_wide(arguments)
        if name == "expandtabs":
            budget.make(len(text) + text.count("\t") * WIDEST_FIELD)
    elif name == "replace":
        price_replace(budget, text, arguments)
    elif name == "join" and arguments:
        price_join(budget, text, arguments[0])
    elif name in ("format", "format_map"):
        price_format(text, arguments)
