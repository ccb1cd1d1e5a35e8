"""Compare the product's masks with the oracle, template by template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tests.chat.conversations import CORPORA, DATE, ODD, SPECIAL, VARIABLES, Row, corpus_rows
from tests.chat.loop_oracle import OracleTemplate, TemplateRaised
from tests.chat.mask_oracle import check_mask, to_train
from tests.chat.turn_oracle import Conversation, lost
from tokenmill.chat import ChatSpec, Renderer
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

Answer = tuple[str, Any, Any]


@dataclass(slots=True)
class Score:
    pairs: int = 0
    proven: int = 0
    due: int = 0
    unproven: Counter[str] = field(default_factory=Counter)
    violated: Counter[str] = field(default_factory=Counter)
    unsure: Counter[str] = field(default_factory=Counter)
    reports: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def wrong(self, kind: str, report: str) -> None:
        self.violated[kind] += 1
        self.reports.append(report)

    def add(self, other: Score) -> None:
        self.pairs += other.pairs
        self.proven += other.proven
        self.due += other.due
        self.unproven.update(other.unproven)
        self.violated.update(other.violated)
        self.unsure.update(other.unsure)
        self.reports += other.reports
        self.notes += other.notes


@lru_cache(maxsize=128)
def oracle(name: str, source: str) -> OracleTemplate:
    return OracleTemplate(source, {**SPECIAL, **VARIABLES.get(name, {})}, DATE)


@dataclass(slots=True)
class ExpectedSample:
    part: int
    messages: list[dict[str, Any]]
    tools: Any
    trained: list[int]
    calls: dict[int, Any] = field(default_factory=dict)
    without_content: set[int] = field(default_factory=set)

    def form(self, other: bool, texts: bool) -> list[dict[str, Any]]:
        """Return messages; ``other``: empty text for null content, and null for that of calls."""
        if not other and not texts:
            return self.messages
        return [
            {
                **message,
                **({"content": ""} if other and message.get("content") is None else {}),
                **({"content": None} if other and n in self.without_content else {}),
                **({"tool_calls": self.calls[n]} if texts and n in self.calls else {}),
            }
            for n, message in enumerate(self.messages)
        ]


def expected_samples(row: Row, spec: ChatSpec) -> list[ExpectedSample]:
    conversation = read(row, spec)
    if isinstance(conversation, Plain):
        return []
    without_content = {
        n
        for n, message in enumerate(conversation.messages)
        if id(message) in conversation.without_content
    }
    calls = {
        n: call_list(conversation.calls[id(message)], text_arguments)
        for n, message in enumerate(conversation.messages)
        if id(message) in conversation.calls
    }
    messages = list(conversation.messages)
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
        return [ExpectedSample(0, messages, conversation.tools, trained, calls, without_content)]
    return [
        ExpectedSample(
            part, messages[: index + 1], conversation.tools, [index], calls, without_content
        )
        for part, index in enumerate(assistants)
        if index in trained
    ]


def score(
    name: str, source: str, rows: Mapping[str, Row], *, spec: ChatSpec | None = None
) -> Score:
    total = Score()
    template = oracle(name, source)
    spec = spec or ChatSpec(date=DATE)
    product = Renderer(spec, source, template.given).render(list(rows.values()))
    if product.notes.get("mismatches"):
        total.wrong("differs from the reference", f"{name}: the product's own audit found it")
    texts = zip(product.texts, product.spans, product.turns, strict=True)
    rendered = dict(zip(zip(product.source, product.part, strict=True), texts, strict=True))
    rejected = {(source, part): error for source, part, error in product.rejected}
    for number, (case, row) in enumerate(rows.items()):
        for job in expected_samples(row, spec):
            key = (number, job.part)
            where = f"{name} × {case}" + (f" part {job.part}" if job.part else "")
            _score_one(total, where, template, job, spec, rendered.get(key), rejected.get(key))
    return total


def conversation_of(template: OracleTemplate, job: ExpectedSample) -> Conversation | TemplateRaised:
    """Return the conversation in the form that the template accepts, or its error.

    Null becomes empty text only if the template fails without content. If it fails on calls or
    drops them, they are tried with other empty content and with arguments as texts.
    """

    @cache
    def conversation(other: bool, texts: bool) -> Conversation | TemplateRaised:
        try:
            return Conversation(template, job.form(other, texts), job.tools)
        except TemplateRaised as refusal:
            return refusal

    def render(other: bool, texts: bool) -> str | None:
        talk = conversation(other, texts)
        if isinstance(talk, TemplateRaised):
            return None
        return talk.found.text if talk.found else template.plain(talk.messages, job.tools)

    def loses(other: bool, texts: bool) -> bool:
        talk = conversation(other, texts)
        if isinstance(talk, TemplateRaised):
            return True
        is_lost = talk.found is not None and lost(talk.messages, talk.found) is not None
        return is_lost and not template.has_generation_blocks

    nulls = any(message.get("content") is None for message in job.messages)
    forms = [(False, False)]
    if (nulls and render(False, False) is None) or (job.without_content and not nulls):
        forms.append((True, False))
    if job.calls:
        forms += [(False, True), (True, True)]
    complete = [form for form in forms if not loses(*form)]
    printed = [form for form in forms if render(*form) is not None]
    chosen = next(iter([*complete, *printed]), (False, False))
    return conversation(*chosen)


def _score_one(
    total: Score,
    where: str,
    template: OracleTemplate,
    job: ExpectedSample,
    spec: ChatSpec,
    answer: Answer | None,
    error: RowError | None,
) -> None:
    total.pairs += 1
    talk = conversation_of(template, job)
    if isinstance(talk, TemplateRaised):
        if error is None or error.reason not in ("template_error", "limit"):
            outcome = "accepted" if error is None else error.reason
            total.wrong("accepted a row that the template rejects", f"{where}: {outcome}: {talk}")
        return
    if error is not None and error.reason not in REASONS:
        total.wrong("an unknown reason", f"{where}: rejected as {error.reason}: {error}")
        return
    if (error is None) == (answer is None):
        total.wrong("neither accepted nor rejected", f"{where}: {error or 'no answer'}")
        return
    if talk.found is None:
        total.unsure["sentinels do not survive"] += 1
        total.notes.append(f"{where}: the sentinels do not survive")
    missing = lost(talk.messages, talk.found) if talk.found is not None else None
    is_empty = not to_train(talk, job.trained)
    total.due += missing is None and not is_empty
    if error is not None:
        if error.reason in ("template_error", "limit"):
            total.wrong(
                "rejected a row that the template renders", f"{where}: {error.reason}: {error}"
            )
        elif missing is None and not is_empty:
            total.unproven[error.reason] += 1
            total.notes.append(f"{where}: {error.reason}: {error}")
        return
    assert answer is not None
    text, spans, turns = answer
    if missing is None and not is_empty:
        total.proven += 1
    surely = (
        lost(talk.messages, talk.found, every_thought=False) if missing and talk.found else None
    )
    if surely is not None and not template.has_generation_blocks:
        total.wrong("accepted a row that loses content", f"{where}: accepted, but {surely} is lost")
    if talk.found is None:
        if text != template.plain(talk.messages, job.tools):
            total.wrong("another text", f"{where}: another text than jinja2's")
        return
    verdict = check_mask(
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


def sample(shared: Path, per_corpus: int | None, odd: bool = True) -> dict[str, Row]:
    rows = dict(ODD) if odd else {}
    for corpus in CORPORA:
        for number, row in enumerate(corpus_rows(shared, corpus, per_corpus)):
            rows[f"{corpus} {number}"] = row
    return rows
