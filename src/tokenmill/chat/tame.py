"""Whether a template may run where its steps are counted but not priced: in the fast engine.

minijinja stops a template after so many instructions (its fuel), but one instruction can make a
string of any length, and a value that is doubled in a loop is huge after forty. `is_tame` reads the
parsed template and says no when something in it could grow faster than the text it is given: a
name that is assigned from itself twice, a recursive macro, a repetition or padding by a computed
number. Such a template is rendered by the reference alone, which prices every step; nothing else
changes for it. Saying no too often costs time, saying yes too often would cost memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jinja2 import nodes

LARGEST_GROWTH = 4096  # how often one value may be copied on its way through assignments
# fmt: off
# None of these makes more than a few times what it is given.
FILTERS = {
    "abs", "attr", "bool", "capitalize", "count", "d", "default", "dictsort", "e", "escape",
    "first", "float", "groupby", "int", "items", "last", "length", "list", "lower", "map", "max",
    "min", "reject", "rejectattr", "reverse", "round", "safe", "select", "selectattr", "sort",
    "string", "sum", "title", "tokenmill_concat", "tokenmill_walk", "trim", "unique", "upper",
}
METHODS = {
    "append", "capitalize", "changed", "count", "cycle", "endswith", "find", "get", "index",
    "isalnum", "isalpha", "isdigit", "islower", "isnumeric", "isspace", "isupper", "items", "keys",
    "lower", "lstrip", "pop", "rfind", "rindex", "rstrip", "split", "splitlines", "startswith",
    "strip", "title", "upper", "values",
}
FUNCTIONS = {"raise_exception", "strftime_now", "range", "namespace", "dict", "caller"}
# fmt: on
FOREIGN = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Pow)


def is_tame(tree: nodes.Template) -> bool:
    """Whether every value stays in proportion to what the template is given."""
    if any(True for _ in tree.find_all(FOREIGN)):
        return False
    if not all(_small_factor(node) for node in tree.find_all(nodes.Mul)):
        return False
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    calls = tree.find_all((nodes.Filter, nodes.Call))
    if not all(_bounded_call(node, macros) for node in calls):
        return False
    return _grows_slowly(_Flow(tree))


def _small_factor(node: nodes.Mul) -> bool:
    return any(
        isinstance(side, nodes.Const) and isinstance(side.value, int) and abs(side.value) <= 64
        for side in (node.left, node.right)
    )


def _bounded_call(node: nodes.Expr, macros: set[str]) -> bool:
    """Whether a filter, method or function makes no more than a few times what it is given."""
    if isinstance(node, nodes.Filter):
        name, known = node.name, FILTERS
    elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        name, known = node.node.attr, METHODS
    elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
        name, known = node.node.name, FUNCTIONS | macros
    else:  # a generation block
        return isinstance(node, nodes.Call) and isinstance(node.node, nodes.ExtensionAttribute)
    arguments = [*node.args, *(keyword.value for keyword in node.kwargs)]
    if name in ("indent", "tojson"):
        return all(_small(argument) for argument in arguments)
    if name in ("replace", "join"):
        return all(_short(argument) for argument in arguments)
    return name in known


def _small(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and (
        not isinstance(node.value, int) or abs(node.value) <= 256
    )


def _short(node: nodes.Node) -> bool:
    """A literal, or a name of the loop's own making such as ``', '``: never a whole text."""
    return isinstance(node, nodes.Const) and len(str(node.value)) <= 256


def _small_results(node: nodes.Node) -> bool:
    """Steps whose result has no size: true or false, a number, a count."""
    if isinstance(node, nodes.Filter):
        return node.name in ("length", "count", "int", "float", "abs", "round", "bool")
    return isinstance(node, nodes.Test | nodes.Compare | nodes.Not)


Uses = dict[str, int]


class _Flow:
    """How often each name's value goes into which other name's, read off a template.

    Names that a macro takes or assigns are its own. A call of a macro counts once however often it
    is made: each call takes instructions of its own, which the engine counts. Of branches that
    exclude each other, the one that uses a name most counts.
    """

    def __init__(self, tree: nodes.Template) -> None:
        self.macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        self.assigned: list[tuple[str, Uses]] = []
        self._walk(tree.body, "", frozenset())

    def _walk(self, body: Sequence[nodes.Node], scope: str, own: frozenset[str]) -> None:
        """Collect assignments, each macro's in a scope of its own."""
        for node in body:
            if isinstance(node, nodes.Macro):
                inside = frozenset(arg.name for arg in node.args)
                inside |= set(_locals(node))
                self.assigned.append((node.name, self._uses(node.body, node.name, inside)))
                self._walk(node.body, node.name, inside)
                continue
            if isinstance(node, nodes.Assign | nodes.AssignBlock | nodes.For):
                value = (
                    [node.node] if isinstance(node, nodes.Assign)
                    else [node.iter] if isinstance(node, nodes.For) else node.body
                )  # fmt: skip
                uses = self._uses(value, scope, own)
                for target in _targets(node.target):
                    self.assigned.append((_scoped(target, scope, own), uses))
            if isinstance(node, nodes.With):
                for bound_to, bound in zip(node.targets, node.values, strict=True):
                    uses = self._uses([bound], scope, own)
                    self.assigned += [(_scoped(t, scope, own), uses) for t in _targets(bound_to)]
            if isinstance(node, nodes.CallBlock):
                self.assigned.append(("caller", self._uses(node.body, scope, own)))
            if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
                self._pass_arguments(node, scope, own)
            self._walk(list(node.iter_child_nodes()), scope, own)

    def _pass_arguments(self, call: nodes.Call, scope: str, own: frozenset[str]) -> None:
        macro = self.macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is None:
            return
        names = [argument.name for argument in macro.args]
        given = [*zip(names, call.args, strict=False), *((k.key, k.value) for k in call.kwargs)]
        for name, value in given:
            self.assigned.append((f"{macro.name}:{name}", self._uses([value], scope, own)))

    def _uses(self, body: Sequence[nodes.Node], scope: str, own: frozenset[str]) -> Uses:
        """Names whose values go into what these nodes make, and how often."""
        found: Counter[str] = Counter()
        for node in body:
            found.update(self._of(node, scope, own))
        return found

    def _of(self, node: nodes.Node, scope: str, own: frozenset[str]) -> Uses:
        if _small_results(node) or isinstance(node, nodes.Macro | nodes.Assign | nodes.AssignBlock):
            return {}
        if isinstance(node, nodes.Name):
            return {_scoped(node.name, scope, own): 1}
        if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
            return {_scoped(f"{node.node.name}.{node.attr}", scope, own): 1}
        if isinstance(node, nodes.Getitem):
            return self._of(node.node, scope, own)
        if isinstance(node, nodes.If):
            branches = [node.body, *(branch.body for branch in node.elif_), node.else_]
            return _most(self._uses(branch, scope, own) for branch in branches)
        if isinstance(node, nodes.CondExpr):
            sides = [side for side in (node.expr1, node.expr2) if side is not None]
            return _most(self._of(side, scope, own) for side in sides)
        if isinstance(node, nodes.Or | nodes.And):
            return _most(self._of(side, scope, own) for side in (node.left, node.right))
        if isinstance(node, nodes.For):
            each = {_scoped(name, scope, own) for name in _targets(node.target)}
            inner = self._uses(node.body, scope, own)
            return {name: n if name in each else 2 * n for name, n in inner.items()}
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
            if node.node.name in self.macros or node.node.name == "caller":
                return {node.node.name: 1}
            return self._uses([*node.args, *(k.value for k in node.kwargs)], scope, own)
        uses = self._uses(list(node.iter_child_nodes()), scope, own)
        return {name: 2 * n for name, n in uses.items()} if _lengthens(node) else uses


def _most(branches: Iterable[Uses]) -> Uses:
    found: Uses = {}
    for branch in branches:
        for name, count in branch.items():
            found[name] = max(found.get(name, 0), count)
    return found


def _scoped(name: str, scope: str, own: frozenset[str]) -> str:
    return f"{scope}:{name}" if name.split(".")[0] in own else name


def _locals(macro: nodes.Macro) -> Iterator[str]:
    for node in macro.find_all((nodes.Assign, nodes.AssignBlock, nodes.For)):
        if isinstance(node, nodes.Assign | nodes.AssignBlock | nodes.For):
            yield from (name for name in _targets(node.target) if "." not in name)


def _targets(target: nodes.Node) -> list[str]:
    if isinstance(target, nodes.NSRef):
        return [f"{target.name}.{target.attr}"]
    if isinstance(target, nodes.Name):
        return [target.name]
    return [name for inner in target.iter_child_nodes() for name in _targets(inner)]


def _lengthens(node: nodes.Node) -> bool:
    """Whether a step makes more than it is given: harmless once, not in a circle."""
    if isinstance(node, nodes.FilterBlock):
        node = node.filter
    if isinstance(node, nodes.Filter):
        name = node.name
    elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        name = node.node.attr
    else:
        return isinstance(node, nodes.Mul)
    if name == "replace":
        lengths = [len(str(a.value)) for a in node.args if isinstance(a, nodes.Const)]
        return lengths != sorted(lengths, reverse=True) or len(lengths) < 2
    return name in ("join", "tojson", "string", "indent")


def _grows_slowly(flow: _Flow) -> bool:
    """No name is made of itself twice over, and no chain of copies is long."""
    uses: dict[str, Uses] = {}
    for target, used in flow.assigned:
        known = uses.setdefault(target, {})
        for name, count in used.items():
            known[name] = max(known.get(name, 0), count)
    # An attribute is part of its object; an object that is handed on whole takes all of them along.
    bare = {name for used in uses.values() for name in used if "." not in name}
    for name in {n for n in (*uses, *(u for used in uses.values() for u in used)) if "." in n}:
        whole = name.split(".")[0]
        uses.setdefault(name, {}).setdefault(whole, 1)
        if whole in bare:
            uses.setdefault(whole, {}).setdefault(name, 1)
    reach = {name: _reachable(name, uses) for name in uses}
    recursive = {name for name in flow.macros if name in reach.get(name, ())}
    kept = {name for name in uses if _is_kept(name, recursive)}
    once: dict[str, int] = {}
    for target, used in flow.assigned:
        circle = {
            name: count
            for name, count in used.items()
            if (name == target or target in reach.get(name, ())) and name not in flow.macros
        }
        if sum(circle.values()) > 1:
            if target in kept or any(name in kept for name in circle) or set(circle) != {target}:
                return False
            once[target] = once.get(target, 1) * circle[target]
            if once[target] > LARGEST_GROWTH:
                return False
    counted: dict[str, int] = {}
    return all(_copies(name, uses, reach, counted) <= LARGEST_GROWTH for name in uses)


def _is_kept(name: str, recursive: set[str]) -> bool:
    """Whether a name's value outlives one round of a loop: a namespace's does, or a recursion's.

    A plain name that a loop assigns is forgotten after each round, so one statement cannot feed
    itself.
    """
    return "." in name or name in recursive or name.split(":")[0] in recursive


def _reachable(start: str, uses: dict[str, Uses]) -> set[str]:
    found: set[str] = set()
    pending = list(uses.get(start, ()))
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending.extend(uses.get(name, ()))
    return found


def _copies(
    name: str, uses: dict[str, Uses], reach: dict[str, set[str]], known: dict[str, int]
) -> int:
    """How often one given text can stand in a value; a circle adds, it does not multiply."""
    if name not in known:
        known[name] = 1
        below = sum(
            count * _copies(used, uses, reach, known)
            for used, count in sorted(uses.get(name, {}).items())
            if name not in reach.get(used, ())
        )
        known[name] = min(max(below, 1), LARGEST_GROWTH + 1)
    return known[name]
