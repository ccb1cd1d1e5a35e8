r"""Marked renders: private-use characters around each message's text show where it is printed.

A *piece* is a run of one message's own characters: its content inside the outer whitespace, cut at
the thinking tags that the template knows; its reasoning; the strings in its tool calls. `Marker`
puts one private-use character before and one after every piece, each pair its own, so that the
rendered text says which piece stands where. `read_marks` takes them out again. A marked render
counts only when what remains is exactly the plain render: a template that looks at the text (does
it start with ``<tool_response>``?) could otherwise be led to print something else.

::

    "  <think>hmm</think> hi \n"   →   "  <think>⟨hmm⟩</think> ⟨hi⟩ \n"
        whitespace and tags stay outside, so that trimming and splitting do what they always do
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jinja2.nodes

from tokenmill.chat.template import REASONING_KEYS

FIRST_MARK, LAST_MARK = 0xF0000, 0x10FFFD  # the two private planes; no text font uses them
MARK = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]")
TAG = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,30}\]|◁[^◁▷\s]{1,30}▷|<\|[^<>|\s]{1,30}>")
THINKING = re.compile(r"think|thought|reason|inner|analysis", re.IGNORECASE)
CLOSING = re.compile(r"^(?:<\|?/|\[/|◁/)|(?<![a-z])end[_▁]|_end|suffix|<\|close", re.IGNORECASE)

TEXT, REASONING, CALL = "text", "reasoning", "call"


@dataclass(slots=True)
class Piece:
    """A run of one message's characters."""

    message: int
    kind: str
    text: str


@dataclass(slots=True)
class Hit:
    """A place where a piece is printed: ``text[start:end]``."""

    start: int
    end: int
    piece: int
    message: int


def literals(tree: jinja2.nodes.Template) -> set[str]:
    """Every string a template holds, printed or compared."""
    found = {str(node.data) for node in tree.find_all(jinja2.nodes.TemplateData)}
    found |= {n.value for n in tree.find_all(jinja2.nodes.Const) if isinstance(n.value, str)}
    return found


def thinking_tags(strings: Iterable[str]) -> set[str]:
    """The thinking tags among a template's strings."""
    tags = {t for s in strings for t in TAG.findall(s) if THINKING.search(t)}
    # A template that cuts at "</think>" means "<think>" too, named or not.
    tags |= {t.replace("/", "", 1) for t in tags if CLOSING.search(t) and "/" in t}
    return tags


def compared_strings(strings: Iterable[str]) -> re.Pattern[str] | None:
    """Markup among a template's strings that content might be compared with or cut at."""
    return any_of({s.strip() for s in strings if re.search(r"[<\[|{]", s) and len(s) < 64})


def any_of(tags: Iterable[str]) -> re.Pattern[str] | None:
    """One pattern for any of these strings, the longest first; None where there are none."""
    ordered = sorted((re.escape(tag) for tag in tags if tag), key=lambda t: (-len(t), t))
    return re.compile(f"({'|'.join(ordered)})") if ordered else None


def cut(
    text: str, tags: re.Pattern[str] | None, thinking: re.Pattern[str] | None
) -> list[tuple[str, str]]:
    """Cut one text into (kind, run): own text, reasoning, or "" for whitespace and tags."""
    runs: list[tuple[str, str]] = []
    kind = TEXT
    for index, run in enumerate(tags.split(text) if tags is not None else (text,)):
        if index % 2:
            runs.append(("", run))
            if thinking is not None and thinking.fullmatch(run):
                if not CLOSING.search(run):
                    kind = REASONING
                else:
                    if not any(k == REASONING for k, _ in runs) and not _opened(runs, thinking):
                        # "…</think> answer" without an opener: the prompt had opened it.
                        runs = [(REASONING if k else k, r) for k, r in runs]
                    kind = TEXT
            continue
        core = run.strip()
        if not core:
            runs.append(("", run))
            continue
        lead = run.index(core)
        runs += [("", run[:lead]), (kind, core), ("", run[lead + len(core) :])]
    return [r for r in runs if r[1]]


def _opened(runs: list[tuple[str, str]], thinking: re.Pattern[str]) -> bool:
    return any(not k and thinking.fullmatch(r) and not CLOSING.search(r) for k, r in runs)


class Marker:
    """Marks the messages of one conversation.

    Args:
        messages: The conversation as the template gets it.
        thinking: Thinking tags at which assistant texts are cut.
        compared: Further strings at which every text is cut, None for none.
        calls: Whether strings in tool calls are marked.
        besides: Other values that may be printed, whose private-use characters are not taken.
    """

    def __init__(
        self,
        messages: list[dict[str, Any]],
        thinking: re.Pattern[str] | None,
        compared: re.Pattern[str] | None = None,
        calls: bool = True,
        besides: Any = None,
    ) -> None:
        self.pieces: list[Piece] = []
        self._assistants = {i for i, m in enumerate(messages) if m["role"] == "assistant"}
        self._thinking = thinking
        self._compared = compared
        self._used = set(MARK.findall(_all_text(messages) + _all_text(besides)))
        self._alphabet = (
            chr(code) for code in range(FIRST_MARK, LAST_MARK) if chr(code) not in self._used
        )
        self.opens: dict[str, int] = {}
        self.closes: dict[str, int] = {}
        self.messages = [self._message(i, m, calls) for i, m in enumerate(messages)]

    def _pair(self, message: int, kind: str, text: str) -> tuple[str, str]:
        opening, closing = next(self._alphabet, None), next(self._alphabet, None)
        if opening is None or closing is None:
            raise OverflowError("more texts than private-use characters")
        self.opens[opening] = self.closes[closing] = len(self.pieces)
        self.pieces.append(Piece(message, kind, text))
        return opening, closing

    def _mark(self, index: int, text: str, kind: str, cut_thinking: bool) -> str:
        tags = self._compared or (self._thinking if cut_thinking else None)
        marked = []
        for found, run in cut(text, tags, self._thinking if cut_thinking else None):
            if found:
                opening, closing = self._pair(index, kind if found == TEXT else found, run)
                run = f"{opening}{run}{closing}"
            marked.append(run)
        return "".join(marked)

    def _message(self, index: int, message: dict[str, Any], calls: bool) -> dict[str, Any]:
        marked = dict(message)
        assistant = message["role"] == "assistant"
        same: dict[str, str] = {}
        for key in REASONING_KEYS:
            value = message.get(key)
            if isinstance(value, str):
                if value not in same:
                    same[value] = self._mark(index, value, REASONING, False)
                marked[key] = same[value]
        content = message.get("content")
        if isinstance(content, str):
            marked["content"] = self._mark(index, content, TEXT, assistant)
        elif isinstance(content, list):
            marked["content"] = [
                {**part, "text": self._mark(index, part["text"], TEXT, assistant)}
                if isinstance(part, dict) and isinstance(part.get("text"), str)
                else part
                for part in content
            ]
        if calls:
            for key in ("tool_calls", "function_call"):
                if message.get(key):
                    marked[key] = self._calls(index, message[key])
        return marked

    def _calls(self, index: int, value: Any, inside: bool = False) -> Any:
        if isinstance(value, dict):
            return {
                key: self._calls(index, item, inside or key == "arguments")
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._calls(index, item, inside) for item in value]
        if inside and isinstance(value, str):
            return self._mark(index, value, CALL, False)
        return value

    def read(self, marked: str) -> tuple[str, list[Hit]] | None:
        """Take the marks out: the text, and where each piece stands in it.

        Returns:
            None where the marks are not in order: a text was cut, changed or printed inside out.
        """
        parts: list[str] = []
        hits: list[Hit] = []
        position = last = 0
        open_piece: int | None = None
        for found in MARK.finditer(marked):
            mark = found[0]
            if mark in self._used:
                continue
            parts.append(marked[last : found.start()])
            position += found.start() - last
            last = found.end()
            if open_piece is None:
                open_piece = self.opens.get(mark)
                if open_piece is None:
                    return None
                start = position
            elif self.closes.get(mark) == open_piece:
                piece = self.pieces[open_piece]
                exact = piece.message in self._assistants and piece.kind != CALL
                if exact and not _says(parts, position - start, piece.text):
                    return None  # (others' texts may be quoted or trimmed: only their place counts)
                hits.append(Hit(start, position, open_piece, piece.message))
                open_piece = None
            else:
                return None
        parts.append(marked[last:])
        return None if open_piece is not None else ("".join(parts), hits)


def _all_text(value: Any) -> str:
    """Everything a conversation says, to see which private-use characters it holds itself."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "".join(_all_text(part) for item in value.items() for part in item)
    if isinstance(value, (list, tuple)):
        return "".join(_all_text(item) for item in value)
    return ""


def _says(parts: list[str], length: int, text: str) -> bool:
    """Whether the last part is exactly this text (marks leave it in one part)."""
    return len(text) == length and parts[-1] == text
