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
from collections.abc import Iterator, Sequence

from jinja2 import nodes

LARGEST_GROWTH = 4096  # how often one value may be copied on its way through assignments
# fmt: off
# None of these makes more than a few times what it is given.
FILTERS = {
    "abs", "attr", "bool", "capitalize", "count", "d", "default", "dictsort", "e", "escape",
    "first", "float", "groupby", "int", "items", "last", "length", "list", "lower", "map", "max",
    "min", "reject", "rejectattr", "reverse", "round", "safe", "select", "selectattr", "sort", "string",
    "sum", "title", "tokenmill_concat", "tokenmill_walk", "trim", "unique", "upper",
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
    return _grows_slowly(list(_assignments(tree)))


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


def _assignments(tree: nodes.Template) -> Iterator[tuple[list[str], Counter[str]]]:
    """Every place that gives a name a value: the names, and the names the value is made of."""
    for node in tree.find_all((nodes.Assign, nodes.AssignBlock, nodes.For, nodes.Macro)):
        if isinstance(node, nodes.Assign):
            yield _targets(node.target), _names([node.node])
        elif isinstance(node, nodes.AssignBlock):
            yield _targets(node.target), _names(node.body)
        elif isinstance(node, nodes.For):
            yield _targets(node.target), _names([node.iter])
        elif isinstance(node, nodes.Macro):
            yield [node.name], _names(node.body)
    macros = {node.name: node for node in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            given = [*call.args, *(keyword.value for keyword in call.kwargs)]
            names = [argument.name for argument in macros[call.node.name].args]
            for name in names:
                yield [name], Counter(dict.fromkeys(_names(given), 1))


def _targets(target: nodes.Node) -> list[str]:
    if isinstance(target, nodes.NSRef):
        return [f"{target.name}.{target.attr}"]
    if isinstance(target, nodes.Name):
        return [target.name]
    return [name for inner in target.iter_child_nodes() for name in _targets(inner)]


def _names(body: Sequence[nodes.Node]) -> Counter[str]:
    """Names used in a body, those inside its loops counted twice."""
    found: Counter[str] = Counter()
    for node in body:
        if isinstance(node, nodes.Test | nodes.Compare):
            continue  # gives true or false, whatever its size
        if isinstance(node, nodes.Name):
            found[node.name] += 1
        elif isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
            found[f"{node.node.name}.{node.attr}"] += 1
            found[node.node.name] += 0
        else:
            inner = _names(list(node.iter_child_nodes()))
            if isinstance(node, nodes.For) or _lengthens(node):
                inner = Counter({name: 2 * count for name, count in inner.items()})
            found += inner
    return found


def _lengthens(node: nodes.Node) -> bool:
    """Whether a step makes more than it is given: harmless once, not in a circle."""
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


def _grows_slowly(assignments: list[tuple[list[str], Counter[str]]]) -> bool:
    """No name is made of itself twice over, and no chain of copies is long."""
    uses: dict[str, set[str]] = {}
    for targets, used in assignments:
        for target in targets:
            uses.setdefault(target, set()).update(used)
    reach = {name: _reachable(name, uses) for name in uses}
    growth: dict[str, int] = {}
    for targets, used in assignments:
        for target in targets:
            again = sum(n for name, n in used.items() if target in reach.get(name, ()))
            again += used[target] if target not in reach.get(target, ()) else 0
            if again > 1:
                return False
            growth[target] = max(growth.get(target, 1), sum(used.values()))
    return all(_copies(name, uses, growth, reach, {}) <= LARGEST_GROWTH for name in uses)


def _reachable(start: str, uses: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    pending = list(uses.get(start, ()))
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending.extend(uses.get(name, ()))
    return found


def _copies(
    name: str,
    uses: dict[str, set[str]],
    growth: dict[str, int],
    reach: dict[str, set[str]],
    known: dict[str, int],
) -> int:
    if name not in uses:
        return 1
    if name not in known:
        known[name] = 1  # a cycle adds, it does not multiply: that was shown before
        below = [
            _copies(used, uses, growth, reach, known)
            for used in sorted(uses[name])
            if name not in reach.get(used, ())
        ]
        known[name] = min(growth[name] * max(below, default=1), LARGEST_GROWTH + 1)
    return known[name]
