"""The product's masks before the oracle: every template × every conversation, as a table.

::

    python -m tests.chat.judge                        # zoo × odd cases × a sample of each corpus
    python -m tests.chat.judge --template qwen3       # templates whose name holds it, in detail
    python -m tests.chat.judge --case echo --details 5
    python -m tests.chat.judge --all --jobs 2 --log FILE    # every row of every corpus: an hour

The log has a line for every template × corpus that is done; the same command goes on from there
unless what judges or what is judged has changed since. ``--reference N`` also holds every N-th row
against the product's own reference, ``renderer="jinja2"``.

Per template: pairs tried, refused by the template itself, content lost (an assistant's words that
the render does not hold), no trained token, proven, rejected though nothing is lost, violations,
not judged.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import inspect
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tests.chat.conversations import CORPORA, DATE, ODD, SPECIAL, VARIABLES, Row, corpus_rows, zoo
from tests.chat.loop_oracle import OracleTemplate, Refused
from tests.chat.mask_oracle import judge, to_train
from tests.chat.turn_oracle import Conversation, lost
from tokenmill.chat import ChatSpec, Renderer, Rendering
from tokenmill.chat.calls import call_list, text_arguments
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

Place = tuple[int, int]
Answer = tuple[str, Any, Any]


def make_renderer(
    spec: ChatSpec,
    template: str | Mapping[str, str] | None,
    special_tokens: Mapping[str, str] | None = None,
    renderer: str = "auto",
) -> Renderer:
    """The product's renderer, all by position."""
    return Renderer(spec, template, special_tokens, renderer=renderer)


@dataclass(slots=True)
class Score:
    """What came out for one template."""

    pairs: int = 0
    refused: int = 0
    lost: int = 0
    nothing: int = 0
    proven: int = 0
    due: int = 0
    compared: int = 0
    unproven: Counter[str] = field(default_factory=Counter)
    violated: Counter[str] = field(default_factory=Counter)
    unsure: Counter[str] = field(default_factory=Counter)
    reports: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def wrong(self, kind: str, report: str) -> None:
        """Take down a violation."""
        self.violated[kind] += 1
        self.reports.append(report)

    def add(self, other: Score) -> None:
        """Sum up."""
        for name in ("pairs", "refused", "lost", "nothing", "proven", "due", "compared"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.unproven.update(other.unproven)  # a dict, where it was read from a log
        self.violated.update(other.violated)
        self.unsure.update(other.unsure)
        self.reports += other.reports
        self.notes += other.notes


@lru_cache(maxsize=128)
def oracle(name: str, source: str) -> OracleTemplate:
    """The oracle of a template, compiled once for all tests of a process."""
    return OracleTemplate(source, {**SPECIAL, **VARIABLES.get(name, {})}, DATE)


@dataclass(slots=True)
class Wanted:
    """One text that a row is to give: its messages, and which of them are trained."""

    part: int
    messages: list[dict[str, Any]]
    tools: Any
    trained: list[int]
    nulls: set[int] = field(default_factory=set)
    calls: dict[int, Any] = field(default_factory=dict)
    hollow: set[int] = field(default_factory=set)

    def form(self, nulls: bool, texts: bool) -> list[dict[str, Any]]:
        """The messages with null contents, and with calls whose arguments are texts."""
        if not nulls and not texts:
            return self.messages
        return [
            {
                **message,
                **({"content": None} if nulls and n in self.nulls else {}),
                **({"tool_calls": self.calls[n]} if texts and n in self.calls else {}),
            }
            for n, message in enumerate(self.messages)
        ]


def wanted(row: Row, spec: ChatSpec) -> list[Wanted]:
    """The texts of a row as the product documents them; empty: it has no conversation to judge."""
    found = read(row, spec)
    if isinstance(found, Plain):
        return []
    hollow = {n for n, message in enumerate(found.messages) if id(message) in found.hollow}
    nulls = {n for n, message in enumerate(found.messages) if id(message) in found.nulls} | hollow
    calls = {
        n: call_list(found.calls[id(message)], text_arguments)
        for n, message in enumerate(found.messages)
        if id(message) in found.calls
    }
    messages = list(found.messages)
    while messages and messages[-1]["role"] in UNTRAINED_ROLES:
        messages.pop()
    if not messages or messages[-1]["role"] == "user":
        return []
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = assistants[-1:] if spec.train_on == "last_assistant_message" else assistants
    trained = [
        index
        for index in chosen
        if messages[index].get("train") is not False
        and messages[index].get("weight") != 0
        and messages[index].get("step_loss_mask") != 0
    ]
    if spec.expand != "turns":
        return [Wanted(0, messages, found.tools, trained, nulls, calls, hollow)]
    return [
        Wanted(part, messages[: index + 1], found.tools, [index], nulls, calls, hollow)
        for part, index in enumerate(assistants)
        if index in trained
    ]


def score(
    name: str,
    source: str,
    rows: Mapping[str, Row],
    *,
    spec: ChatSpec | None = None,
    renderer: str = "auto",
    jobs: Mapping[str, list[Wanted]] | None = None,
    reference: int = 0,
    make: Callable[..., Renderer] = make_renderer,
) -> Score:
    """Let the product render rows under one template and judge what it says.

    Args:
        name: The template's.
        source: The template.
        rows: By name.
        spec: What is asked of the product.
        renderer: The product's way to render.
        jobs: What `wanted` says of every row, where that is known.
        reference: Every so many-th row is also rendered by the product's reference.
        make: Makes the product's renderers, or keeps them.
    """
    total = Score()
    template = oracle(name, source)
    spec = spec or ChatSpec(date=DATE)
    product = make(spec, source, template.given, renderer).render(list(rows.values()))
    if product.notes.get("mismatches"):
        total.wrong("differs from the reference", f"{name}: the product's own audit found it")
    made, rejected = _by_place(product)
    for number, (case, row) in enumerate(rows.items()):
        for job in wanted(row, spec) if jobs is None else jobs[case]:
            place = (number, job.part)
            where = f"{name} × {case}" + (f" part {job.part}" if job.part else "")
            _judge_one(total, where, template, job, spec, made.get(place), rejected.get(place))
    if reference:
        some = dict(list(rows.items())[::reference])
        ways = [make(spec, source, template.given, way) for way in (renderer, "jinja2")]
        outcomes = (_by_place(way.render(list(some.values()))) for way in ways)
        fast, slow = ({**texts, **errors} for texts, errors in outcomes)
        for place in {**fast, **slow}:
            total.compared += 1
            if _plainly(fast.get(place)) != _plainly(slow.get(place)):
                where = f"{name} × {list(some)[place[0]]} part {place[1]}"
                total.wrong("differs from the reference", f"{where}: {slow.get(place)}"[:500])
    return total


def _by_place(product: Rendering) -> tuple[dict[Place, Answer], dict[Place, RowError]]:
    """What the product made and what it rejected, by row and part."""
    made = zip(product.texts, product.spans, product.turns, strict=True)
    places = zip(product.source, product.part, strict=True)
    rejected = {(source, part): error for source, part, error in product.rejected}
    return dict(zip(places, made, strict=True)), rejected


def _plainly(outcome: Answer | RowError | None) -> Any:
    """An outcome in a form that can be compared."""
    return (outcome.reason, str(outcome)) if isinstance(outcome, RowError) else outcome


def conversation_of(template: OracleTemplate, job: Wanted) -> Conversation | Refused:
    """The conversation in the form that the template takes, or its refusal.

    Null contents as they stand, arguments as objects. Null is empty text where the template fails
    on null or prints it as a word. Where it fails on calls or prints them nowhere, they are tried
    with null content and with arguments as texts.
    """

    @cache
    def conversation(nulls: bool, texts: bool) -> Conversation | Refused:
        try:
            return Conversation(template, job.form(nulls, texts), job.tools)
        except Refused as refusal:
            return refusal

    def render(nulls: bool, texts: bool) -> str | None:
        talk = conversation(nulls, texts)
        if isinstance(talk, Refused):
            return None
        return talk.found.text if talk.found else template.plain(talk.messages, job.tools)

    def words(nulls: bool, texts: bool) -> bool:
        """Whether null is printed as a word."""
        text, without = render(nulls, texts) or "", render(False, texts) or ""
        return text.count("None") > without.count("None")

    def loses(nulls: bool, texts: bool) -> bool:
        talk = conversation(nulls, texts)
        if isinstance(talk, Refused):
            return True
        gone = talk.found is not None and lost(talk.messages, talk.found) is not None
        return gone and not template.says_itself

    given = job.nulls - job.hollow
    first = bool(given) and render(True, False) is not None and not words(True, False)
    chosen = (first, False)
    if job.calls and loses(*chosen):
        forms = ((True, False), (True, True), (False, True))
        taken = [form for form in forms if render(*form) is not None and not words(*form)]
        whole = [form for form in taken if not loses(*form)]
        as_text = [form for form in taken if form[1] and render(*chosen) is None]
        chosen = next(iter([*whole, *as_text]), chosen)
    return conversation(*chosen)


def _judge_one(
    total: Score,
    where: str,
    template: OracleTemplate,
    job: Wanted,
    spec: ChatSpec,
    answer: Answer | None,
    error: RowError | None,
) -> None:
    total.pairs += 1
    talk = conversation_of(template, job)
    if isinstance(talk, Refused):
        total.refused += 1
        if error is None or error.reason not in ("template_error", "limit"):
            said = "accepted" if error is None else error.reason
            total.wrong("accepted what the template refuses", f"{where}: {said}: {talk}")
        return
    if error is not None and error.reason not in REASONS:
        total.wrong("a reason of its own", f"{where}: rejected as {error.reason}: {error}")
        return
    if (error is None) == (answer is None):
        total.wrong("neither accepted nor rejected", f"{where}: {error or 'no answer'}")
        return
    if talk.found is None:
        total.unsure["sentinels do not survive"] += 1
        total.notes.append(f"{where}: the sentinels do not survive")
    gone = lost(talk.messages, talk.found) if talk.found is not None else None
    silent = not to_train(talk, job.trained)
    if gone is not None:
        total.lost += 1
    elif silent:
        total.nothing += 1
    else:
        total.due += 1
    if error is not None:
        if error.reason in ("template_error", "limit"):
            total.wrong("refused what the template renders", f"{where}: {error.reason}: {error}")
        elif gone is None and not silent:
            total.unproven[error.reason] += 1
            total.notes.append(f"{where}: {error.reason}: {error}")
        return
    assert answer is not None
    text, spans, turns = answer
    if gone is None and not silent:
        total.proven += 1
    surely = lost(talk.messages, talk.found, every_thought=False) if gone and talk.found else None
    if surely is not None and not template.says_itself:
        total.wrong("accepted what loses content", f"{where}: accepted, but {surely} is lost")
    if talk.found is None:
        if text != template.plain(talk.messages, job.tools):
            total.wrong("another text", f"{where}: another text than jinja2's")
        return
    verdict = judge(
        talk,
        text,
        spans,
        trained=job.trained,
        turn_end=spec.turn_end,
        thinking_opener=spec.thinking_opener,
    )
    for reason in verdict.unsure:
        total.unsure["where a turn starts"] += 1
        total.notes.append(f"{where}: {reason}")
    for violation in verdict.violations:
        total.wrong(violation.kind, f"{where}: {violation}")
    ends = [end for _, end in turns]
    if [role for role, _ in turns] != [message["role"] for message in talk.messages]:
        total.wrong("turns of other roles", f"{where}: {turns}")
    elif ends != sorted(ends) or ends[-1] != len(text):
        total.wrong("turns out of order", f"{where}: {turns} of {len(text)}")


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


Task = tuple[str, str]
Done = tuple[str, str, Score, float]


@dataclass(slots=True)
class Sweep:
    """Chunks of work, each a template and a corpus, and the log of those that are done."""

    templates: Mapping[str, str]
    rows: Mapping[str, Mapping[str, Row]]
    spec: ChatSpec
    renderer: str
    reference: int
    log: Path | None
    jobs: dict[str, list[Wanted]] = field(init=False)
    digest: str = field(init=False)
    renderers: dict[Any, Renderer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read every row once for all templates, and what the log must agree with."""
        every = (pair for rows in self.rows.values() for pair in rows.items())
        self.jobs = {case: wanted(row, self.spec) for case, row in every}
        here = Path(__file__).parent
        judges = [here / "conversations.py", here / "judge.py", *here.glob("*_oracle.py")]
        judged = sorted(Path(inspect.getfile(ChatSpec)).parent.glob("*.py"))
        counts = {corpus: len(rows) for corpus, rows in self.rows.items()}
        options = repr((self.spec, self.renderer, self.reference, counts))
        digest = hashlib.sha256(options.encode())
        for path in [*sorted(judges), *judged]:
            digest.update(path.read_bytes())
        self.digest = digest.hexdigest()[:16]

    def _renderer(self, spec: ChatSpec, source: str, given: Mapping[str, str], way: str) -> Any:
        """A renderer for all chunks of a template: making one takes as long as a thousand rows."""
        key = (source, repr(given), way)
        if key not in self.renderers:
            self.renderers[key] = make_renderer(spec, source, given, way)
        return self.renderers[key]

    def chunk(self, task: Task) -> Done:
        """Judge one corpus under one template."""
        name, corpus = task
        began = time.process_time()
        found = score(
            name,
            self.templates[name],
            self.rows[corpus],
            spec=self.spec,
            renderer=self.renderer,
            jobs=self.jobs,
            reference=self.reference,
            make=self._renderer,
        )
        return name, corpus, found, time.process_time() - began

    def done(self) -> dict[tuple[str, str], Score]:
        """What the log says of chunks that need not be judged again."""
        found = {}
        logged = self.log is not None and self.log.exists()
        for text in self.log.read_text("utf-8").splitlines() if self.log and logged else ():
            entry = json.loads(text)
            if entry["digest"] == self.digest:
                found[entry["template"], entry["corpus"]] = Score(**entry["score"])
        return found

    def _spread(self, tasks: list[Task], processes: int) -> Iterator[Done]:
        gc.freeze()
        if processes == 1:
            yield from map(self.chunk, tasks)
            return
        _inherited.append(self)  # by processes that are forked, rather than sent with every task
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            yield from pool.imap_unordered(_chunk, tasks)

    def run(self, processes: int) -> dict[str, Score]:
        """Judge what is not done yet, the small corpora first; the score of every template."""
        found = self.done()
        tasks = [
            (name, corpus)
            for corpus in sorted(self.rows, key=lambda corpus: len(self.rows[corpus]))
            for name in self.templates
            if (name, corpus) not in found
        ]
        for name, corpus, result, seconds in self._spread(tasks, processes):
            found[name, corpus] = result
            if self.log:
                entry: dict[str, Any] = {"digest": self.digest, "template": name, "corpus": corpus}
                kept = {part.name: getattr(result, part.name) for part in fields(result)}
                entry |= {"seconds": round(seconds, 2), "score": kept}
                with self.log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
        totals = {name: Score() for name in self.templates}
        for (name, corpus), result in sorted(found.items()):
            if name in totals and corpus in self.rows:
                totals[name].add(result)
        return totals


_inherited: list[Sweep] = []


def _chunk(task: Task) -> Done:
    return _inherited[-1].chunk(task)


def main(arguments: Iterable[str] | None = None) -> int:
    """Print the table; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--template", default="", help="only templates whose name holds this")
    parser.add_argument("--case", default="", help="only conversations whose name holds this")
    parser.add_argument("--all", action="store_true", help="every row of every corpus")
    parser.add_argument("--rows", type=int, default=3, help="rows per corpus (default 3)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--log", type=Path, help="a line per template × corpus; goes on from there")
    parser.add_argument("--reference", type=int, default=0, help="compare every so many-th row")
    parser.add_argument("--details", type=int, help="reports per template (with --template: 20)")
    parser.add_argument("--notes", action="store_true", help="also what was unproven or unsure")
    parser.add_argument("--turn-end", default="stop", choices=("stop", "turn"))
    parser.add_argument("--expand", default="none", choices=("none", "turns"))
    parser.add_argument("--thinking-opener", default="prompt", choices=("trained", "prompt"))
    parser.add_argument("--renderer", default="auto", choices=("auto", "jinja2"))
    options = parser.parse_args(None if arguments is None else list(arguments))
    details = options.details
    if details is None:
        details = 20 if options.template else 0
    shared = data_directory()
    rows: dict[str, dict[str, Row]] = {"odd cases": {}, **{corpus: {} for corpus in CORPORA}}
    for case, row in sample(shared, None if options.all else options.rows).items():
        if options.case in case:
            rows["odd cases" if case in ODD else case.split()[0]][case] = row
    began = time.perf_counter()
    sweep = Sweep(
        {n: s for n, s in zoo(shared).items() if options.template.lower() in n.lower()},
        rows,
        ChatSpec(
            date=DATE,
            turn_end=options.turn_end,
            expand=options.expand,
            thinking_opener=options.thinking_opener,
        ),
        options.renderer,
        options.reference,
        options.log,
    )
    total = Score()
    print(f"{'template':<44} " + " ".join(f"{h:>7}" for h in HEADINGS))
    for name, found in sweep.run(options.jobs).items():
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
        f" violations; {sum(total.unsure.values())} not judged; {total.compared} compared with the"
        f" reference; {time.perf_counter() - began:.0f} s"
    )
    return int(bool(total.violated))


if __name__ == "__main__":
    sys.exit(main())
