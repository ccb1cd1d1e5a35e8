"""Generate any amount of distinct rows of one kind from a small corpus of that kind.

Repeating the same rows would hit caches that real data does not. `write_rows` writes the corpus
first and then variants of its rows, round after round, without equal lines:

* A *piece* is a clause, a sentence or a line with the space after it. A variant of a text has the
  same number of pieces, drawn from the pieces of the same *place* in the corpus (speaker, part type
  and key). So words, lengths and languages are those of the corpus. A text of one piece can repeat
  in another row. Word caches of all engines have more hits than on as much real text.
* JSON inside a text is varied value by value and stays JSON. Numbers get other digits of the same
  count; a single word (an id, a name, an enumeration value) keeps its letters.
* System prompts, keys and the only tool list of a corpus repeat, as in real data. If there are
  several tool lists, each round has its own variant of each.
* Shapes (roles, keys, number of turns) stay. Long agent runs do not repeat their shapes, so
  `agent_runs` recombines *exchanges* (a user's turn and all messages until the next) of different
  runs to new runs with the corpus's numbers of turns.
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
LINKS = ("id", "tool_call_id")  # connect a tool message to its call
COLUMNS = ("messages", "conversations", "instruction", "input", "output", "tools")
FEWEST_TURNS, MAX_TURNS = 20, 60  # of an agent run


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a corpus, without columns that are not tokenized."""
    with open(path, "rb") as lines:
        rows = [json.loads(line) for line in lines]
    return [{name: row[name] for name in COLUMNS if name in row} for row in rows]


def write_rows(
    path: Path, corpora: list[list[Row]], size: int, rounds: Rounds | None = None
) -> int:
    """Write ``size`` bytes of distinct rows; returns how many.

    Args:
        path: The file to write.
        corpora: Rows to write first and to vary, each corpus from its own pieces.
        size: Minimum number of bytes.
        rounds: Returns the rows of another round of a corpus; None: its own rows.
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
        for corpus, variant in zip(corpora, variants, strict=True):
            variant.begin_round()
            for row in rounds(corpus, chance) if rounds else corpus:
                yield variant.of(row)


class Variants:
    """Creates variants of rows from the pieces of a corpus."""

    def __init__(self, corpus: list[Row], chance: random.Random) -> None:
        self._choose = chance.choice
        self._digit = lambda match: chance.choice("123456789")
        self._float = chance.random
        self._inner: dict[str, list[str]] = defaultdict(list)
        self._last: dict[str, list[str]] = defaultdict(list)
        self._forms: dict[tuple[str, str], Any] = {}  # texts repeat every round; split them once
        self._lists: dict[str, Any] = {}
        self._one_list = len({json.dumps(row.get("tools")) for row in corpus}) == 1
        for row in corpus:
            self.of(row)  # fills the pieces of every place
        self._lists.clear()

    def begin_round(self) -> None:
        """Start a round; its rows share the variants of shared tool lists."""
        self._lists.clear()

    def of(self, row: Row) -> Row:
        """Return a row of the same shape with other texts."""
        variant: Row = self._vary({k: v for k, v in row.items() if k != "tools"}, "", "")
        if "tools" in row:
            variant["tools"] = row["tools"] if self._one_list else self._tools(row["tools"])
        return variant

    def _tools(self, tools: Any) -> Any:
        key = json.dumps(tools)
        if key not in self._lists:
            self._lists[key] = self._vary(tools, "tools", "tools")
        return self._lists[key]

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
        """Return a function that creates variants of a text, or the text itself if it stays."""
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
        """Vary thinking and answers from their own pieces; the tags stay."""
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
    """Return the rows that do not end with a user's turn, which every tool rejects."""
    turns = [row.get("messages") or row.get("conversations") for row in rows]
    return [
        row
        for row, messages in zip(rows, turns, strict=True)
        if not messages
        or messages[-1].get("role", messages[-1].get("from")) not in ("user", "human")
    ]


def long_runs(runs: list[Row]) -> list[Row]:
    """Return agent runs of 20 to 60 turns, each cut after its last answer to the user."""
    result = []
    for run in runs:
        messages = run["messages"]
        while messages and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
            messages = messages[:-1]
        if FEWEST_TURNS <= len(messages) <= MAX_TURNS:
            result.append({**run, "messages": messages})
    return result


def agent_runs(runs: list[Row], chance: random.Random) -> Iterator[Row]:
    """Yield as many new runs as there are, from exchanges of different runs."""
    openings, exchanges = [], []
    for run in runs:
        messages = run["messages"]
        starts = [n for n, message in enumerate(messages) if message["role"] == "user"]
        cut = [messages[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
        openings.append(messages[: starts[0]] + cut[0])
        exchanges += cut[1:]
    for run in runs:
        length = len(chance.choice(runs)["messages"])
        messages = list(chance.choice(openings))
        while len(messages) < length:
            messages += chance.choice(exchanges)
        if len(messages) <= MAX_TURNS:
            yield {**run, "messages": messages}
