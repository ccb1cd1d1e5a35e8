"""A sandboxed jinja2 environment with limits, because chat templates may be hostile.

Limits are counted, never timed, so a row is rejected on every machine or on none. Inputs of an
operation are counted before it runs and its result afterwards. An operation that can multiply its
input (a repetition, a join, a wide field) has a guard, which counts the result in advance.
"""

from __future__ import annotations

import operator
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import jinja2
import jinja2.compiler
import jinja2.exceptions
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from markupsafe import Markup

# For a row of up to a million characters: less than 5 seconds and 256 MB.
BASE_STEPS = 5_000_000
STEPS_PER_CHARACTER = 4
BASE_SIZE = 128 << 20  # bytes
SIZE_PER_CHARACTER = 64

OBJECT = 64  # bytes of a small value, or of the text of a number
POINTER = 8
KEPT = 96  # bytes of an item of a list, tuple or call, which may be a new object
ENTRY = 104  # bytes of an item of a dict
GENERATOR = 512
NUMERAL = 400  # characters of the longest float without a precision
QUOTED = 10  # how much longer `repr` may make a text: \\U0010ffff
ESCAPED = 6  # how much longer HTML or JSON escapes may make it
CASED = 8  # how much larger a change of case may make it, with temporary copies

MAX_WIDTH = 1 << 16  # sum of all widths and precisions in a format
MAX_INTEGER_BITS = 1 << 12
MAX_DEPTH = 320  # of nested values: more than a row may have (256), less than the C stack allows
SHORT = 64  # characters whose reading is not counted
NO_RANDOMNESS = "the template uses random values, which a recipe cannot pin"

_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_SIZED: tuple[Any, ...] = (str, list, tuple, dict, range, set, frozenset, *_VIEWS)
_SCALARS = frozenset((str, int, float, bool, type(None)))
_MAPPINGS = (dict, types.MappingProxyType)
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_HIDDEN = ("_block_vars", "_loop_vars", "caller")  # arguments that jinja2 adds to calls

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {  # by jinja2's names
    "eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "gteq": operator.ge,
    "lt": operator.lt, "lteq": operator.le, "in": lambda a, b: a in b,
    "notin": lambda a, b: a not in b,
}  # fmt: skip


class RaiseExceptionCalled(jinja2.TemplateError):
    """The template called raise_exception."""


class LimitReached(Exception):
    """The template exceeded a limit."""


class Weight(NamedTuple):
    """The weight of a value and everything inside it; shared parts count twice."""

    nodes: int
    size: int  # bytes of its texts and numbers
    depth: int


def _text_size(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def _leaf_size(value: Any) -> int:
    if isinstance(value, str):
        return _text_size(value)
    return value.bit_length() >> 1 if isinstance(value, int) else 0


def _inside(value: Any) -> Collection[Any] | None:
    """Return the contents of a value that would be printed, hashed or compared."""
    if value.__class__ in _SCALARS or isinstance(value, str | range):
        return None
    if isinstance(value, _MAPPINGS):
        return [*value, *value.values()]
    if isinstance(value, jinja2.utils.Namespace):
        return _inside(object.__getattribute__(value, "_Namespace__attrs"))
    if isinstance(value, jinja2.utils.Cycler):
        value = value.items
    return value if isinstance(value, _SIZED) else None


class Counter:
    """The remaining steps and bytes of one render.

    Steps are evaluated nodes of the template, calls, items of iterators, and one for every 16
    bytes that an operation reads. Size is the bytes of all values created, in use or not.
    """

    __slots__ = ("size", "steps")

    def __init__(self) -> None:
        self.steps = self.size = 0

    def start(self, characters: int) -> None:
        self.steps = BASE_STEPS + STEPS_PER_CHARACTER * characters
        self.size = BASE_SIZE + SIZE_PER_CHARACTER * characters

    def count(self, steps: int, size: int = 0) -> None:
        """Subtract steps and bytes; raise `LimitReached` if none are left."""
        self.steps -= steps
        self.size -= size
        if self.steps < 0:
            raise LimitReached("the template takes too many steps")
        if self.size < 0:
            raise LimitReached("the template produces too much text")

    def weigh(self, value: Any, depth: int = 0) -> Weight:
        """Visit everything inside a value, one step each."""
        inside = _inside(value)
        if inside is None:
            return Weight(1, _leaf_size(value), 0)
        if depth > MAX_DEPTH:
            raise LimitReached("the template nests values too deeply")
        self.count(1 + len(inside))
        nodes, size, deepest = 1, 0, 0
        for item in inside:
            weight = self.weigh(item, depth + 1)
            nodes += weight.nodes
            size += weight.size
            deepest = max(deepest, weight.depth)
        return Weight(nodes, size, deepest + 1)

    def text(self, value: Any) -> int:
        """Return the largest possible size of ``str(value)``; count its contents as steps."""
        if isinstance(value, str):
            return _text_size(value)
        weight = self.weigh(value)
        self.count(weight.size >> 4)
        return OBJECT * weight.nodes + QUOTED * weight.size

    def read(self, value: Any, times: int = 1) -> None:
        """Count comparing or hashing a value."""
        nodes, size, _ = self.weigh(value)
        self.count(times * (nodes + (size >> 4)))

    def iterate(self, values: Any, steps: int = 1) -> Any:
        """Count the steps of an iteration: at once for collections, else one by one."""
        if isinstance(values, _SIZED):
            self.count(1 + steps * len(values))
            return values
        if not isinstance(values, Iterable) or isinstance(values, jinja2.Undefined):
            return values  # iterating raises an error, or yields nothing
        return self._iterate(values, steps)

    def _iterate(self, values: Iterable[Any], steps: int) -> Iterator[Any]:
        for value in values:
            self.count(steps, POINTER)
            yield value

    def listed(self, values: Any, steps: int = 1) -> Any:
        """Count an iteration in advance; return a list in place of an iterator."""
        values = self.iterate(values, steps)
        if isinstance(values, types.GeneratorType):
            values = list(values)
        if isinstance(values, _SIZED):
            self.count(1, 2 * KEPT * len(values))
        return values

    def made(self, value: Any) -> Any:
        kind = value.__class__
        if isinstance(value, str):
            self.count(1, OBJECT + _text_size(value))
        elif kind is int:
            if value.bit_length() > MAX_INTEGER_BITS:
                raise LimitReached("the template computes a number that is too large")
        elif kind is list or kind is tuple:
            self.count(1, OBJECT + POINTER * len(value))
        elif kind is dict:
            self.count(1, OBJECT + ENTRY * len(value))
        else:
            self.count(1, GENERATOR if kind is types.GeneratorType else OBJECT)
        return value

    def key(self, key: Any) -> Any:
        kind = key.__class__
        if kind is not int and (kind is not str or len(key) > SHORT):
            self.read(key)
        return key

    def compare(self, name: str, left: Any, right: Any) -> bool:
        if name in ("in", "notin"):
            right = self._membership(left, right)
        elif isinstance(left, str):
            if isinstance(right, str) and len(left) > SHORT:
                self.count(min(len(left), len(right)) >> 4)
        elif left.__class__ not in _SCALARS and right.__class__ not in _SCALARS:
            alike = left.__class__ is right.__class__ and isinstance(left, list | tuple | dict)
            if not (alike and name in ("eq", "ne") and len(left) != len(right)):
                self.read(left)
        result: bool = OPERATORS[name](left, right)
        return result

    def _membership(self, value: Any, container: Any) -> Any:
        if isinstance(container, Iterator):
            container = self.listed(container)
        if isinstance(container, str):
            if isinstance(value, str):
                self.count(len(container) * min(len(value), 128) >> 6)
        elif isinstance(container, _MAPPINGS):
            self.key(value)
        elif isinstance(container, _SIZED):
            self.read(value, 1 + len(container))
        return container

    def binary(self, symbol: str, left: Any, right: Any) -> None:
        if isinstance(left, int | float) and isinstance(right, int | float):
            bits = left.bit_length() if isinstance(left, int) and isinstance(right, int) else 0
            if symbol == "**" and bits * max(right, 0) > MAX_INTEGER_BITS:
                raise LimitReached("the template computes a number that is too large")
        elif symbol == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    self.count(1, _copied(repeated) * max(times, 0))
        elif symbol == "%" and isinstance(left, str):
            _percent(self, left, right)
        elif symbol == "+":
            self.count(1, _copied(left) + _copied(right))
        elif isinstance(left, _VIEWS) or isinstance(right, _VIEWS):
            raise jinja2.exceptions.SecurityError("views of a dict cannot be subtracted here")
        if isinstance(left, Markup) or isinstance(right, Markup):
            self.count(1, ESCAPED * (_copied(left) + _copied(right)))

    def call(
        self, rule: Rule, values: list[Any], named: dict[str, Any], *, escapes: bool = False
    ) -> None:
        """Count a call before it runs.

        ``values`` are its value and arguments; an iterator among them is replaced by one that
        counts. ``escapes``: the call may escape its arguments.
        """
        size_before = self.size
        value, arguments = values[0], [*values[1:], *named.values()]
        pattern = sum(len(argument) for argument in arguments if isinstance(argument, str))
        size = sum(map(self.text, arguments))
        if rule.reads == "text":
            size += self.text(value)
            if rule.converts and not isinstance(value, str):
                self.count(1, size)
                values[0] = value = str(value)
            if isinstance(value, str):
                self.count(len(value) * (pattern if rule.product else min(pattern, 128)) >> 6)
        elif rule.reads == "items":
            values[0] = self.iterate(value, 4 + (pattern >> 1))
        elif rule.reads != "nothing":
            values[0] = self.listed(value, 4 + (pattern >> 1))
            if rule.reads == "all":
                weight = self.weigh(values[0])
                size += OBJECT * weight.nodes + 4 * weight.size
                self.count((size >> 5) * weight.nodes.bit_length())
        self.count(4 + (size >> 4), rule.growth * size)
        if rule.guard is not None:
            rule.guard(self, values, named)
        if escapes or any(isinstance(argument, Markup) for argument in (value, *arguments)):
            self.count(1, ESCAPED * (size_before - self.size))


# Guards count the result of an operation in advance.
Guard = Callable[[Counter, list[Any], dict[str, Any]], None]


class Rule(NamedTuple):
    """How a filter, method or test is counted.

    ``reads`` is the part of the value that it reads: the text, items one by one, a list of all
    items, everything inside them, or nothing that depends on the size.
    """

    reads: Literal["text", "items", "list", "all", "nothing"] = "text"
    guard: Guard | None = None
    growth: int = 1  # how much larger the result can be than the input
    converts: bool = True  # whether the value becomes a text first
    product: bool = False  # whether a search takes time proportional to the product of both lengths


def _argument(
    values: list[Any], named: dict[str, Any], place: int, name: str, default: Any = None
) -> Any:
    return values[place] if len(values) > place else named.get(name, default)


def _copied(value: Any) -> int:
    if isinstance(value, str):
        return _text_size(value)
    return POINTER * len(value) if isinstance(value, list | tuple) else 0


def check_widths(format_string: str) -> None:
    """Raise `LimitReached` if a format names widths that are larger than any text needs."""
    widths = re.findall(r"\d+", format_string)
    if any(len(width) > 6 for width in widths) or sum(map(int, widths)) > MAX_WIDTH:
        raise LimitReached("the template formats a field that is too wide")


def _percent(counter: Counter, template: str, values: Any) -> None:
    check_widths(template)
    if "*" in template and isinstance(values, tuple):
        check_widths(" ".join(str(value) for value in values if isinstance(value, int)))
    fields = template.count("%")
    repeated = 1 if isinstance(values, tuple) else max(fields, 1)  # a mapping's values
    size = repeated * counter.text([values]) + NUMERAL * fields + _text_size(template)
    counter.count(4 * len(template) + 16 * fields, size)


def _format_filter(counter: Counter, values: list[Any], named: dict[str, Any]) -> None:
    counter.count(1, counter.text(values[0]))
    _percent(counter, str(values[0]), named or tuple(values[1:]))


def _format_method(counter: Counter, values: list[Any], named: dict[str, Any]) -> None:
    template = values[0]
    check_widths(template)
    if re.search(r"\{[^}]*\{", template.replace("{{", "")):
        raise LimitReached("the template computes the width of a field")
    fields = template.count("{")
    size = NUMERAL + counter.text([*values[1:], *named.values()])
    counter.count(len(template) + 32 * fields, fields * size)


def _number(counter: Counter, values: list[Any], named: dict[str, Any]) -> None:
    # A number is a width, a precision or a number of items.
    numbers = (abs(a) for a in (*values[1:], *named.values()) if isinstance(a, int))
    counter.count(1, 2 * OBJECT * sum(numbers))


def _width(counter: Counter, values: list[Any], named: dict[str, Any]) -> int:
    """Return the size of all arguments; a number counts as that many characters."""
    args = [*values[1:], *named.values()]
    return 4 * sum(abs(a) if isinstance(a, int) else counter.weigh(a).size for a in args)


def _lines(counter: Counter, values: list[Any], named: dict[str, Any]) -> None:
    if isinstance(values[0], str):
        lines = 2 + sum(map(values[0].count, "\t" + _LINE_ENDS))
        counter.count(
            lines + (len(values[0]) >> 2), lines * (_width(counter, values, named) + 2 * OBJECT)
        )


def _tojson(counter: Counter, values: list[Any], named: dict[str, Any]) -> None:
    weight = counter.weigh(values[0])
    levels = 1 + weight.depth
    counter.count(
        (4 + levels + weight.nodes.bit_length()) * weight.nodes + (weight.size >> 4),
        (OBJECT + levels * _width(counter, values, named)) * weight.nodes + ESCAPED * weight.size,
    )


def _replace(counter: Counter, values: list[Any], named: dict[str, Any]) -> None:
    text = values[0]
    old, new = (str(_argument(values, named, n, k, "")) for n, k in ((1, "old"), (2, "new")))
    wide = 1 if text.isascii() and new.isascii() else 4
    counter.count(1, wide * (len(text) + text.count(old) * len(new)))


def _split(counter: Counter, values: list[Any], named: dict[str, Any]) -> None:
    text, separator = values[0], _argument(values, named, 1, "sep")
    pieces = text.count(separator) if isinstance(separator, str) and separator else len(text) // 2
    most = _argument(values, named, 2, "maxsplit", -1)
    pieces = 1 + (min(pieces, most) if isinstance(most, int) and most >= 0 else pieces)
    counter.count(pieces, 2 * OBJECT * pieces)


def _join(counter: Counter, values: list[Any], named: dict[str, Any], glue: int = 0) -> None:
    """Count a join; ``glue`` is the index of the separator among the values."""
    if glue == 0 and len(values) > 1:
        values[1] = counter.listed(values[1])
    joined = values[1 - glue] if len(values) > 1 - glue else ()
    if isinstance(joined, _SIZED):
        weight = counter.weigh(joined)
        wide = 4 if weight.depth <= 1 else QUOTED
        between = counter.text(_argument(values, named, glue, "d", ""))
        counter.count(weight.nodes, len(joined) * between + wide * weight.size)


def _sum(counter: Counter, values: list[Any], named: dict[str, Any]) -> None:
    """Allow numbers only: summing lists would create a new list for every item."""
    if not isinstance(_argument(values, named, 2, "start", 0), int | float):
        raise LimitReached("the template sums values that are not numbers")


def _unique(counter: Counter, values: list[Any], named: dict[str, Any]) -> None:
    """Count comparisons of values other than strings, whose hashes a template may choose."""
    if isinstance(values[0], _SIZED):
        attribute = _argument(values, named, 2, "attribute")
        others = [v for v in values[0] if attribute is not None or not isinstance(v, str)]
        counter.read(others, len(others))


def _index(counter: Counter, values: list[Any], named: dict[str, Any]) -> None:
    for sought in values[1:2]:
        counter.read(sought, 1 + len(values[0]))


def _remainder(counter: Counter, values: list[Any], named: dict[str, Any]) -> None:
    counter.binary("%", values[0], values[1] if len(values) > 1 else 2)


_EMPTY, _ITEMS, _ALL, _COPY = Rule("nothing"), Rule("items"), Rule("all"), Rule("text")
_CASE, _PREDICATE = Rule(growth=CASED), Rule(growth=0)
_TEXT_METHODS: dict[str, Rule] = {
    **dict.fromkeys((
        "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
        "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
        "isupper", "startswith",
    ), _PREDICATE),
    **dict.fromkeys(("capitalize", "casefold", "lower", "swapcase", "title", "upper"), _CASE),
    **dict.fromkeys(("lstrip", "rfind", "rindex", "rstrip", "strip"), Rule(product=True)),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), Rule(guard=_number)),
    **dict.fromkeys(("removeprefix", "removesuffix"), _COPY),
    **dict.fromkeys(("partition", "split"), Rule(guard=_split)),
    **dict.fromkeys(("rpartition", "rsplit"), Rule(guard=_split, product=True)),
    "expandtabs": Rule(guard=_lines),
    "format": Rule("nothing", _format_method),
    "join": Rule("nothing", _join),
    "replace": Rule(guard=_replace),
    "splitlines": Rule(growth=2 * KEPT),
}  # fmt: skip
_LIST_METHODS = dict.fromkeys(("count", "index"), Rule("nothing", _index))
METHODS: dict[type, dict[str, Rule]] = {  # any other method of a builtin type is refused
    str: _TEXT_METHODS,
    Markup: _TEXT_METHODS,
    list: {**_LIST_METHODS, "copy": Rule("list")},
    tuple: _LIST_METHODS,
    range: _LIST_METHODS,
    dict: {**dict.fromkeys(("get", "items", "keys", "values"), _EMPTY), "copy": Rule("list")},
}

FILTERS: dict[str, Rule] = {  # any other is refused
    **dict.fromkeys(("abs", "attr", "count", "d", "default", "first", "last", "length"), _EMPTY),
    **dict.fromkeys(("e", "escape", "forceescape"), Rule(growth=2 * ESCAPED)),
    **dict.fromkeys(("capitalize", "lower", "upper"), _CASE),
    **dict.fromkeys(("float", "int", "truncate"), Rule(converts=False)),
    **dict.fromkeys(("items", "map", "reject", "rejectattr", "select", "selectattr"), _ITEMS),
    **dict.fromkeys(("batch", "slice"), Rule("list", _number)),
    **dict.fromkeys(("list", "reverse"), Rule("list")),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort"), _ALL),
    **dict.fromkeys(("safe", "string"), _COPY),
    **dict.fromkeys(("title", "wordcount"), Rule(growth=2 * KEPT)),
    "center": Rule(guard=_number),
    "format": Rule("nothing", _format_filter),
    "indent": Rule(guard=_lines, growth=4, converts=False),
    "join": Rule("list", partial(_join, glue=1)),
    "replace": Rule(guard=_replace),
    "round": Rule("nothing", _number),
    "sum": Rule("all", _sum),
    "tojson": Rule("nothing", _tojson),
    "trim": Rule(product=True),
    "unique": Rule("all", _unique),
}

_COMPARISONS = {
    "==": "eq", "eq": "eq", "equalto": "eq", "!=": "ne", "ne": "ne", ">": "gt", "gt": "gt",
    "greaterthan": "gt", ">=": "gteq", "ge": "gteq", "<": "lt", "lt": "lt", "lessthan": "lt",
    "<=": "lteq", "le": "lteq", "in": "in",
}  # fmt: skip
# None: costs nothing, or is a comparison. Any other test is refused.
TESTS: dict[str, Rule | None] = {
    **dict.fromkeys((
        "boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable",
        "mapping", "none", "number", "sameas", "sequence", "string", "true", "undefined",
        *_COMPARISONS,
    )),
    **dict.fromkeys(("divisibleby", "even", "odd"), Rule("nothing", _remainder)),
    **dict.fromkeys(("lower", "upper"), _PREDICATE),
}  # fmt: skip

_OWN_CODE = (  # these run code of the template, which is counted already
    jinja2.runtime.BlockReference,
    jinja2.runtime.LoopContext,
    jinja2.runtime.Macro,
    jinja2.runtime.Undefined,
    jinja2.utils.Joiner,
)


# Code generation.

_SIZES: dict[type[jinja2.nodes.Node], int] = {  # bytes besides the results of operations
    jinja2.nodes.CallBlock: 1536,
    jinja2.nodes.Dict: 256,
    jinja2.nodes.For: GENERATOR,
    jinja2.nodes.Macro: 1536,
    jinja2.nodes.Pair: 2 * ENTRY,
}
_CONTAINERS = (jinja2.nodes.List, jinja2.nodes.Tuple, jinja2.nodes.Call, jinja2.nodes.Output)


def body_cost(body: Iterable[jinja2.nodes.Node]) -> tuple[int, int]:
    """Return the steps and size of running a body once, without the bodies inside it."""
    steps, size, pending = 1, 0, list(body)
    while pending:
        node = pending.pop()
        children = list(node.iter_child_nodes(exclude=("body", "else_")))
        pending += children
        steps += 1
        size += _SIZES.get(type(node), 0)
        if isinstance(node, _CONTAINERS):
            size += OBJECT + KEPT * len(children)
        elif isinstance(node, jinja2.nodes.TemplateData):
            size += _text_size(node.data)
    return steps, size


class _CountingGenerator(jinja2.compiler.CodeGenerator):
    """Counts operations without a hook: bodies, comparisons, ``~``, slices, keys, ``*``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls: dict[int, str] = {}  # by the id of a node: the call its value is passed to

    def visit(self, node: jinja2.nodes.Node, *args: Any, **kwargs: Any) -> Any:
        call = self._calls.get(id(node))
        if call is None:
            return super().visit(node, *args, **kwargs)
        self.write(call)
        super().visit(node, *args, **kwargs)
        self.write(")")
        return None

    def blockvisit(self, nodes: Any, frame: Any) -> None:
        self.writeline("environment.counter.count({}, {})".format(*body_cost(nodes)))
        super().blockvisit(nodes, frame)

    def _count_before(self, node: jinja2.nodes.Node) -> None:
        """Count an expression outside a body whenever it is evaluated."""
        steps, size = body_cost([node])
        self._calls[id(node)] = f"(environment.counter.count({steps}, {size}) or "

    def visit_For(self, node: jinja2.nodes.For, frame: Any) -> None:  # noqa: N802
        if node.test is not None:
            self._count_before(node.test)
        super().visit_For(node, frame)

    def macro_body(self, node: Any, frame: Any) -> Any:
        for default in node.defaults:
            self._count_before(default)
        return super().macro_body(node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: Any) -> None:  # noqa: N802
        for pair in node.items:
            if not isinstance(pair.key, jinja2.nodes.Const):
                self._calls[id(pair.key)] = "environment.counter.key("
        super().visit_Dict(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Any) -> None:  # noqa: N802
        for part in node.nodes:
            self._calls[id(part)] = "environment.finalize(context.eval_ctx, "
        super().visit_Concat(node, frame)

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: Any) -> None:  # noqa: N802
        is_slice = isinstance(node.arg, jinja2.nodes.Slice)
        self.write("environment.counter.made(" if is_slice else "(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: Any) -> None:  # noqa: N802
        """Write a chain; an operand after a comparison that fails is not evaluated."""
        self.write("environment.compare(")
        self.visit(node.expr, frame)
        for operand in node.ops:
            self.write(f", ({operand.op!r}, lambda: ")
            self.visit(operand.expr, frame)
            self.write(")")
        self.write(")")

    def signature(self, node: Any, frame: Any, extra_kwargs: Any = None) -> None:
        for unpacked in (node.dyn_args, node.dyn_kwargs):
            if unpacked is not None:
                self._calls[id(unpacked)] = "environment.counter.listed("
        super().signature(node, frame, extra_kwargs)


# The environment.


class CountingEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _CountingGenerator
    intercepted_binops = frozenset(("*", "**", "%", "+", "-"))

    def __init__(self, extensions: Sequence[Any]) -> None:
        self.counter = Counter()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=extensions,
            finalize=self._print,
            optimized=False,  # constants would be computed while compiling, and not counted
        )
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        for name, function in list(self.tests.items()):
            self.tests[name] = self._counted_test(name, function)
        self.filters["random"] = self.globals["lipsum"] = self._refuse_randomness

    def _refuse_randomness(self, *_: Any, **__: Any) -> NoReturn:
        raise RaiseExceptionCalled(NO_RANDOMNESS)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        rule = FILTERS.get(name)
        self.filters[name] = self._counted(function, rule, f"filter {name!r}", self.counter.made)

    def _counted_test(self, name: str, function: Any) -> Any:
        if name in _COMPARISONS:
            return partial(self.counter.compare, _COMPARISONS[name])
        if name in TESTS and TESTS[name] is None:
            return function
        return self._counted(function, TESTS.get(name), f"test {name!r}", lambda result: result)

    def _counted(
        self, function: Any, rule: Rule | None, name: str, made: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        passes = jinja2.utils._PassArg.from_obj(function)
        first = 0 if passes is None else 1

        def counted(*args: Any, **kwargs: Any) -> Any:
            if rule is None:
                raise jinja2.exceptions.SecurityError(f"the {name} is not allowed here")
            values = list(args[first:])
            if values:
                context = args[0] if first else None
                escapes = bool(getattr(context, "autoescape", False))
                self.counter.call(rule, values, kwargs, escapes=escapes)
            return made(function(*args[:first], *values, **kwargs))

        if passes is not None:
            counted.jinja_pass_arg = passes  # type: ignore[attr-defined]
        return counted

    @jinja2.pass_eval_context
    def _print(self, context: jinja2.nodes.EvalContext, value: Any) -> Any:
        size = self.counter.text(value)
        self.counter.count(1, ESCAPED * size if context.autoescape else size)
        return value

    def compare(self, left: Any, *comparisons: tuple[str, Callable[[], Any]]) -> Any:
        result: Any = True
        for name, operand in comparisons:
            right = operand()
            result = self.counter.compare(name, left, right)
            if not result:
                break
            left = right
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.counter.key(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.counter.binary(operator, left, right)
        result = self.binop_table[operator](left, right)
        return self.counter.made(result) if isinstance(result, int) else result

    def wrap_str_format(self, value: Any) -> Any:
        wrapped: Any = super().wrap_str_format(value)
        if wrapped is not None:
            wrapped.__self__ = value.__self__
        return wrapped

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if isinstance(__obj, _OWN_CODE):
            return __self.counter.made(super().call(__context, __obj, *args, **kwargs))
        named = {k: v for k, v in kwargs.items() if k not in _HIDDEN}
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, types.BuiltinFunctionType) or isinstance(owner, str):
            name = __obj.__name__
            rule = METHODS.get(owner.__class__, {}).get(name)
            if rule is None:
                kind = owner.__class__.__name__
                raise jinja2.exceptions.SecurityError(f"{kind}.{name} is not allowed here")
            called = [owner, *args]
            __self.counter.call(rule, called, named)
            return __self.counter.made(__obj(*called[1:], **named))
        __self.counter.call(_EMPTY, [None, *args], named)
        return __self.counter.made(super().call(__context, __obj, *args, **kwargs))

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the template's exception, without jinja2's rewriting of tracebacks."""
        if source is not None:
            super().handle_exception(source)
        raise
