"""Take a row through a template's syntax tree and record its path; render rows along known paths.

`Tracer` walks the tree that jinja2 parsed, with the row's values as symbols that know from which
message they were taken. What does not come from the row is computed by the reference's own
functions. An unknown statement, filter or use of a symbol raises `Untraceable` with its line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

import msgspec
from jinja2 import Undefined, nodes
from markupsafe import Markup

from tokenmill.chat.expressions import FUNCTIONS, Expressions, line_of
from tokenmill.chat.program import (
    HELD,
    ME,
    NOTHING,
    PLAIN,
    WHOLE,
    Beyond,
    Frame,
    Function,
    Inconsistent,
    Joined,
    LoopVariable,
    Memo,
    Method,
    Namespace,
    NotTraced,
    Refused,
    Rope,
    Run,
    Sources,
    Symbol,
    TemplateBlock,
    Unlearned,
    Untraceable,
    class_of,
    entered,
    from_row,
    owner_code,
    real,
    sources_of,
)
from tokenmill.chat.template import ReferenceTemplate, alias_reasoning, tojson
from tokenmill.errors import RowError

MOST_OPERATIONS = 200_000  # in a program; real templates with all their rows take a few thousand
MOST_TOOLS = 256  # lists of tools that are remembered; data sets have a few, or one per row


class Break(Exception):
    """The template leaves a loop."""


class Continue(Exception):
    """The template goes on with a loop's next item."""


class Tracer(Expressions):
    """Takes rows through one template and writes their paths into its program."""

    def __init__(self, reference: ReferenceTemplate, *, add_generation_prompt: bool) -> None:
        super().__init__(reference.names, reference.environment, tojson)
        self._tree = reference.tree
        self._variables = {**reference.variables, "add_generation_prompt": add_generation_prompt}
        self._owner_of: Callable[[int], Any] = lambda _: None
        self._out: list[str] = []

    # -- one row -----------------------------------------------------------------------------

    def learn(self, messages: list[Any], tools: Any) -> None:
        """Record the path of one row in the program."""
        self._owner_of = {id(message): k for k, message in enumerate(messages)}.get
        frame = self._frame = Frame(self.program.main, [{}])
        self._variables["messages"] = Symbol("R.messages", messages, frozenset((WHOLE,)))
        self._variables["tools"] = Symbol("R.tools", tools, NOTHING)
        self._out = []
        try:
            self._body(self._tree.body)
            frame.cursor.emit(("end",))
        except (Break, Continue):
            raise Untraceable("a break outside a loop") from None

    # -- statements ---------------------------------------------------------------------------

    def _body(self, body: list[nodes.Node]) -> None:
        if body:
            self._emit("body", *self._names.cost(body))
        for node in body:
            try:
                visit = getattr(self, f"_do_{type(node).__name__}", None)
                if visit is None:
                    raise Untraceable(f"a {type(node).__name__} statement")
                visit(node)
            except Untraceable as error:
                error.line = error.line or line_of(node)
                raise
            except (Break, Continue, Refused):
                raise
            except Exception as error:
                self._fail(error)

    def _do_Output(self, node: nodes.Output) -> None:
        for part in node.nodes:
            if isinstance(part, nodes.TemplateData):
                self._print(part.data)
            elif (
                isinstance(part, nodes.Call)
                and isinstance(part.node, nodes.Name)
                and part.node.name in self._names.macros
            ):
                self._run_macro(part.node.name, part, None)
            else:
                self._print(self._value(part))

    def _print(self, value: Any) -> None:
        if isinstance(value, Joined):
            for part in value.parts:
                self._print(part)
            return
        if isinstance(value, Symbol):
            self._print_symbol(value)
            return
        if isinstance(value, Undefined):
            return
        if not isinstance(value, (str, int, float, NoneType, list, dict, tuple)):
            raise Untraceable(f"printing a {type(value).__name__}")
        text = str(value)
        if text:
            self._out.append(text)
            self._emit("print", text)

    def _print_symbol(self, symbol: Symbol) -> None:
        kind = self._kind(symbol)
        if kind is Undefined:
            return
        if self._frame.kinds.get(symbol.code) is Rope:
            self._out.append(str(symbol.value))
            self._emit("rope", symbol.code)
            return
        sources = symbol.sources
        said = self._frame.facts.get((symbol.code, "is"))
        if said is not None and not sources:  # a role that has been asked for
            self._print(said)
            return
        if kind is Markup:
            symbol = self._let(f"str.__str__({symbol.code})", symbol.value, sources, str)
        elif kind is not str:
            if kind not in (int, float, bool, NoneType, list, tuple, dict):
                raise Untraceable(f"printing a {kind.__name__}")
            if kind in (int, float, bool, NoneType):
                # Numbers of any message count as printed by the one that the template is at.
                if kind is NoneType and sources:
                    self._emit("none")
                sources = frozenset((ME,)) if sources else NOTHING
            symbol = self._let(f"str({symbol.code})", str(symbol.value), sources, str)
        self._out.append(symbol.value)
        if not sources:
            self._emit("plain", symbol.code)
        elif sources == {ME}:
            self._emit("own", symbol.code)
        else:
            self._emit("taken", symbol.code, owner_code(sources))

    def _do_If(self, node: nodes.If) -> None:
        if self._truth(self._value(node.test)):
            self._body(node.body)
            return
        for other in node.elif_:
            if self._truth(self._value(other.test)):
                self._body(other.body)
                return
        self._body(node.else_)

    def _do_Assign(self, node: nodes.Assign) -> None:
        value = self._value(node.node)
        self._assign(node.target, value)
        frame = self._frame
        if frame.index_loop and isinstance(node.target, nodes.Name) and isinstance(value, Symbol):
            known = self._owner_of(id(value.value)) is not None
            if known and frame.kinds.get(value.code) in (None, dict):
                self._emit("stand", value.code)
                frame.stands = True
                frame.scopes[-1][node.target.name] = Symbol(
                    value.code, value.value, frozenset((ME,))
                )

    def _assign(self, target: nodes.Node, value: Any) -> None:
        if isinstance(target, nodes.Name):
            self._frame.scopes[-1][target.name] = value
        elif isinstance(target, nodes.NSRef):
            self._set_attribute(target, value)
        elif isinstance(target, nodes.Tuple):
            self._unpack(target, value)
        else:
            raise Untraceable(f"assigning to a {type(target).__name__}", line_of(target))

    def _set_attribute(self, target: nodes.NSRef, value: Any) -> None:
        namespace = self._lookup(target.name)
        if self._kind(namespace) is not Namespace or target.attr.startswith("_"):
            raise Untraceable("an attribute set on something else than a namespace")
        known = self._frame.known
        for key in [key for key in known if key[1] == target.attr]:
            del known[key]
        sources = sources_of(value)
        if isinstance(value, Joined):
            parts = [f"({self._code(p)}, {owner_code(sources_of(p))})" for p in value.parts]
            code, held = f"rope(R, {', '.join(parts)})", Rope(value.value)
            code = self._let(code, held, sources, Rope, grows=True, fresh=True).code
        else:
            code, held = self._code(value), real(value)
        self._emit("set", namespace.code, target.attr, code, owner_code(sources))
        namespace.value.values[target.attr] = held
        if not from_row(value):
            known[namespace.code, target.attr] = value
        elif isinstance(value, Symbol):
            known[namespace.code, target.attr] = Symbol(
                code, real(value), frozenset((("namespace", namespace.code, target.attr),))
            )

    def _unpack(self, target: nodes.Tuple, value: Any) -> None:
        count = len(target.items)
        if isinstance(value, Symbol):
            kind = self._kind(value)
            if kind not in (list, tuple):
                raise Untraceable(f"unpacking a {kind.__name__}", line_of(target))
            if not self._ask(f"len({value.code}) == {count}", len(value.value) == count):
                self._refuse("not enough or too many values to unpack")
            for index, name in enumerate(target.items):
                item = self._let(f"{value.code}[{index}]", value.value[index], value.sources)
                self._assign(name, item)
            return
        items = list(value)
        if len(items) != count:
            self._refuse("not enough or too many values to unpack")
        for name, item in zip(target.items, items, strict=True):
            self._assign(name, item)

    def _do_AssignBlock(self, node: nodes.AssignBlock) -> None:
        value: Any = self._captured(node.body)
        if node.filter is not None:
            value = self._apply_filters(node.filter, value)
        self._assign(node.target, value)

    def _do_FilterBlock(self, node: nodes.FilterBlock) -> None:
        self._print(self._apply_filters(node.filter, self._captured(node.body)))

    def _apply_filters(self, node: nodes.Filter, value: Any) -> Any:
        if node.node is not None:
            assert isinstance(node.node, nodes.Filter)
            value = self._apply_filters(node.node, value)
        return self._filter(node, value)

    def _captured(self, body: list[nodes.Node]) -> Any:
        frame = self._frame
        saved = frame.variable()
        self._emit("capture", saved)
        outside, self._out = self._out, []
        self._body_in_scope(body)
        text = "".join(self._out)
        self._out = outside
        name = frame.variable()
        self._emit("captured", saved, name)
        frame.kinds[name] = str
        sources: set[Any] = set()
        for node in body:
            for loaded in node.find_all(nodes.Name):
                if loaded.ctx == "load":
                    sources |= sources_of(self._lookup(loaded.name))
        return Symbol(name, text, frozenset(sources))

    def _do_CallBlock(self, node: nodes.CallBlock) -> None:
        attribute = node.call.node
        if not isinstance(attribute, nodes.ExtensionAttribute) or node.args:
            raise Untraceable("a call block", line_of(node))
        self._emit("generation")
        self._body_in_scope(node.body)
        self._emit("generation")

    def _do_With(self, node: nodes.With) -> None:
        values = [self._value(value) for value in node.values]
        self._frame.scopes.append({})
        for target, value in zip(node.targets, values, strict=True):
            self._assign(target, value)
        self._body(node.body)
        self._frame.scopes.pop()

    def _do_Scope(self, node: nodes.Scope) -> None:
        self._body_in_scope(node.body)

    def _do_Macro(self, node: nodes.Macro) -> None:
        if self._names.macros.get(node.name) is not node:
            raise Untraceable("a macro inside something else", line_of(node))

    def _do_Break(self, node: nodes.Node) -> None:
        raise Break

    def _do_Continue(self, node: nodes.Node) -> None:
        raise Continue

    # -- loops and macros ---------------------------------------------------------------------

    def _slots(self, node: nodes.Node, moved: bool) -> tuple[list[Any], list[str], tuple[int, ...]]:
        """Return what a block reads from outside: values, their code and their classes."""
        values = [self._lookup(name) for name in self._names.reads(node)]
        if any(isinstance(value, (LoopVariable, Method)) for value in values):
            raise Untraceable("a function or loop kept in a variable", line_of(node))
        values += [self._top(name) for name in self._names.macro_reads(node)]
        classes = tuple(class_of(value, moved) for value in values)
        return values, self._passed(values, moved), classes

    def _passed(self, values: list[Any], moved: bool) -> list[str]:
        """Return code for values passed to a block, then for the owners of `HELD` ones."""
        codes = [self._code(value) for value in values]
        return codes + [
            owner_code(sources_of(value)) for value in values if class_of(value, moved) == HELD
        ]

    def _enter(
        self, block: TemplateBlock, node: nodes.Node, values: list[Any], moved: bool
    ) -> Frame:
        """Return a frame for a block, with its values from outside as symbols."""
        names, inside = self._names.reads(node), entered(values, moved)
        top = zip(self._names.macro_reads(node), inside[len(names) :], strict=True)
        return Frame(block, [dict(top), dict(zip(names, inside, strict=False))])

    def _do_For(self, node: nodes.For) -> None:
        if node.recursive:
            raise Untraceable("a recursive loop", line_of(node))
        items = self._items(self._value(node.iter))
        if node.test is not None:
            items = self._filtered(node, items)
        messages = WHOLE in items.sources
        if not node.else_ or self._truth(items):
            self._loop(node, items, messages, isinstance(node.iter, nodes.Call))
        else:
            self._body_in_scope(node.else_)

    def _body_in_scope(self, body: list[nodes.Node]) -> None:
        self._frame.scopes.append({})
        self._body(body)
        self._frame.scopes.pop()

    def _items(self, value: Any) -> Symbol:
        if isinstance(value, Joined):
            value = self._text(value)
        if not isinstance(value, Symbol):
            items = Symbol(self.program.constant(list(value)), list(value), NOTHING)
            self._frame.kinds[items.code] = list
            return items
        kind = self._kind(value)
        if kind is list:
            return value
        if kind in (NoneType, int, float, bool):
            self._refuse(f"a {kind.__name__} is not iterable")
        return self._let(
            f"list({value.code})", list(value.value), value.sources, list, fresh=kind not in PLAIN
        )

    def _filtered(self, node: nodes.For, items: Symbol) -> Symbol:
        assert node.test is not None
        changed = {ref.name for ref in node.find_all(nodes.NSRef)}
        if changed & {name.name for name in node.test.find_all(nodes.Name)}:
            raise Untraceable("a loop whose test reads what its body sets", line_of(node))
        test = nodes.For(node.target, node.iter, [], [], None, False, lineno=line_of(node))
        kept = self._loop(test, items, WHOLE in items.sources, False, keep=node.test, key=node)
        frame = self._frame
        name = frame.variable()
        self._emit("let", name, "R.kept.pop()", True, False)
        frame.kinds[name] = list
        return Symbol(name, kept, items.sources)

    def _loop(
        self,
        node: nodes.For,
        items: Symbol,
        messages: bool,
        index_loop: bool,
        keep: nodes.Node | None = None,
        key: nodes.For | None = None,
    ) -> list[Any]:
        body = key or node
        outer = self._frame
        silent = keep is not None or not self._names.says_something(node)
        stands = messages and not outer.stands and not silent
        values, codes, classes = self._slots(body, stands)
        whose = class_of(items, False)
        name = (id(body), keep is not None, classes, outer.stands, whose)
        block = self.program.block(name)
        if keep is not None:
            self._emit("keep")
        kind = "silent" if silent else "scan" if outer.stands else "loop"
        item_sources: Sources
        if stands:
            item_sources = frozenset((ME,))
        elif messages:
            item_sources = frozenset((("message", "item"),))
        elif whose == HELD:
            item_sources = frozenset((("held", f"env[{len(codes)}]"),))
            codes = [*codes, owner_code(items.sources)]
        else:
            item_sources = frozenset((ME,)) if whose else NOTHING
        if not messages and keep is None and self._names.pure(node):
            kind = f"pure_{kind}"
        self._emit(kind, block.name, items.code, tuple(codes))
        kept = []
        owned = items.value
        for place, item in enumerate(owned):
            frame = self._enter(block, body, values, stands)
            frame.index_loop = index_loop and not outer.stands
            frame.stands = outer.stands or stands
            frame.scopes.append({})
            symbol = Symbol("item", item, item_sources)
            total = Symbol("n", len(owned), NOTHING)
            index = Symbol("i", place, NOTHING)
            every = Symbol("items", owned, items.sources)
            frame.kinds.update({"n": int, "i": int, "items": list})
            frame.loop = LoopVariable(index, total, every)
            self._frame = frame
            stop = False
            try:
                self._assign(node.target, symbol)
                if keep is not None:
                    self._emit("body", *self._names.cost([keep]))
                    if self._truth(self._value(keep)):
                        kept.append(item)
                        self._emit("kept")
                else:
                    self._body(node.body)
                frame.cursor.emit(("end",))
            except Break:
                frame.cursor.emit(("break",))
                stop = True
            except Continue:
                frame.cursor.emit(("continue",))
            except (Untraceable, Refused):
                raise
            except Exception as error:
                self._fail(error)
            finally:
                self._frame = outer
            if stop:
                break
        outer.known.clear()
        return kept

    def _run_macro(
        self, name: str, node: nodes.Call, variable: str | None
    ) -> tuple[nodes.Macro, list[Any]]:
        """Run a macro, which prints into a variable or where it is called.

        Returns:
            The macro, and the values that it was given or may read.
        """
        macro = self._names.macros[name]
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise Untraceable("a macro called with * or **", line_of(node))
        if self._names.takes_anything(macro):
            raise Untraceable("a macro with caller, varargs or kwargs", line_of(macro))
        given = [self._value(argument) for argument in node.args]
        named = {keyword.key: self._value(keyword.value) for keyword in node.kwargs}
        parameters = [parameter.name for parameter in macro.args]
        if len(given) > len(parameters) or set(named) - set(parameters[len(given) :]):
            self._refuse(f"macro {name!r} does not take these arguments")
        passed = {**dict(zip(parameters, given, strict=False)), **named}
        free_names = self._names.macro_reads(macro)
        values = [*map(passed.get, parameters), *(self._top(free) for free in free_names)]
        codes = self._passed(values, False)
        key = (
            id(macro),
            self._frame.stands,
            tuple(parameter in passed for parameter in parameters),
            tuple(class_of(value, False) for value in values),
        )
        frame = Frame(self.program.block(key), [{}, {}])
        frame.stands = self._frame.stands
        inside = entered(values, False)
        for index, free in enumerate(free_names, len(parameters)):
            frame.scopes[0][free] = frame.scopes[1][free] = inside[index]
        frame.scopes.append({})
        outer, self._frame = self._frame, frame
        try:
            arguments = zip(parameters, inside, strict=False)
            self._bind(macro, {name: value for name, value in arguments if name in passed})
            outer.cursor.emit(("macro", frame.cursor.block.name, tuple(codes), variable))
            self._body(macro.body)
            self._emit("end")
        except (Untraceable, Refused):
            raise
        except Exception as error:
            self._fail(error)
        finally:
            self._frame = outer
        outer.known.clear()
        return macro, values

    def _bind(self, macro: nodes.Macro, arguments: Mapping[str, Any]) -> None:
        parameters = [parameter.name for parameter in macro.args]
        defaults = dict(
            zip(parameters[len(parameters) - len(macro.defaults) :], macro.defaults, strict=True)
        )
        for parameter in parameters:
            if parameter in arguments:
                value = arguments[parameter]
            elif parameter in defaults:
                default = defaults[parameter]
                self._emit("body", *self._names.cost([default]))
                value = self._value(default)
            else:
                value = Undefined(name=parameter)
            self._frame.scopes[-1][parameter] = value

    def _call_macro(self, name: str, node: nodes.Call) -> Symbol:
        variable = self._frame.variable()
        outside, self._out = self._out, []
        macro, values = self._run_macro(name, node, variable)
        text = "".join(self._out)
        self._out = outside
        self._frame.kinds[variable] = str
        sources: Sources = frozenset().union(*map(sources_of, values))
        if self._names.reads_messages(macro):
            sources |= {WHOLE}
        return Symbol(variable, text, sources)

    # -- names --------------------------------------------------------------------------------

    def _lookup(self, name: str) -> Any:
        for scope in reversed(self._frame.scopes):
            if name in scope:
                return scope[name]
        return self._given(name)

    def _top(self, name: str) -> Any:
        """Return the value of a name at the top of the template, where macros look it up."""
        top = self._frame.scopes[0]
        return top[name] if name in top else self._given(name)

    def _given(self, name: str) -> Any:
        if name == "loop" and self._frame.loop is not None:
            return self._frame.loop
        if name in self._names.macros:
            return Function(name)
        if name in self._variables:
            return self._variables[name]
        if name in FUNCTIONS:
            return Function(name)
        if name in self._environment.globals:
            raise Untraceable(f"the function {name}")
        return Undefined(name=name)


# -- templates with their known paths ---------------------------------------------------------


class Differs(Exception):
    """A traced path and the reference printed different texts."""


class TracedTemplate:
    """One template and its known paths.

    A row whose path is known is rendered by the program. For a new path, the reference renders the
    row, the tracer records the path, and the program must then print the reference's text. After
    one difference all paths are dropped, and every row must be compared with the reference.
    """

    def __init__(
        self, reference: ReferenceTemplate, *, add_generation_prompt: bool = False
    ) -> None:
        self.reference = reference
        self.add_generation_prompt = add_generation_prompt
        self.learned = 0  # rows from which a path was learned
        self.differed = ""  # what was rendered when the program first differed from the reference
        self._tools: dict[bytes, tuple[list[Any], Memo]] = {}
        self._last_tools: tuple[list[Any] | None, bytes, tuple[list[Any], Memo]]
        self._last_tools = None, b"", ([], {})
        self._start()

    def _start(self) -> None:
        self._tracer: Tracer | NotTraced
        try:
            self._tracer = Tracer(self.reference, add_generation_prompt=self.add_generation_prompt)
        except Untraceable as error:
            self._tracer = error

    def ban(self, what: str) -> NotTraced:
        """Drop every path; from now on each row must be compared with the reference."""
        self.differed = self.differed or what
        self._start()
        return NotTraced("the traced template differed from the reference")

    def follow(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Run:
        """Render a conversation, learning its path where it is new.

        Raises:
            NotTraced: It cannot be traced.
            RowError: Its path is new, and the template refuses it.
        """
        tracer = self._tracer
        if isinstance(tracer, NotTraced):
            raise tracer.with_traceback(None)  # tracebacks of earlier rows would pile up
        given = alias_reasoning(messages)
        memo: Memo | None = None
        if tools:
            tools, memo = self._interned(tools)
        counter = self.reference.environment.counter
        counter.start(0)  # filters that others call by name count, such as map("upper")
        try:
            return tracer.program.run(given, tools, memo)
        except Unlearned:
            return self._learn(tracer, messages, given, tools)
        except Exception as error:
            raise _not_traced(error) from error

    def audit(self, run: Run, messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
        """Compare a run with the reference; on a difference, drop all paths and raise `Differs`."""
        try:
            text = self._rendered(messages, tools)
        except RowError:
            text = None
        if run.text != text:
            self.ban("a row that both rendered")
            raise Differs

    def compared(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Run:
        """Return a run that printed exactly what the reference prints for this conversation."""
        text = self._rendered(messages, tools)
        try:
            run = self.follow(messages, tools)
        except (NotTraced, RowError):
            if not self.differed:
                raise
        else:
            if run.text == text:
                return run
            self.ban("a row that both rendered")
        # A known path was wrong; trace this conversation alone.
        fresh = TracedTemplate(self.reference, add_generation_prompt=self.add_generation_prompt)
        run = fresh.follow(messages, tools)
        if run.text != text:
            raise self.ban("a row that both rendered")
        return run

    def _rendered(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        return self.reference.render(
            messages, tools, add_generation_prompt=self.add_generation_prompt
        )

    def _interned(self, tools: list[Any]) -> tuple[list[Any], Memo | None]:
        """Return the same list for equal tools, with what loops over it printed."""
        last, last_key, known = self._last_tools
        if tools is last:  # one row may be rendered in two forms
            return known
        try:
            key = msgspec.json.encode(tools)
        except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError):
            return tools, None  # not of JSON: a caller's own objects
        if key != last_key:  # data sets with one list of tools: not even hashed
            found = self._tools.get(key)
            if found is None:
                if len(self._tools) >= MOST_TOOLS:
                    self._tools.clear()
                found = self._tools[key] = (tools, {})
            known = found
        self._last_tools = tools, key, known
        return known

    def _learn(
        self,
        tracer: Tracer,
        messages: list[dict[str, Any]],
        given: list[dict[str, Any]],
        tools: list[Any] | None,
    ) -> Run:
        try:
            expected = self._rendered(messages, tools)
        except RowError as error:
            if error.reason == "template_error":
                self._learn_refusal(tracer, given, tools)
            raise
        if tracer.program.size() > MOST_OPERATIONS:
            self._start()
            assert isinstance(self._tracer, Tracer)
            tracer = self._tracer
        self.reference.environment.counter.start(0)
        try:
            tracer.learn(given, tools)
            run = tracer.program.run(given, tools)
        except (Inconsistent, Unlearned) as error:
            raise self.ban(f"one path led to two places: {error}") from error
        except Exception as error:
            raise _not_traced(error) from error
        self.learned += 1
        if run.text != expected:
            raise self.ban("a path that was just learned gave another text")
        return run

    def _learn_refusal(
        self, tracer: Tracer, given: list[dict[str, Any]], tools: list[Any] | None
    ) -> None:
        """Record where the template refuses a row, so that the next such row is not traced."""
        try:
            tracer.learn(given, tools)
        except Inconsistent as error:
            self.ban(f"one path led to two places: {error}")
        except Exception:  # it fails, as it should
            return
        else:
            self.ban("a row that the reference refuses")


def _not_traced(error: Exception) -> NotTraced:
    if isinstance(error, NotTraced):
        return NotTraced(error.cause, error.line)
    if isinstance(error, Refused):
        return NotTraced("the template fails on the row")
    if isinstance(error, Beyond):
        return NotTraced("a row near the limits of a render")
    return NotTraced(f"{type(error).__name__} on the path")
