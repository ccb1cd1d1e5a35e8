"""An oracle of its own kind: who owns each character of a render, from the template's own loop.

It shares nothing with the product's way of finding spans. The template is parsed by a jinja2 set
up as transformers sets it up, and every ``for`` loop is rewritten to print a private-use character
when it takes up one of the conversation's messages (known by identity) and another when it leaves
it. The sentinels ride in the output itself, so macros, set blocks and call blocks keep them. Taken
out again they say for every character which message's turn printed it: the *owner*, the innermost
loop's message. A render that is not the plain one without its sentinels is not judged.

Inside an assistant's turn the *header* is what the generation prompt of that very prefix already
holds; the rest is the model's own, up to and including what closes the turn.

::

    owner   ───── user ──────┐┌──────────────── assistant ─────────────────┐
            …text⟩<|im_end|>\n<|im_start|>assistant\n<think>\n⟨text⟩<|im_end|>\n
                              └────── header ──────┘└opener─┘└own─┘└closer─┘└after

`judge` holds a mask against that: nothing outside the own part trained, all of it trained. Where
the oracle does not know, it says so (`Verdict.unsure`) and the harness counts it.
"""

from __future__ import annotations

import copy
import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

Span = tuple[int, int]
Message = dict[str, Any]

NOBODY = -1
INSIDE = -10  # the innermost of several messages, before `_share` has decided
SHARED = -2  # printed by a loop over an assistant inside another message's step: neither's turn
PLANES = (0x100000, 0xF0000)  # sentinels come from the first plane that no text of the row uses
LEAVE = 0x4000
GENERATION = 0x8000
REASONING = ("reasoning_content", "thinking", "reasoning")
TAG = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,40}\]")
UNIT = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,40}\]|\w+|\s|.", re.DOTALL)
THINKING_WORD = re.compile(r"think|thought|analysis|reason", re.I)
ENDING_WORD = re.compile(r"^<\W*/|^\[/|end|close|^<[a-z]+\|>$", re.I)


class Refused(Exception):
    """The template does not render this conversation."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` as a plain block that says where it printed."""

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
    """jinja2 as `apply_chat_template` sets it up, its clock standing still."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    day = datetime.datetime.strptime(date, "%Y-%m-%d")
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = day.strftime
    made.globals["dict"] = _Dict()
    made.globals["namespace"] = _Namespace
    made.generation = ("", "")  # type: ignore[attr-defined]
    return made


class _Loops(jinja2.visitor.NodeTransformer):
    """Rewrites every loop so that it says when it takes up and leaves an item.

    A loop over numbers that looks messages up by its own variable (``messages[i]``) takes up that
    message. A step that does not print but adds to a text (``ns.out = ns.out ~ …``) speaks there.
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
        node.body = [taken, _says(own, "oracle_enter", line), *body]
        node.body.append(_says(own, "oracle_leave", line))
        return node

    def visit_Assign(self, node: jinja2.nodes.Assign) -> jinja2.nodes.Node:  # noqa: N802
        added, target, line = node.node, node.target, node.lineno
        if not self.stack or not isinstance(added, (jinja2.nodes.Concat, jinja2.nodes.Add)):
            return node
        enter = [_says(own, "oracle_enter", line).nodes[0] for own in self.stack]
        leave = [_says(own, "oracle_leave", line).nodes[0] for own in reversed(self.stack)]
        if isinstance(added, jinja2.nodes.Concat) and _is_place(added.nodes[0], target):
            added.nodes[1:] = [*enter, *added.nodes[1:], *leave]
            return node
        terms = _terms(added)
        if _is_place(terms[0], target) and len(terms) > 1:
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
        return [_says(self.stack[-1], "oracle_leave", node.lineno), node]

    def visit_Continue(self, node: jinja2.nodes.Continue) -> Any:  # noqa: N802
        return self._leaving(node)

    def visit_Break(self, node: jinja2.nodes.Break) -> Any:  # noqa: N802
        return self._leaving(node)


def _is_place(value: Any, target: Any) -> bool:
    """Whether an expression reads the very name or namespace attribute that is assigned."""
    if isinstance(target, jinja2.nodes.NSRef):
        named = isinstance(value, jinja2.nodes.Getattr) and isinstance(value.node, jinja2.nodes.Name)
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


def _says(own: str, name: str, line: int) -> jinja2.nodes.Output:
    item = jinja2.nodes.Name(own, "load", lineno=line)
    return jinja2.nodes.Output([_filter(item, name, [], line)], lineno=line)


@dataclass(slots=True)
class Owned:
    """A render, the owner of every character, and what its generation blocks printed."""

    text: str
    owner: list[int]
    generation: list[Span]


class OracleTemplate:
    """One template, plain and with loops that speak.

    Args:
        source: Jinja source.
        variables: Special tokens and further template variables.
        date: What `strftime_now` says.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], date: str = "2026-11-15") -> None:
        self.source = source
        self.variables = {"documents": None, **variables}
        self.says_itself = bool(re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source))
        self._plain_environment = environment(date)
        self._plain = self._plain_environment.from_string(source)
        self._environment = environment(date)
        self._environment.filters["oracle_item"] = self._item
        self._environment.filters["oracle_add"] = self._add
        self._environment.filters["oracle_enter"] = lambda m: self._sentinel(m, 0)
        self._environment.filters["oracle_leave"] = lambda m: self._sentinel(m, LEAVE)
        tree = _Loops().visit(self._environment.parse(source))
        tree.set_environment(self._environment)
        code = self._environment.compile(tree)
        self._speaking = jinja2.Template.from_code(
            self._environment, code, self._environment.make_globals(None)
        )
        self._indices: dict[int, int] = {}
        self._plane = PLANES[0]

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
            raise Refused(f"{type(error).__name__}: {error}") from error

    def plain(
        self, messages: list[Message], tools: Any = None, *, add_generation_prompt: bool = False
    ) -> str:
        """The render as transformers makes it.

        Raises:
            Refused: The template raises.
        """
        return self._run(self._plain, aliased(messages), tools, add_generation_prompt)

    def owned(
        self, messages: list[Message], tools: Any = None, *, add_generation_prompt: bool = False
    ) -> Owned | None:
        """The render with its owners; None where sentinels change what is printed.

        Raises:
            Refused: The template raises on the plain conversation.
        """
        plain = self.plain(messages, tools, add_generation_prompt=add_generation_prompt)
        for self._plane in PLANES:
            if not any(ord(c) >> 16 == self._plane >> 16 for c in plain if c > "\U000effff"):
                break
        else:
            return None
        ours = [copy.deepcopy(message) for message in aliased(messages)]  # none of them twice
        self._indices = {id(message): index for index, message in enumerate(ours)}
        marks = (chr(self._plane + GENERATION), chr(self._plane + GENERATION + 1))
        self._environment.generation = marks  # type: ignore[attr-defined]
        try:
            found = self._read(self._run(self._speaking, ours, tools, add_generation_prompt))
        except Refused:
            return None
        if found is None or found.text != plain:
            return None
        _share(found, messages)
        _adopt(found, messages)
        return found

    def _read(self, spoken: str) -> Owned | None:
        pieces: list[str] = []
        owner: list[int] = []
        generation: list[Span] = []
        opened: list[int] = []
        stack: list[int] = []
        first, last = self._plane, self._plane + GENERATION + 1
        for part in re.split(f"([{chr(first)}-{chr(last)}])", spoken):
            code = ord(part) - first if len(part) == 1 else -1
            if code < 0 or code > last - first:
                pieces.append(part)
                who = stack[-1] if stack else NOBODY
                owner += [who if len(set(stack)) < 2 else INSIDE - who] * len(part)
            elif code == GENERATION:
                opened.append(len(owner))
            elif code == GENERATION + 1:
                if not opened:
                    return None
                generation.append((opened.pop(), len(owner)))
            elif code < LEAVE:
                stack.append(code)
            elif not stack or stack.pop() != code - LEAVE:
                return None
        if stack or opened:
            return None
        return Owned("".join(pieces), owner, sorted(s for s in generation if s[0] < s[1]))


def _share(found: Owned, messages: list[Message]) -> None:
    """What is printed inside two messages' steps is the innermost's, but never an assistant's."""
    for position, who in enumerate(found.owner):
        if who <= INSIDE:
            inner = INSIDE - who
            assistant = messages[inner].get("role") == "assistant"
            found.owner[position] = SHARED if assistant else inner


def _adopt(found: Owned, messages: list[Message]) -> None:
    """Give an ending outside of every loop to the last assistant where it alone is printed there.

    Some templates take the last message out of their loop and print it by itself.
    """
    last = len(messages) - 1
    if last < 0 or messages[last].get("role") != "assistant" or last in found.owner:
        return
    owned = [n for n, who in enumerate(found.owner) if who != NOBODY]
    start = owned[-1] + 1 if owned else 0
    ending = found.text[start:]
    said = [forms for forms in spoken(messages[last], reasoning=False) if forms[0]]
    if said and owned and all(any(form in ending for form in forms) for forms in said):
        found.owner[start:] = [last] * len(ending)


def aliased(messages: list[Message]) -> list[Message]:
    """Reasoning under the names that templates read, as transformers fills them in."""
    found = []
    for message in messages:
        reasoning = next((message[k] for k in REASONING if message.get(k) is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        found.append(message)
    return found


# --- what an assistant said -----------------------------------------------------------------------


def spoken(message: Message, *, reasoning: bool = True) -> Iterator[list[str]]:
    """Every leaf of what a message says, each in the forms in which it may be printed."""
    yield from ([answer] for answer in _answers(message)[1])
    if reasoning:
        yield from ([thought] for thought in thoughts(message))
    calls = message.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(function, dict):
            yield [str(function.get("name") or "")]
            yield from _printed(function.get("arguments"))


def thoughts(message: Message) -> list[str]:
    """What a message thinks: in front of its answer, and under a key of its own."""
    own = next((message[k] for k in REASONING if isinstance(message.get(k), str)), "")
    return [thought for thought in (*_answers(message)[0], own.strip()) if thought]


def _answers(message: Message) -> tuple[list[str], list[str]]:
    """The thinking and the answers in a message's content."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else []
    if isinstance(content, list):
        texts = [p["text"] for p in content if isinstance(p, dict) and "text" in p]
    thinking: list[str] = []
    answers: list[str] = []
    for text in texts:
        thought, closing, answer = text.rpartition("</think>")
        if closing:
            thinking.append(re.sub(r"^\s*<think>", "", thought).strip())
        answers.append(answer.strip())
    return thinking, answers


def _printed(value: Any) -> Iterator[list[str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            tags = [f"={key}>", f"<{key}>", f'"{key}"']
            yield from ([*forms, *tags] for forms in _printed(str(key)))
            yield from _printed(item)
    elif isinstance(value, list):
        for item in value:
            yield from _printed(item)
    elif isinstance(value, str):
        word = value.strip()
        twice = json.dumps(json.dumps(word)[1:-1])[1:-1]
        yield [
            word,
            json.dumps(word)[1:-1],
            json.dumps(word, ensure_ascii=False)[1:-1],
            twice,
            json.dumps(json.dumps(word, ensure_ascii=False)[1:-1], ensure_ascii=False)[1:-1],
            repr(word)[1:-1],
        ]
    elif value is not None:
        yield [json.dumps(value), str(value)]


def lost(messages: list[Message], found: Owned, *, every_thought: bool = True) -> str | None:
    """The first thing an assistant said that its turn does not print; None: nothing is lost.

    Thinking of turns before the last assistant is history that templates may drop. A last turn that
    thinks in two places and prints one of them has lost something only for `every_thought`.
    """
    assistants = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
    regions: dict[int, list[str]] = {}
    for character, who in zip(found.text, found.owner, strict=True):
        if who != NOBODY:
            regions.setdefault(who, []).append(character)
    for index in assistants:
        region = "".join(regions.get(index, ()))
        words = TAG.sub("\0", region)  # a letter inside a tag is the template's
        leaves = list(spoken(messages[index], reasoning=False))
        thinking = thoughts(messages[index]) if index == assistants[-1] else []
        if thinking and not every_thought:
            leaves.append(thinking)
        elif thinking:
            leaves += [[thought] for thought in thinking]
        for forms in leaves:
            if not any(form in (region if len(form) > 2 else words) for form in forms):
                return f"{forms[0][:60]!r} of message {index}"
    return None


# --- turns ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Turn:
    """An assistant's turn in a render, as offsets into the text.

    ``start`` and ``end`` are the first and last own character, ``header`` the end of the header,
    ``opener`` the start of a thinking opener that the header ends with, ``stop`` the end of what
    closes the turn. ``header`` is None where the oracle cannot say.
    """

    message: int
    start: int
    end: int
    header: int | None
    opener: int | None
    stop: int
    closed: bool


def units(text: str) -> list[str]:
    """A text in units that belong together: a tag, a word, one other character."""
    return [found[0] for found in UNIT.finditer(text)]


def common(left: str, right: str) -> int:
    """Length of what two texts start with, in whole units."""
    if left.startswith(right):
        return len(right)
    length = 0
    for a, b in zip(UNIT.finditer(left), UNIT.finditer(right), strict=False):
        if a[0] != b[0]:
            break
        length += len(a[0])
    return length


def thinking_at_end(prompt: str) -> int:
    """Where the thinking that a generation prompt opens at its end begins, else its length.

    ``<think>\\n``, ``<think>\\n\\n</think>\\n\\n``, ``<|channel|>analysis<|message|>``,
    ``<|channel>thought\\n<channel|>``: a tag that names thinking, or a tag and a word that does,
    with nothing but its end and whitespace after it.
    """
    tags = list(TAG.finditer(prompt))
    for tag in reversed(tags):
        after = prompt[tag.end() :]
        opens = bool(THINKING_WORD.search(tag[0])) and not ENDING_WORD.search(tag[0])
        word = re.match(r"\s*(?:think|thinking|thought|analysis|reasoning)\b\s*", after)
        if not opens and word and not ENDING_WORD.search(tag[0]):
            after, opens = after[word.end() :], True
            after = TAG.sub("", after, count=1) if TAG.match(after) else after
        if opens:
            rest = after.strip()
            ends = TAG.fullmatch(rest)
            if not rest or (ends and ENDING_WORD.search(rest)):
                return tag.start()
            return len(prompt)
    return len(prompt)


class Conversation:
    """One conversation under one template: its owners and its assistants' turns."""

    def __init__(self, template: OracleTemplate, messages: list[Message], tools: Any) -> None:
        self.template = template
        self.messages = messages
        self.tools = tools
        self.found = template.owned(messages, tools)
        self._prompts: dict[int, list[str]] = {}

    def prompts(self, count: int) -> list[str]:
        """What may be the generation prompt after the first messages; empty: none is known."""
        if count not in self._prompts:
            self._prompts[count] = self._find_prompts(count)
        return self._prompts[count]

    def _find_prompts(self, count: int) -> list[str]:
        if count < 1:
            return []
        prefix = self.messages[:count]
        try:
            given = self.template.owned(prefix, self.tools, add_generation_prompt=True)
        except Refused:
            return []
        if given is None:
            return []
        owned = [n for n, who in enumerate(given.owner) if who != NOBODY]
        candidates = [given.text[owned[-1] + 1 :]] if owned else []
        try:
            closed = self.template.plain(prefix, self.tools)
        except Refused:
            closed = None
        if closed is not None and closed != given.text:
            same = len(closed) if given.text.startswith(closed) else common(given.text, closed)
            candidates.append(given.text[same:])
        return [c for c in dict.fromkeys(candidates) if c.strip()]

    def turns(self) -> dict[int, Turn]:
        """The turn of every assistant that prints anything."""
        assert self.found is not None
        places: dict[int, list[int]] = {}
        for position, who in enumerate(self.found.owner):
            places.setdefault(who, []).append(position)
        return {
            index: self._turn(index, places[index])
            for index, message in enumerate(self.messages)
            if message.get("role") == "assistant" and index in places
        }

    def _turn(self, index: int, places: list[int]) -> Turn:
        assert self.found is not None
        text = self.found.text
        start, end = places[0], places[-1] + 1
        header = self._header(index, start, end)
        opener = None
        if header is not None:
            cut = start + thinking_at_end(text[start:header]) if header > start else header
            opener = cut if cut < header else None
        own = text[start:end]
        said = [f for fs in spoken(self.messages[index]) for f in fs if f]
        closed = bool(own.strip()) and not any(own.rstrip().endswith(s) for s in said)
        return Turn(index, start, end, header, opener, start + len(own.rstrip()), closed)

    def _header(self, index: int, start: int, end: int) -> int | None:
        """Where the header of a turn ends; None where no generation prompt explains it."""
        assert self.found is not None
        text = self.found.text
        before = start
        while before and self.found.owner[before - 1] == NOBODY:
            before -= 1
        before = before or start
        own = self.prompts(index)
        others = [
            prompt
            for count in range(1, len(self.messages))
            if count != index and self.messages[count].get("role") == "assistant"
            for prompt in self.prompts(count)
        ]
        later = self.prompts(len(self.messages)) if not (own or others) else []
        for prompts in (own, [*others, *later]):
            reached = [
                place
                for prompt in dict.fromkeys(prompts)
                for place in self._aligned(index, prompt, before, start, end)
            ]
            if reached:
                return max(reached)
        if not own and not others and not later:
            return start  # the template prints no generation prompt: there is no header
        if all(thinking_at_end(p.strip()) == 0 for p in own) and own:
            return start
        if not own and others:
            return start  # this prefix has none, and the turn opens with none of the others
        if self._joined(start):
            return start
        return None

    def _joined(self, start: int) -> bool:
        """Whether a turn goes on with another assistant's, as where a template joins the two."""
        assert self.found is not None
        who = self.found.owner[start - 1] if start else NOBODY
        return who >= 0 and self.messages[who].get("role") == "assistant"

    def _aligned(
        self, index: int, prompt: str, before: int, start: int, end: int
    ) -> Iterator[int]:
        """Where a prompt, laid against the beginning of a turn, stops being the same."""
        assert self.found is not None
        text = self.found.text
        core = prompt[: thinking_at_end(prompt)].strip()
        if not core:
            return
        for base in {before, start}:
            turn = text[base:end]
            length = common(turn, prompt)
            if turn[:length].strip():
                yield max(base + length, start)
            blank = len(turn) - len(turn.lstrip())
            stripped = prompt.lstrip()
            length = common(turn[blank:], stripped)
            if turn[blank : blank + length].strip():
                yield max(base + blank + length, start)
        if text[:start].rstrip().endswith(core):
            yield start
        # A first turn may print more before its header: a bos token, a default system prompt.
        place = text.find(core, start, end)
        said = [f for fs in spoken(self.messages[index]) for f in fs if f]
        if not index and place > start and not any(f in text[start:place] for f in said):
            yield place + common(text[place:end], prompt.lstrip())


# --- the judgement --------------------------------------------------------------------------------


@dataclass(slots=True)
class Violation:
    """A run of characters on which mask and oracle disagree."""

    kind: str
    start: int
    end: int
    owner: str
    excerpt: str

    def __str__(self) -> str:
        """One line for a report."""
        return f"{self.kind} [{self.start}:{self.end}] of {self.owner}: {self.excerpt}"


@dataclass(slots=True)
class Verdict:
    """What the oracle says of one mask."""

    violations: list[Violation] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)


def judge(
    talk: Conversation,
    text: str,
    spans: Sequence[Span],
    *,
    trained: Sequence[int] | None = None,
    turn_end: str = "stop",
    thinking_opener: str = "trained",
) -> Verdict:
    """Hold a mask against the owners of every character.

    Args:
        talk: The conversation under its template.
        text: The product's render.
        spans: What it would train.
        trained: Messages that are to be trained; None: every assistant.
        turn_end: ``stop`` or ``turn``, as in the recipe.
        thinking_opener: Whether a thinking opener that the generation prompt already holds is to
            be ``trained`` or belongs to the ``prompt``.
    """
    verdict = Verdict()
    found = talk.found
    if found is None:
        verdict.unsure.append("the sentinels do not survive the template")
        return verdict
    if found.text != text:
        at = next((n for n, (a, b) in enumerate(zip(text, found.text, strict=False)) if a != b), -1)
        where = _excerpt(text, at, at + 1)
        verdict.violations.append(Violation("another text", at, at + 1, "the render", where))
        return verdict
    if list(spans) != sorted(spans) or any(a >= b for a, b in spans):
        verdict.violations.append(Violation("spans not sorted", 0, 0, "the mask", str(spans)))
        return verdict
    mask = bytearray(len(text))
    for start, end in spans:
        if any(mask[start:end]) or end > len(text):
            verdict.violations.append(Violation("spans overlap", start, end, "the mask", ""))
        mask[start:end] = b"\x01" * (end - start)
    wanted = [i for i, m in enumerate(talk.messages) if m.get("role") == "assistant"]
    if trained is not None:
        wanted = list(trained)
    labels = _labels(talk, found, wanted, turn_end, thinking_opener, verdict)
    wrong: list[str] = []
    for position, (label, on) in enumerate(zip(labels, mask, strict=True)):
        complaint = ""
        if on and label.startswith("!"):
            complaint = f"trained: {label[1:]}"
        elif not on and label.startswith("+") and not text[position].isspace():
            complaint = f"untrained: {label[1:]}"
        wrong.append(complaint)
    position = 0
    keyed = groupby(zip(wrong, found.owner, strict=True), key=lambda pair: pair)
    for (complaint, who), run in keyed:
        length = sum(1 for _ in run)
        if complaint:
            owner = "nobody" if who < 0 else f"{who} ({talk.messages[who].get('role')})"
            excerpt = _excerpt(text, position, position + length)
            verdict.violations.append(
                Violation(complaint, position, position + length, owner, excerpt)
            )
        position += length
    return verdict


def _labels(
    talk: Conversation,
    found: Owned,
    wanted: list[int],
    turn_end: str,
    thinking_opener: str,
    verdict: Verdict,
) -> list[str]:
    """For every character: ``!`` must not be trained, ``+`` must be, ``?`` may be."""
    names = {NOBODY: "!no turn", SHARED: "!two turns"}
    labels = [names.get(who, "!another turn") for who in found.owner]
    if talk.template.says_itself:
        for start, end in found.generation:
            for position in range(start, end):
                who = found.owner[position]
                if who in wanted:
                    labels[position] = "+generation block"
                elif who == NOBODY:
                    labels[position] = "?"
        return labels
    for index, turn in talk.turns().items():
        if index not in wanted:
            continue
        if turn.header is None:
            verdict.unsure.append(f"where message {index} starts: its prompt explains nothing")
        for position in range(turn.start, turn.end):
            if found.owner[position] == index:
                labels[position] = _label(turn, position, turn_end, thinking_opener)
        if not turn.closed:
            _unclosed(talk, found, turn, labels)
        if turn_end == "turn":
            _ending(talk, found, turn, labels)
    return labels


def to_train(talk: Conversation, trained: Sequence[int]) -> bool:
    """Whether the render holds anything but whitespace that must be trained."""
    found = talk.found
    if found is None:
        return True
    labels = _labels(talk, found, list(trained), "stop", "trained", Verdict())
    return any(
        label[0] in "+?" and not character.isspace()
        for label, character in zip(labels, found.text, strict=True)
    )


def _label(turn: Turn, position: int, turn_end: str, thinking_opener: str) -> str:
    if turn.header is None:
        return "?"
    if position < turn.header:
        if turn.opener is not None and position >= turn.opener:
            return "+thinking opener" if thinking_opener == "trained" else "!thinking opener"
        return "!header"
    if position < turn.stop:
        return "+own part"
    if not turn.closed:
        return "?"
    return "!after the closer" if turn_end == "stop" else "?"


def _unclosed(talk: Conversation, found: Owned, turn: Turn, labels: list[str]) -> None:
    """What stands right after a turn that prints no closer may be one.

    Outside of the loop (an eos token) or in the next message's step (``<|assistant_end|>``): that
    may be trained or not, the turn has no other closer. An eos token that ends the render must be.
    """
    eos = str(talk.template.variables.get("eos_token") or "")
    tag = TAG.match(found.text, turn.end)
    if tag and (tag[0] == eos or ENDING_WORD.search(tag[0])):
        labels[tag.start() : tag.end()] = ["?"] * len(tag[0])
    for position in range(turn.end, len(labels)):
        if found.owner[position] != NOBODY:
            break
        labels[position] = "?"
    rest = found.text[turn.end :]
    if eos and rest.strip() == eos:
        at = turn.end + rest.index(eos)
        labels[at : at + len(eos)] = ["+closer"] * len(eos)


def _ending(talk: Conversation, found: Owned, turn: Turn, labels: list[str]) -> None:
    """What only ends the conversation (phi-3: an eos) goes to the last turn under ``turn``."""
    ending = found.text[turn.end :]
    if set(found.owner[turn.end :]) == {NOBODY}:
        prompts = [p for count in range(1, len(talk.messages)) for p in talk.prompts(count)]
        if not any(p.strip() in ending for p in prompts):
            labels[turn.end :] = ["?"] * len(ending)


def _excerpt(text: str, start: int, end: int) -> str:
    before, after = text[max(0, start - 30) : start], text[end : end + 30]
    inside = text[start:end]
    if len(inside) > 90:
        inside = f"{inside[:45]}…{inside[-45:]}"
    return f"{before!r} ⟦{inside!r}⟧ {after!r}"
