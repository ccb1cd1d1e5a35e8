"""An oracle that knows nothing of the product: conversations whose every word is unique.

Each message consists of words that occur nowhere else (``assistant1x0``, ``user2x1``, …), so a
mask can be judged by the words in it alone: all of the assistant's, nobody else's. What closes a
turn is judged by what follows the assistant's last word.
"""

from __future__ import annotations

import re
from typing import Any

Span = tuple[int, int]
Messages = list[dict[str, Any]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where."}},
                "required": ["city"],
            },
        },
    }
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
WORD = re.compile(r"(?:system|user|assistant|reason|call|tool)\d+x\d+")
OPENS_ANOTHER = re.compile(
    r"^\s*(?:<[^<>]*(?:user|observation|tool|system|human)|\[[A-Z]{3})", re.I
)
HEADER = re.compile(r"assistant|chatbot|<start_of_turn>|<\|im_start\|>|start_header", re.I)


def words(kind: str, index: int, count: int = 3) -> str:
    """A text of words that only this message has."""
    return " ".join(f"{kind}{index}x{number}" for number in range(count))


def talk(*roles: str) -> Messages:
    """A conversation of unique words."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [
        {"role": names[role], "content": words(names[role], index)}
        for index, role in enumerate(roles)
    ]


def _thinking() -> Messages:
    messages = talk("u", "a", "u", "a")
    for index in (1, 3):
        thought = words("reason", index)
        messages[index]["content"] = f"<think>\n{thought}\n</think>\n\n{words('assistant', index)}"
    return messages


def _reasoning() -> Messages:
    messages = talk("u", "a", "u", "a")
    for index in (1, 3):
        messages[index]["reasoning_content"] = words("reason", index)
    return messages


def _tools() -> Messages:
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": words("call", 1)}},
    }
    return [
        {"role": "user", "content": words("user", 0)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {
            "role": "tool",
            "name": "get_weather",
            "tool_call_id": "call00001",
            "content": words("tool", 2),
        },
        {"role": "assistant", "content": words("assistant", 3)},
    ]


def _whitespace() -> Messages:
    messages = talk("u", "a", "u", "a")
    for message, (before, after) in zip(
        messages, (("  ", " \n"), ("\n ", " \n\n"), ("\t", ""), (" ", " ")), strict=True
    ):
        message["content"] = f"{before}{message['content']}{after}"
    return messages


def _unicode() -> Messages:
    messages = talk("u", "a")
    messages[0]["content"] = f"你好 👋🏽 {messages[0]['content']} é\u2028"
    messages[1]["content"] = f"你好！ {messages[1]['content']} 🎉\n\n1. 一\n2. \u0301"
    return messages


def _echo() -> Messages:
    same = words("assistant", 9)
    return [{"role": role, "content": same} for role in ("user", "assistant", "user", "assistant")]


CASES: dict[str, tuple[Messages, list[Any] | None]] = {
    "plain": (talk("u", "a"), None),
    "system": (talk("s", "u", "a"), None),
    "multi-turn": (talk("u", "a", "u", "a", "u", "a"), None),
    "thinking": (_thinking(), None),
    "reasoning_content": (_reasoning(), None),
    "tools": (_tools(), TOOLS),
    "whitespace": (_whitespace(), None),
    "echo": (_echo(), None),
    "unicode": (_unicode(), None),
}


def complaints(messages: Messages, text: str, spans: list[Span], *, says_itself: bool) -> list[str]:
    """What is wrong with a mask; empty where nothing is.

    Args:
        messages: The conversation of unique words.
        text: Its render.
        spans: What would be trained.
        says_itself: Whether the template's author marked the spans (then closer and header are
            the author's business).
    """
    found: list[str] = []
    if any(a >= b for a, b in spans) or spans != sorted(spans):
        found.append("spans are not sorted and disjoint")
    trained = " \x00 ".join(text[a:b] for a, b in spans)
    untrained = _outside(text, spans)
    roles = {index: message["role"] for index, message in enumerate(messages)}
    echo = len({m["content"] for m in messages}) < len(messages)
    own = {"assistant", "reason", "call"}
    last = max(i for i, role in roles.items() if role == "assistant")
    for word in set(WORD.findall(trained)):
        kind = re.match("[a-z]+", word)
        if kind is None or kind[0] not in own:
            found.append(f"{word} is trained")
    if echo and (not says_itself or words("assistant", 9) in text):
        count = sum(role == "assistant" for role in roles.values())
        word = words("assistant", 9, 1)
        if trained.count(word) != count or untrained.count(word) != len(messages) - count:
            found.append("the echo is trained in the wrong places")
        return found
    for word in set(WORD.findall(untrained)):
        kind = re.match("[a-z]+", word)
        if kind is not None and kind[0] in own:
            found.append(f"{word} is not trained")
    wanted = {w for m in messages for w in WORD.findall(str(m)) if w[0] in "ac"}
    wanted |= {w for w in WORD.findall(str(messages[last])) if w[0] == "r"}
    if not says_itself:
        found += [f"{word} is nowhere" for word in wanted if word not in trained]
        found += _edges(text, spans)
    return found


def _outside(text: str, spans: list[Span]) -> str:
    position, kept = 0, []
    for start, end in spans:
        kept.append(text[position:start])
        position = end
    return " \x00 ".join([*kept, text[position:]])


def _edges(text: str, spans: list[Span]) -> list[str]:
    """Headers must not be trained, closers must be."""
    found = []
    for start, end in spans:
        inner = text[start:end]
        hits = list(WORD.finditer(inner))
        if not hits:
            found.append("a span without words")
            continue
        if HEADER.search(inner[: hits[0].start()]):
            found.append(f"a header is trained: {inner[: hits[0].start()]!r}")
        closer, rest = inner[hits[-1].end() :].strip(" 🎉1.一2\u0301"), text[end:]
        if not closer and rest.strip() and not OPENS_ANOTHER.match(rest):
            found.append(f"a closer is not trained: {rest[:30]!r}")
        if closer and rest and not re.match(r"[\w\s<\[\]]", rest):
            found.append(f"the span ends inside a closer: {closer!r} {rest[:20]!r}")
        if OPENS_ANOTHER.match(closer) and not closer.startswith(
            ("[TOOL", "[{", "<tool", "<|tool")
        ):
            found.append(f"another turn's opener is trained: {closer!r}")
    return found
