"""The jinja2 environment in which foreign templates run: sandboxed, and every step charged.

`BoundedEnvironment` is jinja2's immutable sandbox whose loops, calls, filters, operators and
printed values are charged to a `limits.Budget`. Loops, `~` and block assignments have no hook of
their own in jinja2, so the parsed template is rewritten (`_Charges`): a loop walks through a
filter that counts, a concatenation becomes a filter that prices it first. What an honest template
prints is the same with and without the charges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from tokenmill.chat import limits

NO_CHANCE = "the template uses chance, which no recipe can pin"


class TemplateRaised(jinja2.TemplateError):
    """The template called raise_exception."""


class _Charges(jinja2.visitor.NodeTransformer):
    """Rewrites a parsed template so that loops and concatenations charge the budget."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802 - jinja2's name
        self.generic_visit(node)
        printed = sum(len(data.data) for data in node.find_all(jinja2.nodes.TemplateData))
        step = jinja2.nodes.Const(printed, lineno=node.lineno)
        node.iter = _filter(node.iter, "tokenmill_walk", [step], node.lineno)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        values = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return _filter(values, "tokenmill_concat", [], node.lineno)


def _filter(
    node: jinja2.nodes.Node, name: str, arguments: list[jinja2.nodes.Expr], line: int
) -> jinja2.nodes.Expr:
    return jinja2.nodes.Filter(node, name, arguments, [], None, None, lineno=line)


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, charging every loop, call, filter, operator and output to a budget."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def __init__(self, extensions: Sequence[Any]) -> None:
        self.budget = limits.Budget()
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self.budget.show
        )
        self.generation_marks = ("", "")
        for name, function in list(self.filters.items()):
            self.filters[name] = self.bounded(name, function)
        self.filters["random"] = self._chance
        self.filters["tokenmill_walk"] = self.budget.walk
        self.filters["tokenmill_concat"] = self._concat
        self.globals["lipsum"] = self._chance

    def _chance(self, *_: Any, **__: Any) -> Any:
        raise TemplateRaised(NO_CHANCE)

    def _concat(self, values: list[Any]) -> str:
        for value in values:
            self.budget.show(value)
        return "".join(map(str, values))

    def bounded(self, name: str, function: Any) -> Any:
        """A filter that is priced before it runs and measured after."""
        passes = jinja2.utils._PassArg.from_obj(function)
        skip = 0 if passes is None else 1
        budget = self.budget

        def bounded(*args: Any, **kwargs: Any) -> Any:
            value = args[skip] if len(args) > skip else None
            rest = (*args[skip + 1 :], *kwargs.values())
            if name == "join":
                if not isinstance(value, (str, list, tuple, dict)) and value is not None:
                    value = list(budget.walk(value))
                    args = (*args[:skip], value, *args[skip + 1 :])
                limits.price_join(budget, str(rest[0]) if rest else "", value)
            elif name in ("string", "tojson", "pprint", "format", "urlencode", "e", "escape"):
                for shown in (value, *rest):
                    budget.show(shown)
                if name == "format" and isinstance(value, str):
                    limits.price_format(value, rest)
                elif name == "tojson":
                    limits.refuse_wide(rest)
            elif name in ("batch", "slice"):
                limits.refuse_wide(rest)
            elif isinstance(value, str):
                limits.price_text_method(budget, value, name, rest)
            return budget.measure(function(*args, **kwargs))

        if passes is not None:
            bounded.jinja_pass_arg = passes  # type: ignore[attr-defined]
        return bounded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Price the operator, then run it."""
        self.budget.spend(1)
        limits.price_operator(self.budget, operator, left, right)
        result = super().call_binop(context, operator, left, right)
        return self.budget.measure(result) if isinstance(result, int) else result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Price the call, then run it."""
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            name = getattr(method, "__name__", "")
            limits.price_text_method(__self.budget, owner, name, (*args, *kwargs.values()))
        return __self.budget.measure(super().call(__context, __obj, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        self.budget.refill(0)  # constant expressions run while compiling
        tree = super()._parse(source, name, filename)
        rewritten: jinja2.nodes.Template = _Charges().visit(tree)
        rewritten.set_environment(self)
        return rewritten
