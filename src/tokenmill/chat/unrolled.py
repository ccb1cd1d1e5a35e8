r"""Whole conversations as one path each: what most rows are, rendered and settled in one step.

Most rows of most data sets are built like many others (`outline`): user, assistant; system, user,
a call, its result, an answer. With the outline known, a template's loops unroll and nearly all of
its questions answer themselves. What is left is a few questions about the texts and a list of
fragments, and where turns begin and trained spans end is known as a fragment and a distance into
it::

    ("user", "assistant")
      "</think>" in text 1?  no  →  ['<|im_start|>user\n', text 0, '<|im_end|>\n<|im_start|>…\n', …]
                                     └──────── turn of user ─────────────────┘└ turn of assistant …

Arguments of calls and lists of tools are looked into by nobody here: they are printed as JSON, or
tools by a loop that looks at nothing else, which the general way's program runs.

`Unrolled` is asked first, for such rows, by `tokenmill.chat.render`. What it does not know goes the
general way (`traced`, then `turns`), and from what came out there it learns: a path is taken up
only where it gives the same text, turns and spans on the row it comes from, and only where nothing
about the spans could depend on the texts. It never changes an outcome.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isfinite
from types import NoneType
from typing import Any, NamedTuple, NoReturn

from jinja2 import Undefined, nodes

from tokenmill.chat.expressions import line_of
from tokenmill.chat.outline import Outline, with_leaves
from tokenmill.chat.program import (
    MIXED,
    MOST_SIZE,
    MOST_WORK,
    NOBODY,
    SCALARS,
    Inconsistent,
    Memo,
    Namespace,
    Refused,
    Run,
    Unlearned,
    run_loop,
    run_pure,
)
from tokenmill.chat.symbols import (
    NOTHING,
    Frame,
    Function,
    Joined,
    LoopVariable,
    Method,
    Symbol,
    Untraceable,
    class_of,
    from_row,
    parts_of,
    sources_of,
)
from tokenmill.chat.template import REASONING_KEYS, ReferenceTemplate, alias_reasoning
from tokenmill.chat.thinking import before_thinking
from tokenmill.chat.trace import Break, Continue, Tracer
from tokenmill.chat.traced import TracedTemplate
from tokenmill.chat.turns import (
    ATOM,
    Messages,
    Opening,
    Openings,
    Settled,
    TurnJudge,
    add_unlooped,
    check_printed,
    common_prefix,
    ends_of,
    pieces_of,
)
from tokenmill.errors import RowError

MOST_MESSAGES = 64  # of a conversation
MOST_OUTLINES = 512  # that are known
MOST_OPERATIONS = 100_000
WORTH_IT = 3  # rows of one outline before the next is learned from
LEAST_PRICE = 24  # steps of whatever makes a text (see `program`)
REFUSED = object()  # in place of a plan: the template refuses the conversation in this form
WORDS = {str, int, bool, NoneType}  # are in JSON what they are to whoever looks for them
MOST_CALLS = 20  # of macros from macros

_STRIPPED = re.compile(r"env\[(\d+)\](?:\.[lr]?strip\((?:|'\\n')\))?")
_WHOLE_MESSAGES = {"length", "count", "first", "last", "list", "reverse"}
_BY_ROLE = {"selectattr", "rejectattr"}
# What makes no more of a text than it is.
_FILTERS = {"trim", "length", "count", "string"}
_METHODS = {
    "strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "split", "rsplit", "splitlines",
    "partition", "rpartition", "find", "rfind", "index", "rindex", "count", "startswith",
    "endswith", "isspace",
}  # fmt: skip


class Leaf(Symbol):
    """A leaf of a conversation: whatever looks at it past the tracer would see something else."""

    def _seen(self, *_: Any) -> NoReturn:
        raise Untraceable("a message looked at as a whole")

    __eq__ = __ne__ = __bool__ = __len__ = __iter__ = __contains__ = _seen
    __str__ = __repr__ = __format__ = __getitem__ = __lt__ = __gt__ = _seen
    __hash__ = _seen


@dataclass(slots=True)
class SpanPlan:
    """Where turns end and trained spans lie in the fragments of one path.

    Attributes:
        roles: Of every message.
        most: Characters of a conversation up to which the general way surely takes it, too.
        ends: Of every message, the fragment before which its turn ends.
        spans: Of every assistant: its number, and fragment and distance of begin and end.
        checks: Assistants of whom is not known that all they say is printed.
        emptied: Whether null contents are given to the template as empty text.
    """

    roles: tuple[str, ...]
    most: int
    ends: list[int]
    spans: list[tuple[int, int, int, int, int]]
    checks: list[TurnCheck]
    emptied: bool


@dataclass(slots=True)
class TurnCheck:
    """What is to be looked for in an assistant's turn.

    Attributes:
        k: Its number.
        own: The fragments taken from its message.
        first: The first fragment of the turn.
        stop: The fragment behind the turn.
        arguments: Where all but odd arguments of calls are known to be printed: those arguments,
            as numbers of leaves.
    """

    k: int
    own: list[int]
    first: int
    stop: int
    arguments: list[int] | None


class Unroller(Tracer):
    """Takes conversations through a template whose roles are known, all in one block."""

    def follow(self, conversation: Known, *, null: bool) -> tuple[list[Any], Run]:
        """Take one conversation through the template.

        Args:
            conversation: The conversation.
            null: Whether contents that are null in the row are given as that, not as empty text.

        Returns:
            What it prints, texts of the template and symbols; and the same as a run.
        """
        block = self.program.block((conversation.outline, null))
        frame = self._frame = Frame(block, [{}])
        self.leaves: list[tuple[int, str]] = []
        """Of every leaf, the number of its message and its key."""

        def leaf(k: int, key: str, value: Any) -> Leaf:
            made = Leaf(f"env[{len(self.leaves)}]", value, frozenset((k,)))
            frame.kinds[made.code] = type(value)
            self.leaves.append((k, key))
            return made

        given = with_leaves(conversation.messages, conversation.nulls, leaf, null)
        given = alias_reasoning(given)
        self._messages: Any = given
        self._tools: Any = conversation.tools
        self._run = Run([], conversation.tools, conversation.memo)
        if conversation.tools:
            self._tools = Leaf("items", conversation.tools, NOTHING)
            frame.kinds["items"] = list
        self._owners = {id(message): k for k, message in enumerate(given)}
        self._fragments: list[Any] = []
        self._calls = 0
        self._body(self.tree.body)
        run = self._run
        run.out = [f if isinstance(f, str) else f.value for f in self._fragments]
        run.text = "".join(run.out)
        return self._fragments, run

    def finish(self, plan: str, fragments: Iterable[Any]) -> None:
        """End the path that was followed, with the name of its plan."""
        self._emit("leaf", plan, tuple(map(self._code, fragments)))

    def give_up(self) -> None:
        """End the path that was being followed: rows that come along it go the general way."""
        self._emit("leaf", "None", ())

    def refuse(self) -> None:
        """End the path that was being followed: the template refuses what comes along it."""
        self._emit("leaf", self.program.constant(REFUSED), ())

    def is_empty(self, code: str) -> bool:
        """Whether a text was found empty on the path that was followed."""
        return self._frame.facts.get(code) is False

    def unprinted(self, fragments: Iterable[Any]) -> bool:
        """Whether JSON was made on the path that is printed nowhere."""
        printed = {part.code for part in fragments if isinstance(part, Symbol)}
        made = self._frame.made
        return any(name not in printed for code, name in made.items() if "F_tojson" in code)

    def made_of(self, symbol: Symbol) -> str:
        """The code that a symbol's value comes from."""
        made = self._frame.made
        return next((code for code, name in made.items() if name == symbol.code), symbol.code)

    def _emit(self, *operation: Any) -> None:
        """Record an operation without counting work and size: `SpanPlan.most` bounds both."""
        if operation[0] == "let":
            operation = (*operation[:3], False, False)
        if operation[0] != "charge":
            super()._emit(*operation)

    # -- printing -----------------------------------------------------------------------------

    def _print(self, value: Any) -> None:
        for part in parts_of(value):
            if isinstance(part, Symbol):
                self._print_text(part)
            elif not isinstance(part, Undefined):
                if not isinstance(part, (str, int, float, type(None))):
                    raise Untraceable(f"printing a {type(part).__name__}")
                self._print_own(str(part))

    def _print_own(self, text: str) -> None:
        """Print a text of the template: one fragment with what it printed just before."""
        fragments, marks = self._fragments, self._run.marks
        fresh = bool(marks) and marks[-1][0] == len(fragments)
        if not text:
            return
        if fragments and isinstance(fragments[-1], str) and not fresh:
            fragments[-1] += text
        else:
            fragments.append(text)

    def _print_text(self, symbol: Symbol) -> None:
        if self._kind(symbol) is not str:
            raise Untraceable("printing something else than a text")
        run, place = self._run, len(self._fragments)
        if symbol.sources and symbol.sources != {run.me}:
            # Whose turn it is printed in follows from whether it says anything.
            self._ask(f"{symbol.code}.strip()", bool(symbol.value.strip()))
            owner = next(iter(symbol.sources)) if len(symbol.sources) == 1 else MIXED
            run.taken.append((place, owner))
        if symbol.sources:
            run.own.append(place)
        self._fragments.append(symbol)

    @contextmanager
    def _apart(self) -> Iterator[list[Any]]:
        """Print into a list of its own."""
        outside, self._fragments = self._fragments, []
        marks = len(self._run.marks)
        own, taken = len(self._run.own), len(self._run.taken)
        try:
            yield self._fragments
        finally:
            if len(self._run.marks) != marks:
                raise Untraceable("turns printed into a variable")
            del self._run.own[own:], self._run.taken[taken:]
            self._fragments = outside

    def _captured(self, body: list[nodes.Node]) -> Any:
        with self._apart() as parts:
            self._body_in_scope(body)
        return Joined(parts)

    def _do_CallBlock(self, node: nodes.CallBlock) -> None:
        raise Untraceable("a generation block", line_of(node))

    # -- loops, macros and namespaces: all in one block ---------------------------------------

    def _do_For(self, node: nodes.For) -> None:
        items = self._value(node.iter)
        if items is self._tools and isinstance(items, Leaf):
            self._print(self._loop_over_tools(node))
            return
        if from_row(items) or node.recursive:
            raise Untraceable("a loop over something of a text", line_of(node))
        self._refuse_keys(items)
        items = list(items)
        if node.test is not None:
            items = [item for item in items if self._passes(node, item)]
        if not items:
            self._body_in_scope(node.else_)
            return
        if isinstance(node.iter, nodes.Call) and self._names.says_something(node):
            raise Untraceable("a loop over numbers", line_of(node))
        owners = [self._owners.get(id(item), self._run.me) for item in items]
        stands = self._run.me == NOBODY and self._names.says_something(node)
        self._loop_over(node, items, owners, stands)

    def _loop_over_tools(self, node: nodes.For) -> Symbol:
        """What a loop over the tools prints that looks at nothing else but a few constants."""
        if node.test is not None or node.else_ or node.recursive or not self._names.pure(node):
            raise Untraceable("a loop over tools that looks at other things", line_of(node))
        values = [self._lookup(name) for name in self._names.reads(node)]
        values += [self._top(name) for name in self._names.macro_reads(node)]
        if any(type(value) not in (*SCALARS, Function) for value in values):
            raise Untraceable("a loop over tools that is handed something", line_of(node))
        loop = (id(node), False, tuple(class_of(value, False) for value in values))
        literal = self._names.literal(node)
        env = tuple(None if isinstance(value, Function) else value for value in values)
        codes = "".join(self._code(value) + "," for value in env)
        run = Run([], self._tools.value, self._run.memo)
        print_tools = self.program.names["print_tools"]
        return self._attempt(
            f"print_tools(R, {loop}, {literal}, ({codes}))",
            lambda: print_tools(run, loop, literal, env),
            NOTHING,
            str,
        )

    def _passes(self, node: nodes.For, item: Any) -> bool:
        assert node.test is not None
        with self._scope(None):
            self._assign(node.target, item)
            return self._truth(self._value(node.test))

    def _loop_over(
        self, node: nodes.For, items: list[Any], owners: list[int], stands: bool
    ) -> None:
        run, outside = self._run, self._run.me
        for place, item in enumerate(items):
            if stands and owners[place] != run.me:
                self._stand(owners[place])
            with self._scope(LoopVariable(place, len(items), items)):
                self._assign(node.target, item)
                if not self._iterated(node.body):
                    break
        if run.me != outside:
            self._stand(outside)

    def _iterated(self, body: list[nodes.Node]) -> bool:
        """One turn of a loop; whether there is another."""
        try:
            self._body(body)
        except Break:
            return False
        except Continue:
            pass
        return True

    def _stand(self, owner: int) -> None:
        self._run.me = owner
        self._run.marks.append((len(self._fragments), owner))

    @contextmanager
    def _scope(self, loop: LoopVariable | None) -> Iterator[None]:
        frame = self._frame
        around, frame.loop = frame.loop, loop
        frame.scopes.append({})
        depth = len(frame.scopes)
        try:
            yield
        finally:
            del frame.scopes[depth - 1 :]
            frame.loop = around

    def _loop_member(self, loop: LoopVariable, key: Any) -> Any:
        index, total, items = loop.index, loop.total, loop.items
        if key in ("previtem", "nextitem"):
            place = index + (1 if key == "nextitem" else -1)
            return items[place] if 0 <= place < total else Undefined(name=key)
        known = {
            "index0": index, "index": index + 1, "length": total, "first": index == 0,
            "last": index + 1 == total, "revindex": total - index, "revindex0": total - index - 1,
        }  # fmt: skip
        if key not in known:
            raise Untraceable(f"loop.{key}")
        return known[key]

    def _call_macro(self, name: str, node: nodes.Call) -> Any:
        with self._apart() as parts:
            self._print_macro(name, node)
        return Joined(parts)

    def _print_macro(self, name: str, node: nodes.Call) -> None:
        macro = self._names.macros[name]
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise Untraceable("a macro called with * or **", line_of(node))
        parameters = [parameter.name for parameter in macro.args]
        arguments = dict(zip(parameters, map(self._value, node.args), strict=False))
        arguments |= {keyword.key: self._value(keyword.value) for keyword in node.kwargs}
        if len(node.args) > len(parameters) or set(arguments) - set(parameters):
            raise Untraceable("a macro that does not take these arguments", line_of(node))
        frame = self._frame
        outside, frame.scopes = frame.scopes, [frame.scopes[0], {}]
        loop, frame.loop = frame.loop, None
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise Untraceable("macros that call themselves", line_of(node))
        try:
            self._bind(macro, arguments)
            self._body(macro.body)
        finally:
            self._calls -= 1
            frame.scopes, frame.loop = outside, loop

    def _namespace(self, given: list[Any], named: dict[str, Any]) -> Any:
        if given:
            raise Untraceable("a namespace made of something")
        return Namespace(dict(named))

    def _set_attribute(self, target: nodes.NSRef, value: Any) -> None:
        namespace = self._lookup(target.name)
        if not isinstance(namespace, Namespace):
            raise Untraceable("an attribute set on something else than a namespace")
        if isinstance(value, Joined) and sources_of(value):
            raise Untraceable("texts collected in a namespace", line_of(target))
        namespace.values[target.attr] = value

    def _member(self, base: Any, key: Any, *, item: bool) -> Any:
        if isinstance(base, Leaf) and not isinstance(base.value, str):
            raise Untraceable("a member of arguments or tools")
        if isinstance(base, Namespace):
            return base.values.get(key, self.program.names["U"])
        return super()._member(base, key, item=item)

    def _do_Assign(self, node: nodes.Assign) -> None:
        self._assign(node.target, self._value(node.node))

    # -- what is left to the general way ------------------------------------------------------

    def _refuse(self, why: str) -> NoReturn:
        raise Refused(why)  # whether the path ends here is for `Unrolled` to say

    def _refuse_keys(self, value: Any) -> None:
        """Refuse to go through a message's keys: rows differ in their order."""
        if id(value) in self._owners:
            raise Untraceable("the keys of a message")

    def _call_method(self, method: Method, given: list[Any], named: dict[str, Any]) -> Any:
        if method.name != "get":
            self._refuse_keys(method.owner)
        return super()._call_method(method, given, named)

    def _apply(self, name: str, value: Any, given: list[Any], named: dict[str, Any]) -> Any:
        if name not in ("length", "count"):
            self._refuse_keys(value)
        by_role = name in _BY_ROLE and given[:1] == ["role"]
        if name not in _WHOLE_MESSAGES and not by_role and _holds_text([value, *given]):
            raise Untraceable(f"the filter {name} on whole messages")
        as_json = name == "tojson" and isinstance(value, Leaf) and not isinstance(value.value, str)
        if from_row(value) and name not in _FILTERS and not as_json:
            raise Untraceable(f"the filter {name}")
        return super()._apply(name, value, given, named)

    def _bounded_method(self, owner: Any, name: str, values: list[Any]) -> None:
        if name not in _METHODS:
            raise Untraceable(f"the method {name}")

    def _text(self, joined: Joined) -> Symbol:
        parts = [part for part in joined.parts if not isinstance(part, str) or part]
        if len(parts) != 1 or not isinstance(parts[0], Symbol):
            raise Untraceable("texts put together")
        return parts[0]

    def _collection(self, items: list[Any], kind: type, opening: str, closing: str) -> Any:
        if from_row(*items):
            raise Untraceable("a list of texts")
        return kind(items)

    def _mapping(self, pairs: list[tuple[Any, Any]]) -> Any:
        if any(from_row(*pair) for pair in pairs):
            raise Untraceable("an object of texts")
        return dict(pairs)

    def _arithmetic(self, node: nodes.BinExpr) -> Any:
        value = super()._arithmetic(node)
        if isinstance(value, Symbol) and isinstance(value.value, str):
            raise Untraceable(f"a text and {node.operator}", line_of(node))
        return value


def _holds_text(values: Iterable[Any]) -> bool:
    """Whether texts of messages lie in these values."""
    for value in values:
        within = list(value.values()) if isinstance(value, dict) else value
        if isinstance(within, (list, tuple)) and (from_row(*within) or _holds_text(within)):
            return True
    return False


class Known(NamedTuple):
    """A conversation that went the general way.

    Attributes:
        outline: Its outline.
        leaves: Its leaves.
        messages: Its messages, null contents as empty text.
        nulls: `id` of the messages whose content is null in the row.
        tools: Its tools.
        memo: What the general way's program remembers of them.
    """

    outline: Outline
    leaves: list[Any]
    messages: Messages
    nulls: Collection[int]
    tools: list[Any] | None
    memo: Memo | None


class Unrolled:
    """Known whole conversations of one template.

    One of these is for conversations without tools, one for an empty list of tools, which is
    something else, and one for all others.

    Args:
        reference: The template.
        traced: The general way.
        judge: Settles renders of it.
    """

    def __init__(
        self, reference: ReferenceTemplate, traced: TracedTemplate, judge: TurnJudge
    ) -> None:
        self._judge = judge
        self._reference = reference
        self._traced = traced
        self._unroller: Unroller | None = None
        self._functions: dict[Outline, Callable[..., Any] | None] = {}
        self._met: dict[Outline, int] = {}
        self._run = Run([], None, None)  # which a path without tools leaves as it is
        self.differed: list[str] = []
        """What should never have been: paths that gave something else than the general way."""
        self.worth_learning = False
        """Whether the path of the row just asked for is not known and may be learned."""

    def settle(
        self,
        outline: Outline,
        leaves: list[Any],
        messages: Messages,
        trained: Sequence[int] | None,
        tools: list[Any] | None = None,
    ) -> Settled | None:
        """Render and settle a conversation; None where its path is not known.

        Raises:
            RowError: As `TurnJudge.settle`.
        """
        self.worth_learning = False
        try:
            function = self._functions[outline]
        except KeyError:
            self._meet(outline)
            return None
        if function is None:
            return None
        run = self._run
        if tools:
            tools, memo = self._traced.interned(tools)
            run = Run([], tools, memo)
        try:
            plan, out = function(run, None, 0, 0, tools, leaves)
        except Exception:  # a question not answered before, or one that the reference must answer
            self.worth_learning = True
            return None
        text = "".join(out)
        if plan is None or sum(map(len, leaves), len(text)) + run.size + 16 * run.work > plan.most:
            return None
        position = list(accumulate(map(len, out), initial=0))
        ends = [position[place] for place in plan.ends]
        spans = None
        if trained is not None:
            if plan.checks:
                self._check(plan, messages, leaves, out, text, position)
            spans = [
                (position[first] + begin, position[last] + end)
                for k, first, begin, last, end in plan.spans
                if k in trained
            ]
        return Settled(text, spans, plan.roles, ends, emptied=plan.emptied)

    def _meet(self, outline: Outline) -> None:
        """An outline that is not known: learned from once it has come a few times."""
        met = self._met.get(outline, 0) + 1
        if met >= WORTH_IT:
            self.worth_learning = True
        elif len(self._met) < 4 * MOST_OUTLINES:
            self._met[outline] = met

    def _check(
        self,
        plan: SpanPlan,
        messages: Messages,
        leaves: list[Any],
        out: list[str],
        text: str,
        position: list[int],
    ) -> None:
        last = plan.spans[-1][0]
        for check in plan.checks:
            if check.arguments is not None and all(
                _is_ordinary(leaves[place]) for place in check.arguments
            ):
                continue
            said = [out[place] for place in check.own]
            turn = text[position[check.first] : position[check.stop]]
            k = check.k
            check_printed(messages[k], k, said, text, k == last, self._judge.thinking, turn)

    def _print_tools(
        self, run: Run, loop: tuple[Any, ...], literal: int, env: tuple[Any, ...]
    ) -> str:
        """What a loop over the tools prints, by the general way's program."""
        body = self._traced.loop_over_tools(loop)
        tools = run.tools
        run.work += 2 + len(tools)
        run.size += literal * len(tools)
        first = len(run.out)
        try:
            run_pure(run, run_loop, body, tools, env)
            if any(run.ownership()):
                raise Unlearned
            return "".join(run.out[first:])
        finally:
            del run.out[first:]

    def learn(self, conversation: Known, run: Run, emptied: bool) -> None:
        """Take up the path of a conversation that went the general way.

        Args:
            conversation: The conversation.
            run: Its render.
            emptied: Whether it has null contents and was rendered with empty texts for them.
        """
        outline, messages = conversation.outline, conversation.messages
        if self._judge.generation or len(messages) > MOST_MESSAGES:
            self._functions[outline] = None
            return
        if self._unroller is None:
            self._unroller = self._reference.tracer(Unroller, add_generation_prompt=False)
            self._unroller.program.names["print_tools"] = self._print_tools
        unroller = self._unroller
        if len(self._functions) >= MOST_OUTLINES or unroller.program.size() > MOST_OPERATIONS:
            self._functions.setdefault(outline, None)
            return
        roles = tuple([message["role"] for message in messages])
        assistants = [k for k, role in enumerate(roles) if role == "assistant"]
        try:
            wanted = self._judge.settle(run, messages, assistants)
        except RowError:
            return
        wanted.roles, wanted.emptied = roles, emptied
        forms = [True, False] if conversation.nulls else [False]  # contents as null, as text
        taken = not emptied and bool(conversation.nulls)
        try:
            for null in forms[: forms.index(taken) + 1]:
                self._follow(conversation, null, run, taken=null is taken)
        except Inconsistent as error:
            self._distrust(outline, str(error))
            return
        for null in forms:
            unroller.program.block((outline, null))  # also where nothing is known of it yet
        functions = [unroller.program.compiled((outline, null)) for null in forms]
        self._functions[outline] = functions[0] if len(functions) == 1 else _either(*functions)
        found = self.settle(outline, conversation.leaves, messages, assistants, conversation.tools)
        if self.worth_learning or (found is not None and found != wanted):
            self._distrust(outline, f"{found} instead of {wanted}")

    def _follow(self, conversation: Known, null: bool, run: Run, *, taken: bool) -> None:
        """Grow the block of one form of a conversation.

        Args:
            conversation: The conversation.
            null: Whether null contents are given to the template as that.
            run: The render of the form that the template took.
            taken: Whether that is this form.
        """
        unroller = self._unroller
        assert unroller is not None
        try:
            fragments, unrolled = unroller.follow(conversation, null=null)
            plan = None
            if taken and not unroller.unprinted(fragments):
                plan = self._plan(fragments, unrolled, conversation.messages)
            if plan is None:
                unroller.give_up()
                return
            plan.emptied = bool(conversation.nulls) and not null
            plan.most = min(
                16 * (MOST_WORK - run.work) // max(run.reads, 1),
                MOST_SIZE // (run.work // LEAST_PRICE + 1) - len(run.text),
            )
            unroller.finish(unroller.program.constant(plan), fragments)
        except Inconsistent:
            raise
        except Refused as error:
            if not taken and self._is_refused(conversation, str(error)):
                unroller.refuse()
            else:
                unroller.give_up()
        except Exception:  # not unrolled: the general way says why
            unroller.give_up()

    def _is_refused(self, conversation: Known, why: str) -> bool:
        """Whether the reference refuses a conversation with its null contents, for this reason."""
        messages = [
            {**message, "content": None} if id(message) in conversation.nulls else message
            for message in conversation.messages
        ]
        try:
            self._reference.render(messages, conversation.tools)
        except RowError as error:
            return error.reason == "template_error" and why in error.message
        return False

    def _distrust(self, outline: Outline, why: str) -> None:
        self.differed.append(f"{outline}: {why}")
        self._functions[outline] = None

    # -- where everything lies ----------------------------------------------------------------

    def _plan(self, fragments: list[Any], run: Run, messages: Messages) -> SpanPlan | None:
        """Where turns and spans lie in a path's fragments; None where texts have a say in it."""
        literal = [fragment if isinstance(fragment, str) else "" for fragment in fragments]
        position = [0, *accumulate(map(len, run.out))]
        for (first, owner), (stop, _) in pairwise([*run.marks, (len(fragments), NOBODY)]):
            if owner >= 0 and first < stop and not any(literal[first:stop]):
                return None  # empty or not: that is up to a text
        pieces = pieces_of(run, position)
        if run.taken:
            add_unlooped(run, position, pieces)
        ends = ends_of(messages, pieces, range(len(fragments) + 1))  # in fragments
        roles = tuple([message["role"] for message in messages])
        plan = SpanPlan(roles, 0, ends, [], [], emptied=False)
        for k, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if k not in pieces or pieces[k][0] < 0:
                return None
            first, stop = pieces[k]
            if any(first <= place < stop for place, _ in run.taken):
                return None
            own = [place for place in run.own if first <= place < stop]
            words = own[-1] if own else first - 1
            tail = "".join(literal[words + 1 : stop])
            closer = tail.rstrip()
            lead = _until_text(literal[first:stop])
            opening = self._judge.openings.after(messages[k - 1]["role"] if k else None)
            skip = _given(opening, lead, self._judge.openings)
            if not closer or skip is None or not all(literal[words + 1 : stop]):
                return None
            place, end = stop, len(closer) - len(tail)
            whole = self._judge.turn_end == "turn"
            if whole and (k + 1 < len(messages) or not self._judge.openings.standing):
                if ends[k] < stop:
                    return None
                place, end = ends[k], 0
            plan.spans.append((k, first, skip, place, end))
            last = "assistant" not in roles[k + 1 :]
            arguments = self._unchecked(k, [fragments[place] for place in own], last)
            if arguments != []:
                plan.checks.append(TurnCheck(k, own, first, stop, arguments))
        return plan

    def _unchecked(self, k: int, printed: Iterable[Symbol], last: bool) -> list[int] | None:
        """Arguments that are left to look at where all else that an assistant says is printed.

        Its text and its last reasoning but for whitespace around them, the names of its calls, and
        their arguments as they are or as JSON; what `check_printed` looks for. None where
        something of it is not printed, or in another form.
        """
        unroller = self._unroller
        assert unroller is not None
        codes = {unroller.made_of(symbol) for symbol in printed}
        whole = {int(found[1]) for code in codes if (found := _STRIPPED.fullmatch(code))}
        arguments, said = [], True
        for place, (whose, key) in enumerate(unroller.leaves):
            code = f"env[{place}]"
            if whose != k:
                continue
            if key == "call.arguments" and f"F_tojson({code})" in codes:
                arguments.append(place)
            elif key in ("call.name", "call.arguments"):
                said = said and code in codes
            elif key == "content" or (last and key in REASONING_KEYS):
                said = said and (place in whole or unroller.is_empty(code))
        return arguments if said else None


def _either(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    """What the first form of a conversation gives, or the second where that is refused."""

    def function(*given: Any) -> Any:
        found = first(*given)
        return second(*given) if found[0] is REFUSED else found

    return function


def _is_ordinary(value: Any) -> bool:
    """Whether JSON prints all of a value as `check_printed` looks for it."""
    kind = type(value)
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str or (type(item) not in WORDS and not _is_ordinary(item)):
                return False
        return True
    if kind is list:
        return all(map(_is_ordinary, value))
    return kind in WORDS or (kind is float and isfinite(value))


def _until_text(literal: list[str]) -> str:
    """What a turn prints before anything of a message."""
    stop = next((place for place, text in enumerate(literal) if not text), len(literal))
    return "".join(literal[:stop])


def _given(opening: Opening, lead: str, openings: Openings) -> int | None:
    """How much of a turn is given to the model, None where that is up to the turn's text.

    As `TurnJudge` finds it, of what the turn prints before its text.
    """
    for prompt, skip in zip(opening.prompts, opening.skips, strict=True):
        if lead.startswith(prompt):
            return skip
        if prompt.startswith(lead):
            return None
    if not lead.strip():
        return 0
    starts = []
    for prompt in opening.prompts:
        place = lead.rfind(prompt[: before_thinking(prompt)].strip())
        if prompt.strip().startswith(lead.strip()):
            return None
        if place >= 0:
            common = common_prefix(prompt.lstrip(), lead[place:])
            if len(list(ATOM.finditer(lead[place + len(common) :]))) < 2:
                return None  # its last word may go on in the text
            starts.append(place + openings.untrained(common))
    if starts:
        return max(starts)
    if opening.silent:
        return 0
    known = openings.lead
    return len(known) if not opening.prompts and lead.startswith(known) else None
