"""Record what a template did for a row as a path, compile paths to Python and run them on rows.

Each *block* of a template (the whole, a loop's body, a macro) has a tree of paths: operations up to
a branch condition on the row, then one path per outcome. A template is a pure program, so a row
with the same outcomes takes the same path. `Recorder` writes paths; a `Run` follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NoReturn

from jinja2 import Undefined

from tokenmill.chat.sandbox import BASE_SIZE, BASE_STEPS

Operation = tuple[Any, ...]
NOBODY = -1  # owner of the template's own text
MIXED = -2  # owner of a text of several messages, or of an unknown one
# A run counts bodies as the reference does, and sizes more coarsely. A run within these limits is
# within those of the reference, which renders all other rows.
MOST_WORK = BASE_STEPS // 10
MOST_SIZE = BASE_SIZE // 16

LOOPS = {f"{pure}{kind}" for pure in ("", "pure_") for kind in ("loop", "scan", "silent")}
ENDINGS = {"end", "break", "continue", "raise"}
CODE = {
    "own": "own.append(len(out)); out.append({0})",
    "plain": "out.append({0})",
    "taken": "R.print_taken({0}, {1})",
    "rope": "R.print_rope({0})",
    "capture": "{0} = R.capture(); out = R.out; own = R.own",
    "set": "{0}.values[{1!r}] = {2}; {0}.owners[{1!r}] = {3}",
    "none": "R.nones += 1",
    "charge": "R.work += len({0}) >> 4",
    "iterate": "R.work += {1} * len({0})",
    "keep": "R.kept.append([])",
    "kept": "R.kept[-1].append(item)",
    "stand": "k = R.owner_of(id({0}))\nif k is not None: R.me = k; R.marks.append((len(out), k))",
    "generation": "R.generation.append(len(out))",
}  # generated code of operations, formatted with their arguments


class Unlearned(Exception):
    """The row takes a path that no row took before."""


class Refused(Exception):
    """The template raises on the row; the reference words it."""


class Beyond(Exception):
    """The row may exceed a limit of `sandbox`; the reference decides."""


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


class Rope(str):
    """A text with its parts, for templates that collect a conversation in a namespace.

    `parts` are (text, message at which it was appended, message that it was taken from).
    """

    __slots__ = ("parts",)
    parts: list[tuple[str, int, int]]


def rope(run: Run, *parts: tuple[str, int]) -> Rope:
    """Join (text, message that it was taken from) at the message that the run is at."""
    made = Rope("".join([text for text, _ in parts]))
    made.parts = []
    for text, owner in parts:
        if type(text) is Rope:
            made.parts += text.parts
        elif text:
            made.parts.append((text, run.me, owner))
    return made


class Run:
    __slots__ = (
        "_owners", "generation", "kept", "marks", "me", "memo", "messages", "nones", "out", "own",
        "size", "taken", "text", "tools", "weights", "work",
    )  # fmt: skip

    def __init__(self, messages: list[Any], tools: Any, memo: Memo | None) -> None:
        self.messages = messages
        self.tools = tools
        self.memo = memo
        if len(set(map(id, messages))) != len(messages):  # one object twice is two messages
            self.messages = [dict(message) for message in messages]
        self._owners: dict[int, int] | None = None
        self.me = NOBODY
        self.work = 0
        self.size = 0
        self.text = ""
        self.nones = 0  # number of null values of messages that were printed as a word
        self.out: list[str] = []
        # Indices in `out` of what was taken from the message that the template was at:
        self.own: list[int] = []
        # (index in `out`, message): what was taken from a message found some other way.
        self.taken: list[tuple[int, int]] = []
        # (index in `out`, message): from here on the template is at that message.
        self.marks: list[tuple[int, int]] = []
        self.weights: dict[int, tuple[int, Any]] = {}
        self.kept: list[list[Any]] = []  # items that passed the test of each ``for … if`` under way
        self.generation: list[int] = []  # indices in `out`: begin and end of generation blocks

    def owner_of(self, identity: int, default: int | None = None) -> Any:
        if self._owners is None:
            self._owners = {id(message): k for k, message in enumerate(self.messages)}
        return self._owners.get(identity, default)

    def capture(self) -> tuple[Any, ...]:
        """Print into a separate text from now on."""
        saved = (self.out, self.own, self.taken, self.marks, self.generation)
        self.out, self.own, self.taken, self.marks, self.generation = [], [], [], [], []
        return saved

    def captured(self, saved: tuple[Any, ...]) -> str:
        """Return the text printed since `capture`, and print to the previous one again."""
        text = "".join(self.out)
        self.out, self.own, self.taken, self.marks, self.generation = saved
        return text

    def ownership(self) -> tuple[int, ...]:
        own, taken = len(self.own), len(self.taken)
        return self.nones, own, taken, len(self.marks), len(self.generation)

    def build(self, value: Any) -> Any:
        """Weigh a list or object that the template makes: nested, a few can be very large."""
        self.weights[id(value)] = (self._weigh(value), value)
        return value

    def repeat(self, text: str, times: int) -> str:
        if len(text) * times > MOST_SIZE:
            raise Beyond
        return text * times

    def _weigh(self, value: Any) -> int:
        weight, pending = 0, [value]
        while pending:
            item = pending.pop()
            known = self.weights.get(id(item))
            if known is not None:
                weight += known[0]
            elif isinstance(item, str):
                weight += len(item) + 1
            elif isinstance(item, dict):
                pending += [*item, *item.values()]
            elif isinstance(item, (list, tuple)):
                pending += item
            weight += 1
            if weight > MOST_SIZE:
                raise Beyond
        return weight

    def print_taken(self, text: str, owner: int) -> None:
        """Print what was taken from another message than the loop's, or from none."""
        if owner != NOBODY:
            self.own.append(len(self.out))
            self.taken.append((len(self.out), owner))
        self.out.append(text)

    def print_rope(self, text: Rope) -> None:
        outside = standing = self.me
        for part, stood, owner in text.parts:
            if stood != standing:
                standing = stood
                self.marks.append((len(self.out), outside if stood == NOBODY else stood))
            if owner in (NOBODY, stood):
                if owner != NOBODY:
                    self.own.append(len(self.out))
                self.out.append(part)
            else:
                self.print_taken(part, owner)
        if standing != outside:
            self.marks.append((len(self.out), outside))


def one_owner(*owners: int) -> int:
    """Return the owner that all of these share, apart from `NOBODY`."""
    found = set(owners) - {NOBODY}
    return found.pop() if len(found) == 1 else MIXED if found else NOBODY


def run_loop(run: Run, body: Body, items: Sequence[Any], env: Values) -> None:
    """Run a loop's body for every item; a message owns what is printed at it."""
    owner_of, total, marks, out, outside = run.owner_of, len(items), run.marks, run.out, run.me
    if items is run.messages and outside == NOBODY:  # as most templates do it
        for place, item in enumerate(items):
            run.me = place
            marks.append((len(out), place))
            if body(run, item, place, total, items, env):
                break
    else:
        for place, item in enumerate(items):
            owner = owner_of(id(item), outside)
            if owner != run.me:
                run.me = owner
                marks.append((len(out), owner))
            if body(run, item, place, total, items, env):
                break
    if run.me != outside:
        run.me = outside
        marks.append((len(out), outside))
    if run.work > MOST_WORK or run.size > MOST_SIZE:
        raise Beyond


def run_scan(run: Run, body: Body, items: Sequence[Any], env: Values) -> None:
    """Run a loop inside a message's turn, which owns what is printed.

    What is printed at another message is recorded as taken from that one, even the template's own
    text: a turn that shows another's empty text shows what the template prints around it.
    """
    owner_of, total, me = run.owner_of, len(items), run.me
    for place, item in enumerate(items):
        printed = len(run.out)
        stop = body(run, item, place, total, items, env)
        owner = owner_of(id(item), me)
        if owner != me and len(run.out) > printed:
            places = range(printed, len(run.out))
            run.taken += [(place, owner) for place in places if run.out[place].strip()]
        if stop:
            break
    if run.work > MOST_WORK or run.size > MOST_SIZE:
        raise Beyond


def run_silent(run: Run, body: Body, items: Sequence[Any], env: Values) -> None:
    """Run a loop that prints nothing."""
    total = len(items)
    for place, item in enumerate(items):
        if body(run, item, place, total, items, env):
            break
    if run.work > MOST_WORK or run.size > MOST_SIZE:
        raise Beyond


def run_pure(run: Run, loop: Body, body: Body, items: Sequence[Any], env: Values) -> None:
    """Run a loop that reads only its items and `env`; over the tools, once per list of tools."""
    memo = run.memo
    if memo is None or items is not run.tools or not all(type(value) in SCALARS for value in env):
        loop(run, body, items, env)
        return
    key = (body, env, tuple(map(type, env)))  # 1 and True are equal and print differently
    known = memo.get(key)
    if known is None:
        first, work, size = len(run.out), run.work, run.size
        before = run.ownership()
        loop(run, body, items, env)
        if run.ownership() == before:  # the memo keeps the text without owners
            memo[key] = ("".join(run.out[first:]), run.work - work, run.size - size)
        return
    text, work, size = known
    run.out.append(text)
    run.work += work
    run.size += size


class Path:
    """Operations that follow one another, then a question with the paths of its answers."""

    __slots__ = ("branches", "operations", "question")

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.question: tuple[str, str] | None = None  # ("bool" or "type", code)
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
    """The same outcomes led to another operation, so no path of the template can be used."""


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
        elif path.question is not None:
            raise Inconsistent(f"{path.question} became {operation}")
        else:
            path.operations.append(operation)
            self.block.grow()
        self.index += 1

    def ask(self, kind: str, code: str, answer: Any) -> None:
        """Record a branch condition and follow the path of its outcome."""
        path = self.path
        if self.index < len(path.operations):
            raise Inconsistent(f"{path.operations[self.index]} became a question about {code}")
        if path.question is None:
            path.question = (kind, code)
            self.block.grow()
        elif path.question != (kind, code):
            raise Inconsistent(f"{path.question} became {(kind, code)}")
        if answer not in path.branches:
            path.branches[answer] = Path()
            self.block.grow()
        self.path = path.branches[answer]
        self.index = 0


class Program:
    """The blocks of one template with its constants, compiled as they grow."""

    def __init__(self) -> None:
        self.blocks: dict[Any, TemplateBlock] = {}
        self.grown = True
        self.names: dict[str, Any] = {"U": Undefined(), "MOST_SIZE": MOST_SIZE}
        types = (Undefined, NoneType, Namespace, Rope, Unlearned, Refused, Beyond)
        functions = (run_loop, run_scan, run_silent, run_pure, rope, one_owner)
        self.names |= {known.__name__: known for known in (*types, *functions)}
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
            self.names[name] = value  # kept here, so that its id stays its own
        return name

    def type_name(self, kind: type) -> str:
        known = (str, dict, list, int, bool, float, NoneType, Undefined, Namespace, Rope)
        return kind.__name__ if kind in known else self.constant(kind)

    def size(self) -> int:
        return sum(block.root.size() for block in self.blocks.values())

    def run(self, messages: list[Any], tools: Any, memo: Memo | None = None) -> Run:
        """Render one conversation; ``memo`` holds what loops over this very list of tools printed.

        Raises `Unlearned`, `Refused`, `Beyond`, or whatever an operation of the template raises.
        """
        if self.grown:
            self._compile()
        run = Run(messages, tools, memo)
        self.names["block_0"](run, None, 0, 0, (), ())
        if run.work > MOST_WORK or run.size > MOST_SIZE:
            raise Beyond
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
    lines = [f"def {block.name}(R, item, i, n, items, env):", " out = R.out; own = R.own"]
    _write(block.root, program, " ", (0, 0), lines)
    return "\n".join(lines) + "\n"


def _write(path: Path, program: Program, indent: str, cost: Cost, lines: list[str]) -> None:
    """Write a path and its branches.

    Every branch ends in a return, so the largest needs no further level of indentation.
    """
    while True:
        ended, cost = _operations(path, indent, cost, lines)
        if ended:
            return
        if path.question is None:
            lines.append(f"{indent}raise Unlearned")
            return
        kind, code = path.question
        branches = sorted(path.branches.items(), key=lambda branch: branch[1].size())
        for answer, branch in branches[:-1]:
            lines.append(f"{indent}if {_holds(kind, code, answer, program)}:")
            _write(branch, program, indent + " ", cost, lines)
        answer, path = branches[-1]
        if kind == "type" or len(branches) == 1:
            condition = _holds(kind, code, answer, program)
            lines.append(f"{indent}if not ({condition}): raise Unlearned")


def _holds(kind: str, code: str, answer: Any, program: Program) -> str:
    if kind == "type":
        return f"type({code}) is {program.type_name(answer)}"
    return code if answer else f"not ({code})"


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
                lines.append(f"{indent}raise Refused")
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
    check = ["if R.size > MOST_SIZE: raise Beyond"] if grows else []
    return [f"R.size += len({variable})", *check]


def _tuple(codes: Iterable[str]) -> str:
    return "(" + "".join(f"{code}," for code in codes) + ")"


# -- recording a path: symbols, and what a template does with them ----------------------------

ME, WHOLE = "me", "whole"
Sources = frozenset[Any]
NOTHING: Sources = frozenset()
HELD = 2  # class of a value that is passed into a block with its owner
FEW = 64  # characters of an argument that may multiply a text

PLAIN = (str, int, float, bool, NoneType, list, tuple, dict, Undefined)


class NotTraced(Exception):
    """No path can say what the template prints for this row; causes are few."""

    def __init__(self, cause: str, line: int = 0) -> None:
        super().__init__(cause)
        self.cause = cause
        self.line = line

    def __str__(self) -> str:
        return f"{self.cause} (line {self.line} of the template)" if self.line else self.cause


class Untraceable(NotTraced):
    """The template does something that is not traced, whatever the row."""


@dataclass(slots=True, eq=False)
class Symbol:
    """A value of the row being traced."""

    code: str  # finds it in any row
    value: Any  # in this row
    sources: Sources  # where it was taken from


@dataclass(slots=True, eq=False)
class Joined:
    """Texts and symbols to be joined, not yet needed as one text."""

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
    """What is known while one block is traced."""

    def __init__(self, block: TemplateBlock, scopes: list[dict[str, Any]]) -> None:
        self.cursor = TreeCursor(block)
        self.scopes = scopes
        self.kinds: dict[str, type] = {}
        self.facts: dict[Any, Any] = {}
        self.made: dict[str, str] = {}
        self.known: dict[tuple[str, str], Any] = {}
        self.variables = 0
        self.stands = False  # whether a loop around it is iterating over messages
        self.index_loop = False
        self.loop: LoopVariable | None = None

    def variable(self) -> str:
        """Return a new name, which is the same for every row on a path."""
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
        """Return a symbol for the value of some code; the same code gives the same symbol."""
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
        made = self._let(code, None, sources, kind, grows=True, fresh=fresh)
        made.value = compute()
        return made

    def _ask(self, code: str, answer: bool) -> bool:
        """Record a branch condition, once on a path."""
        facts = self._frame.facts
        if code not in facts:
            self._frame.cursor.ask("bool", code, answer)
            facts[code] = answer
        return bool(facts[code])

    def _code(self, value: Any) -> str:
        if isinstance(value, Symbol):
            return value.code
        if isinstance(value, Joined):
            return self._text(value).code
        if isinstance(value, Function):
            return "None"  # calls find it by its name
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
            self._frame.cursor.ask("type", value.code, kind)
            kinds[value.code] = kind
        return str if kind is Rope else kind

    def _sized(self, value: Any) -> bool:
        return self._kind(value) in (str, list, tuple, dict)

    def _fail(self, error: Exception) -> NoReturn:
        """Raise `Refused` where an operation fails on this row; the reference words it."""
        if isinstance(error, (Inconsistent, RecursionError, NameError, AssertionError)):
            raise error
        raise Refused(f"{type(error).__name__}: {error}") from error

    def _refuse(self, why: str) -> NoReturn:
        """End this path: the template fails here for every row on it."""
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
    return any(isinstance(value, (Symbol, Joined)) for value in values)


def real(value: Any) -> Any:
    return value.value if from_row(value) else value


def parts_of(value: Any) -> list[Any]:
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
    """Classify a value from outside a block by its owner.

    ``moved``: the block is at another message than the code around it.
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
