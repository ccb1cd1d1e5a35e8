"""Rows in, texts and trained spans out.

`Renderer` is what the build half holds: made once per worker from a spec, a template and the
special tokens, then given batches of parsed rows. Each row becomes a conversation (`shapes`), is
rendered, and its spans are proven (`spans`, `layout`); a row that cannot be is rejected with its
reason. The fast engine (`fast`) renders where it is shown to equal the reference; the result is
the same without it.

A `Rendering` holds the accepted texts in the order of the rows; under ``expand="turns"`` one row
gives several, numbered by ``part``.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.chat.checks import Proof, Span
from tokenmill.chat.fast import LONGEST, FastTemplate, audited
from tokenmill.chat.layout import Layout, Signatures, learnable
from tokenmill.chat.shapes import Conversation, Plain, conversation, read
from tokenmill.chat.spans import Prover
from tokenmill.chat.spec import ChatSpec
from tokenmill.chat.template import ReferenceTemplate
from tokenmill.errors import RowError, TemplateError, UsageError

LAYOUTS_KEPT = 2048  # signatures remembered per template; real data sets have a few hundred


@dataclass(slots=True)
class Rendering:
    """The outcome of one batch."""

    texts: list[str] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    part: list[int] = field(default_factory=list)
    spans: list[list[Span] | None] = field(default_factory=list)
    turns: list[list[tuple[str, int]]] = field(default_factory=list)
    rejected: list[tuple[int, int, RowError]] = field(default_factory=list)
    notes: dict[str, int | str] = field(default_factory=dict)
    unclosed: list[int] = field(default_factory=list)
    """Numbers of the texts in which nothing closes some assistant turn."""

    def note(self, name: str, count: int = 1) -> None:
        """Add to one of the counters that go into the proof."""
        self.notes[name] = int(self.notes.get(name, 0)) + count


@dataclass(slots=True)
class Job:
    """One text to be made: a conversation and the messages of it that are trained."""

    source: int
    part: int
    talk: Conversation
    trained: tuple[int, ...] | None  # None: everything
    engine: _Engine
    signature: Any = None
    texts: list[str] | None = None
    fast: str | None = None


class _Engine:
    """One template: its reference, its prover, its fast twin, and what has been learned."""

    def __init__(
        self, source: str, spec: ChatSpec, variables: Mapping[str, Any], fast: bool
    ) -> None:
        self.reference = ReferenceTemplate(source, variables, spec.date)
        self.fast = FastTemplate.of(self.reference, spec.date) if fast else None
        self.prover = Prover(self.reference, spec.turn_end, self.fast)
        self.signatures = Signatures(self.prover.tags)
        self.layouts: OrderedDict[Any, Layout | None] = OrderedDict()


class Renderer:
    """Turns parsed rows into texts with proven spans.

    Args:
        spec: The row-shaping options.
        template: Jinja source, several by name (``default``, ``tool_use``), or None, which leaves
            only plain text and prompt+completion strings.
        special_tokens: Names and texts of the tokenizer's special tokens, as templates see them.
        fast: Whether the fast engine may be used; it never changes the result.
    """

    def __init__(
        self,
        spec: ChatSpec,
        template: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        fast: bool = True,
        renderer: str = "auto",
    ) -> None:
        fast = fast and renderer == "auto"
        self.spec = spec
        self.special_tokens = dict(special_tokens or {})
        self._fast = fast
        self._sources: dict[str, str] = {}
        if isinstance(template, str):
            self._sources = {"default": template}
        elif template is not None:
            self._sources = dict(template)
        self._engines: dict[str, _Engine] = {}
        self.engine_seconds = 0.0
        """Time spent in the fast engine itself; the rest of `render` reads and proves."""
        if "default" in self._sources and spec.format != "text":
            self._engine("default")  # one that does not compile is refused here, not at a row

    def _engine(self, name: str) -> _Engine:
        if name not in self._engines:
            variables = {**self.special_tokens, **self.spec.template_kwargs}
            self._engines[name] = _Engine(self._sources[name], self.spec, variables, self._fast)
        return self._engines[name]

    def _for(self, tools: list[Any] | None) -> _Engine:
        """The template of a conversation, chosen as transformers chooses it."""
        if not self._sources:
            raise UsageError(
                "these rows are conversations and the tokenizer has no chat template:"
                " give one with chat_template="
            )
        if tools is not None and "tool_use" in self._sources:
            return self._engine("tool_use")
        if "default" in self._sources:
            return self._engine("default")
        names = ", ".join(sorted(self._sources))
        raise UsageError(f"the tokenizer has no default chat template, only {names}: choose one")

    def reference(self, tools: list[Any] | None = None) -> ReferenceTemplate:
        """The reference template that renders a conversation with these tools."""
        return self._for(tools).reference

    def prompt(self, messages: Sequence[Any], tools: list[Any] | None = None, **kwargs: Any) -> str:
        """A conversation with the generation prompt after it, for generation.

        Args:
            messages: OpenAI messages.
            tools: Tool descriptions.
            kwargs: Further template variables for this prompt alone.

        Raises:
            RowError: The template refuses it.
        """
        talk = conversation("messages", list(messages))
        if not talk.messages:
            raise RowError("the conversation is empty")
        template = self._for(tools).reference
        if kwargs:
            variables = {**template.variables, **kwargs}
            template = ReferenceTemplate(template.source, variables, self.spec.date)
        return template.render(talk.messages, tools, add_generation_prompt=True)

    def render(self, rows: Sequence[Any]) -> Rendering:
        """Render a batch of parsed rows.

        Raises:
            UsageError: The spec asks of these rows what they cannot give.
            TemplateError: The template asks for a date that the spec does not pin.
        """
        result = Rendering()
        if not self._render(rows, result, fast=self._fast):
            redone, result = result, Rendering()
            result.note("mismatches", int(redone.notes["mismatches"]))
            result.note("audited", int(redone.notes["audited"]))
            self._render(rows, result, fast=False)
        result.notes["renderer"] = "minijinja" if "rows_fast" in result.notes else "jinja2"
        return result

    def _render(self, rows: Sequence[Any], result: Rendering, *, fast: bool) -> bool:
        """One pass; False where the fast engine was seen to differ."""
        pending: list[Job | Plain | RowError] = []
        sources: list[int] = []
        for index, row in enumerate(rows):
            try:
                found = read(row, self.spec)
                jobs = [found] if isinstance(found, Plain) else self._jobs(index, found, result)
                pending += jobs
                sources += [index] * len(jobs)
            except RowError as error:
                pending.append(error)
                sources.append(index)
        if fast:
            self._render_fast([job for job in pending if isinstance(job, Job)])
        for index, job in zip(sources, pending, strict=True):
            try:
                if isinstance(job, Job):
                    if job.fast is None:
                        self._accept_proof(job, self._prove(job, result), result)
                    elif not self._compare(job, result):
                        return False
                elif isinstance(job, Plain):
                    self._plain(index, job, result)
                else:
                    raise job
            except RowError as error:
                part = job.part if isinstance(job, Job) else 0
                result.rejected.append((index, part, error))
        return True

    def _render_fast(self, jobs: list[Job]) -> None:
        """Let the fast engine render what it may."""
        for engine in self._engines.values():
            if engine.fast is None:
                continue
            ours = [
                job
                for job in jobs
                if job.engine is engine and job.talk.simple and job.talk.tools is None
            ]
            for job in ours:
                job.signature, job.texts = engine.signatures.read(job.talk.messages)
            short = [job for job in ours if sum(map(len, job.texts or ())) < LONGEST]
            start = time.perf_counter()
            texts = engine.fast.render_many([job.talk.messages for job in short])
            self.engine_seconds += time.perf_counter() - start
            for job, text in zip(short, texts, strict=True):
                job.fast = text

    def _plain(self, index: int, found: Plain, result: Rendering) -> None:
        everything = self.spec.trained(found.shape)
        eos = ""
        if self.spec.append_eos:
            eos = self.special_tokens.get("eos_token", "")
            if not eos:
                raise UsageError(
                    "append_eos needs an eos token and the tokenizer has none: append_eos=False"
                )
        if everything not in ("everything", "completion"):
            raise UsageError(
                f"train_on={everything!r} needs messages; the prompts and completions of these"
                " rows are strings"
            )
        end = "" if found.text.endswith(eos) else eos
        text = f"{found.prompt}{found.text}{end}"
        if found.shape == "text":
            turns = [("text", len(text))]
        else:
            turns = [("prompt", len(found.prompt)), ("completion", len(text))]
        spans: list[Span] | None = None
        if everything == "completion":
            spans = [(len(found.prompt), len(text))]
        if len(text) == (len(found.prompt) if spans else 0):
            raise RowError("there is no text to train on", reason="no_trained_tokens")
        self._accept(result, index, 0, text, spans, turns)

    def _accept(
        self,
        result: Rendering,
        source: int,
        part: int,
        text: str,
        spans: list[Span] | None,
        turns: list[tuple[str, int]],
    ) -> None:
        result.texts.append(text)
        result.source.append(source)
        result.part.append(part)
        result.spans.append(spans)
        result.turns.append(turns)

    def _jobs(self, index: int, talk: Conversation, result: Rendering) -> list[Job]:
        """The texts that one conversation gives, and what is trained in each."""
        train_on = self.spec.trained(talk.shape)
        if train_on == "everything":
            return [Job(index, 0, talk, None, self._for(talk.tools))]
        _trim(talk, self.spec.trailing, result)
        messages = talk.messages
        assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        wanted = assistants
        if train_on == "completion":
            wanted = [i for i in assistants if i >= talk.completion]
        elif train_on == "last_assistant_message":
            wanted = assistants[-1:]
        if not talk.simple:
            wanted = [i for i in wanted if not _untrained(messages[i])]
        if not wanted:
            raise RowError("no assistant turn of this row is to be trained",
                           reason="no_trained_tokens")  # fmt: skip
        if self.spec.expand != "turns":
            return [Job(index, 0, talk, tuple(wanted), self._for(talk.tools))]
        chosen = set(wanted)
        return [
            Job(
                index,
                turn,
                Conversation(talk.shape, messages[: i + 1], talk.tools, simple=talk.simple),
                (i,),
                self._for(talk.tools),
            )
            for turn, i in enumerate(assistants)
            if i in chosen
        ]

    def _compare(self, job: Job, result: Rendering) -> bool:
        """Prove a fast render by a layout; False where the reference was seen to differ."""
        engine, text, texts = job.engine, job.fast, job.texts
        assert text is not None
        assert texts is not None
        layout = engine.layouts.get((job.signature, job.trained))
        if layout is None or text != layout.expected(texts):
            proof = self._prove(job, result)
            if proof.text != text:
                result.note("rows_fast_differs")
            self._accept_proof(job, proof, result)
            if (job.signature, job.trained) not in engine.layouts:
                self._learn(engine, (job.signature, job.trained), proof)
            return True
        if audited(len(result.texts), text):
            result.note("audited")
            if engine.reference.render(job.talk.messages) != text:
                result.note("mismatches")
                return False
        spans, turns = layout.place(texts)
        result.note("rows_fast")
        if not layout.closed:
            result.note("rows_without_closer")
            result.unclosed.append(len(result.texts))
        self._accept(
            result, job.source, job.part, text, None if job.trained is None else spans, turns
        )
        return True

    def _learn(self, engine: _Engine, key: Any, proof: Proof) -> None:
        engine.layouts[key] = Layout(proof) if proof.hits and learnable(proof) else None
        if len(engine.layouts) > LAYOUTS_KEPT:
            engine.layouts.popitem(last=False)

    def _prove(self, job: Job, result: Rendering) -> Proof:
        result.note("rows_reference")
        prover = job.engine.prover
        if job.trained is None:
            return prover.follow(job.talk.messages, job.talk.tools)
        proof = prover.prove(job.talk.messages, job.talk.tools, job.trained)
        if proof.dropped:
            result.note("generation_drops")
        return proof

    def _accept_proof(self, job: Job, proof: Proof, result: Rendering) -> None:
        if job.trained is not None and not proof.spans:
            raise RowError("the template prints nothing of what is to be trained",
                           reason="no_trained_tokens")  # fmt: skip
        if any(not turn.closed for turn in proof.turns.values()):
            result.note("rows_without_closer")
            result.unclosed.append(len(result.texts))
        spans = None if job.trained is None else proof.spans
        self._accept(result, job.source, job.part, proof.text, spans, proof.ends)


def _untrained(message: dict[str, Any]) -> bool:
    """Whether a message says itself that it is not to be trained."""
    return (
        message.get("train") is False
        or _zero(message.get("step_loss_mask"))
        or _zero(message.get("weight"))
    )


def _zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0


def _trim(talk: Conversation, trailing: str, result: Rendering) -> None:
    """Cut what follows the last assistant turn, as far as the spec says."""
    messages = talk.messages
    end = len(messages)
    while end and messages[end - 1]["role"] in ("tool", "function", "ipython"):
        end -= 1
    if end < len(messages):
        result.note("trimmed_tool_turns")
    if end and messages[end - 1]["role"] == "user":
        result.note("trailing_user")
        if trailing == "reject":
            raise RowError(
                "the conversation ends with a user turn (trailing='trim' cuts it)",
                reason="trailing_user",
            )
        result.note("trimmed_trailing")
        while end and messages[end - 1]["role"] in ("user", "tool", "function", "ipython"):
            end -= 1
    if end < len(messages):
        talk.messages = messages[:end]


__all__ = ["Renderer", "Rendering", "TemplateError"]
