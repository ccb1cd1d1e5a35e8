"""An oracle for masks: the owner of each character of a render, from the template's own loop.

It shares no code with the product. Every ``for`` loop is rewritten to print a private-use character
when it begins and ends one of the messages, compared by identity. These sentinels show which
message's turn printed each character. A render that differs without its sentinels is not checked.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

Span = tuple[int, int]
Run = tuple[int, int, int]
Message = dict[str, Any]

NO_OWNER = -1
INSIDE = -10  # the innermost of several messages, before `_share` has decided
SHARED = -2  # printed by a loop over an assistant inside another message's step: neither's turn
PLANES = (0x100000, 0xF0000)  # sentinels come from the first plane that no text of the row uses
LEAVE = 0x4000
GENERATION = 0x8000
PLAIN: dict[str, CodeType] = {}  # compiled sources, for any variables and date
WITH_SENTINELS: dict[str, CodeType] = {}  # the same with sentinels in loops
REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateRaised(Exception):
    """The template does not render this conversation."""


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012 - jinja2's own spelling

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("_around"), [], [], body)
        return block.set_lineno(line)

    def _around(self, caller: Any) -> str:
        opening, closing = self.environment.generation  # type: ignore[attr-defined]
        return f"{opening}{caller()}{closing}"


class _Namespace(jinja2.utils.Namespace):
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"{name!r} on a namespace")


class _Dict:
    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(message)


def environment(date: str) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    result = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    day = datetime.datetime.strptime(date, "%Y-%m-%d")
    result.filters["tojson"] = _tojson
    result.globals["raise_exception"] = _raise
    result.globals["strftime_now"] = day.strftime
    result.globals["dict"] = _Dict()
    result.globals["namespace"] = _Namespace
    result.generation = ("", "")  # type: ignore[attr-defined]
    return result


class _Loops(jinja2.visitor.NodeTransformer):
    """Rewrites every loop so that it prints a sentinel when it begins and ends an item.

    A loop over numbers that looks messages up by its own variable (``messages[i]``) begins that
    message. A step that appends to a text (``ns.out = ns.out ~ …``) adds the sentinels there.
    """

    def __init__(self) -> None:
        self.count = 0
        self.stack: list[str] = []

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802 - jinja2's
        self.count += 1
        own = f"oracle_item_{self.count}"
        self.stack.append(own)
        body = [part for child in node.body for part in self._listed(self.visit(child))]
        self.stack.pop()
        node.else_ = [part for child in node.else_ for part in self._listed(self.visit(child))]
        line = node.lineno
        names = [node.target] if isinstance(node.target, jinja2.nodes.Name) else []
        if isinstance(node.target, jinja2.nodes.Tuple):
            names = [n for n in node.target.items if isinstance(n, jinja2.nodes.Name)]
        items = [jinja2.nodes.Name(n.name, "load", lineno=line) for n in names]
        looked_up = sorted(
            {
                found.node.name
                for child in node.body
                for found in [*child.find_all(jinja2.nodes.Getitem)]
                if isinstance(found.node, jinja2.nodes.Name)
                and isinstance(found.arg, jinja2.nodes.Name)
                and found.arg.name in {n.name for n in names}
            }
        )
        lists = [jinja2.nodes.Name(name, "load", lineno=line) for name in looked_up]
        item = _filter(
            jinja2.nodes.List(items, lineno=line),
            "oracle_item",
            [jinja2.nodes.List(lists, lineno=line)],
            line,
        )
        taken = jinja2.nodes.Assign(jinja2.nodes.Name(own, "store", lineno=line), item, lineno=line)
        node.body = [taken, _sentinel_output(own, "oracle_enter", line), *body]
        node.body.append(_sentinel_output(own, "oracle_leave", line))
        return node

    def visit_Assign(self, node: jinja2.nodes.Assign) -> jinja2.nodes.Node:  # noqa: N802
        added, target, line = node.node, node.target, node.lineno
        if not self.stack or not isinstance(added, (jinja2.nodes.Concat, jinja2.nodes.Add)):
            return node
        enter = [_sentinel_output(own, "oracle_enter", line).nodes[0] for own in self.stack]
        leave = [
            _sentinel_output(own, "oracle_leave", line).nodes[0] for own in reversed(self.stack)
        ]
        if isinstance(added, jinja2.nodes.Concat) and _is_target(added.nodes[0], target):
            added.nodes[1:] = [*enter, *added.nodes[1:], *leave]
            return node
        terms = _terms(added)
        if _is_target(terms[0], target) and len(terms) > 1:
            owners = [jinja2.nodes.Name(own, "load", lineno=line) for own in self.stack]
            node.node = _filter(
                jinja2.nodes.List(terms, lineno=line),
                "oracle_add",
                [jinja2.nodes.List(owners, lineno=line)],
                line,
            )
        return node

    def _listed(self, node: Any) -> list[Any]:
        return node if isinstance(node, list) else [] if node is None else [node]

    def _leaving(self, node: jinja2.nodes.Node) -> Any:
        if not self.stack:
            return node
        return [_sentinel_output(self.stack[-1], "oracle_leave", node.lineno), node]

    def visit_Continue(self, node: jinja2.nodes.Continue) -> Any:  # noqa: N802
        return self._leaving(node)

    def visit_Break(self, node: jinja2.nodes.Break) -> Any:  # noqa: N802
        return self._leaving(node)


def _is_target(value: Any, target: Any) -> bool:
    if isinstance(target, jinja2.nodes.NSRef):
        named = isinstance(value, jinja2.nodes.Getattr) and isinstance(
            value.node, jinja2.nodes.Name
        )
        return named and (value.node.name, value.attr) == (target.name, target.attr)
    if isinstance(target, jinja2.nodes.Name):
        return isinstance(value, jinja2.nodes.Name) and value.name == target.name
    return False


def _terms(value: Any) -> list[Any]:
    if isinstance(value, jinja2.nodes.Add):
        return [*_terms(value.left), value.right]
    return [value]


def _filter(node: Any, name: str, arguments: list[Any], line: int) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, arguments, [], None, None, lineno=line)


def _sentinel_output(own: str, name: str, line: int) -> jinja2.nodes.Output:
    item = jinja2.nodes.Name(own, "load", lineno=line)
    return jinja2.nodes.Output([_filter(item, name, [], line)], lineno=line)


@dataclass(slots=True)
class Owned:
    """A render, the owners of its characters, and the spans of its generation blocks.

    ``runs`` are start, end and owner, one after the other over the whole text; neighbours differ.
    """

    text: str
    runs: list[Run]
    generation: list[Span]

    @property
    def owner(self) -> list[int]:
        return [who for start, end, who in self.runs for _ in range(start, end)]

    def before(self, position: int) -> int:
        return next((who for start, end, who in self.runs if start < position <= end), NO_OWNER)

    def end(self) -> int:
        return max((end for _, end, who in self.runs if who != NO_OWNER), default=0)


class OracleTemplate:
    def __init__(self, source: str, variables: Mapping[str, Any], date: str = "2026-11-15") -> None:
        self.source = source
        self.given = dict(variables)
        self.variables = {"documents": None, **variables}
        self.has_generation_blocks = bool(re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source))
        self._plain_environment = environment(date)
        if source not in PLAIN:
            PLAIN[source] = self._plain_environment.compile(source)
        self._plain = jinja2.Template.from_code(
            self._plain_environment, PLAIN[source], self._plain_environment.make_globals(None)
        )
        self._environment = environment(date)
        self._environment.filters["oracle_item"] = self._item
        self._environment.filters["oracle_add"] = self._add
        self._environment.filters["oracle_enter"] = lambda m: self._sentinel(m, 0)
        self._environment.filters["oracle_leave"] = lambda m: self._sentinel(m, LEAVE)
        self._indices: dict[int, int] = {}
        self._plane = PLANES[0]
        self.usual: dict[str, list[str]] = {}

    @cached_property
    def _with_sentinels(self) -> jinja2.Template:
        if self.source not in WITH_SENTINELS:
            tree = _Loops().visit(self._environment.parse(self.source))
            tree.set_environment(self._environment)
            WITH_SENTINELS[self.source] = self._environment.compile(tree)
        return jinja2.Template.from_code(
            self._environment, WITH_SENTINELS[self.source], self._environment.make_globals(None)
        )

    def _item(self, items: list[Any], lists: list[Any]) -> Any:
        found = {id(item): item for item in items if id(item) in self._indices}
        if not found:
            for item in items:
                for values in lists:
                    if type(item) is int and isinstance(values, (list, tuple)):
                        near = values[item] if -len(values) <= item < len(values) else None
                        if id(near) in self._indices:
                            found[id(near)] = near
        return next(iter(found.values())) if len(found) == 1 else None

    def _add(self, terms: list[Any], owners: list[Any]) -> Any:
        total, *rest = terms
        if all(isinstance(term, str) for term in terms):
            total += "".join(self._sentinel(owner, 0) for owner in owners)
            rest += [self._sentinel(owner, LEAVE) for owner in reversed(owners)]
        for term in rest:
            total = total + term
        return total

    def _sentinel(self, item: Any, offset: int) -> str:
        index = self._indices.get(id(item))
        return "" if index is None else chr(self._plane + offset + index)

    def _run(
        self, template: jinja2.Template, messages: Any, tools: Any, add_generation_prompt: bool
    ) -> str:
        try:
            return template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except Exception as error:  # a template can raise whatever Python can
            raise TemplateRaised(f"{type(error).__name__}: {error}") from error

    def plain(
        self, messages: list[Message], tools: Any = None, *, add_generation_prompt: bool = False
    ) -> str:
        return self._run(self._plain, aliased(messages), tools, add_generation_prompt)

    def owned(
        self, messages: list[Message], tools: Any = None, *, add_generation_prompt: bool = False
    ) -> Owned | None:
        """Return the render with its owners; None if sentinels change the output."""
        plain = self.plain(messages, tools, add_generation_prompt=add_generation_prompt)
        for self._plane in PLANES:
            if not re.search(f"[{chr(self._plane)}-{chr(self._plane + 0xFFFF)}]", plain):
                break
        else:
            return None
        ours = [dict(message) for message in aliased(messages)]  # none of them twice
        self._indices = {id(message): index for index, message in enumerate(ours)}
        marks = (chr(self._plane + GENERATION), chr(self._plane + GENERATION + 1))
        self._environment.generation = marks  # type: ignore[attr-defined]
        try:
            found = self._read(self._run(self._with_sentinels, ours, tools, add_generation_prompt))
        except TemplateRaised:
            return None
        if found is None or found.text != plain:
            return None
        found.runs = _shared(found.runs, messages)
        return found

    def _read(self, marked: str) -> Owned | None:
        pieces: list[str] = []
        runs: list[Run] = []
        generation: list[Span] = []
        opened: list[int] = []
        stack: list[int] = []
        at = 0
        first, last = self._plane, self._plane + GENERATION + 1
        for part in re.split(f"([{chr(first)}-{chr(last)}])", marked):
            code = ord(part) - first if len(part) == 1 else -1
            if code < 0 or code > last - first:
                pieces.append(part)
                who = stack[-1] if stack else NO_OWNER
                who = who if len(set(stack)) < 2 else INSIDE - who
                runs.append((at, at + len(part), who))
                at += len(part)
            elif code == GENERATION:
                opened.append(at)
            elif code == GENERATION + 1:
                if not opened:
                    return None
                generation.append((opened.pop(), at))
            elif code < LEAVE:
                stack.append(code)
            elif not stack or stack.pop() != code - LEAVE:
                return None
        if stack or opened:
            return None
        return Owned("".join(pieces), runs, sorted(s for s in generation if s[0] < s[1]))


def _shared(runs: list[Run], messages: list[Message]) -> list[Run]:
    """Assign text inside two messages' steps to the inner one, unless that is an assistant."""
    merged: list[Run] = []
    for start, end, who in runs:
        if who <= INSIDE:
            inner = INSIDE - who
            who = SHARED if messages[inner].get("role") == "assistant" else inner
        if merged and merged[-1][2] == who:
            start = merged.pop()[0]
        if start < end:
            merged.append((start, end, who))
    return merged


def aliased(messages: list[Message]) -> list[Message]:
    result = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None}
        reasoning = next((message[k] for k in REASONING if k in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        result.append(message)
    return result
