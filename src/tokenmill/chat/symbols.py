"""Symbols: values of a row as a tracer sees them, and how what is done with them is written down.

A `Symbol` has the value it has in the row at hand and the code that finds it in any row. It also
knows its *sources*: where it was taken from. `Recorder` is the tracer's hand: it writes operations
and questions into the block that is being traced (`Frame`) and remembers what was answered there,
so that nothing is asked twice.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any, NoReturn

from jinja2 import Undefined

from tokenmill.chat.program import (
    MIXED,
    NOBODY,
    Inconsistent,
    Program,
    Refused,
    Rope,
    TemplateBlock,
    TreeCursor,
)

ME, WHOLE = "me", "whole"
Sources = frozenset[Any]
NOTHING: Sources = frozenset()
HELD = 2  # of a value whose owner goes with it into a block
FEW = 64  # characters of an argument that may multiply a text

PLAIN = (str, int, float, bool, NoneType, list, tuple, dict, Undefined)


class Untraceable(Exception):
    """The template does something that is not traced.

    Args:
        cause: What it does, the same words for every row that meets it.
        line: The line of the template.
    """

    def __init__(self, cause: str, line: int = 0) -> None:
        super().__init__(cause)
        self.cause = cause
        self.line = line


class Symbol:
    """A value of the row: what it is here, and the code that finds it in any row."""

    __slots__ = ("code", "sources", "value")

    def __init__(self, code: str, value: Any, sources: Sources) -> None:
        self.code = code
        self.value = value
        self.sources = sources


class Joined:
    """Texts and symbols put together and not yet needed as one text."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    @property
    def value(self) -> str:
        """The text in this row."""
        return "".join(part if isinstance(part, str) else part.value for part in self.parts)


class LoopVariable:
    """The `loop` of a loop's body."""

    def __init__(self, index: Any, total: Any, items: Any) -> None:
        self.index = index
        self.total = total
        self.items = items


class Method:
    """A method looked up and not yet called."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name


class Function:
    """A function that templates may call by its name."""

    def __init__(self, name: str) -> None:
        self.name = name


class Frame:
    """What is known while one block is traced."""

    def __init__(self, block: TemplateBlock, scopes: list[dict[str, Any]]) -> None:
        self.cursor = TreeCursor(block)
        self.scopes = scopes
        self.kinds: dict[str, type] = {}
        self.facts: dict[Any, Any] = {}
        self.made: dict[str, str] = {}
        self.known: dict[tuple[str, str], Any] = {}
        self.variables = 0
        self.stands = False  # whether some loop around it stands at a message
        self.index_loop = False
        self.loop: LoopVariable | None = None

    def variable(self) -> str:
        """A new name; the same one at the same place of the same path."""
        self.variables += 1
        return f"t{self.variables}"


class Recorder:
    """Writes down what a template does with the symbols of one row."""

    def __init__(self) -> None:
        self.program = Program()
        self._frame = Frame(self.program.main, [{}])

    def _emit(self, *operation: Any) -> None:
        self._frame.cursor.emit(operation)

    def _let(
        self,
        code: str,
        value: Any,
        sources: Sources,
        kind: type | None = None,
        *,
        grows: bool = False,
        fresh: bool = False,
    ) -> Symbol:
        """A symbol for what some code gives; the same code gives the same symbol."""
        frame = self._frame
        name = None if fresh else frame.made.get(code)
        if name is None:
            name = frame.variable()
            sized = kind in (str, list, tuple, Rope)
            self._emit("let", name, code, sized, grows)
            if not fresh:
                frame.made[code] = name
            if kind is not None:
                frame.kinds[name] = kind
        return Symbol(name, value, sources)

    def _attempt(
        self,
        code: str,
        compute: Callable[[], Any],
        sources: Sources,
        kind: type | None = None,
        *,
        fresh: bool = False,
    ) -> Symbol:
        """A symbol for an operation that can fail: written down before it is tried here."""
        made = self._let(code, None, sources, kind, grows=True, fresh=fresh)
        made.value = compute()
        return made

    def _ask(self, code: str, answer: bool) -> bool:
        """A question with yes or no for an answer, asked once on a path."""
        facts = self._frame.facts
        if code not in facts:
            self._frame.cursor.ask("bool", code, answer)
            facts[code] = answer
        return bool(facts[code])

    def _code(self, value: Any) -> str:
        """Code for any value."""
        if isinstance(value, Symbol):
            return value.code
        if isinstance(value, Joined):
            return self._text(value).code
        if isinstance(value, Function):
            return "None"  # known by its name wherever it can be called
        if isinstance(value, (LoopVariable, Method)):
            raise Untraceable("a function or loop used as a value")
        if isinstance(value, (list, tuple, dict)) and not value:
            return repr(value)
        return self.program.constant(value)

    def _text(self, joined: Joined) -> Symbol:
        """One text of texts put together."""
        parts = [part for part in joined.parts if not (isinstance(part, str) and not part)]
        if len(parts) == 1 and isinstance(parts[0], Symbol):
            return parts[0]
        code = "''.join((" + "".join(self._code(part) + "," for part in parts) + "))"
        return self._let(code, joined.value, sources_of(joined), str, grows=True)

    def _kind(self, value: Any) -> type:
        """The type of a value; of a symbol whose type is not known it is asked."""
        if isinstance(value, Joined):
            return str
        if not isinstance(value, Symbol):
            return type(value)
        kinds = self._frame.kinds
        kind = kinds.get(value.code)
        if kind is None:
            kind = type(value.value)
            self._frame.cursor.ask("type", value.code, kind)
            kinds[value.code] = kind
        return str if kind is Rope else kind

    def _sized(self, value: Any) -> bool:
        return self._kind(value) in (str, list, tuple, dict)

    def _fail(self, error: Exception) -> NoReturn:
        """An operation fails on this row; what the reference says of it counts."""
        if isinstance(error, (Inconsistent, RecursionError, NameError, AssertionError)):
            raise error
        raise Refused(f"{type(error).__name__}: {error}") from error

    def _refuse(self, why: str) -> NoReturn:
        """End this path: the template fails here for every row that comes along it."""
        self._emit("raise")
        raise Refused(why)

    def _undefined(self, value: Any) -> bool:
        if not isinstance(value, Symbol):
            return isinstance(value, Undefined)
        kind = self._frame.kinds.get(value.code)
        if kind is None:
            if self._ask(f"type({value.code}) is Undefined", type(value.value) is Undefined):
                self._frame.kinds[value.code] = Undefined
                return True
            return False
        return kind is Undefined

    def _truth(self, value: Any) -> bool:
        if isinstance(value, Joined):
            if any(isinstance(part, str) and part for part in value.parts):
                return True
            value = self._text(value)
        if isinstance(value, (LoopVariable, Method, Function)):
            return True
        if not isinstance(value, Symbol):
            return bool(value)
        kind = self._frame.kinds.get(value.code)
        if kind in (NoneType, Undefined):
            return False
        if kind is not None and not hasattr(kind, "__len__") and not hasattr(kind, "__bool__"):
            return True
        return self._ask(value.code, bool(value.value))


def from_row(*values: Any) -> bool:
    """Whether any of these values is of the row, and not the template's own."""
    return any(isinstance(value, (Symbol, Joined)) for value in values)


def real(value: Any) -> Any:
    """The value in the row at hand."""
    return value.value if from_row(value) else value


def parts_of(value: Any) -> list[Any]:
    """The texts and symbols that a text is put together of."""
    return list(value.parts) if isinstance(value, Joined) else [value]


def sources_of(value: Any) -> Sources:
    """Where a value was taken from; nowhere, if it is the template's own."""
    if isinstance(value, Symbol):
        return value.sources
    if isinstance(value, Joined):
        return frozenset().union(
            *(part.sources for part in value.parts if isinstance(part, Symbol))
        )
    return NOTHING


def class_of(value: Any, moved: bool) -> Any:
    """What a block that is entered knows of a value from outside: whose it is, nothing else.

    Args:
        value: The value outside.
        moved: Whether the block stands at another message than the code around it.
    """
    if isinstance(value, Function):
        return value.name
    sources = sources_of(value)
    if not sources:
        return 0
    if WHOLE in sources:
        return 3
    return 1 if sources == {ME} and not moved else HELD


def entered(values: list[Any], moved: bool) -> list[Any]:
    """Values from outside as a block sees them."""
    inside: list[Any] = []
    owners = len(values)
    for index, value in enumerate(values):
        if isinstance(value, Function):
            inside.append(value)
            continue
        whose = class_of(value, moved)
        sources: Sources = frozenset(((), (ME,), (), (WHOLE,))[whose])
        if whose == HELD:
            sources = frozenset((("held", f"env[{owners}]"),))
            owners += 1
        inside.append(Symbol(f"env[{index}]", real(value), sources))
    return inside


def owner_code(sources: Sources) -> str:
    """Code for the message that a value was taken from."""
    if WHOLE in sources:
        return str(MIXED)
    owners = ["R.me"] if ME in sources else []
    for source in sorted(sources - {ME}):
        if source[0] == "message":
            owners.append(f"R.owner_of(id({source[1]}), {MIXED})")
        elif source[0] == "held":
            owners.append(source[1])
        else:
            owners.append(f"{source[1]}.owners.get({source[2]!r}, {NOBODY})")
    if not owners:
        return str(NOBODY)
    return owners[0] if len(owners) == 1 else f"one_owner({', '.join(owners)})"
