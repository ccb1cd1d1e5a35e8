"""Record the path of a row through a template's syntax tree; render rows along recorded paths.

`Tracer` walks jinja2's syntax tree. The row's values are symbols with the messages that they come
from; the reference's own functions compute everything else. An unknown statement, filter or use of
a symbol raises `Untraceable` with its line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import compress
from types import NoneType
from typing import Any

import msgspec
from jinja2 import Undefined, nodes
from markupsafe import Markup

from tokenmill.chat.expressions import FUNCTIONS, Expressions, line_of
from tokenmill.chat.program import (
    ALL_MESSAGES,
    BOUND,
    CURRENT_MESSAGE,
    NO_SOURCE,
    PLAIN,
    AnnotatedStr,
    Frame,
    Function,
    Inconsistent,
    Joined,
    LimitExceeded,
    LoopVariable,
    Memo,
    Method,
    Namespace,
    NotTraced,
    PathMiss,
    Run,
    Sources,
    Symbol,
    TemplateBlock,
    TemplateFails,
    TemplateRaised,
    Untraceable,
    class_of,
    entered,
    from_row,
    owner_code,
    real,
    sources_of,
)
from tokenmill.chat.template import ReferenceTemplate, normalize_messages, tojson
from tokenmill.errors import RowError

MAX_OPERATIONS = 200_000  # in a program; real templates with all their rows take a few thousand
MAX_TOOLS = 256  # cached lists of tools; datasets have a few, or one per row


class Break(Exception):
    """The template leaves a loop."""


class Continue(Exception):
    """The template continues with a loop's next item."""


class Tracer(Expressions):
    """Traces rows through one template and records their paths in its program."""

    def __init__(self, reference: ReferenceTemplate, *, add_generation_prompt: bool) -> None:
        super().__init__(reference.names, reference.environment, tojson)
        self._tree = reference.tree
        self._variables = {**reference.variables, "add_generation_prompt": add_generation_prompt}
        self._owner_of: Callable[[int], Any] = lambda _: None
        self._out: list[str] = []

    # -- one row -----------------------------------------------------------------------------

    def record(self, messages: list[Any], tools: Any) -> None:
        """Record the path of one row in the program."""
        self._owner_of = {id(message): k for k, message in enumerate(messages)}.get
        frame = self._frame = Frame(self.program.main, [{}])
        self._variables["messages"] = Symbol("R.messages", messages, frozenset((ALL_MESSAGES,)))
        self._variables["tools"] = Symbol("R.tools", tools, NO_SOURCE)
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
            except (Break, Continue, TemplateRaised):
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
        if self._frame.kinds.get(symbol.code) is AnnotatedStr:
            self._out.append(str(symbol.value))
            self._emit("annotated", symbol.code)
            return
        sources = symbol.sources
        literal = self._frame.facts.get((symbol.code, "is"))
        if literal is not None and not sources:  # a role that a condition has compared
            self._print(literal)
            return
        if kind is Markup:
            symbol = self._let(f"str.__str__({symbol.code})", symbol.value, sources, str)
        elif kind is not str:
            if kind not in (int, float, bool, NoneType, list, tuple, dict):
                raise Untraceable(f"printing a {kind.__name__}")
            if kind in (int, float, bool, NoneType):
                # A number from any message counts as printed by the current message.
                sources = frozenset((CURRENT_MESSAGE,)) if sources else NO_SOURCE
            symbol = self._let(f"str({symbol.code})", str(symbol.value), sources, str)
        self._out.append(symbol.value)
        if not sources:
            self._emit("plain", symbol.code)
        elif sources == {CURRENT_MESSAGE}:
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
        if (
            (frame.index_loop or frame.index_scan)
            and isinstance(node.target, nodes.Name)
            and isinstance(value, Symbol)
        ):
            is_message = self._owner_of(id(value.value)) is not None
            if not is_message or frame.kinds.get(value.code) not in (None, dict):
                return
            if frame.index_scan:
                self._emit("other", value.code)
            else:
                self._emit("enter", value.code)
                frame.is_at_message = True
                frame.scopes[-1][node.target.name] = Symbol(
                    value.code, value.value, frozenset((CURRENT_MESSAGE,))
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
            raise Untraceable("an attribute set on a value that is not a namespace")
        attributes = self._frame.attributes
        for key in [key for key in attributes if key[1] == target.attr]:
            del attributes[key]
        sources = sources_of(value)
        if isinstance(value, Joined):
            parts = [f"({self._code(p)}, {owner_code(sources_of(p))})" for p in value.parts]
            code, new_value = f"annotate(R, {', '.join(parts)})", AnnotatedStr(value.value)
            code = self._let(code, new_value, sources, AnnotatedStr, grows=True, fresh=True).code
        else:
            code, new_value = self._code(value), real(value)
        self._emit("set", namespace.code, target.attr, code, owner_code(sources))
        namespace.value.values[target.attr] = new_value
        if not from_row(value):
            attributes[namespace.code, target.attr] = value
        elif isinstance(value, Symbol):
            attributes[namespace.code, target.attr] = Symbol(
                code, real(value), frozenset((("namespace", namespace.code, target.attr),))
            )

    def _unpack(self, target: nodes.Tuple, value: Any) -> None:
        count = len(target.items)
        if isinstance(value, Symbol):
            kind = self._kind(value)
            if kind not in (list, tuple):
                raise Untraceable(f"unpacking a {kind.__name__}", line_of(target))
            if not self._branch(f"len({value.code}) == {count}", len(value.value) == count):
                self._raise("not enough or too many values to unpack")
            for index, name in enumerate(target.items):
                item = self._let(f"{value.code}[{index}]", value.value[index], value.sources)
                self._assign(name, item)
            return
        items = list(value)
        if len(items) != count:
            self._raise("not enough or too many values to unpack")
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
            raise Untraceable("a nested macro", line_of(node))

    def _do_Break(self, node: nodes.Node) -> None:
        raise Break

    def _do_Continue(self, node: nodes.Node) -> None:
        raise Continue

    # -- loops and macros ---------------------------------------------------------------------

    def _slots(self, node: nodes.Node, moved: bool) -> tuple[list[Any], list[str], tuple[Any, ...]]:
        """Return the values that a block reads from outside, their code and their classes."""
        values = [self._lookup(name) for name in self._names.reads(node)]
        if any(isinstance(value, (LoopVariable, Method)) for value in values):
            raise Untraceable("a function or loop stored in a variable", line_of(node))
        values += [self._top(name) for name in self._names.macro_reads(node)]
        classes = tuple((class_of(value, moved), self._is_namespace(value)) for value in values)
        return values, self._passed(values, moved), classes

    def _is_namespace(self, value: Any) -> bool:
        return isinstance(value, Symbol) and self._frame.kinds.get(value.code) is Namespace

    def _passed(self, values: list[Any], moved: bool) -> list[str]:
        """Return code for values passed to a block, then for the owners of `BOUND` ones."""
        codes = [self._code(value) for value in values]
        return codes + [
            owner_code(sources_of(value)) for value in values if class_of(value, moved) == BOUND
        ]

    def _enter(
        self, block: TemplateBlock, node: nodes.Node, values: list[Any], moved: bool
    ) -> Frame:
        """Return a frame for a block, with its values from outside as symbols."""
        names, inside = self._names.reads(node), entered(values, moved)
        top = zip(self._names.macro_reads(node), inside[len(names) :], strict=True)
        frame = Frame(block, [dict(top), dict(zip(names, inside, strict=False))])
        namespaces = map(self._is_namespace, values)
        frame.kinds |= {symbol.code: Namespace for symbol in compress(inside, namespaces)}
        return frame

    def _do_For(self, node: nodes.For) -> None:
        if node.recursive:
            raise Untraceable("a recursive loop", line_of(node))
        items = self._items(self._value(node.iter))
        if node.test is not None:
            items = self._filtered(node, items)
        messages = ALL_MESSAGES in items.sources
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
            items = Symbol(self.program.constant(list(value)), list(value), NO_SOURCE)
            self._frame.kinds[items.code] = list
            return items
        kind = self._kind(value)
        if kind is list:
            return value
        if kind in (NoneType, int, float, bool):
            self._raise(f"a {kind.__name__} is not iterable")
        return self._let(
            f"list({value.code})", list(value.value), value.sources, list, fresh=kind not in PLAIN
        )

    def _filtered(self, node: nodes.For, items: Symbol) -> Symbol:
        assert node.test is not None
        changed = {ref.name for ref in node.find_all(nodes.NSRef)}
        if changed & {name.name for name in node.test.find_all(nodes.Name)}:
            raise Untraceable("a loop whose test reads what its body sets", line_of(node))
        test = nodes.For(node.target, node.iter, [], [], None, False, lineno=line_of(node))
        passed = self._loop(
            test, items, ALL_MESSAGES in items.sources, False, test=node.test, key=node
        )
        frame = self._frame
        name = frame.variable()
        self._emit("let", name, "R.kept.pop()", True, False)
        frame.kinds[name] = list
        return Symbol(name, passed, items.sources)

    def _loop(
        self,
        node: nodes.For,
        items: Symbol,
        messages: bool,
        index_loop: bool,
        test: nodes.Node | None = None,
        key: nodes.For | None = None,
    ) -> list[Any]:
        body = key or node
        outer = self._frame
        silent = test is not None or not self._names.has_output(node)
        is_at_message = messages and not outer.is_at_message and not silent
        values, codes, classes = self._slots(body, is_at_message)
        owner_class = class_of(items, False)
        name = (id(body), test is not None, classes, outer.is_at_message, owner_class)
        block = self.program.block(name)
        if test is not None:
            self._emit("keep")
        kind = "silent" if silent else "scan" if outer.is_at_message else "loop"
        item_sources: Sources
        if is_at_message:
            item_sources = frozenset((CURRENT_MESSAGE,))
        elif messages:
            item_sources = frozenset((("message", "item"),))
        elif owner_class == BOUND:
            item_sources = frozenset((("bound", f"env[{len(codes)}]"),))
            codes = [*codes, owner_code(items.sources)]
        else:
            item_sources = frozenset((CURRENT_MESSAGE,)) if owner_class else NO_SOURCE
        if not messages and test is None and self._names.pure(node):
            kind = f"pure_{kind}"
        self._emit(kind, block.name, items.code, tuple(codes))
        passed = []
        owned = items.value
        for position, item in enumerate(owned):
            frame = self._enter(block, body, values, is_at_message)
            frame.index_loop = index_loop and not outer.is_at_message
            frame.index_scan = index_loop and outer.is_at_message
            frame.is_at_message = outer.is_at_message or is_at_message
            frame.scopes.append({})
            symbol = Symbol("item", item, item_sources)
            total = Symbol("n", len(owned), NO_SOURCE)
            index = Symbol("i", position, NO_SOURCE)
            all_items = Symbol("items", owned, items.sources)
            frame.kinds.update({"n": int, "i": int, "items": list})
            frame.loop = LoopVariable(index, total, all_items)
            self._frame = frame
            stop = False
            try:
                self._assign(node.target, symbol)
                if test is not None:
                    self._emit("body", *self._names.cost([test]))
                    if self._truth(self._value(test)):
                        passed.append(item)
                        self._emit("kept")
                else:
                    self._body(node.body)
                frame.cursor.emit(("end",))
            except Break:
                frame.cursor.emit(("break",))
                stop = True
            except Continue:
                frame.cursor.emit(("continue",))
            except (Untraceable, TemplateRaised):
                raise
            except Exception as error:
                self._fail(error)
            finally:
                self._frame = outer
            if stop:
                break
        outer.attributes.clear()
        return passed

    def _run_macro(
        self, name: str, node: nodes.Call, variable: str | None
    ) -> tuple[nodes.Macro, list[Any]]:
        """Run a macro, which prints into a variable or where it is called.

        Returns:
            The macro, and its arguments and the global values that it may read.
        """
        macro = self._names.macros[name]
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise Untraceable("a macro called with * or **", line_of(node))
        if self._names.takes_any_arguments(macro):
            raise Untraceable("a macro with caller, varargs or kwargs", line_of(macro))
        args = [self._value(argument) for argument in node.args]
        kwargs = {keyword.key: self._value(keyword.value) for keyword in node.kwargs}
        parameters = [parameter.name for parameter in macro.args]
        if len(args) > len(parameters) or set(kwargs) - set(parameters[len(args) :]):
            self._raise(f"macro {name!r} does not take these arguments")
        passed = {**dict(zip(parameters, args, strict=False)), **kwargs}
        free_names = self._names.macro_reads(macro)
        values = [*map(passed.get, parameters), *(self._top(free) for free in free_names)]
        codes = self._passed(values, False)
        key = (
            id(macro),
            self._frame.is_at_message,
            tuple(parameter in passed for parameter in parameters),
            tuple(class_of(value, False) for value in values),
        )
        frame = Frame(self.program.block(key), [{}, {}])
        frame.is_at_message = self._frame.is_at_message
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
        except (Untraceable, TemplateRaised):
            raise
        except Exception as error:
            self._fail(error)
        finally:
            self._frame = outer
        outer.attributes.clear()
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
            sources |= {ALL_MESSAGES}
        return Symbol(variable, text, sources)

    # -- names --------------------------------------------------------------------------------

    def _lookup(self, name: str) -> Any:
        for scope in reversed(self._frame.scopes):
            if name in scope:
                return scope[name]
        return self._global(name)

    def _top(self, name: str) -> Any:
        """Return the value of a top-level name, as macros look it up."""
        top = self._frame.scopes[0]
        return top[name] if name in top else self._global(name)

    def _global(self, name: str) -> Any:
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


# -- templates with their recorded paths -------------------------------------------------------


class AuditMismatch(Exception):
    """A traced path and the reference printed different texts."""


class TracedTemplate:
    """One template and its recorded paths.

    The program renders a row whose path is recorded. For a new path, the reference renders the row,
    the tracer records the path, and the program must then print the reference's text. After one
    difference all paths are dropped, and every row must be compared with the reference.
    """

    def __init__(
        self, reference: ReferenceTemplate, *, add_generation_prompt: bool = False
    ) -> None:
        self.reference = reference
        self.add_generation_prompt = add_generation_prompt
        self.recorded = 0  # rows from which a path was recorded
        self.differed = ""  # the first difference from the reference
        self._tools: dict[bytes, tuple[list[Any], Memo]] = {}
        self._last_key = b""
        self._recent: dict[int, tuple[list[Any], tuple[list[Any], Memo]]] = {}  # by `id`
        self._start()

    def _start(self) -> None:
        self._tracer: Tracer | NotTraced
        try:
            self._tracer = Tracer(self.reference, add_generation_prompt=self.add_generation_prompt)
        except Untraceable as error:
            self._tracer = error

    def drop_paths(self, what: str) -> NotTraced:
        """Drop every path; from now on each row must be compared with the reference."""
        self.differed = self.differed or what
        self._start()
        return NotTraced("the traced template differed from the reference")

    def follow(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Run:
        """Render a conversation, and record its path if it is new.

        The result does not depend on the rows that were rendered before.

        Raises:
            TemplateFails: The template raises an error.
            NotTraced: It cannot be traced.
            RowError: It exceeds a limit.
        """
        tracer = self._tracer
        if isinstance(tracer, NotTraced):
            raise tracer.with_traceback(None)  # else it collects the tracebacks of earlier rows
        normalized = normalize_messages(messages)
        memo: Memo | None = None
        if tools:
            tools, memo = self._interned(tools)
        counter = self.reference.environment.counter
        counter.start(0)  # filters called by name, such as map("upper"), count steps
        try:
            return tracer.program.run(normalized, tools, memo)
        except PathMiss:
            return self._record(tracer, messages, normalized, tools)
        except LimitExceeded as error:
            self._rendered(messages, tools)  # raises an error if the reference exceeds it, too
            raise _not_traced(error) from error
        except Exception as error:
            raise _not_traced(error) from error

    def audit(self, run: Run, messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
        """Compare a run with the reference. If they differ, drop all paths and raise."""
        try:
            text = self._rendered(messages, tools)
        except RowError:
            text = None
        if run.text != text:
            self.drop_paths("a row that both rendered")
            raise AuditMismatch

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
            self.drop_paths("a row that both rendered")
        # A recorded path was wrong; trace this conversation alone.
        fresh = TracedTemplate(self.reference, add_generation_prompt=self.add_generation_prompt)
        run = fresh.follow(messages, tools)
        if run.text != text:
            raise self.drop_paths("a row that both rendered")
        return run

    def _rendered(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        return self.reference.render(
            messages, tools, add_generation_prompt=self.add_generation_prompt
        )

    def _interned(self, tools: list[Any]) -> tuple[list[Any], Memo | None]:
        """Return one list for equal tools, with the cached output of loops over it."""
        recent = self._recent.get(id(tools))
        if recent is not None and recent[0] is tools:  # one row may be rendered in two forms
            return recent[1]
        try:
            key = msgspec.json.encode(tools)
        except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError):
            return tools, None  # contains objects that are not JSON
        key = self._last_key if key == self._last_key else key  # it has its hash already
        cached = self._tools.get(key)
        if cached is None:
            if len(self._tools) >= MAX_TOOLS:
                self._tools.clear()
            cached = self._tools[key] = (tools, {})
        if len(self._recent) >= MAX_TOOLS:
            self._recent.clear()
        self._last_key, self._recent[id(tools)] = key, (tools, cached)
        return cached

    def _record(
        self,
        tracer: Tracer,
        messages: list[dict[str, Any]],
        normalized: list[dict[str, Any]],
        tools: list[Any] | None,
    ) -> Run:
        try:
            expected = self._rendered(messages, tools)
        except RowError as error:
            if error.reason != "template_error":
                raise
            self._record_error(tracer, normalized, tools)
            raise TemplateFails from error
        if tracer.program.size() > MAX_OPERATIONS:
            self._start()
            assert isinstance(self._tracer, Tracer)
            tracer = self._tracer
        self.reference.environment.counter.start(0)
        try:
            tracer.record(normalized, tools)
            run = tracer.program.run(normalized, tools)
        except (Inconsistent, PathMiss) as error:
            raise self.drop_paths(f"equal outcomes led to different operations: {error}") from error
        except Exception as error:
            raise _not_traced(error) from error
        self.recorded += 1
        if run.text != expected:
            raise self.drop_paths("a path that was just recorded gave another text")
        return run

    def _record_error(
        self, tracer: Tracer, normalized: list[dict[str, Any]], tools: list[Any] | None
    ) -> None:
        """Record where the template raises an error, so that the next such row is not traced."""
        try:
            tracer.record(normalized, tools)
        except Inconsistent as error:
            self.drop_paths(f"equal outcomes led to different operations: {error}")
        except Exception:  # the same error as in the reference
            return
        else:
            self.drop_paths("a row on which the reference raises an error")


def _not_traced(error: Exception) -> NotTraced:
    if isinstance(error, NotTraced):
        return NotTraced(error.cause, error.line)
    if isinstance(error, TemplateRaised):
        return TemplateFails()
    if isinstance(error, LimitExceeded):
        return NotTraced("a row near the limits of a render")
    return NotTraced(f"{type(error).__name__} on the path")
