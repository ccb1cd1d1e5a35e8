"""Distinct rows of one kind in any amount, made of a corpus of that kind.

Some corpora are small (a hundred rows), and a file of the same rows over and over would be served
from caches that real data does not fill. `write_rows` writes the corpus itself first and then
*variants* of its rows, round after round, no two lines alike:

* A *piece* is a clause, a sentence or a line with the space behind it. Every text becomes as many
  pieces as it had, each drawn from the pieces that stand at the same *place* in the corpus (the
  speaker, the part's type and the key: what assistants think, what users ask, the ``instructions``
  of a tool's answer). So words, lengths and languages are the corpus's own; a text of one piece can
  come back, in another row, and longer ones do not. What engines remember by word, ours and the
  peers', they find more often than in as much real text.
* JSON inside a text is varied value by value and stays JSON. Numbers get other digits, as many as
  before; a single word (an id, a name, a member of an enumeration) keeps its letters.
* What repeats in real data repeats here: system prompts, keys, the one tool list of a corpus that
  has only one. Where it has several, each round makes its own variant of each, so there are as
  many different lists per row as in the corpus.
* Shapes (roles, keys, number of turns) are the rows' own. Long agent runs do not repeat theirs, so
  `agent_runs` recombines *exchanges* (a user's turn and all that follows until the next) of
  different runs to new runs with the corpus's numbers of turns.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

Row = dict[str, Any]
Rounds = Callable[[list[Row], random.Random], Iterator[Row]]

PIECE = re.compile(r".+?(?:[.!?,;:]+\s+|[。！？，；]+\s*|\n\s*|$)", re.DOTALL)
THINKING = re.compile(r"(</?think>)")
DIGIT = re.compile(r"\d")
LINKS = ("id", "tool_call_id")  # tie a tool's answer to its call
COLUMNS = ("messages", "conversations", "instruction", "input", "output", "tools")
FEWEST_TURNS, MOST_TURNS = 20, 60  # of an agent run


def read_rows(path: Path) -> list[Row]:
    """The rows of a corpus, without columns that nobody tokenizes."""
    with open(path, "rb") as lines:
        rows = [json.loads(line) for line in lines]
    return [{name: row[name] for name in COLUMNS if name in row} for row in rows]


def write_rows(
    path: Path, corpora: list[list[Row]], size: int, rounds: Rounds | None = None
) -> int:
    """Write ``size`` bytes of distinct rows; returns how many.

    Args:
        path: The file to write.
        corpora: Rows to begin with and to vary, each corpus out of its own pieces.
        size: Bytes at least.
        rounds: Makes the rows of one more round of a corpus; its own rows where it is None.
    """
    chance = random.Random(13)
    seen: set[int] = set()
    written = 0
    with open(path, "wb") as file:
        for row in _endless(corpora, rounds, chance):
            line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
            digest = xxhash.xxh3_64_intdigest(line)
            if digest not in seen:
                seen.add(digest)
                written += file.write(line)
            if written >= size:
                break
    return len(seen)


def _endless(
    corpora: list[list[Row]], rounds: Rounds | None, chance: random.Random
) -> Iterator[Row]:
    for corpus in corpora:
        yield from corpus
    variants = [Variants(corpus, chance) for corpus in corpora]
    while True:
        for corpus, made in zip(corpora, variants, strict=True):
            made.begin_round()
            for row in rounds(corpus, chance) if rounds else corpus:
                yield made.of(row)


class Variants:
    """Makes rows like the given ones out of other pieces."""

    def __init__(self, corpus: list[Row], chance: random.Random) -> None:
        self._choose = chance.choice
        self._digit = lambda match: chance.choice("123456789")
        self._float = chance.random
        self._inner: dict[str, list[str]] = defaultdict(list)
        self._last: dict[str, list[str]] = defaultdict(list)
        self._forms: dict[tuple[str, str], Any] = {}  # texts come back every round; cut them once
        self._lists: dict[str, Any] = {}
        self._one_list = len({json.dumps(row.get("tools")) for row in corpus}) == 1
        for row in corpus:
            self.of(row)  # fills the pieces of every place
        self._lists.clear()

    def begin_round(self) -> None:
        """Rows of one round that shared a tool list in the corpus share a variant of it."""
        self._lists.clear()

    def of(self, row: Row) -> Row:
        """A row of the same shape with other texts."""
        made: Row = self._vary({k: v for k, v in row.items() if k != "tools"}, "", "")
        if "tools" in row:
            made["tools"] = row["tools"] if self._one_list else self._tools(row["tools"])
        return made

    def _tools(self, tools: Any) -> Any:
        known = json.dumps(tools)
        if known not in self._lists:
            self._lists[known] = self._vary(tools, "tools", "tools")
        return self._lists[known]

    def _vary(self, value: Any, speaker: str, key: str) -> Any:
        if isinstance(value, str):
            return self._text(value, f"{speaker}.{key}")
        if isinstance(value, list):
            return [self._vary(item, speaker, key) for item in value]
        if isinstance(value, dict):
            own = value.get("role") or value.get("from") or value.get("type")
            if own == "system":
                return value
            speaker = f"{speaker}/{own}" if isinstance(own, str) else speaker
            return {k: v if k in LINKS else self._vary(v, speaker, k) for k, v in value.items()}
        if isinstance(value, float):
            return round(value * (0.5 + self._float()), 2)
        if isinstance(value, int) and not isinstance(value, bool):
            return int(DIGIT.sub(self._digit, str(value)))
        return value

    def _text(self, text: str, place: str) -> str:
        form = self._forms.get((place, text))
        if form is None:
            form = self._forms[place, text] = self._form(text, place)
        return form() if callable(form) else str(form)

    def _form(self, text: str, place: str) -> Any:
        """How to make texts like this one: a function, or the text itself where it is to stay."""
        if THINKING.search(text):
            return self._thinking(THINKING.split(text), place)
        if text[:1] in ("{", "["):
            try:
                value = json.loads(text)
            except ValueError:
                pass
            else:
                gaps = (", ", ": ") if ": " in text else (",", ":")
                return lambda: json.dumps(
                    self._vary(value, place, ""), ensure_ascii=False, separators=gaps
                )
        if text.isascii() and not re.search(r"\s", text):
            return (lambda: DIGIT.sub(self._digit, text)) if DIGIT.search(text) else text
        body = text.lstrip()
        pieces = PIECE.findall(body)
        if not pieces:
            return text
        inner, last = self._inner[place], self._last[place]
        inner += pieces[:-1]
        last.append(pieces[-1])
        head, count, choose = text[: len(text) - len(body)], len(pieces) - 1, self._choose
        return lambda: head + "".join([choose(inner) for _ in range(count)]) + choose(last)

    def _thinking(self, segments: list[str], place: str) -> Callable[[], str]:
        """Thinking is made of thoughts, an answer of answers; the tags stay where they are."""
        places = [place] * len(segments)
        for number in range(1, len(segments), 2):
            places[number + 1] = f"{place}.thinking" if segments[number] == "<think>" else place
        pairs = [
            (segment, "" if number % 2 else where)
            for number, (segment, where) in enumerate(zip(segments, places, strict=True))
        ]
        return lambda: "".join(
            self._text(segment, where) if where else segment for segment, where in pairs
        )


def answered(rows: list[Row]) -> list[Row]:
    """Rows that do not end with a user's turn; the others are rejected by everybody."""
    turns = [row.get("messages") or row.get("conversations") for row in rows]
    return [
        row
        for row, said in zip(rows, turns, strict=True)
        if not said or said[-1].get("role", said[-1].get("from")) not in ("user", "human")
    ]


def long_runs(runs: list[Row]) -> list[Row]:
    """Agent runs of 20 to 60 turns, each cut behind its last answer to the user."""
    found = []
    for run in runs:
        messages = run["messages"]
        while messages and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
            messages = messages[:-1]
        if FEWEST_TURNS <= len(messages) <= MOST_TURNS:
            found.append({**run, "messages": messages})
    return found


def agent_runs(runs: list[Row], chance: random.Random) -> Iterator[Row]:
    """As many new runs as there are, of exchanges of different runs."""
    openings, exchanges = [], []
    for run in runs:
        messages = run["messages"]
        starts = [n for n, message in enumerate(messages) if message["role"] == "user"]
        cut = [messages[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
        openings.append(messages[: starts[0]] + cut[0])
        exchanges += cut[1:]
    for run in runs:
        wanted = len(chance.choice(runs)["messages"])
        messages = list(chance.choice(openings))
        while len(messages) < wanted:
            messages += chance.choice(exchanges)
        if len(messages) <= MOST_TURNS:
            yield {**run, "messages": messages}
