"""The jinja2 environment in which foreign templates run: sandboxed, and every step charged.

`BoundedEnvironment` is jinja2's immutable sandbox, charging a `limits.Budget`. Calls, filters,
tests, operators and printed values have hooks in jinja2; the rest is charged by the code that a
template becomes (`_ChargingGenerator`): what can run more than once, the body of a loop, macro or
block, charges on entry what its own nodes cost, and comparisons, slices, keys, concatenations and
unpacked arguments go through the environment. The parsed tree stays as the template says it, and
what an honest template prints is the same with and without the charges.
"""

from __future__ import annotations

import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from functools import update_wrapper
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.exceptions
import jinja2.filters
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import markupsafe

from tokenmill.chat import limits

NO_CHANCE = "the template uses chance, which no recipe can pin"


class TemplateRaised(jinja2.TemplateError):
    """The template called raise_exception."""


# What evaluating one node costs besides its children, in the units of `limits`: work and size.
_COSTS: dict[type[jinja2.nodes.Node], tuple[int, int]] = {
    jinja2.nodes.Assign: (4, 0),
    jinja2.nodes.AssignBlock: (16, 192),
    jinja2.nodes.BinExpr: (12, 32),
    jinja2.nodes.Block: (24, 256),
    jinja2.nodes.Call: (24, 64),
    jinja2.nodes.CallBlock: (64, 1536),
    jinja2.nodes.Compare: (4, 0),
    jinja2.nodes.Concat: (24, 64),
    jinja2.nodes.Const: (0, 0),
    jinja2.nodes.Dict: (8, 256),
    jinja2.nodes.Filter: (8, 64),
    jinja2.nodes.FilterBlock: (16, 192),
    jinja2.nodes.For: (32, 512),
    jinja2.nodes.Getattr: (32, 64),
    jinja2.nodes.Getitem: (16, 64),
    jinja2.nodes.List: (4, 64),
    jinja2.nodes.Macro: (64, 1536),
    jinja2.nodes.NSRef: (12, 0),
    jinja2.nodes.Output: (4, 16),
    jinja2.nodes.Name: (5, 0),
    jinja2.nodes.Pair: (4, 200),
    jinja2.nodes.Test: (8, 0),
    jinja2.nodes.Tuple: (4, 64),
}
_STEP = (4, 16)  # entering a body, printing a value
_ITEM = (4, 96)  # what a list, a tuple or a call holds on to: it may be an object of its own


def _cost(node: jinja2.nodes.Node) -> tuple[int, int]:
    """What running a node once costs at most, without the bodies that charge for themselves."""
    kind = next((kind for kind in type(node).__mro__ if kind in _COSTS), None)
    work, size = _COSTS[kind] if kind is not None else (3, 0)
    if isinstance(node, jinja2.nodes.Macro | jinja2.nodes.Block):
        return work, size
    if isinstance(node, jinja2.nodes.If):
        tests = _costs([node.test, *(branch.test for branch in node.elif_)])
        branches = [_costs(b) for b in (node.body, *(e.body for e in node.elif_), node.else_)]
        most = (max(work for work, _ in branches), max(size for _, size in branches))
        return work + tests[0] + most[0], size + tests[1] + most[1]
    children = list(node.iter_child_nodes())
    if isinstance(node, jinja2.nodes.For):
        children = [node.iter, *node.else_]
    elif isinstance(node, jinja2.nodes.CallBlock):
        children = [node.call, *node.defaults]
    elif isinstance(node, jinja2.nodes.List | jinja2.nodes.Tuple | jinja2.nodes.Call):
        work, size = work + _ITEM[0] * len(children), size + _ITEM[1] * len(children)
    elif isinstance(node, jinja2.nodes.Output):
        work, size = work + _STEP[0] * len(children), size + _STEP[1] * len(children)
        literals = [child for child in children if isinstance(child, jinja2.nodes.Literal)]
        size += sum(
            limits.text_size(str(getattr(n, "data", getattr(n, "value", "")))) for n in literals
        )
    inner = _costs(children)
    return work + inner[0], size + inner[1]


def _costs(nodes: Sequence[jinja2.nodes.Node]) -> tuple[int, int]:
    each = [_cost(node) for node in nodes]
    return sum(work for work, _ in each), sum(size for _, size in each)


def _is_small(node: jinja2.nodes.Node) -> bool:
    """Whether comparing with this, or looking it up, cannot take long."""
    if isinstance(node, jinja2.nodes.Neg):
        node = node.node
    if isinstance(node, jinja2.nodes.Const):
        return not isinstance(node.value, str) or len(node.value) <= limits.SHORT
    if isinstance(node, jinja2.nodes.List | jinja2.nodes.Tuple | jinja2.nodes.Dict):
        return not node.items
    return False


def _is_small_list(node: jinja2.nodes.Node) -> bool:
    return (
        isinstance(node, jinja2.nodes.List | jinja2.nodes.Tuple)
        and len(node.items) <= limits.SHORT
        and all(isinstance(item, jinja2.nodes.Const) and _is_small(item) for item in node.items)
    )


class _ChargingGenerator(jinja2.compiler.CodeGenerator):
    """Writes the Python of a template, with charges where jinja2 has no hook for them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._entered: dict[int, tuple[int, int]] = {}  # bodies that charge on entry, by id
        self._wrapped: dict[int, str] = {}  # expressions that are handed to a call, by id

    def visit(self, node: jinja2.nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Write a node, in the call that it is wrapped in."""
        call = self._wrapped.get(id(node))
        if call is None:
            return super().visit(node, *args, **kwargs)
        self.write(call)
        super().visit(node, *args, **kwargs)
        self.write(")")
        return None

    def blockvisit(self, nodes: Any, frame: Any) -> None:
        """Write a body, charging first."""
        cost = self._entered.get(id(nodes))
        if cost is not None:
            self.writeline(f"environment.budget.charge({cost[0]}, {cost[1]})")
        super().blockvisit(nodes, frame)

    def _charge_entry(
        self, body: list[jinja2.nodes.Node], others: Sequence[jinja2.nodes.Node] = ()
    ) -> None:
        work, size = _costs([*body, *others])
        self._entered[id(body)] = work + _STEP[0], size + _STEP[1]

    def visit_Template(self, node: jinja2.nodes.Template, frame: Any = None) -> None:  # noqa: N802
        for block in node.find_all(jinja2.nodes.Block):
            self._charge_entry(block.body)
        super().visit_Template(node, frame)

    def macro_body(self, node: Any, frame: Any) -> Any:
        self._charge_entry(node.body, node.defaults)
        return super().macro_body(node, frame)

    def visit_For(self, node: jinja2.nodes.For, frame: Any) -> None:  # noqa: N802
        self._charge_entry(node.body)
        if node.test is not None:
            work, size = _cost(node.test)
            self._wrapped[id(node.test)] = (
                f"(environment.budget.charge({work + _STEP[0]}, {size}) or "
            )
        super().visit_For(node, frame)

    def visit_Const(self, node: jinja2.nodes.Const, frame: Any) -> None:  # noqa: N802
        if isinstance(node.value, int) and node.value.bit_length() > limits.LONGEST_NUMBER:
            self.fail("an enormous number", node.lineno)
        super().visit_Const(node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: Any) -> None:  # noqa: N802
        for pair in node.items:
            if not isinstance(pair.key, jinja2.nodes.Const):
                self._wrapped[id(pair.key)] = "environment.key("
        super().visit_Dict(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Any) -> None:  # noqa: N802
        escapes = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        for part in node.nodes:
            self._wrapped[id(part)] = f"environment.{'show_escaped' if escapes else 'finalize'}("
        super().visit_Concat(node, frame)

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: Any) -> None:  # noqa: N802
        if _is_small(node.arg) and not isinstance(node.arg, jinja2.nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        if isinstance(node.arg, jinja2.nodes.Slice):
            self.write("environment.slice(")
            places = [node.node, node.arg.start, node.arg.stop, node.arg.step]
        else:
            self.write("environment.at(")
            places = [node.node, node.arg]
        for place in places:
            if place is None:
                self.write("None")
            else:
                self.visit(place, frame)
            self.write(", ")
        self.write(")")

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: Any) -> None:  # noqa: N802
        """Each operand is evaluated once, and none after a comparison that fails."""
        left: jinja2.nodes.Expr | str = node.expr
        self.write("(")
        for place, operand in enumerate(node.ops):
            kept = None if operand is node.ops[-1] else self.temporary_identifier()
            if place:
                self.write(" and ")
            self._compare(left, operand, kept, frame)
            left = kept or operand.expr
        self.write(")")

    def _compare(
        self,
        left: jinja2.nodes.Expr | str,
        operand: jinja2.nodes.Operand,
        kept: str | None,
        frame: Any,
    ) -> None:
        membership = operand.op in ("in", "notin")
        plain = (
            _is_small_list(operand.expr)
            if membership
            else _is_small(operand.expr) or (not isinstance(left, str) and _is_small(left))
        )
        if plain:
            before, between, after = "", f" {jinja2.compiler.operators[operand.op]} ", ""
        elif membership:
            before = (
                "not environment.contains(" if operand.op == "notin" else "environment.contains("
            )
            between, after = ", ", ")"
        else:
            before, between, after = f"environment.compare({operand.op!r}, ", ", ", ")"
        self.write(before)
        if isinstance(left, str):
            self.write(left)
        else:
            self.visit(left, frame)
        self.write(between)
        if kept is not None:
            self.write(f"({kept} := ")
        self.visit(operand.expr, frame)
        self.write(")" * (kept is not None) + after)

    def signature(self, node: Any, frame: Any, extra_kwargs: Any = None) -> None:
        if node.dyn_args is not None:
            self._wrapped[id(node.dyn_args)] = "environment.spread("
        if node.dyn_kwargs is not None:
            self._wrapped[id(node.dyn_kwargs)] = "environment.spread("
        super().signature(node, frame, extra_kwargs)

    def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
        """Nothing but literals is worked out while compiling."""
        if not isinstance(node, jinja2.nodes.TemplateData | jinja2.nodes.Const):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: Any, frame: Any, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            finalize = finalize._replace(src="environment.show_escaped(")
        super()._output_child_pre(node, frame, finalize)


class _Fields(jinja2.sandbox.SandboxedFormatter):
    """`str.format` in the sandbox, each field priced when it is made."""

    longer = 1

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Price the field, then make it."""
        for _ in range(self.longer):
            limits.price_field(self._env.budget, value, format_spec)  # type: ignore[attr-defined]
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Price ``!r`` and the like, then do it."""
        if conversion is not None:
            self._env.budget.make(  # type: ignore[attr-defined]
                limits.QUOTED * self._env.budget.shown(value)  # type: ignore[attr-defined]
            )
        return super().convert_field(value, conversion)


class _EscapedFields(_Fields, markupsafe.EscapeFormatter):
    longer = limits.ESCAPED


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, charging everything that a template does to a budget."""

    code_generator_class = _ChargingGenerator
    intercepted_binops = frozenset(("*", "**", "%", "+", "-"))

    def __init__(self, extensions: Sequence[Any]) -> None:
        self.budget = limits.Budget()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=extensions,
            finalize=self.budget.show,
            optimized=False,  # constants would be worked out while compiling, and unpriced
        )
        for name, function in list(self.filters.items()):
            self.filters[name] = self.bounded(name, function)
        for name, function in list(self.tests.items()):
            self.tests[name] = self._bounded_test(name, function)
        self.filters["random"] = self._chance
        self.globals["lipsum"] = self._chance

    def _chance(self, *_: Any, **__: Any) -> Any:
        raise TemplateRaised(NO_CHANCE)

    # Filters and tests.

    def bounded(self, name: str, function: Any) -> Any:
        """A filter that is priced before it runs and measured after."""
        entry = limits.FILTERS.get(name)
        if entry is None:
            return self._unpriced(f"filter {name!r}")
        passes = jinja2.utils._PassArg.from_obj(function)
        skip = 0 if passes is None else 1
        budget, price, takes = self.budget, entry.price, entry.takes

        def run(*args: Any, **kwargs: Any) -> Any:
            if len(args) <= skip:
                return function(*args, **kwargs)  # which words the error
            value, rest = args[skip], args[skip + 1 :]
            budget.spend(limits.CALL_WORK)
            if takes == "text":
                if not isinstance(value, str):
                    value = str(budget.show(value))
            elif takes == "steps":
                value = budget.walk(value, limits.step_work(rest, kwargs))
            elif takes != "value":
                value = budget.listed(value)
            for argument in (*rest, *kwargs.values()) if rest or kwargs else ():
                if argument.__class__ not in limits.SCALARS and price is not limits.free:
                    budget.show(argument)
            before = budget.size
            seen = value if entry.attribute is None else self._keys(entry, value, rest, kwargs)
            price(budget, seen, rest, kwargs)
            if isinstance(value, markupsafe.Markup) or (
                passes is jinja2.utils._PassArg.eval_context and args[0].autoescape
            ):
                budget.make(limits.ESCAPED * (before - budget.size))
            return budget.measure(function(*args[:skip], value, *rest, **kwargs))

        def run_later(*args: Any, **kwargs: Any) -> Iterator[Any]:
            yield from run(*args, **kwargs)

        bounded: Any = run_later if takes == "list later" else run
        if passes is not None:
            bounded.jinja_pass_arg = passes
        return bounded

    def _keys(
        self, entry: limits.Filter, values: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a filter will look at of each value: itself, or the attribute that it names."""
        place = entry.attribute
        path = kwargs.get("attribute") if place is None or len(rest) <= place else rest[place]
        if path is None or not isinstance(values, limits.SIZED):
            return values
        paths = path.split(",") if isinstance(path, str) else [path]
        self.budget.spend(limits.step_work((path,), {}) * len(values))
        getters = [jinja2.filters.make_attrgetter(self, path) for path in paths]
        try:
            return [get(value) for value in values for get in getters]
        except jinja2.UndefinedError:
            return values  # the filter fails there, too, or puts its default

    def _bounded_test(self, name: str, function: Any) -> Any:
        """A test that is priced before it runs."""
        if name not in limits.TESTS:
            return self._unpriced(f"test {name!r}")
        if name == "in":
            return self.contains
        price = limits.TESTS[name]
        if price is None:
            return function
        passes = jinja2.utils._PassArg.from_obj(function)
        skip = 0 if passes is None else 1
        budget = self.budget

        def bounded(*args: Any, **kwargs: Any) -> Any:
            budget.spend(limits.CALL_WORK)
            if len(args) > skip:
                price(budget, args[skip], args[skip + 1 :], kwargs)
            return function(*args, **kwargs)

        if passes is not None:
            bounded.jinja_pass_arg = passes  # type: ignore[attr-defined]
        return bounded

    def _unpriced(self, what: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise jinja2.exceptions.SecurityError(f"the {what} has no price here")

        return refuse

    # What the code of a template calls.

    def show_escaped(self, value: Any) -> Any:
        """Charge a value that is about to become text and may be escaped."""
        self.budget.make(limits.ESCAPED * self.budget.shown(value))
        return value

    def key(self, value: Any) -> Any:
        """Charge a value that becomes a key of a dict."""
        limits.price_key(self.budget, value)
        return value

    def at(self, value: Any, argument: Any) -> Any:
        """Price ``value[argument]``, then look it up."""
        if argument.__class__ is not int:
            limits.price_key(self.budget, argument, value)
        return self.getitem(value, argument)

    def slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Price ``value[start:stop:step]``, then cut it."""
        limits.price_slice(self.budget, value, start, stop, step)
        return value[start:stop:step]

    def compare(self, symbol: str, left: Any, right: Any) -> Any:
        """Price a comparison, then make it."""
        if left.__class__ is not int and right.__class__ is not int:
            limits.price_comparison(self.budget, symbol, left, right)
        return limits.OPERATORS[symbol](left, right)

    def contains(self, value: Any, container: Any) -> bool:
        """Price ``value in container``, then find out."""
        if container.__class__ is not dict or value.__class__ is not str:
            container = limits.price_membership(self.budget, value, container)
        return value in container

    def spread(self, values: Any) -> Any:
        """Charge arguments that are unpacked."""
        values = self.budget.listed(values)
        if isinstance(values, limits.SIZED):
            self.budget.make(3 * limits.ENTRY * len(values))
        return values

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Price the operator, then run it."""
        if left.__class__ is str and right.__class__ is str and operator == "+":
            self.budget.make(limits.text_size(left) + limits.text_size(right))
            return left + right
        limits.price_operator(self.budget, operator, left, right)
        result = self.binop_table[operator](left, right)
        if isinstance(result, int) and result.bit_length() > limits.LONGEST_NUMBER:
            raise limits.LimitReached("the template makes an enormous number")
        return result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Price the call, then run it."""
        budget, kind = __self.budget, __obj.__class__
        if kind is types.BuiltinFunctionType or isinstance(
            getattr(__obj, "__self__", None), markupsafe.Markup
        ):
            return budget.measure(__self._call_method(__obj, args, kwargs))
        if kind not in _UNPRICED:
            name = getattr(__obj, "__name__", kind.__name__)
            if name in limits.CONSUMING and args:
                args = (budget.listed(args[0]), *args[1:])
            given = {k: v for k, v in kwargs.items() if k not in _HIDDEN}
            limits.FUNCTIONS.get(name, limits.price_shown)(budget, None, args, given)
        return budget.measure(super().call(__context, __obj, *args, **kwargs))

    def _call_method(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of a value of Python's own."""
        owner, name = method.__self__, method.__name__
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        kind = owner if isinstance(owner, type) else owner.__class__
        price = limits.METHODS.get(kind, {}).get(name)
        if price is None:
            raise jinja2.exceptions.SecurityError(f"{kind.__name__}.{name} has no price here")
        if name in limits.CONSUMING and args:
            args = (self.budget.listed(args[0]), *args[1:])
        before = self.budget.size
        price(self.budget, owner, args, kwargs)
        if kind is markupsafe.Markup:
            self.budget.make(limits.ESCAPED * (before - self.budget.size))
        return (self.wrap_str_format(method) or method)(*args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """``str.format`` as the sandbox has it, with a price for each field."""
        if not isinstance(value, types.MethodType | types.BuiltinMethodType):
            return None
        text = value.__self__
        if value.__name__ not in ("format", "format_map") or not isinstance(text, str):
            return None
        formatter = (
            _EscapedFields(self, escape=text.escape)
            if isinstance(text, markupsafe.Markup)
            else _Fields(self)
        )
        takes_mapping = value.__name__ == "format_map"

        def format_priced(*args: Any, **kwargs: Any) -> str:
            if takes_mapping:
                if kwargs or len(args) != 1:
                    raise TypeError("format_map() takes exactly one argument")
                (kwargs,), args = args, ()
            self.budget.charge(limits.STEP_WORK * len(text), limits.text_size(text))
            return type(text)(formatter.vformat(text, args, kwargs))

        return update_wrapper(format_priced, value)

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise what a template raised, without holding on to all that it had made until then.

        Errors are collected with their tracebacks, and each would hold its template's variables.
        """
        error = sys.exc_info()[1]
        if source is not None or error is None:
            super().handle_exception(source)
        traceback.clear_frames(error.__traceback__)
        context = sys._getframe(1).f_locals.get("ctx")  # of jinja2.Template.generate
        if isinstance(context, jinja2.runtime.Context):
            context.vars.clear()
        try:
            raise error.with_traceback(None) from None
        finally:
            del error, context

    # Compiling.

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        self.budget.refill(len(source))  # literals are shown while compiling
        return super()._parse(source, name, filename)

    def _compile(self, source: str, filename: str) -> types.CodeType:
        try:
            return super()._compile(source, filename)
        except (SyntaxError, MemoryError, RecursionError) as error:
            raise jinja2.TemplateError(f"Python cannot compile it: {error}") from error


_HIDDEN = frozenset(("_block_vars", "_loop_vars", "caller"))  # what jinja2 adds to a call
_UNPRICED = frozenset(  # these run the template's own code, which charges for itself
    (
        jinja2.runtime.BlockReference,
        jinja2.runtime.LoopContext,
        jinja2.runtime.Macro,
        jinja2.utils.Joiner,
        jinja2.runtime.Undefined,
    )
)
