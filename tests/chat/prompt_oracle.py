"""Check masks by the row's own generation prompts and by unique words.

The oracle does not look at how a template prints. For every assistant turn the reference renders
the messages before it with the generation prompt: where the text begins with that, nothing before
its end may be trained in this turn. Every field of `conversations` has words of its own, so the
trained text shows which fields are trained. Calls and reasoning whose words also occur in the text
are among them.

`python -m tests.chat.prompt_oracle DIR [NAME ...]` prints the table for the templates in DIR, where
the shared data was unpacked.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.chat import ChatSpec, Renderer
from tokenmill.errors import RowError, TemplateError

Message = dict[str, Any]
Row = dict[str, Any]
DATE = "2026-11-15"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_PROPERTIES = {
    "city": {"type": "string", "description": "A city."},
    "days": {"type": "integer", "description": "Days."},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["city"]},
    },
}


class Verdict(NamedTuple):
    """``kind``: right, wrong, refused (not provable by prompts), avoidable, template."""

    kind: str
    detail: str = ""


def user(n: int, content: Any = None) -> Message:
    return {"role": "user", "content": content or f"userA{n} userB{n}?"}


def says(n: int, content: Any = None, **others: Any) -> Message:
    given = f"ansA{n} ansB{n}." if content is None else content
    return {"role": "assistant", "content": given, **others}


def call(n: int, name: str = "get_weather", arguments: Any = None) -> dict[str, Any]:
    given = {"city": f"cityA{n}"} if arguments is None else arguments
    function = {"name": name, "arguments": given}
    return {"id": f"callid{n:03d}", "type": "function", "function": function}


def calls(n: int, content: Any = "", *given: dict[str, Any], **others: Any) -> Message:
    return says(n, content, tool_calls=list(given) or [call(n)], **others)


def result(n: int, content: Any = None) -> Message:
    given = f"resA{n} resB{n}" if content is None else content
    keys = {"name": "get_weather", "tool_call_id": f"callid{n:03d}"}
    return {"role": "tool", **keys, "content": given}


def system(content: str = "sysA sysB.") -> Message:
    return {"role": "system", "content": content}


def _agent(step: Message, *following: Message, answer: Message | None = None) -> Row:
    messages = [user(1), step, *(following or (result(1),)), answer or says(9)]
    return {"messages": messages, "tools": [TOOL]}


def conversations() -> dict[str, Row]:
    """Rows of every kind by name."""
    u, a, r = user, says, result
    number = {"city": "cityA1", "days": 47}
    nested = {"city": {"nameA": ["cityA1", "cityB1"]}}
    thinks = "<think>\nthinkA1\n</think>\n\nansA1 ansB1."
    chats = {
        "plain": [u(1), a(1)],
        "system": [system(), u(1), a(1)],
        "two": [u(1), a(1), u(2), a(2)],
        "system two": [system(), u(1), a(1), u(2), a(2), u(3), a(3)],
        "no_think": [system("/no_think"), u(1), a(1), u(2), a(2)],
        "no_think user": [u(1, "userA1 /no_think"), a(1)],
        "no_think last": [u(1), a(1), u(2, "userA2 /no_think"), a(2)],
        "think_off": [system("sysA <|think_off|>"), u(1), a(1)],
        "think_on": [system("sysA <|think_on|>"), u(1), a(1)],
        "reasoning": [u(1), a(1, reasoning_content="thinkA1 thinkB1")],
        "reasoning two": [
            u(1), a(1, reasoning_content="thinkA1"), u(2), a(2, reasoning_content="thinkA2"),
        ],
        "reasoning quoted": [u(1), a(1, "It is 42.", reasoning_content="42")],
        "reasoning tags": [u(1), a(1, thinks)],
        "empty last": [u(1), a(1), u(2), a(2, "")],
        "same words": [u(1, "echoA"), a(1, "echoA")],
        "same answers": [u(1), a(1, "same."), u(2), a(2, "same.")],
        "two users": [u(1), u(2), a(2)],
        "two assistants": [u(1), a(1), a(2)],
        "developer": [{"role": "developer", "content": "devA devB"}, u(1), a(1)],
        "spaces": [u(1), a(1, "\n ansA1 ansB1. \n"), u(2), a(2)],
        "named": [u(1), a(1, name="ansNameA")],
        "call without tools": [u(1), calls(1, "I use get_weather with city cityA1."), r(1), a(2)],
    }  # fmt: skip
    rows: dict[str, Row] = {name: {"messages": messages} for name, messages in chats.items()}
    rows |= {
        "tools unused": {"messages": [u(1), a(1), u(2), a(2)], "tools": [TOOL]},
        "call": _agent(calls(1)),
        "call null": _agent({**calls(1), "content": None}),
        "call without content": _agent({"role": "assistant", "tool_calls": [call(1)]}),
        "call text": _agent(calls(1, "ansA1 ansB1.")),
        "call quoting text": _agent(calls(1, "I use get_weather with city cityA1.")),
        "call twice": _agent(calls(1), r(1), calls(2), r(2)),
        "call then user": _agent(calls(1), r(1), a(2), u(3)),
        "calls two": _agent(calls(1, "", call(1), call(2)), r(1), r(2)),
        "calls equal": _agent(calls(1, "", call(1), call(1)), r(1), r(1)),
        "call empty": _agent(calls(1, "I will call list_files now", call(1, "list_files", {}))),
        "call number": _agent(calls(1, "", call(1, arguments=number))),
        "call nested": _agent(calls(1, "", call(1, arguments=nested))),
        "call last": {"messages": [u(1), calls(1)], "tools": [TOOL]},
        "call last text": {"messages": [u(1), calls(1, "get_weather cityA1")], "tools": [TOOL]},
        "quoted result": _agent(calls(1), answer=a(2, "resA1 resB1 said ansA2")),
        "quoted before": _agent(calls(1, "resA1 resB1 ansA1")),
        "empty result": _agent(calls(1), r(1, "")),
        "null result": _agent(calls(1), {**r(1), "content": None}),
        "object result": _agent(calls(1), r(1, {"tempA1": "resA1"})),
        "reasoning call": _agent(
            calls(1, "", reasoning_content="thinkA1"), answer=a(2, reasoning_content="thinkA2")
        ),
        "result then user": _agent(calls(1), r(1), u(2)),
    }
    steps = [m for n in range(1, 6) for m in (u(n), calls(n), r(n), a(n + 20))]
    rows["long"] = {"messages": [system(), *steps], "tools": [TOOL]}
    return rows


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from (word.strip(".?,") for word in value.split())
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _words(item)
    elif isinstance(value, list):
        for item in value:
            yield from _words(item)
    elif value is not None:
        yield str(value)


def required(message: Message, last: bool) -> Counter[str]:
    """Return the words that must be trained with an assistant's message."""
    content = message.get("content") or ""
    if not last:
        content = content.rpartition("</think>")[2]
    words = Counter(_words(content.replace("<think>", "").replace("</think>", "")))
    if last:
        words.update(_words(message.get("reasoning_content")))
    for one in message.get("tool_calls") or ():
        words.update((one["function"]["name"], *_words(one["function"]["arguments"])))
    return words


def foreign(messages: list[Message]) -> set[str]:
    """Return the words that occur in other messages than the assistant's."""
    own = repr([message for message in messages if message["role"] == "assistant"])
    texts = [message.get("content") for message in messages if message["role"] != "assistant"]
    return {word for text in texts for word in _words(text) if len(word) > 4 and word not in own}


class Oracle:
    """Checks the renders of one template."""

    def __init__(self, source: str) -> None:
        self.renderer = Renderer(ChatSpec(date=DATE), source, SPECIAL)

    def _text(self, messages: list[Message], tools: Any, prompt: bool = False) -> str | None:
        try:
            return self.renderer.reference(tools).render(
                copy.deepcopy(messages), tools, add_generation_prompt=prompt
            )
        except (RowError, TemplateError):
            return None

    def check(self, row: Row) -> Verdict:
        """Render a row and return whether its mask is right."""
        rendering = self.renderer.render([copy.deepcopy(row)])
        messages, tools = row["messages"], row.get("tools")
        assistants = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
        prompts = {k: self._text(messages[:k], tools, prompt=True) for k in assistants}
        if rendering.rejected:
            error = rendering.rejected[0][2]
            kind = self._refusal(messages, tools, prompts)
            return Verdict(kind, f"{error.reason}: {error.message}")
        text, spans = rendering.texts[0], rendering.spans[0] or []
        blocks = self.renderer.reference(tools).has_generation
        problems = [] if blocks else list(_lost_words(messages, assistants, text, spans))
        trained = "".join(text[start:stop] for start, stop in spans)
        problems += [f"{word!r} is trained" for word in foreign(messages) if word in trained]
        for k, prompt in prompts.items():
            after_answer = k and messages[k - 1]["role"] == "assistant"
            if prompt is None or after_answer or not text.startswith(prompt):
                continue
            place = len(prompt)
            header = [(a, text[a:place]) for a, b in spans if a < place < b]
            if blocks:  # one that begins inside the generation prompt is its author's decision
                bare = len(self._text(messages[:k], tools) or "")
                header = [(a, part) for a, part in header if a <= bare < place]
            problems += [f"turn {k} trains its prompt {part!r}" for _, part in header]
        if problems:
            return Verdict("wrong", "; ".join(problems) + " :: " + marked(text, spans))
        return Verdict("right")

    def _refusal(self, messages: list[Message], tools: Any, prompts: dict[int, Any]) -> str:
        """Return whether prompts and unique words prove a row that was rejected."""
        text = self._text(messages, tools)
        if text is None:
            return "template"
        end = len(text)
        for k, prompt in reversed(prompts.items()):
            if prompt is None or not text.startswith(prompt):
                return "refused"
            segment = text[len(prompt) : end]
            words = required(messages[k], k == max(prompts))
            if any(segment.count(word) < times for word, times in words.items()):
                return "refused"
            end = len(prompt)
        return "avoidable"


def _lost_words(
    messages: list[Message], assistants: list[int], text: str, spans: list[tuple[int, int]]
) -> Iterator[str]:
    trained = "".join(text[start:stop] for start, stop in spans)
    words: Counter[str] = Counter()
    for k in assistants:
        words += required(messages[k], k == assistants[-1])
    for word, times in words.items():
        if trained.count(word) < times:
            yield f"{word!r} is not trained"


def marked(text: str, spans: list[tuple[int, int]]) -> str:
    """Return the text with brackets around its trained parts."""
    parts, place = [], 0
    for start, stop in spans:
        parts += [text[place:start], "⟦", text[start:stop], "⟧"]
        place = stop
    return "".join([*parts, text[place:]])


def templates(shared: Path) -> dict[str, Path]:
    """Return the shared templates by name."""
    found = [*shared.glob("templates/*/*.jinja"), *shared.glob("wild/*.jinja")]
    return {path.name: path for path in sorted(found)}


def table(paths: dict[str, Path]) -> dict[str, dict[str, Verdict]]:
    """Check every conversation with every template that compiles."""
    verdicts: dict[str, dict[str, Verdict]] = {}
    for name, path in paths.items():
        try:
            oracle = Oracle(path.read_text())
        except TemplateError:
            continue
        verdicts[name] = {kind: oracle.check(row) for kind, row in conversations().items()}
    return verdicts


def main() -> None:
    chosen = {
        name: path
        for name, path in templates(Path(sys.argv[1])).items()
        if not sys.argv[2:] or any(part in name for part in sys.argv[2:])
    }
    total: Counter[str] = Counter()
    for name, verdicts in table(chosen).items():
        kinds = Counter(verdict.kind for verdict in verdicts.values())
        total += kinds
        print(f"{name:80.80} {dict(kinds)}")
        for kind, verdict in verdicts.items():
            if verdict.kind in ("wrong", "avoidable"):
                print(f"    {verdict.kind}: {kind}: {verdict.detail[:600]!r}")
    print(dict(total))


if __name__ == "__main__":
    main()
