"""Record the path that a template takes for a row, compile paths to Python and run them on rows.

Each *block* of a template (the whole, a loop's body, a macro) has a tree of paths: operations up to
a branch condition on the row, then one path per outcome. A template is a pure program, so a row
with the same outcomes takes the same path. `Recorder` writes paths; a `Run` follows them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NoReturn

from jinja2 import Undefined

from tokenmill.chat.sandbox import BASE_SIZE, BASE_STEPS

Operation = tuple[Any, ...]
NO_OWNER = -1  # of the template's own text
MIXED = -2  # owner of text from several messages, or from an unknown one
# A run counts bodies as the reference does, and sizes more coarsely. A run within these limits is
# also within the limits of the reference, which renders all other rows.
MAX_WORK = BASE_STEPS // 10
MAX_SIZE = BASE_SIZE // 16

LOOPS = {f"{pure}{kind}" for pure in ("", "pure_") for kind in ("loop", "scan", "silent")}
ENDINGS = {"end", "break", "continue", "raise"}
CODE = {
    "own": "own.append(len(out)); out.append({0})",
    "plain": "out.append({0})",
    "taken": "R.print_taken({0}, {1})",
    "annotated": "R.print_annotated({0})",
    "capture": "{0} = R.capture(); out = R.out; own = R.own",
    "set": "{0}.values[{1!r}] = {2}; {0}.owners[{1!r}] = {3}",
    "charge": "R.work += len({0}) >> 4",
    "iterate": "R.work += {1} * len({0})",
    "keep": "R.kept.append([])",
    "kept": "R.kept[-1].append(item)",
    "enter": (
        "k = R.owner_of(id({0}))\nif k is not None: R.current = k; R.marks.append((len(out), k))"
    ),
    "other": "R.other = len(out), R.owner_of(id({0}), R.current)",
    "generation": "R.generation.append(len(out))",
}  # generated code of operations, formatted with their arguments


class PathMiss(Exception):
    """The row takes a path that is not recorded yet."""


class TemplateRaised(Exception):
    """The template raises an error on the row. The reference gives its message."""


class LimitExceeded(Exception):
    """The row may exceed a limit of `sandbox`. The reference decides."""


Cost = tuple[int, int]  # work, size
Memo = dict[Any, tuple[str, int, int]]  # text, work and size of loops over one list of tools
Body = Callable[..., Any]
Values = tuple[Any, ...]
SCALARS = {str, int, bool, NoneType, Undefined}


class Namespace:
    __slots__ = ("owners", "values")

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.owners: dict[str, int] = {}


class AnnotatedStr(str):
    """A string with the messages that its parts come from.

    Some templates collect a conversation in a namespace and print it at the end. Each part is
    (text, message that the loop was at, message that the text was taken from).
    """

    __slots__ = ("parts",)
    parts: list[tuple[str, int, int]]


def annotate(run: Run, *parts: tuple[str, int]) -> AnnotatedStr:
    """Join pairs of a text and the message that it was taken from, at the run's current message."""
    result = AnnotatedStr("".join([text for text, _ in parts]))
    result.parts = []
    for text, owner in parts:
        if type(text) is AnnotatedStr:
            result.parts += text.parts
        elif text:
            result.parts.append((text, run.current, owner))
    return result


class Run:
    __slots__ = (
        "_owners", "current", "generation", "in_order", "inserted", "kept", "marks", "memo",
        "messages", "other", "out", "own", "size", "taken", "text", "tools", "weights", "work",
    )  # fmt: skip

    def __init__(self, messages: list[Any], tools: Any, memo: Memo | None) -> None:
        self.messages = messages
        self.tools = tools
        self.memo = memo
        if len(set(map(id, messages))) != len(messages):  # one object twice is two messages
            self.messages = [dict(message) for message in messages]
        self._owners: dict[int, int] | None = None
        self.current = NO_OWNER
        self.work = 0
        self.size = 0
        self.text = ""
        self.out: list[str] = []
        # Indices in `out` of text taken from the current message:
        self.own: list[int] = []
        # (index in `out`, message) of text taken from another message, or from an unknown one:
        self.taken: list[tuple[int, int]] = []
        # (index in `out`, message): from this index on, the template is at that message.
        self.marks: list[tuple[int, int]] = []
        self.in_order = False  # whether one loop over all messages set the first marks
        self.weights: dict[int, tuple[int, Any]] = {}
        self.kept: list[list[Any]] = []  # items that pass the test of each running ``for … if``
        self.generation: list[int] = []  # indices in `out`: begin and end of generation blocks
        # Parts of `out` that a loop inside a turn printed for another message:
        self.inserted: list[tuple[int, int]] = []
        self.other = (0, NO_OWNER)  # the index and message where such a loop is

    def owner_of(self, identity: int, default: int | None = None) -> Any:
        if self._owners is None:
            self._owners = {id(message): k for k, message in enumerate(self.messages)}
        return self._owners.get(identity, default)

    def capture(self) -> tuple[Any, ...]:
        """Start printing into a separate text."""
        saved = (self.out, self.own, self.taken, self.marks, self.generation, self.inserted)
        self.out, self.own, self.taken, self.marks, self.generation = [], [], [], [], []
        self.inserted = []
        return saved

    def captured(self, saved: tuple[Any, ...]) -> str:
        """Return the text printed since `capture`, and go back to the previous one."""
        text = "".join(self.out)
        self.in_order = False
        self.out, self.own, self.taken, self.marks, self.generation, self.inserted = saved
        return text

    def ownership(self) -> tuple[int, ...]:
        own, taken = len(self.own), len(self.taken)
        return own, taken, len(self.marks), len(self.generation)

    def build(self, value: Any) -> Any:
        """Record the weight of a list or object that the template builds."""
        self.weights[id(value)] = (self._weigh(value), value)
        return value

    def repeat(self, text: str, times: int) -> str:
        if len(text) * times > MAX_SIZE:
            raise LimitExceeded
        return text * times

    def _weigh(self, value: Any) -> int:
        weight, pending = 0, [value]
        while pending:
            item = pending.pop()
            cached = self.weights.get(id(item))
            if cached is not None:
                weight += cached[0]
            elif isinstance(item, str):
                weight += len(item) + 1
            elif isinstance(item, dict):
                pending += [*item, *item.values()]
            elif isinstance(item, (list, tuple)):
                pending += item
            weight += 1
            if weight > MAX_SIZE:
                raise LimitExceeded
        return weight

    def print_taken(self, text: str, owner: int) -> None:
        """Print text that was taken from another message than the current one, or from none."""
        if owner != NO_OWNER:
            self.own.append(len(self.out))
            self.taken.append((len(self.out), owner))
        self.out.append(text)

    def print_annotated(self, text: AnnotatedStr) -> None:
        outer = current = self.current
        for part, message, owner in text.parts:
            if message != current:
                current = message
                self.marks.append((len(self.out), outer if message == NO_OWNER else message))
            if owner in (NO_OWNER, message):
                if owner != NO_OWNER:
                    self.own.append(len(self.out))
                self.out.append(part)
            else:
                self.print_taken(part, owner)
        if current != outer:
            self.marks.append((len(self.out), outer))


def one_owner(*owners: int) -> int:
    """Return the owner that all of these share, ignoring `NO_OWNER`."""
    distinct = set(owners) - {NO_OWNER}
    return distinct.pop() if len(distinct) == 1 else MIXED if distinct else NO_OWNER


def run_loop(run: Run, body: Body, items: Sequence[Any], env: Values) -> None:
    """Run a loop's body for every item; a message owns the text printed during its iteration."""
    owner_of, total, marks, out, outer = run.owner_of, len(items), run.marks, run.out, run.current
    if items is run.messages and outer == NO_OWNER:  # most templates have this form
        is_first = not marks
        for index, item in enumerate(items):
            run.current = index
            marks.append((len(out), index))
            if body(run, item, index, total, items, env):
                break
        else:
            run.in_order |= is_first
    else:
        for index, item in enumerate(items):
            owner = owner_of(id(item), outer)
            if owner != run.current:
                run.current = owner
                marks.append((len(out), owner))
            if body(run, item, index, total, items, env):
                break
    if run.current != outer:
        run.current = outer
        marks.append((len(out), outer))
    if run.work > MAX_WORK or run.size > MAX_SIZE:
        raise LimitExceeded


def run_scan(run: Run, body: Body, items: Sequence[Any], env: Values) -> None:
    """Run a loop inside a message's turn; the turn owns the printed text.

    While the loop is at another message, that message owns the text, even text of the template
    itself: a turn that includes an empty message also includes the text around it.
    """
    owner_of, total, current, outer = run.owner_of, len(items), run.current, run.other
    for index, item in enumerate(items):
        run.other = len(run.out), owner_of(id(item), current)
        stop = body(run, item, index, total, items, env)
        first, owner = run.other
        if owner != current and len(run.out) > first:
            indices = range(first, len(run.out))
            run.taken += [(index, owner) for index in indices if run.out[index].strip()]
            run.inserted.append((first, len(run.out)))
        if stop:
            break
    run.other = outer
    if run.work > MAX_WORK or run.size > MAX_SIZE:
        raise LimitExceeded


def run_silent(run: Run, body: Body, items: Sequence[Any], env: Values) -> None:
    """Run a loop that prints nothing."""
    total = len(items)
    for index, item in enumerate(items):
        if body(run, item, index, total, items, env):
            break
    if run.work > MAX_WORK or run.size > MAX_SIZE:
        raise LimitExceeded


def run_pure(run: Run, loop: Body, body: Body, items: Sequence[Any], env: Values) -> None:
    """Run a loop that reads only its items and `env`; cache its output for lists of tools."""
    memo = run.memo
    if memo is None or items is not run.tools or not all(type(value) in SCALARS for value in env):
        loop(run, body, items, env)
        return
    key = (body, env, tuple(map(type, env)))  # 1 and True are equal and print differently
    cached = memo.get(key)
    if cached is None:
        first, work, size = len(run.out), run.work, run.size
        before = run.ownership()
        loop(run, body, items, env)
        if run.ownership() == before:  # the memo stores text without owners
            memo[key] = ("".join(run.out[first:]), run.work - work, run.size - size)
        return
    text, work, size = cached
    run.out.append(text)
    run.work += work
    run.size += size


class Path:
    """A sequence of operations, then a branch condition with one path per outcome."""

    __slots__ = ("branches", "condition", "operations")

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.condition: tuple[str, str] | None = None  # ("bool" or "type", code)
        self.branches: dict[Any, Path] = {}

    def size(self) -> int:
        total, pending = 0, [self]
        while pending:
            path = pending.pop()
            total += 1 + len(path.operations)
            pending += path.branches.values()
        return total


class TemplateBlock:
    """A part of a template with variables of its own: the whole, a loop's body, a macro."""

    def __init__(self, number: int, program: Program) -> None:
        self.name = f"block_{number}"  # of its function
        self.program = program
        self.root = Path()
        self.grow()

    def grow(self) -> None:
        self.grown = self.program.grown = True


class Inconsistent(Exception):
    """The same outcomes led to different operations, so no path of the template can be used."""


class TreeCursor:
    """The tracer's position in a block's tree."""

    __slots__ = ("block", "index", "path")

    def __init__(self, block: TemplateBlock) -> None:
        self.block = block
        self.path = block.root
        self.index = 0

    def emit(self, operation: Operation) -> None:
        """Record an operation, or compare it with the one recorded here before."""
        path = self.path
        if self.index < len(path.operations):
            if path.operations[self.index] != operation:
                raise Inconsistent(f"{path.operations[self.index]} became {operation}")
        elif path.condition is not None:
            raise Inconsistent(f"{path.condition} became {operation}")
        else:
            path.operations.append(operation)
            self.block.grow()
        self.index += 1

    def branch(self, kind: str, code: str, outcome: Any) -> None:
        """Record a branch condition and follow the path of its outcome."""
        path = self.path
        if self.index < len(path.operations):
            raise Inconsistent(f"{path.operations[self.index]} became a condition on {code}")
        if path.condition is None:
            path.condition = (kind, code)
            self.block.grow()
        elif path.condition != (kind, code):
            raise Inconsistent(f"{path.condition} became {(kind, code)}")
        if outcome not in path.branches:
            path.branches[outcome] = Path()
            self.block.grow()
        self.path = path.branches[outcome]
        self.index = 0


class Program:
    """The blocks of one template with its constants, compiled as they grow."""

    def __init__(self) -> None:
        self.blocks: dict[Any, TemplateBlock] = {}
        self.grown = True
        self.names: dict[str, Any] = {"U": Undefined(), "MAX_SIZE": MAX_SIZE}
        types = (Undefined, NoneType, Namespace, AnnotatedStr)
        errors = (PathMiss, TemplateRaised, LimitExceeded)
        functions = (run_loop, run_scan, run_silent, run_pure, annotate, one_owner)
        self.names |= {known.__name__: known for known in (*types, *errors, *functions)}
        self._constants: dict[tuple[type, Any], str] = {}
        self.main = self.block("template")

    def block(self, key: Any) -> TemplateBlock:
        if key not in self.blocks:
            self.blocks[key] = TemplateBlock(len(self.blocks), self)
        return self.blocks[key]

    def constant(self, value: Any) -> str:
        kind = type(value)
        if kind in (str, int, bool, NoneType):
            return repr(value)
        if kind is Undefined:
            return "U"
        # By content: a list literal of the template is a new object for every row.
        plain = kind in (float, list, tuple, dict)
        key = (kind, repr(value)) if plain else (kind, id(value))
        name = self._constants.get(key)
        if name is None:
            name = self._constants[key] = f"C{len(self._constants)}"
            self.names[name] = value  # the reference keeps its id from being reused
        return name

    def type_name(self, kind: type) -> str:
        known = (str, dict, list, int, bool, float, NoneType, Undefined, Namespace, AnnotatedStr)
        return kind.__name__ if kind in known else self.constant(kind)

    def size(self) -> int:
        return sum(block.root.size() for block in self.blocks.values())

    def run(self, messages: list[Any], tools: Any, memo: Memo | None = None) -> Run:
        """Render one conversation; ``memo`` caches the output of loops over this list of tools.

        Raises `PathMiss`, `TemplateRaised`, `LimitExceeded`, or an exception of the template.
        """
        if self.grown:
            self._compile()
        run = Run(messages, tools, memo)
        self.names["block_0"](run, None, 0, 0, (), ())
        if run.work > MAX_WORK or run.size > MAX_SIZE:
            raise LimitExceeded
        run.text = "".join(run.out)
        return run

    def _compile(self) -> None:
        for block in self.blocks.values():
            if block.grown:
                source = function(block, self)
                exec(compile(source, f"<template {block.name}>", "exec"), self.names)
                block.grown = False
        self.grown = False


def function(block: TemplateBlock, program: Program) -> str:
    """Return the source of one Python function for a block."""
    lines: list[str] = []
    _write(block.root, program, " ", (0, 0), lines)
    body = "\n".join(lines)
    read = [f" {name} = R.{name}" for name in ("out", "own") if re.search(rf"\b{name}\b", body)]
    return "\n".join([f"def {block.name}(R, item, i, n, items, env):", *read, body]) + "\n"


def _write(path: Path, program: Program, indent: str, cost: Cost, lines: list[str]) -> None:
    """Write a path and its branches.

    Every branch ends in a return, so the largest needs no further level of indentation.
    """
    while True:
        ended, cost = _operations(path, indent, cost, lines)
        if ended:
            return
        if path.condition is None:
            lines.append(f"{indent}raise PathMiss")
            return
        kind, code = path.condition
        branches = sorted(path.branches.items(), key=lambda branch: branch[1].size())
        for outcome, branch in branches[:-1]:
            lines.append(f"{indent}if {_holds(kind, code, outcome, program)}:")
            _write(branch, program, indent + " ", cost, lines)
        outcome, path = branches[-1]
        if kind == "type" or len(branches) == 1:
            condition = _holds(kind, code, outcome, program)
            lines.append(f"{indent}if not ({condition}): raise PathMiss")


def _holds(kind: str, code: str, outcome: Any, program: Program) -> str:
    if kind == "type":
        return f"type({code}) is {program.type_name(outcome)}"
    return code if outcome else f"not ({code})"


def _operations(path: Path, indent: str, cost: Cost, lines: list[str]) -> tuple[bool, Cost]:
    printed: list[str] = []

    def flush() -> None:
        if printed:
            text = "".join(printed)
            lines.append(f"{indent}out.append({text!r})")
            printed.clear()

    for operation in path.operations:
        name, *rest = operation
        if name == "print":
            printed.append(rest[0])
            continue
        if name == "body":
            cost = cost[0] + rest[0], cost[1] + rest[1]
            continue
        flush()
        if name in ENDINGS:
            if name == "raise":
                lines.append(f"{indent}raise TemplateRaised")
            else:
                lines.append(f"{indent}R.work += {cost[0]}; R.size += {cost[1]}")
                lines.append(f"{indent}return {name == 'break'}")
            return True, cost
        lines += [indent + line for line in _code_of(name, rest)]
    flush()
    return False, cost


def _code_of(name: str, rest: list[Any]) -> list[str]:
    if name == "let":
        variable, code, sized, grows = rest
        return [f"{variable} = {code}", *(_counted(variable, grows) if sized else ())]
    if name in LOOPS:
        block, items, env = rest
        function = f"run_pure(R, run_{name[5:]}" if name.startswith("pure_") else f"run_{name}(R"
        return [f"R.work += len({items})", f"{function}, {block}, {items}, {_tuple(env)})"]
    if name == "macro":
        block, env, variable = rest
        call = f"{block}(R, None, 0, 0, (), {_tuple(env)})"
        if variable is None:
            return [call]
        return [f"S = R.capture(); {call}; {variable} = R.captured(S)", *_counted(variable)]
    if name == "captured":
        saved, variable = rest
        return [
            f"{variable} = R.captured({saved}); out = R.out; own = R.own",
            *_counted(variable),
        ]
    return CODE[name].format(*rest).split("\n")


def _counted(variable: str, grows: bool = True) -> list[str]:
    check = ["if R.size > MAX_SIZE: raise LimitExceeded"] if grows else []
    return [f"R.size += len({variable})", *check]


def _tuple(codes: Iterable[str]) -> str:
    return "(" + "".join(f"{code}," for code in codes) + ")"


# -- recording a path: symbols and the operations on them --------------------------------------

CURRENT_MESSAGE, ALL_MESSAGES = "current", "all"
Sources = frozenset[Any]
NO_SOURCE: Sources = frozenset()
BOUND = 2  # class of a value that is passed into a block with its owner
MAX_ARG = 64  # characters of an argument that can multiply a text

PLAIN = (str, int, float, bool, NoneType, list, tuple, dict, Undefined)


class NotTraced(Exception):
    """This row cannot be rendered along a path. There are few different causes."""

    def __init__(self, cause: str, line: int = 0) -> None:
        super().__init__(cause)
        self.cause = cause
        self.line = line

    def __str__(self) -> str:
        return f"{self.cause} (line {self.line} of the template)" if self.line else self.cause


class TemplateFails(NotTraced):
    """The template raises an error on this row."""

    def __init__(self) -> None:
        super().__init__("the template fails on the row")


class Untraceable(NotTraced):
    """The template uses a feature that tracing does not support, for any row."""


@dataclass(slots=True, eq=False)
class Symbol:
    """A value of the row being traced."""

    code: str  # computes it for any row
    value: Any  # in this row
    sources: Sources  # the messages that it was taken from


@dataclass(slots=True, eq=False)
class Joined:
    """Texts and symbols that will be joined when one text is needed."""

    parts: list[Any]

    @property
    def value(self) -> str:
        return "".join(part if isinstance(part, str) else part.value for part in self.parts)


@dataclass(slots=True, eq=False)
class LoopVariable:
    """The `loop` of a loop's body."""

    index: Symbol
    total: Symbol
    items: Symbol


@dataclass(slots=True, eq=False)
class Method:
    owner: Any
    name: str


@dataclass(slots=True, eq=False)
class Function:
    name: str


class Frame:
    """State of the tracer while it traces one block."""

    def __init__(self, block: TemplateBlock, scopes: list[dict[str, Any]]) -> None:
        self.cursor = TreeCursor(block)
        self.scopes = scopes
        self.kinds: dict[str, type] = {"R.messages": list}
        self.facts: dict[Any, Any] = {}
        self.variable_names: dict[str, str] = {}
        self.attributes: dict[tuple[str, str], Any] = {}
        self.variable_count = 0
        self.is_at_message = False  # whether a loop around it is iterating over messages
        self.index_loop = False  # whether it is a loop over indices, outside any turn
        self.index_scan = False  # the same inside a message's turn
        self.loop: LoopVariable | None = None

    def variable(self) -> str:
        """Return a new name, which is the same for every row on a path."""
        self.variable_count += 1
        return f"t{self.variable_count}"


class Recorder:
    """Records the operations of a template on the symbols of one row."""

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
        """Return a symbol for the value of some code; the same code gives the same symbol."""
        frame = self._frame
        name = None if fresh else frame.variable_names.get(code)
        if name is None:
            name = frame.variable()
            sized = kind in (str, list, tuple, AnnotatedStr)
            self._emit("let", name, code, sized, grows)
            if not fresh:
                frame.variable_names[code] = name
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
        symbol = self._let(code, None, sources, kind, grows=True, fresh=fresh)
        symbol.value = compute()
        return symbol

    def _branch(self, code: str, outcome: bool) -> bool:
        """Record a branch condition, once on a path."""
        facts = self._frame.facts
        if code not in facts:
            self._frame.cursor.branch("bool", code, outcome)
            facts[code] = outcome
        return bool(facts[code])

    def _code(self, value: Any) -> str:
        if isinstance(value, Symbol):
            return value.code
        if isinstance(value, Joined):
            return self._text(value).code
        if isinstance(value, Function):
            return "None"  # calls look it up by name
        if isinstance(value, (LoopVariable, Method)):
            raise Untraceable("a function or loop used as a value")
        if isinstance(value, (list, tuple, dict)) and not value:
            return repr(value)
        return self.program.constant(value)

    def _text(self, joined: Joined) -> Symbol:
        parts = [part for part in joined.parts if not (isinstance(part, str) and not part)]
        if len(parts) == 1 and isinstance(parts[0], Symbol):
            return parts[0]
        code = "''.join((" + "".join(self._code(part) + "," for part in parts) + "))"
        return self._let(code, joined.value, sources_of(joined), str, grows=True)

    def _kind(self, value: Any) -> type:
        """Return the type of a value; an unknown type of a symbol becomes a branch."""
        if isinstance(value, Joined):
            return str
        if not isinstance(value, Symbol):
            return type(value)
        kinds = self._frame.kinds
        kind = kinds.get(value.code)
        if kind is None:
            kind = type(value.value)
            self._frame.cursor.branch("type", value.code, kind)
            kinds[value.code] = kind
        return str if kind is AnnotatedStr else kind

    def _sized(self, value: Any) -> bool:
        return self._kind(value) in (str, list, tuple, dict)

    def _fail(self, error: Exception) -> NoReturn:
        """Raise `TemplateRaised` where an operation fails on this row."""
        if isinstance(error, (Inconsistent, RecursionError, NameError, AssertionError)):
            raise error
        raise TemplateRaised(f"{type(error).__name__}: {error}") from error

    def _raise(self, why: str) -> NoReturn:
        """End this path: the template fails here for every row on it."""
        self._emit("raise")
        raise TemplateRaised(why)

    def _undefined(self, value: Any) -> bool:
        if not isinstance(value, Symbol):
            return isinstance(value, Undefined)
        kind = self._frame.kinds.get(value.code)
        if kind is None:
            if self._branch(f"type({value.code}) is Undefined", type(value.value) is Undefined):
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
        return self._branch(value.code, bool(value.value))


def from_row(*values: Any) -> bool:
    return any(isinstance(value, (Symbol, Joined)) for value in values)


def real(value: Any) -> Any:
    return value.value if from_row(value) else value


def parts_of(value: Any) -> list[Any]:
    return list(value.parts) if isinstance(value, Joined) else [value]


def sources_of(value: Any) -> Sources:
    """Return the sources of a value; none if it is the template's own."""
    if isinstance(value, Symbol):
        return value.sources
    if isinstance(value, Joined):
        return frozenset().union(
            *(part.sources for part in value.parts if isinstance(part, Symbol))
        )
    return NO_SOURCE


def class_of(value: Any, moved: bool) -> Any:
    """Classify a value from outside a block by its owner.

    ``moved``: the block iterates over messages and the code around it does not.
    """
    if isinstance(value, Function):
        return value.name
    sources = sources_of(value)
    if not sources:
        return 0
    if ALL_MESSAGES in sources:
        return 3
    return 1 if sources == {CURRENT_MESSAGE} and not moved else BOUND


def entered(values: list[Any], moved: bool) -> list[Any]:
    """Return the symbols by which a block reads values from outside."""
    inside: list[Any] = []
    owners = len(values)
    for index, value in enumerate(values):
        if isinstance(value, Function):
            inside.append(value)
            continue
        owner_class = class_of(value, moved)
        sources: Sources = frozenset(((), (CURRENT_MESSAGE,), (), (ALL_MESSAGES,))[owner_class])
        if owner_class == BOUND:
            sources = frozenset((("bound", f"env[{owners}]"),))
            owners += 1
        inside.append(Symbol(f"env[{index}]", real(value), sources))
    return inside


def owner_code(sources: Sources) -> str:
    """Return code that computes the owner of a value."""
    if ALL_MESSAGES in sources:
        return str(MIXED)
    owners = ["R.current"] if CURRENT_MESSAGE in sources else []
    for source in sorted(sources - {CURRENT_MESSAGE}):
        if source[0] == "message":
            owners.append(f"R.owner_of(id({source[1]}), {MIXED})")
        elif source[0] == "bound":
            owners.append(source[1])
        else:
            owners.append(f"{source[1]}.owners.get({source[2]!r}, {NO_OWNER})")
    if not owners:
        return str(NO_OWNER)
    return owners[0] if len(owners) == 1 else f"one_owner({', '.join(owners)})"
