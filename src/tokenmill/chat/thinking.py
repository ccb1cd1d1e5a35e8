"""Find a template's thinking tags in its strings, and cut texts at them into text and reasoning."""

from __future__ import annotations

import re
from collections.abc import Iterable

import jinja2.nodes

TAG = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,30}\]|◁[^◁▷\s]{1,30}▷|<\|[^<>|\s]{1,30}>")
THINKING = re.compile(r"think|thought|reason|inner|analysis", re.IGNORECASE)
CLOSING = re.compile(r"^(?:<\|?/|\[/|◁/)|(?<![a-z])end[_▁]|_end|suffix|<\|close", re.IGNORECASE)
# An opening tag in several units: <|open|>think<|sep|>, <|channel|>analysis<|message|>.
SPREAD = re.compile(
    rf"({TAG.pattern})\s*(?:think|thinking|thought|analysis|reasoning)\s*(?:{TAG.pattern})?\s*$"
)

TEXT, REASONING = "text", "reasoning"


def literals(tree: jinja2.nodes.Template) -> set[str]:
    texts = {str(node.data) for node in tree.find_all(jinja2.nodes.TemplateData)}
    texts |= {n.value for n in tree.find_all(jinja2.nodes.Const) if isinstance(n.value, str)}
    return texts


def thinking_tags(strings: Iterable[str]) -> set[str]:
    tags = {t for s in strings for t in TAG.findall(s) if THINKING.search(t)}
    # A template that splits at "</think>" also implies "<think>".
    tags |= {t.replace("/", "", 1) for t in tags if CLOSING.search(t) and "/" in t}
    return tags


def any_of(tags: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern of these strings, the longest first; None if there are none."""
    ordered = sorted((re.escape(tag) for tag in tags if tag), key=lambda t: (-len(t), t))
    return re.compile(f"({'|'.join(ordered)})") if ordered else None


def cut(text: str, tags: re.Pattern[str] | None) -> list[tuple[str, str]]:
    """Split a text at thinking tags into (kind, text) pairs without the tags."""
    runs: list[tuple[str, str]] = []
    kind, opened = TEXT, False
    for index, run in enumerate(tags.split(text) if tags is not None else (text,)):
        if not index % 2:
            if core := run.strip():
                runs.append((kind, core))
        elif not CLOSING.search(run):
            kind, opened = REASONING, True
        else:
            if not opened:  # "…</think> answer": the generation prompt opened the thinking
                runs = [(REASONING, core) for _, core in runs]
            kind, opened = TEXT, True
    return runs


def before_thinking(prompt: str) -> int:
    """Return the length of a generation prompt without the thinking that it opens at its end."""
    spread = SPREAD.search(prompt)
    if spread is not None and not CLOSING.search(spread[1]):
        return spread.start()
    end = len(prompt)
    for tag in reversed(list(TAG.finditer(prompt))):
        rest = prompt[tag.end() : end]
        if not THINKING.search(tag[0]) or rest.strip():
            break
        if not CLOSING.search(tag[0]):
            return tag.start()
        end = tag.start()
    return len(prompt)
