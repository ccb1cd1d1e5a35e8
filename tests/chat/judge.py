"""The product's masks before the oracle: every template × every conversation, as a table.

::

    python -m tests.chat.judge                        # zoo × odd cases × a sample of each corpus
    python -m tests.chat.judge --template qwen3       # templates whose name holds it, in detail
    python -m tests.chat.judge --case echo --details 5
    python -m tests.chat.judge --all                  # every row of every corpus: hours

Per template: pairs tried, refused by the template itself, content lost (an assistant's words that
the render does not hold), no trained token, proven, rejected though nothing is lost, violations,
not judged.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chat.conversations import CORPORA, DATE, ODD, SPECIAL, VARIABLES, Row, corpus_rows, zoo
from tests.chat.loop_oracle import Conversation, OracleTemplate, Refused, judge, lost, to_train
from tokenmill.chat import ChatSpec, Renderer
from tokenmill.chat.shapes import Plain, read
from tokenmill.errors import RowError

REASONS = (
    "template_error",
    "template_drops_content",
    "mask_unproven",
    "no_trained_tokens",
    "limit",
)
UNTRAINED_ROLES = ("tool", "function", "ipython")


def make_renderer(
    spec: ChatSpec,
    template: str | Mapping[str, str] | None,
    special_tokens: Mapping[str, str] | None = None,
    renderer: str = "auto",
    kind: Any = Renderer,
    **more: Any,
) -> Any:
    """A renderer, whichever of the two keywords its constructor has."""
    names = inspect.signature(kind).parameters
    keyword: dict[str, Any] = {"fast": renderer == "auto"}
    if "renderer" in names:
        keyword = {"renderer": renderer}
    return kind(spec, template, special_tokens, **keyword, **more)


@dataclass(slots=True)
class Score:
    """What came out for one template."""

    pairs: int = 0
    refused: int = 0
    lost: int = 0
    nothing: int = 0
    proven: int = 0
    due: int = 0
    unproven: Counter[str] = field(default_factory=Counter)
    violated: Counter[str] = field(default_factory=Counter)
    unsure: Counter[str] = field(default_factory=Counter)
    reports: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Score) -> None:
        """Sum up."""
        for name in ("pairs", "refused", "lost", "nothing", "proven", "due"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.unproven += other.unproven
        self.violated += other.violated
        self.unsure += other.unsure
        self.reports += other.reports
        self.notes += other.notes


def conversation(row: Row) -> tuple[list[dict[str, Any]], Any, list[int]] | None:
    """Messages, tools and trained messages of a row as the product documents it."""
    found = read(row, ChatSpec())
    if isinstance(found, Plain):
        return None
    messages = list(found.messages)
    while messages and messages[-1]["role"] in UNTRAINED_ROLES:
        messages.pop()
    if not messages or messages[-1]["role"] == "user":
        return None
    trained = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
        and message.get("train") is not False
        and message.get("weight") != 0
        and message.get("step_loss_mask") != 0
    ]
    return messages, found.tools, trained


def score(
    name: str,
    source: str,
    rows: Mapping[str, Row],
    *,
    turn_end: str = "stop",
    thinking_opener: str = "trained",
    renderer: str = "auto",
    special_tokens: Mapping[str, str] = SPECIAL,
) -> Score:
    """Let the product render rows under one template and judge what it says."""
    total = Score()
    special_tokens = {**special_tokens, **VARIABLES.get(name, {})}
    template = OracleTemplate(source, special_tokens, DATE)
    spec = ChatSpec(date=DATE, turn_end=turn_end)
    product = make_renderer(spec, source, special_tokens, renderer).render(list(rows.values()))
    accepted = {source: number for number, source in enumerate(product.source)}
    rejected = {source: error for source, _, error in product.rejected}
    for number, (case, row) in enumerate(rows.items()):
        where = f"{name} × {case}"
        found = conversation(row)
        if found is None:
            continue
        messages, tools, trained = found
        total.pairs += 1
        error: RowError | None = rejected.get(number)
        try:
            talk = Conversation(template, messages, tools)
        except Refused as refusal:
            total.refused += 1
            if error is None or error.reason not in ("template_error", "limit"):
                said = "accepted" if error is None else error.reason
                total.violated["accepted what the template refuses"] += 1
                total.reports.append(f"{where}: {said}, but the template refuses: {refusal}")
            continue
        if error is not None and error.reason not in REASONS:
            total.violated["a reason of its own"] += 1
            total.reports.append(f"{where}: rejected as {error.reason}: {error}")
            continue
        gone = lost(messages, talk.found) if talk.found is not None else None
        if talk.found is None:
            total.unsure["sentinels do not survive"] += 1
            total.notes.append(f"{where}: the sentinels do not survive")
        silent = not to_train(talk, trained)
        if gone is not None:
            total.lost += 1
        elif silent:
            total.nothing += 1
        else:
            total.due += 1
        if error is not None:
            if error.reason in ("template_error", "limit"):
                total.violated["refused what the template renders"] += 1
                total.reports.append(f"{where}: {error.reason}: {error}")
            elif gone is None and not silent:
                total.unproven[error.reason] += 1
                total.notes.append(f"{where}: {error.reason}: {error}")
            continue
        if number not in accepted:
            total.violated["neither accepted nor rejected"] += 1
            total.reports.append(f"{where}: neither accepted nor rejected")
            continue
        if gone is None and not silent:
            total.proven += 1
        text, spans = product.texts[accepted[number]], product.spans[accepted[number]]
        surely = lost(messages, talk.found, every_thought=False) if gone and talk.found else None
        if surely is not None and not talk.template.says_itself:
            total.violated["accepted what loses content"] += 1
            total.reports.append(f"{where}: accepted, but {surely} is lost")
        if talk.found is None:
            if text != template.plain(messages, tools):
                total.violated["another text"] += 1
                total.reports.append(f"{where}: another text than jinja2's")
            continue
        verdict = judge(
            talk,
            text,
            spans,
            trained=trained,
            turn_end=turn_end,
            thinking_opener=thinking_opener,
        )
        for reason in verdict.unsure:
            total.unsure["where a turn starts"] += 1
            total.notes.append(f"{where}: {reason}")
        for violation in verdict.violations:
            total.violated[violation.kind] += 1
            total.reports.append(f"{where}: {violation}")
    return total


def data_directory() -> Path:
    """The shared data, unpacked: where the tests find it, or /tmp/data."""
    from tests.conftest import unpack_shared

    if not os.environ.get("TOKENMILL_TEST_DATA") and Path("/tmp/data/templates").is_dir():
        return Path("/tmp/data")
    found = unpack_shared()
    if found is None:
        sys.exit("no shared data: name the unpacked directory with TOKENMILL_TEST_DATA=")
    return found


def sample(shared: Path, per_corpus: int | None, odd: bool = True) -> dict[str, Row]:
    """The odd cases and rows of every corpus, by name."""
    rows = dict(ODD) if odd else {}
    for corpus in CORPORA:
        for number, row in enumerate(corpus_rows(shared, corpus, per_corpus)):
            rows[f"{corpus} {number}"] = row
    return rows


HEADINGS = ("pairs", "refused", "lost", "silent", "due", "proven", "wrong", "unsure")


def line(name: str, total: Score) -> str:
    """One line of the table."""
    cells = (
        total.pairs,
        total.refused,
        total.lost,
        total.nothing,
        total.due,
        total.proven,
        sum(total.violated.values()),
        sum(total.unsure.values()),
    )
    reasons = ", ".join(f"{k} {v}" for k, v in (total.unproven + total.violated).most_common())
    return f"{name[:44]:<44} " + " ".join(f"{c:>7}" for c in cells) + f"  {reasons}"


def main(arguments: Iterable[str] | None = None) -> int:
    """Print the table; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--template", default="", help="only templates whose name holds this")
    parser.add_argument("--case", default="", help="only conversations whose name holds this")
    parser.add_argument("--all", action="store_true", help="every row of every corpus")
    parser.add_argument("--rows", type=int, default=3, help="rows per corpus (default 3)")
    parser.add_argument("--details", type=int, help="reports per template (with --template: 20)")
    parser.add_argument("--notes", action="store_true", help="also what was unproven or unsure")
    parser.add_argument("--turn-end", default="stop", choices=("stop", "turn"))
    parser.add_argument("--thinking-opener", default="trained", choices=("trained", "prompt"))
    parser.add_argument("--renderer", default="auto", choices=("auto", "jinja2"))
    options = parser.parse_args(None if arguments is None else list(arguments))
    details = options.details
    if details is None:
        details = 20 if options.template else 0
    shared = data_directory()
    rows = sample(shared, None if options.all else options.rows)
    rows = {case: row for case, row in rows.items() if options.case in case}
    total = Score()
    print(f"{'template':<44} " + " ".join(f"{h:>7}" for h in HEADINGS))
    began = time.perf_counter()
    for name, source in zoo(shared).items():
        if options.template.lower() not in name.lower():
            continue
        found = score(
            name,
            source,
            rows,
            turn_end=options.turn_end,
            thinking_opener=options.thinking_opener,
            renderer=options.renderer,
        )
        print(line(name, found), flush=True)
        for report in found.reports[:details]:
            print(f"    {report}")
        for note in found.notes[: details or 20] if options.notes else ():
            print(f"    ({note})")
        total.add(found)
    print(line("all", total))
    share = total.proven / total.due if total.due else 1.0
    print(
        f"proven {share:.2%} of {total.due} that lose nothing; {sum(total.violated.values())}"
        f" violations; {sum(total.unsure.values())} not judged;"
        f" {time.perf_counter() - began:.0f} s"
    )
    return int(bool(total.violated))


if __name__ == "__main__":
    sys.exit(main())
