"""Evaluate jinja2 expressions on symbols, or raise `Untraceable`.

Each expression becomes an operation that calls the same Python method or jinja2 function as the
reference. Operations that can multiply a text (a repetition, a long separator) are bounded or not
traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import NoneType
from typing import Any, TypeVar

import jinja2.compiler
import jinja2.filters
import jinja2.tests
from jinja2 import Undefined, nodes
from markupsafe import Markup

from tokenmill.chat.program import (
    ALL_MESSAGES,
    MAX_ARG,
    MAX_SIZE,
    NO_SOURCE,
    PLAIN,
    Function,
    Joined,
    LoopVariable,
    Method,
    Namespace,
    Recorder,
    Symbol,
    Untraceable,
    from_row,
    owner_code,
    parts_of,
    real,
    sources_of,
)
from tokenmill.chat.sandbox import OPERATORS, CountingEnvironment, body_cost

TYPE_TESTS = {"string", "mapping", "sequence", "iterable", "number", "boolean", "integer", "float"}
VALUE_TESTS = {
    "true", "false", "odd", "even", "divisibleby", "eq", "equalto", "==", "ne", "!=", "lt", "<",
    "lessthan", "gt", ">", "greaterthan", "le", "<=", "ge", ">=", "in", "lower", "upper", "sameas",
}  # fmt: skip
TEXT_METHODS: dict[str, type | None] = {
    "strip": str, "lstrip": str, "rstrip": str, "upper": str, "lower": str, "title": str,
    "capitalize": str, "casefold": str, "swapcase": str, "removeprefix": str, "removesuffix": str,
    "replace": str, "join": str, "format": str, "split": list, "rsplit": list, "splitlines": list,
    "partition": tuple, "rpartition": tuple, "find": int, "rfind": int, "index": int, "count": int,
    "rindex": int, "startswith": bool, "endswith": bool, "isspace": bool, "isdigit": bool,
    "isalpha": bool, "isalnum": bool, "isupper": bool, "islower": bool, "istitle": bool,
    "isnumeric": bool, "isdecimal": bool, "isidentifier": bool, "isascii": bool,
}  # fmt: skip
OBJECT_METHODS = {"get", "items", "keys", "values"}
LIST_METHODS = {"index", "count"}
# Filters whose result depends on their inputs alone and is at most a few times as large, with the
# type of the result where it is always the same.
FILTERS: dict[str, type | None] = {
    "trim": str, "upper": str, "lower": str, "capitalize": str, "title": str, "string": str,
    "tojson": str, "join": str, "replace": str, "length": int, "count": int, "list": list,
    "wordcount": int, "dictsort": list, "sort": list, "reverse": None, "first": None, "last": None,
    "items": None, "select": None, "reject": None, "selectattr": None, "rejectattr": None,
    "map": None, "unique": None, "min": None, "max": None, "int": None, "float": float,
    "abs": None, "round": None, "attr": None, "groupby": None, "escape": None, "e": None,
    "safe": None, "indent": str,
}  # fmt: skip
# Global functions that a template may call.
FUNCTIONS = {"raise_exception", "strftime_now", "namespace", "dict", "range"}
MAX_PARTS = 256  # of a text before its parts are joined
LAZY = {"items", "select", "reject", "selectattr", "rejectattr", "map", "unique", "reverse"}
ITERATING = {*LAZY, "dictsort", "groupby", "join", "list", "max", "min", "sort"}
ARITHMETIC = (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod)
PROMPT = "add_generation_prompt"
PRODUCING = (nodes.BinExpr, nodes.Call, nodes.Concat, nodes.Filter)
TESTS: dict[str, Any] = jinja2.tests.TESTS
Result = TypeVar("Result")


def line_of(node: nodes.Node) -> int:
    return getattr(node, "lineno", 0) or 0


def _cached(method: Callable[[Any, Any], Result]) -> Callable[[Any, Any], Result]:
    """Cache a method of `Names` per node, because walking a tree is slower than most rows."""

    @functools.wraps(method)
    def cached(names: Names, node: nodes.Node) -> Result:
        results = names.results.setdefault(method.__name__, {})
        if node not in results:
            results[node] = method(names, node)
        result: Result = results[node]
        return result

    return cached


class Names:
    """The names that parts of a template read, and those that it assigns anywhere."""

    def __init__(self, tree: nodes.Template) -> None:
        self.tree = tree
        self.macros: dict[str, nodes.Macro] = {}
        for node in tree.body:
            if isinstance(node, nodes.Macro):
                if node.name in self.macros:
                    raise Untraceable("a macro defined twice", line_of(node))
                self.macros[node.name] = node
        self.assigned = {n.name for n in tree.find_all(nodes.Name) if n.ctx in ("store", "param")}
        if self.assigned & self.macros.keys():
            raise Untraceable("a macro's name assigned again")
        self.results: dict[str, dict[nodes.Node, Any]] = {}

    @_cached
    def _loaded(self, node: nodes.Node) -> set[str]:
        names = {n.name for n in node.find_all(nodes.Name) if n.ctx == "load"}
        if isinstance(node, nodes.Name):  # find_all leaves out the node itself
            names.add(node.name)
        return names | {n.name for n in node.find_all(nodes.NSRef)}

    @_cached
    def reads(self, node: nodes.Node) -> tuple[str, ...]:
        """Return the names read inside a node that the template assigns somewhere."""
        return tuple(sorted(self._loaded(node) & self.assigned - {"loop"}))

    def reads_messages(self, macro: nodes.Macro) -> bool:
        return "messages" in self._loaded(macro) - self.assigned

    def cost(self, body: list[nodes.Node]) -> tuple[int, int]:
        """Return the steps of running a body once, and its size in units of a `Run`."""
        results = self.results.setdefault("cost", {})
        if body[0] not in results:
            steps, size = body_cost(body)
            results[body[0]] = steps, size >> 3
        cost: tuple[int, int] = results[body[0]]
        return cost

    def prompt_depends_on_row(self) -> bool:
        """Whether the generation prompt can differ from row to row.

        It cannot where no condition on the row surrounds the test of `add_generation_prompt` and
        everything printed there reads only variables that the template never assigns.
        """
        of_row = (self.assigned | self.macros.keys() | {"messages", "tools"}) - {PROMPT}

        def reads_row(*parts: nodes.Node) -> bool:
            return any(self._loaded(part) & of_row for part in parts)

        def depends(node: nodes.Node, inside: bool) -> bool:
            if isinstance(node, nodes.If):
                inside = inside or reads_row(node.test)
                if PROMPT in self._loaded(node.test) and (inside or reads_row(*node.body)):
                    return True
            elif isinstance(node, (nodes.Assign, nodes.CondExpr, nodes.Output)):
                return PROMPT in self._loaded(node)
            return any(depends(child, inside) for child in node.iter_child_nodes())

        return depends(self.tree, False)

    @_cached
    def has_output(self, loop: nodes.For) -> bool:
        """Whether a loop's body prints, or appends to a text that may be printed later."""
        return any(True for _ in loop.find_all(nodes.Output)) or any(
            True
            for assign in loop.find_all((nodes.Assign, nodes.AssignBlock))
            if isinstance(getattr(assign, "target", None), nodes.NSRef)
            for _ in assign.find_all((nodes.Add, nodes.Concat))
        )

    @_cached
    def takes_any_arguments(self, macro: nodes.Macro) -> bool:
        """Whether a macro reads its caller, varargs or kwargs."""
        unnamed = {"caller", "varargs", "kwargs"}
        return any(name.name in unnamed for name in macro.find_all(nodes.Name))

    @_cached
    def pure(self, node: nodes.Node) -> bool:
        """Whether a part sets nothing outside itself and reads no messages."""
        parts = [node, *(self.macros[name] for name in self._called(node))]
        return not any(
            isinstance(part, nodes.NSRef) or getattr(part, "name", "") == "messages"
            for one in parts
            for part in one.find_all((nodes.NSRef, nodes.Name))
        )

    @_cached
    def macro_reads(self, node: nodes.Node) -> tuple[str, ...]:
        """Return the top-level names that macros called from a node may read."""
        read = [self._loaded(self.macros[name]) & self.assigned for name in self._called(node)]
        return tuple(sorted(set().union(*read) - {"loop"}))

    def _called(self, node: nodes.Node) -> set[str]:
        called: set[str] = set()
        pending = [name for name in self._loaded(node) if name in self.macros]
        if isinstance(node, nodes.Macro):
            pending.append(node.name)
        while pending:
            name = pending.pop()
            if name not in called:
                called.add(name)
                loaded = self._loaded(self.macros[name])
                pending += [other for other in loaded if other in self.macros]
        return called


class Expressions(Recorder):
    """Evaluates expressions of a template on the symbols of one row."""

    def __init__(
        self, names: Names, environment: CountingEnvironment, tojson: Callable[..., str]
    ) -> None:
        super().__init__()
        self._names = names
        self._environment = environment
        context = environment.from_string("").new_context({})
        first = {"context": context, "eval_context": context.eval_ctx, "environment": environment}
        self._filters: dict[str, Callable[..., Any]] = {}
        for name in FILTERS:
            function: Any = tojson if name == "tojson" else jinja2.filters.FILTERS[name]
            passes = getattr(function, "jinja_pass_arg", None)
            if passes is not None:
                function = functools.partial(function, first[passes.name])
            self._filters[name] = self.program.names[f"F_{name}"] = function
        for name in (*TYPE_TESTS, *VALUE_TESTS):
            if name.isidentifier():
                self.program.names[f"T_{name}"] = TESTS[name]
        self.program.names["get_item"] = environment.getitem
        self.program.names["safe_range"] = environment.globals["range"]

    def _lookup(self, name: str) -> Any:
        raise NotImplementedError

    def _call_macro(self, name: str, node: nodes.Call) -> Symbol:
        raise NotImplementedError

    # -- expressions --------------------------------------------------------------------------

    def _value(self, node: nodes.Node) -> Any:
        name = "_arithmetic" if isinstance(node, ARITHMETIC) else f"_get_{type(node).__name__}"
        visit = getattr(self, name, None)
        if visit is None:
            raise Untraceable(f"a {type(node).__name__} expression", line_of(node))
        try:
            value = visit(node)
        except Untraceable as error:
            error.line = error.line or line_of(node)
            raise
        if isinstance(value, (str, list)) and isinstance(node, PRODUCING) and len(value) > MAX_ARG:
            self._emit("body", 0, len(value))  # the reference computes it for every row
        return value

    def _get_Const(self, node: nodes.Const) -> Any:
        return node.value

    def _get_TemplateData(self, node: nodes.TemplateData) -> str:
        return node.data

    def _get_Name(self, node: nodes.Name) -> Any:
        return self._lookup(node.name)

    def _get_List(self, node: nodes.List | nodes.Tuple) -> Any:
        kind, code = (list, "[{}]") if isinstance(node, nodes.List) else (tuple, "({})")
        items = [self._value(item) for item in node.items]
        if not from_row(*items):
            return kind(items)
        code = code.format("".join(self._code(item) + "," for item in items))
        sources = frozenset().union(*map(sources_of, items))
        return self._let(f"R.build({code})", kind(map(real, items)), sources, kind)

    _get_Tuple = _get_List  # noqa: N815 - jinja2's name

    def _get_Dict(self, node: nodes.Dict) -> Any:
        pairs = [(self._value(pair.key), self._value(pair.value)) for pair in node.items]
        return self._mapping(pairs)

    def _mapping(self, pairs: list[tuple[Any, Any]]) -> Any:
        flat = [item for pair in pairs for item in pair]
        if not from_row(*flat):
            return dict(pairs)
        members = "".join(f"{self._code(k)}: {self._code(v)}, " for k, v in pairs)
        code = f"R.build({{{members}}})"
        sources = frozenset().union(*(sources_of(item) for item in flat))
        return self._let(code, {real(k): real(v) for k, v in pairs}, sources, dict)

    def _get_CondExpr(self, node: nodes.CondExpr) -> Any:
        if self._truth(self._value(node.test)):
            return self._value(node.expr1)
        return self._value(node.expr2) if node.expr2 is not None else Undefined()

    def _get_And(self, node: nodes.And) -> Any:
        left = self._value(node.left)
        return self._value(node.right) if self._truth(left) else left

    def _get_Or(self, node: nodes.Or) -> Any:
        left = self._value(node.left)
        return left if self._truth(left) else self._value(node.right)

    def _get_Not(self, node: nodes.Not) -> bool:
        return not self._truth(self._value(node.node))

    def _get_Compare(self, node: nodes.Compare) -> bool:
        left = self._value(node.expr)
        for operand in node.ops:
            right = self._value(operand.expr)
            if not self._compare(operand.op, left, right):
                return False
            left = right
        return True

    def _compare(self, name: str, left: Any, right: Any) -> bool:
        if name in ("in", "notin") and isinstance(right, Symbol):
            kind = self._kind(right)
            if kind in (NoneType, int, float, bool):
                self._raise(f"in a {kind.__name__}")
        outcome = OPERATORS[name](real(left), real(right))
        if not from_row(left, right):
            return bool(outcome)
        if type(outcome) is not bool:
            raise Untraceable("a comparison whose result is not a boolean")
        codes = self._code(left), self._code(right)
        facts = self._frame.facts
        if name in ("eq", "ne") and isinstance(right, str):
            known = facts.get((codes[0], "is"))
            if known is not None:
                return (known == right) is (name == "eq")
            equal = self._branch(f"{codes[0]} == {codes[1]}", (outcome is True) is (name == "eq"))
            if equal:
                facts[codes[0], "is"] = right
            return equal is (name == "eq")
        positive = {"ne": "eq", "notin": "in"}.get(name, name)
        if positive == "in" and from_row(right) and self._sized(right):
            self._emit("charge", codes[1])
        code = f"{codes[0]} {jinja2.compiler.operators[positive]} {codes[1]}"
        result = self._branch(f"({code})", outcome is not (positive != name))
        return result is not (positive != name)

    def _arithmetic(self, node: nodes.BinExpr) -> Any:
        sign = node.operator
        function = self._environment.binop_table[sign]
        left, right = self._value(node.left), self._value(node.right)
        if not from_row(left, right):
            return self._environment.call_binop(None, sign, left, right)
        kinds = self._kind(left), self._kind(right)
        if sign == "+" and kinds == (str, str):
            return self._join([*parts_of(left), *parts_of(right)])
        numbers = (int, float, bool)
        if kinds[0] in numbers and kinds[1] in numbers:
            kind: type | None = float if float in kinds else int
            kind = None if sign in ("/", "//", "%") else kind
        elif sign == "+" and kinds == (list, list):
            kind = list
        elif sign == "%" and kinds[0] is str and isinstance(left, str):
            if "*" in left or any(c.isdigit() for c in left):
                raise Untraceable("a format with a width", line_of(node))
            kind = str
        elif sign == "*" and kinds == (str, int):
            code = f"R.repeat({self._code(left)}, {self._code(right)})"
            text, times = real(left), real(right)
            if len(text) * times > MAX_SIZE:
                raise Untraceable("a text repeated too often", line_of(node))
            return self._attempt(code, lambda: text * times, sources_of(left), str)
        elif sign == "+" and Undefined in kinds:
            self._raise("undefined in a sum")
        elif (
            sign == "+" and kinds[0] in (str, list) and kinds[1] in (str, list, *numbers, NoneType)
        ):
            self._raise("a sum of different types")
        else:
            function(real(left), real(right))  # most of these fail, as in the reference
            raise Untraceable(f"{kinds[0].__name__} {sign} {kinds[1].__name__}", line_of(node))
        code = f"({self._code(left)} {sign} {self._code(right)})"
        code = f"R.build{code}" if kind is list else code
        sources = sources_of(left) | sources_of(right)
        return self._attempt(code, lambda: function(real(left), real(right)), sources, kind)

    def _get_Neg(self, node: nodes.Neg) -> Any:
        value = self._value(node.node)
        if isinstance(value, Symbol) and self._kind(value) in (int, float):
            return self._let(f"(-{value.code})", -value.value, value.sources, self._kind(value))
        if from_row(value):
            raise Untraceable("a negative of a value that is not a number", line_of(node))
        return -value

    def _get_Pos(self, node: nodes.Pos) -> Any:
        value = self._value(node.node)
        if from_row(value):
            raise Untraceable("a plus sign", line_of(node))
        return +value

    def _get_Concat(self, node: nodes.Concat) -> Any:
        parts: list[Any] = []
        for value in [self._value(part) for part in node.nodes]:
            if isinstance(value, Joined):
                parts += value.parts
            elif isinstance(value, Symbol):
                kind = self._kind(value)
                if kind is str:
                    parts.append(value)
                elif kind is Markup:
                    code = f"str.__str__({value.code})"
                    parts.append(self._let(code, str(value.value), value.sources, str))
                elif kind in (int, float, bool, NoneType, list, dict, tuple):
                    parts.append(
                        self._let(f"str({value.code})", str(value.value), value.sources, str)
                    )
                elif kind is not Undefined:
                    raise Untraceable(f"joining a {kind.__name__}")
            elif isinstance(value, (LoopVariable, Method, Function)):
                raise Untraceable("joining a function")
            else:
                parts.append(str(value))
        return self._join(parts)

    def _join(self, parts: list[Any]) -> Any:
        """Join texts, and merge neighbouring texts of the template."""
        merged: list[Any] = []
        for part in parts:
            if isinstance(part, str) and merged and isinstance(merged[-1], str):
                merged[-1] += part
            elif isinstance(part, Symbol) or part != "":
                merged.append(part)
        joined = Joined(merged)
        # A text that is appended to itself in a loop would have more and more parts.
        return self._text(joined) if len(merged) > MAX_PARTS else joined

    # -- members ------------------------------------------------------------------------------

    def _get_Getattr(self, node: nodes.Getattr) -> Any:
        return self._member(self._value(node.node), node.attr, item=False)

    def _get_Getitem(self, node: nodes.Getitem) -> Any:
        base = self._value(node.node)
        if isinstance(node.arg, nodes.Slice):
            return self._slice(base, node.arg)
        return self._member(base, self._value(node.arg), item=True)

    def _member(self, base: Any, key: Any, *, item: bool) -> Any:
        if isinstance(base, LoopVariable):
            return self._loop_member(base, key)
        if isinstance(base, (Method, Function)):
            raise Untraceable("a member of a function")
        if isinstance(base, Joined):
            base = self._text(base)
        if not isinstance(base, Symbol) and not from_row(key):
            return self._constant_member(base, key, item)
        kind = self._kind(base)
        if kind is Undefined:
            self._raise("a member of an undefined value")
        if kind is Namespace:
            return self._attribute(base, key)
        if isinstance(key, str):
            return self._named_member(base, kind, key, item)
        if not isinstance(base, Symbol):
            base = Symbol(self.program.constant(base), base, NO_SOURCE)
            self._frame.kinds[base.code] = kind
        if isinstance(key, int) and kind in (list, tuple, str):
            is_inside = -len(base.value) <= key < len(base.value)
            length = key + 1 if key >= 0 else -key
            if not self._branch(f"len({base.code}) >= {length}", is_inside):
                return Undefined()
            return self._element(base, repr(key), base.value[key], kind)
        if isinstance(key, Symbol) and kind in (list, tuple, str) and self._kind(key) is int:
            is_inside = -len(base.value) <= key.value < len(base.value)
            code = f"-len({base.code}) <= {key.code} < len({base.code})"
            if not self._branch(code, is_inside):
                return Undefined()
            return self._element(base, key.code, base.value[key.value], kind)
        value = self._environment.getitem(base.value, real(key))
        if not isinstance(value, PLAIN):
            raise Untraceable("a member found by a computed name")
        return self._let(
            f"get_item({base.code}, {self._code(key)})", value, base.sources, None, fresh=True
        )

    def _element(self, base: Symbol, index: str, value: Any, kind: type) -> Symbol:
        code = f"{base.code}[{index}]"
        return self._one_of(self._let(code, value, base.sources, str if kind is str else None))

    def _one_of(self, symbol: Symbol) -> Symbol:
        """Mark an element of the list of messages as one message."""
        if ALL_MESSAGES in symbol.sources:
            symbol.sources = frozenset((("message", symbol.code),))
        return symbol

    def _constant_member(self, base: Any, key: Any, item: bool) -> Any:
        is_key = item and isinstance(base, dict) and key in base
        has_methods = isinstance(base, (str, dict, list)) and isinstance(key, str)
        if has_methods and hasattr(base, key) and not is_key:
            return Method(base, key)
        function = self._environment.getitem if item else self._environment.getattr
        return function(base, key)

    def _named_member(self, base: Any, kind: type, key: str, item: bool) -> Any:
        if kind is dict:
            if hasattr(dict, key):
                if item and self._branch(f"{key!r} in {base.code}", key in base.value):
                    return self._let(f"{base.code}[{key!r}]", base.value[key], base.sources)
                return Method(base, key)
            value = base.value.get(key, self.program.names["U"])
            # A role does not count as text of the message: an answer may be just "assistant".
            sources = NO_SOURCE if key == "role" else base.sources
            return self._let(f"{base.code}.get({key!r}, U)", value, sources)
        if kind in (str, list, tuple, int, float, bool, NoneType):
            if hasattr(kind, key):
                return Method(base, key)
            return Undefined(name=key)
        if kind.__name__ == "generator" and not hasattr(kind, key):
            return Undefined(name=key)
        raise Untraceable(f"a member of a {kind.__name__}")

    def _attribute(self, namespace: Symbol, key: Any) -> Any:
        if not isinstance(key, str):
            raise Untraceable("a computed attribute of a namespace")
        attributes = self._frame.attributes
        key_pair = (namespace.code, key)
        if key_pair not in attributes:
            value = namespace.value.values.get(key, self.program.names["U"])
            source = ("namespace", namespace.code, key)
            attributes[key_pair] = self._let(
                f"{namespace.code}.values.get({key!r}, U)", value, frozenset((source,)), fresh=True
            )
        return attributes[key_pair]

    def _loop_member(self, loop: LoopVariable, key: Any) -> Any:
        index, total = loop.index, loop.total
        if key == "index0":
            return index
        if key == "length":
            return total
        if key == "first":
            return self._branch("i == 0", index.value == 0)
        if key == "last":
            return self._branch("i + 1 == n", index.value + 1 == total.value)
        if key == "index":
            return self._let("(i + 1)", index.value + 1, NO_SOURCE, int)
        if key == "revindex":
            return self._let("(n - i)", total.value - index.value, NO_SOURCE, int)
        if key == "revindex0":
            return self._let("(n - i - 1)", total.value - index.value - 1, NO_SOURCE, int)
        if key in ("previtem", "nextitem"):
            step = -1 if key == "previtem" else 1
            position = index.value + step
            exists = 0 <= position < total.value
            if not self._branch("i > 0" if step < 0 else "i + 1 < n", exists):
                return Undefined(name=key)
            code = f"items[i {'-' if step < 0 else '+'} 1]"
            return self._one_of(self._let(code, loop.items.value[position], loop.items.sources))
        if key in ("depth", "depth0"):
            return 1 if key == "depth" else 0
        if key == "cycle":
            return Method(loop, "cycle")
        raise Untraceable(f"loop.{key}")

    def _slice(self, base: Any, node: nodes.Slice) -> Any:
        if isinstance(base, Joined):
            base = self._text(base)
        bounds = [
            None if bound is None else self._value(bound)
            for bound in (node.start, node.stop, node.step)
        ]
        if not from_row(base, *bounds):
            return self._environment.getitem(base, slice(*bounds))
        kind = self._kind(base)
        for bound in bounds:
            if self._kind(bound) not in (int, NoneType):
                raise Untraceable("a slice with bounds that are not integers", line_of(node))
        if kind not in (str, list, tuple):
            raise Untraceable(f"a slice of a {kind.__name__}", line_of(node))
        code = ":".join("" if bound is None else self._code(bound) for bound in bounds)
        value = real(base)[slice(*map(real, bounds))]
        return self._let(f"{self._code(base)}[{code}]", value, sources_of(base), kind)

    # -- calls --------------------------------------------------------------------------------

    def _get_Call(self, node: nodes.Call) -> Any:
        target = self._value(node.node)
        if isinstance(target, Function):
            if target.name in self._names.macros:
                return self._call_macro(target.name, node)
            return self._call_function(target.name, node)
        if isinstance(target, Undefined):
            self._raise("an undefined value is called")
        if not isinstance(target, Method):
            if isinstance(target, Symbol) and self._kind(target) in (*PLAIN, Namespace):
                self._raise("a value is called")
            raise Untraceable("a call of a computed value", line_of(node))
        return self._call_method(target, *self._arguments(node, "method"))

    def _arguments(
        self, node: nodes.Call | nodes.Filter, what: str
    ) -> tuple[list[Any], dict[str, Any]]:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise Untraceable(f"a {what} called with * or **", line_of(node))
        args = [self._value(argument) for argument in node.args]
        return args, {str(pair.key): self._value(pair.value) for pair in node.kwargs}

    def _call_function(self, name: str, node: nodes.Call) -> Any:
        args, kwargs = self._arguments(node, "function")
        if name == "namespace":
            return self._namespace(args, kwargs)
        if name == "dict":
            if args:
                raise Untraceable("dict() with positional arguments", line_of(node))
            return self._mapping(list(kwargs.items()))
        if name == "range":
            return self._range(args, kwargs)
        if name == "raise_exception":
            self._raise("raise_exception")
        if from_row(*args, *kwargs.values()):
            raise Untraceable(f"{name} of a text of the row", line_of(node))
        function: Any = self._environment.globals[name]
        return function(*args, **kwargs)

    def _namespace(self, args: list[Any], kwargs: dict[str, Any]) -> Symbol:
        if args or any(key.startswith("_") for key in kwargs):
            raise Untraceable("a namespace with positional or underscore arguments")
        code = (
            "Namespace({" + "".join(f"{k!r}: {self._code(v)}, " for k, v in kwargs.items()) + "})"
        )
        value = Namespace({key: real(item) for key, item in kwargs.items()})
        symbol = self._let(code, value, NO_SOURCE, Namespace, fresh=True)
        for key, item in kwargs.items():
            if from_row(item):
                self._emit("set", symbol.code, key, self._code(item), owner_code(sources_of(item)))
            else:
                self._frame.attributes[symbol.code, key] = item
        return symbol

    def _range(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if kwargs:
            raise Untraceable("range() with named arguments")
        if not from_row(*args):
            return list(self.program.names["safe_range"](*args))
        if any(self._kind(value) is not int for value in args):
            raise Untraceable("range() of values that are not integers")
        code = f"list(safe_range({', '.join(map(self._code, args))}))"
        numbers = [real(value) for value in args]
        safe_range = self.program.names["safe_range"]
        return self._attempt(code, lambda: list(safe_range(*numbers)), NO_SOURCE, list)

    def _call_method(self, method: Method, args: list[Any], kwargs: dict[str, Any]) -> Any:
        owner, name = method.owner, method.name
        if isinstance(owner, LoopVariable):
            return self._cycle(owner, args)
        kind = self._kind(owner)
        values = [*args, *kwargs.values()]
        sources = frozenset().union(sources_of(owner), *(sources_of(value) for value in values))
        for value in values:
            self._code(value)
        if kind is str and name in TEXT_METHODS:
            result = TEXT_METHODS[name]
            self._bounded_method(owner, name, values)
        elif kind is dict and name in OBJECT_METHODS:
            result = None
        elif kind in (list, tuple) and name in LIST_METHODS:
            result = int
        else:
            raise Untraceable(f"the method {name} of a {kind.__name__}")

        def call() -> Any:
            options = {key: real(item) for key, item in kwargs.items()}
            return getattr(real(owner), name)(*map(real, args), **options)

        if not from_row(owner, *values):
            return call()
        arguments = [*map(self._code, args)]
        arguments += [f"{key}={self._code(item)}" for key, item in kwargs.items()]
        code = f"{self._code(owner)}.{name}({', '.join(arguments)})"
        if result in (bool, int) and name not in ("startswith", "endswith"):
            self._emit("charge", self._code(owner))
        if result is bool:
            return self._branch(code, call())
        if kind is dict and name != "get":
            return self._attempt(f"list({code})", lambda: list(call()), sources, list)
        return self._attempt(code, call, sources, result)

    def _bounded_method(self, owner: Any, name: str, values: list[Any]) -> None:
        """Raise `Untraceable` for calls that can multiply a text before it is counted."""
        if name == "replace":
            if from_row(*values) or any(isinstance(v, str) and len(v) > MAX_ARG for v in values):
                raise Untraceable("replace by a text of the row")
        elif name == "join":
            if from_row(owner) or len(real(owner)) > MAX_ARG:
                raise Untraceable("join with a text of the row")
        elif name == "format":
            template = owner if isinstance(owner, str) else "["
            if any(c in template for c in ".[!:") or template.count("{") > MAX_ARG:
                raise Untraceable("format with more than plain fields")
            if any(self._kind(value) not in (str, int, float, bool) for value in values):
                raise Untraceable("format of values that are not texts or numbers")

    def _cycle(self, loop: LoopVariable, args: list[Any]) -> Any:
        if not args:
            self._raise("no items for cycling given")
        if from_row(*args):
            raise Untraceable("loop.cycle of texts of the row")
        chosen = loop.index.value % len(args)
        for candidate in range(len(args)):
            if self._branch(f"i % {len(args)} == {candidate}", chosen == candidate):
                return args[candidate]
        raise AssertionError(chosen)

    # -- filters and tests --------------------------------------------------------------------

    def _get_Filter(self, node: nodes.Filter) -> Any:
        assert node.node is not None
        return self._filter(node, self._value(node.node))

    def _filter(self, node: nodes.Filter, value: Any) -> Any:
        name = node.name
        args, kwargs = self._arguments(node, "filter")
        if name in ("default", "d"):
            return self._default(value, args, kwargs)
        if name not in self._filters:
            raise Untraceable(f"the filter {name}", line_of(node))
        return self._apply(name, value, args, kwargs)

    def _default(self, value: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        names = ["default_value", "boolean"]
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        if set(options) - set(names) or len(args) > 2:
            self._raise("default() does not take these arguments")
        fallback = options.get("default_value", "")
        if self._undefined(value):
            return fallback
        if self._truth(options.get("boolean", False)) and not self._truth(value):
            return fallback
        return value

    def _apply(self, name: str, value: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        arguments = [*args, *kwargs.values()]
        symbolic = from_row(value, *arguments)
        if isinstance(value, Joined) and name == "string":
            return value
        if isinstance(value, Symbol) and name == "string" and self._kind(value) is str:
            return value
        if name == "tojson" and from_row(*arguments):
            raise Untraceable("tojson with computed options")
        if name in ("tojson", "indent") and any(
            (isinstance(item, int) and item > MAX_ARG)
            or (isinstance(item, str) and len(item) > MAX_ARG)
            for item in arguments
        ):
            raise Untraceable(f"{name} with a wide indent")
        if name in ("replace", "join", "indent") and any(
            from_row(item) or (isinstance(item, str) and len(item) > MAX_ARG) for item in arguments
        ):
            raise Untraceable(f"the filter {name} with a text of the row")
        for item in (value, *arguments):
            if isinstance(item, (LoopVariable, Method, Function)):
                raise Untraceable("a filter on a function")
        if isinstance(value, Symbol) and isinstance(value.value, Namespace):
            raise Untraceable("a filter on a namespace")
        typed = "length", "count", "trim", "upper", "lower", "first", "last"
        if symbolic and name in typed and isinstance(value, Symbol):
            self._kind(value)

        def call() -> Any:
            options = {key: real(item) for key, item in kwargs.items()}
            return self._filters[name](real(value), *map(real, args), **options)

        if not symbolic:
            result = call()
            if name in LAZY and not isinstance(result, PLAIN):
                return list(result)
            return result
        sources = frozenset().union(sources_of(value), *(sources_of(item) for item in arguments))
        codes = [self._code(value), *map(self._code, args)]
        codes += [f"{key}={self._code(item)}" for key, item in kwargs.items()]
        if name in ITERATING and self._sized(value):
            names = sum(len(item) for item in arguments if isinstance(item, str))
            self._emit("iterate", codes[0], 3 + (names >> 4))
        kind = FILTERS[name]
        if name in ("trim", "upper", "lower") and self._kind(value) is str and not arguments:
            method = "strip" if name == "trim" else name
            code = f"{codes[0]}.{method}()"
        elif name in ("length", "count"):
            code, sources = f"len({codes[0]})", NO_SOURCE
        else:
            code = f"F_{name}({', '.join(codes)})"
        if name in ("safe", "escape", "e", "reverse") and self._kind(value) not in (str, list):
            raise Untraceable(f"{name} of a value that is not a text or list")
        symbol = self._attempt(code, call, sources, kind, fresh=name in LAZY)
        return self._one_of(symbol) if name in ("first", "last", "min", "max") else symbol

    def _get_Test(self, node: nodes.Test) -> bool:
        value = self._value(node.node)
        if node.dyn_args is not None or node.dyn_kwargs is not None or node.kwargs:
            raise Untraceable("a test with named arguments", line_of(node))
        args = [self._value(argument) for argument in node.args]
        name = node.name
        if isinstance(value, (LoopVariable, Method, Function)):
            if name in ("defined", "undefined"):
                return name == "defined"
            raise Untraceable(f"a function tested for {name}")
        if name in ("defined", "undefined"):
            return self._undefined(value) is (name == "undefined")
        if name == "none":
            if not isinstance(value, Symbol):
                return value is None
            kind = self._frame.kinds.get(value.code)
            if kind is not None:
                return kind is NoneType
            if self._branch(f"{value.code} is None", value.value is None):
                self._frame.kinds[value.code] = NoneType
                return True
            return False
        if name in TYPE_TESTS:
            kind = self._kind(value)
            if kind not in PLAIN:
                raise Untraceable(f"a {kind.__name__} tested for {name}")
            return bool(TESTS[name](real(value)))
        if name not in VALUE_TESTS:
            raise Untraceable(f"the test {name}")
        if name in ("eq", "equalto", "==", "ne", "!=", "in") and len(args) == 1:
            sign = {"equalto": "eq", "==": "eq", "!=": "ne"}.get(name, name)
            return self._compare(sign, value, args[0])
        outcome = bool(TESTS[name](real(value), *map(real, args)))
        if not from_row(value, *args):
            return outcome
        if not name.isidentifier():
            raise Untraceable(f"the test {name}")
        codes = ", ".join(map(self._code, (value, *args)))
        return self._branch(f"T_{name}({codes})", outcome)
