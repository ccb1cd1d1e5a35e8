"""Rows in, texts and trained spans out.

`Renderer` is what the build half holds: made once per worker from a spec, a template and the
special tokens, then given batches of parsed rows. Each row becomes a conversation (`shapes`), is
rendered along a traced path (`traced`), and its turns and spans follow from the path (`turns`); a
row of which that cannot be shown is rejected with its reason.

With ``renderer="jinja2"`` the reference renders every row and the traced path only says which part
of that very text is whose. Either way a row's outcome depends on the row and the spec alone.

`Renderer.prompts` renders conversations that a model is to go on with: messages go in as they are,
list contents included, and the generation prompt follows. A sample of what paths print, by content,
the reference renders, too; one difference, and the paths are out.

A `Rendering` holds the accepted texts in the order of the rows; under ``expand="turns"`` one row
gives several, numbered by ``part``, and under ``expand="append"`` as many as a rollout of it would
have to begin anew (`append`). So does a row with a group of answers (`groups`): one text for
each, each rendered by itself; if one of them is rejected, all are.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import xxhash

from tokenmill.chat.append import join, sampled
from tokenmill.chat.groups import AnswerGroup, incomparable, read_row
from tokenmill.chat.outline import Outline, outline_of
from tokenmill.chat.pictures import (
    MediaTokens,
    Picture,
    image_parts,
    refuse_pictures,
    refuse_tokens,
    take_pictures,
)
from tokenmill.chat.program import NullPrinted, Run
from tokenmill.chat.shapes import Conversation, Plain
from tokenmill.chat.spec import ChatSpec, turns_of_groups
from tokenmill.chat.template import ReferenceTemplate
from tokenmill.chat.thinking import before_thinking, literals, thinking_tags
from tokenmill.chat.traced import NotTraced, TracedTemplate
from tokenmill.chat.turns import Openings, Settled, Span, TurnJudge, unproven
from tokenmill.chat.unrolled import Known, Unrolled
from tokenmill.chat.weights import message_weight, of_turns, row_weight, scaled
from tokenmill.errors import RowError, UsageError
from tokenmill.options import Variables

RENDERERS = ("auto", "jinja2")
FIRST_AUDITED = 2  # rows at the start of every batch that the reference renders, too
AUDIT_ONE_IN = 512  # of the other rows, by content
ROLES_KNOWN = 4096  # orders of roles of which is remembered what is trained
TEMPLATES_KNOWN = 8  # per thread
UNTRAINED: dict[str, Callable[[str], int]] = {"prompt": len, "trained": before_thinking}
"""How much of a generation prompt is not trained, by `ChatSpec.thinking_opener`."""


class Asked(NamedTuple):
    """A conversation that a model is to go on with, and what else its row gives the template."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    variables: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What is known of the texts of one group beside the texts.

    Attributes:
        labels: Of each text, as in `AnswerGroup`.
        scores: Of each text, where the row has them.
        margin: Where the row has one.
        one_prompt: Whether the texts are the same up to where the first of them is trained: some
            templates write a prompt differently for different answers.
    """

    labels: tuple[int, ...]
    scores: tuple[float, ...] | None
    margin: float | None
    one_prompt: bool


@dataclass(slots=True)
class Rendering:
    """The outcome of one batch."""

    texts: list[str] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    part: list[int] = field(default_factory=list)
    spans: list[list[Span] | None] = field(default_factory=list)
    roles: list[Sequence[str]] = field(default_factory=list)
    ends: list[list[int]] = field(default_factory=list)
    """Of every text, where its turns end."""
    rejected: list[tuple[int, int, RowError]] = field(default_factory=list)
    notes: dict[str, int | str] = field(default_factory=dict)
    unclosed: list[int] = field(default_factory=list)
    """Numbers of the texts in which nothing closes some assistant turn."""
    groups: dict[int, GroupFacts] = field(default_factory=dict)
    """Of every group, by the number of its first text; the others follow it."""
    weights: dict[int, Sequence[float]] = field(default_factory=dict)
    """What each turn of a text counts in the loss, by the text's number, where one is not 1."""
    pictures: dict[int, Sequence[Picture]] = field(default_factory=dict)
    """The pictures of a text in order, by the text's number, where it has any."""

    @property
    def turns(self) -> list[list[tuple[str, int]]]:
        """Of every text, role and end of its turns."""
        pairs = zip(self.roles, self.ends, strict=True)
        return [list(zip(roles, ends, strict=True)) for roles, ends in pairs]

    def note(self, name: str, count: int = 1) -> None:
        """Add to one of the counters that go into the proof."""
        self.notes[name] = int(self.notes.get(name, 0)) + count


@dataclass(slots=True)
class Job:
    """One text to be made: a conversation and the messages of it that are trained."""

    source: int
    part: int
    conversation: Conversation
    trained: tuple[int, ...] | None  # None: everything
    template: Template
    weights: tuple[float, ...] = ()
    """What each message of ``trained`` counts in the loss; empty where each counts 1."""
    outlined: tuple[Outline, list[Any]] | None = None
    """Outline and leaves of the conversation, where they are known."""
    rendered: list[dict[str, Any]] | None = None
    """The messages in the form that the template took, where that is not the conversation's."""


class Differs(Exception):
    """A traced path printed something else than the reference."""


def audited(position: int, digest: int) -> bool:
    """Whether the reference renders this row, too: a function of its place and its content."""
    return position < FIRST_AUDITED or digest % AUDIT_ONE_IN == 0


def digest_of(text: str) -> int:
    """What chooses a text for an audit where its row's bytes are not at hand."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace"))


class Template:
    """One template: its reference, its traced paths, and how its turns are told apart."""

    def __init__(self, source: str, spec: ChatSpec, variables: Mapping[str, Any]) -> None:
        self.reference = ReferenceTemplate(source, variables, spec.date)
        self.traced = TracedTemplate(self.reference)
        self.judge = TurnJudge(
            Openings(self._follow, UNTRAINED[spec.thinking_opener]),
            spec.turn_end,
            thinking_tags(literals(self.reference.tree)),
            self.reference.has_generation,
        )
        self.unrolled = {
            tools: Unrolled(self.reference, self.traced, self.judge)
            for tools in ("none", "empty", "some")
        }

    @cached_property
    def asking(self) -> TracedTemplate:
        """Its paths with the generation prompt after the conversation."""
        return TracedTemplate(self.reference, add_generation_prompt=True)

    @property
    def differed(self) -> bool:
        """Whether one of its paths was caught printing something else than the reference."""
        return bool(self.traced.differed or ("asking" in vars(self) and self.asking.differed))

    def _follow(self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool) -> Run:
        """A conversation of our own, with the generation prompt or without."""
        traced = self.asking if prompt else self.traced
        try:
            return traced.follow(messages, tools)
        except NotTraced as error:
            raise unproven(str(error)) from error


class _Known(threading.local):
    """Templates that this thread has met, latest last."""

    def __init__(self) -> None:
        self.templates: OrderedDict[Any, Template] = OrderedDict()


_known = _Known()


def forget() -> None:
    """Meet every template anew, in this thread."""
    _known.templates.clear()


def template_of(source: str, spec: ChatSpec, variables: Mapping[str, Any]) -> Template:
    """A template, with all its paths where this thread has met it before.

    Compiling one costs more than rendering a small file, and nothing that it has learned changes
    an outcome. One that was caught differing is not met again.
    """
    try:
        given = msgspec.json.encode(dict(variables))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return Template(source, spec, variables)
    key = (source, given, spec.date, spec.turn_end, spec.thinking_opener)
    found = _known.templates.pop(key, None)
    if found is None or found.differed:
        found = Template(source, spec, variables)
    _known.templates[key] = found
    if len(_known.templates) > TEMPLATES_KNOWN:
        _known.templates.popitem(last=False)
    return found


class Renderer:
    """Turns parsed rows into texts with proven spans.

    Args:
        spec: The row-shaping options.
        template: Jinja source, several by name (``default``, ``tool_use``), or None, which leaves
            only plain text and prompt+completion strings.
        special_tokens: Names and texts of the tokenizer's special tokens, as templates see them.
        renderer: ``auto`` or ``jinja2``, which renders every row by the reference; never changes
            the result.
        media: What stands for pictures in texts, where rows may have some; without it such rows
            are rejected.
    """

    def __init__(
        self,
        spec: ChatSpec,
        template: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        renderer: str = "auto",
        media: MediaTokens | None = None,
    ) -> None:
        if renderer not in RENDERERS:
            raise UsageError(f"renderer={renderer!r}: choose one of {', '.join(RENDERERS)}")
        self.spec = spec
        self.special_tokens = dict(special_tokens or {})
        self.renderer = renderer
        self.media = media
        self._sources: dict[str, str] = {}
        if isinstance(template, str):
            self._sources = {"default": template}
        elif template is not None:
            self._sources = dict(template)
        self._templates: dict[str, Template] = {}
        self._traced = self._printed = 0
        self._digests: Sequence[int] | None = None
        self._trained: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self.engine_seconds = 0.0
        """Time spent printing; the rest of `render` reads rows and settles turns."""
        if "default" in self._sources and spec.format != "text":
            self._template("default")  # one that does not compile is refused here, not at a row

    def _template(self, name: str, variables: Variables | None = None) -> Template:
        if variables is None and name in self._templates:
            return self._templates[name]
        given = {**self.special_tokens, **(self.spec.template_kwargs or {}), **(variables or {})}
        found = template_of(self._sources[name], self.spec, given)
        if variables is None:
            self._templates[name] = found
        return found

    def _for(self, tools: list[Any] | None, variables: Variables | None = None) -> Template:
        """The template of a conversation, chosen as transformers chooses it.

        What its row gives the template goes before what the spec does.
        """
        if not self._sources:
            raise UsageError(
                "these rows are conversations and the tokenizer has no chat template:"
                " give one with chat_template="
            )
        if tools is not None and "tool_use" in self._sources:
            return self._template("tool_use", variables)
        if "default" in self._sources:
            return self._template("default", variables)
        names = ", ".join(sorted(self._sources))
        raise UsageError(f"the tokenizer has no default chat template, only {names}: choose one")

    def reference(
        self, tools: list[Any] | None = None, variables: Variables | None = None
    ) -> ReferenceTemplate:
        """The reference template that renders a conversation with these tools and variables."""
        return self._for(tools, variables).reference

    def judge(self, tools: list[Any] | None = None) -> TurnJudge:
        """What tells the turns of such a conversation apart."""
        return self._for(tools).judge

    def prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        variables: Variables | None = None,
    ) -> str:
        """A conversation as it is, with the generation prompt after it, by the reference.

        Raises:
            RowError: The template refuses it.
            TemplateError: It asks for a date that is not pinned.
        """
        reference = self.reference(tools, variables)
        return reference.render(messages, tools, add_generation_prompt=True)

    def prompts(self, conversations: Sequence[Asked]) -> list[str | RowError]:
        """`prompt` for many, along traced paths; a refused one is the error in its place."""
        if self.renderer == "auto":
            try:
                return [self._prompt(number, one) for number, one in enumerate(conversations)]
            except Differs:
                self.renderer = "jinja2"  # this batch and every later one is the reference's
        return [self._reference_prompt(one) for one in conversations]

    def printed(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, *, prompt: bool
    ) -> tuple[str, Run | None]:
        """A conversation as the template prints it, and the run that says what is whose.

        The run is None where the template cannot be traced.

        Args:
            messages: The conversation, as it is.
            tools: Its tools.
            prompt: Whether the generation prompt follows.

        Raises:
            RowError: The template refuses it.
            TemplateError: It asks for a date that is not pinned.
        """
        template = self._for(tools)
        traced = template.asking if prompt else template.traced
        run = None
        try:
            run = traced.follow(messages, tools)
            number, self._printed = self._printed, self._printed + 1
            if self.renderer == "auto" and not audited(number, digest_of(run.text)):
                return run.text, run
        except NotTraced:
            pass
        text = template.reference.render(messages, tools, add_generation_prompt=prompt)
        if run is not None and run.text != text:
            traced.ban("a conversation that both rendered")
            self.renderer, run = "jinja2", None
        return text, run

    def _prompt(self, number: int, asked: Asked) -> str | RowError:
        traced = self._for(asked.tools, asked.variables).asking
        try:
            text = traced.follow(asked.messages, asked.tools).text
        except NotTraced as error:
            if traced.differed:
                raise Differs from error
            return self._reference_prompt(asked)
        except RowError as error:
            return error
        if audited(number, digest_of(text)) and self._reference_prompt(asked) != text:
            traced.ban("a prompt that both rendered")
            raise Differs
        return text

    def _reference_prompt(self, asked: Asked) -> str | RowError:
        try:
            return self.prompt(*asked)
        except RowError as error:
            return error

    def render(self, rows: Iterable[Any], digests: Sequence[int] | None = None) -> Rendering:
        """Render a batch of parsed rows.

        Args:
            rows: The rows, one of which may be the RowError that the parser made of it; gone over
                a second time where the reference must render them all.
            digests: Of each row's bytes, where they are known: they choose what is audited, so
                that no text has to be hashed for it.

        Raises:
            UsageError: The spec asks of these rows what they cannot give.
            TemplateError: The template asks for a date that the spec does not pin.
        """
        result = Rendering()
        self._traced = 0
        self._digests = digests
        try:
            self._render(rows, result)
            if self._traced:
                result.note("rows_traced", self._traced)
        except Differs:
            # Out for good: this batch and every later one is the reference's.
            audits = int(result.notes.get("audited", 0))
            result = Rendering()
            result.note("mismatches")
            result.note("audited", audits)
            self.renderer = "jinja2"
            self._render(rows, result)
        result.notes["renderer"] = "traced" if "rows_traced" in result.notes else "jinja2"
        return result

    def _render(self, rows: Iterable[Any], result: Rendering) -> None:
        for index, row in enumerate(rows):
            try:
                found = self.read(row)
                weight = row_weight(row)
                if isinstance(found, Plain):
                    self._accept(result, index, 0, _scaled(self._plain(found), weight))
                    continue
                if isinstance(found, AnswerGroup):
                    self._group(index, found, result, weight)
                    continue
                jobs = self._jobs(index, found, result)
            except RowError as error:
                result.rejected.append((index, 0, error))
                continue
            if self.spec.expand == "append":
                self._append(jobs, result, weight)
                continue
            for job in jobs:
                try:
                    self._accept_settled(job, self._settle(job, result), result, weight)
                except RowError as error:
                    result.rejected.append((index, job.part, error))

    def read(self, row: Any) -> Conversation | Plain | AnswerGroup:
        """One row, with its pictures where it may have some.

        Raises:
            RowError: It has no format that is known, or pictures that nobody can place.
        """
        if self.media is None:
            refuse_pictures(row)
            return read_row(row, self.spec)
        if not isinstance(row, dict):
            return read_row(row, self.spec)
        row, pictures = take_pictures(row, self.spec, self.media)
        found = read_row(row, self.spec)
        for side in found.sides if isinstance(found, AnswerGroup) else [found]:
            if isinstance(side, Plain):
                (side.prompt, side.text), side.pictures = pictures.replace_in(
                    (side.prompt, side.text), self.media.image
                )
                continue
            refuse_tokens(
                [side.messages, side.tools, side.variables], self.media, placeholders=pictures
            )
            if pictures or not side.simple:
                side.illustrate(pictures)
        return found

    def _append(self, jobs: Sequence[Job], result: Rendering, weight: float) -> None:
        """Rows of one turn each, put together where one goes on from the other."""
        held: list[Job] = []
        turns: list[tuple[str, Settled]] = []
        for job in jobs:
            try:
                settled = self._trained_settled(job, self._settle(job, result))
                given = job.rendered or job.conversation.messages
                prompt = self._prompt_of(len(result.texts), given[:-1], job)
                turns.append((prompt, sampled(settled, prompt, len(given) - 1)))
                held.append(job)
            except RowError as error:
                result.rejected.append((job.source, job.part, error))
        for stretch in join(turns):
            members = [held[number] for number in stretch.turns]
            whole = dataclasses.replace(
                members[-1],
                part=members[0].part,
                trained=tuple(k for job in members for k in job.trained or ()),
                weights=tuple(weight for job in members for weight in job.weights),
            )
            try:
                self._accept_settled(whole, stretch.settled, result, weight)
            except RowError as error:
                result.rejected.append((whole.source, whole.part, error))

    def _prompt_of(self, number: int, messages: list[dict[str, Any]], job: Job) -> str:
        """What a model is given to go on with."""
        asked = Asked(messages, job.conversation.tools, job.conversation.variables)
        by_paths = self.renderer == "auto"
        prompt = self._prompt(number, asked) if by_paths else self._reference_prompt(asked)
        if isinstance(prompt, RowError):
            raise prompt
        return prompt

    def _group(self, index: int, group: AnswerGroup, result: Rendering, weight: float) -> None:
        """Render every side of a group by itself; all of them are accepted, or none."""
        if self.spec.expand != "none":
            raise incomparable(turns_of_groups(self.spec.expand))
        settled: list[Settled] = []
        for number, side in enumerate(group.sides):
            try:
                if isinstance(side, Plain):
                    settled.append(self._plain(side))
                    continue
                [job] = self._jobs(index, side, result)
                job.part = number
                settled.append(self._trained_settled(job, self._settle(job, result)))
            except RowError as error:
                raise RowError(
                    f"{group.name(number)}: {error.message}", reason=error.reason
                ) from error
        texts = [side.text for side in settled]
        if len(texts) > 1 and len(set(texts)) == 1:
            raise incomparable("the answers do not differ")
        begin = min(start for side in settled for start, _ in side.spans or [(0, 0)])
        # Texts with different pictures are different prompts.
        prompts = {
            (side.text[:begin], repr([one.value for one in side.pictures])) for side in settled
        }
        if len(prompts) > 1:
            result.note("prompts_differ")
        first = len(result.texts)
        settled = [_scaled(one, weight) for one in settled]  # all of them before one is accepted
        for number, one in enumerate(settled):
            self._accept(result, index, number, one)
        result.groups[first] = GroupFacts(
            group.labels, group.scores, group.margin, one_prompt=len(prompts) == 1
        )

    def _settle(self, job: Job, result: Rendering) -> Settled:
        """Render one conversation and settle its turns."""
        conversation = job.conversation
        messages, tools = conversation.messages, conversation.tools
        unrolled = None
        if self.renderer == "auto" and job.outlined is not None:
            unrolled = job.template.unrolled[
                "some" if tools else "none" if tools is None else "empty"
            ]
            settled = self._settle_unrolled(unrolled, job, result)
            if settled is not None:
                return settled
        try:
            if conversation.nulls:
                run, messages = self._with_nulls(job, result)
                job.rendered = messages
            else:
                run = self._follow(job, messages, result)
            self._count(result)
            settled = job.template.judge.settle(run, messages, job.trained)
        except (NotTraced, RowError) as error:
            other = self._in_another_form(job, error, result)
            if other is None and self.media is not None:
                other = self._in_parts(job, error, result)
            if other is None and isinstance(error, NotTraced):
                return self._untraced(job, error, result)
            if other is None:
                raise
            settled = other
        else:
            settled.emptied = bool(conversation.nulls) and messages is conversation.messages
            if unrolled is not None and unrolled.worth_learning:
                self._learn(unrolled, job, run, settled.emptied)
        if self.media is not None and job.trained is not None and not settled.spans:
            settled = self._in_parts(job, None, result) or settled
        self._note(settled, result)
        return settled

    def _learn(self, unrolled: Unrolled, job: Job, run: Run, emptied: bool) -> None:
        assert job.outlined is not None
        found = job.conversation
        tools, memo = (
            job.template.traced.interned(found.tools) if found.tools else (found.tools, None)
        )
        known = Known(*job.outlined, found.messages, found.nulls, tools, memo)
        unrolled.learn(known, run, emptied)

    def _note(self, settled: Settled, result: Rendering) -> None:
        if settled.dropped:
            result.note("generation_drops")
        if settled.emptied:
            result.note("null_as_empty")

    def _count(self, result: Rendering) -> None:
        if self.renderer == "auto":
            self._traced += 1
        else:
            result.note("rows_reference")

    def _settle_unrolled(self, unrolled: Unrolled, job: Job, result: Rendering) -> Settled | None:
        """Render and settle a conversation, where its path is known."""
        assert job.outlined is not None
        conversation = job.conversation
        messages = conversation.messages
        start = time.perf_counter()
        try:
            settled = unrolled.settle(*job.outlined, messages, job.trained, conversation.tools)
        except RowError:  # it may have other forms: the general way knows them
            settled = None
        self.engine_seconds += time.perf_counter() - start
        if self.media is not None and settled and job.trained is not None and not settled.spans:
            return None  # its texts may have to be parts
        if settled is not None:
            if conversation.nulls:
                self._note(settled, result)
                if not settled.emptied:
                    messages = job.rendered = conversation.form(nulls=True, texts=False)
            self._audit(job, messages, settled.text, result)
            self._traced += 1
        return settled

    def _with_nulls(self, job: Job, result: Rendering) -> tuple[Run, list[dict[str, Any]]]:
        """A conversation with null contents: as it stands where the template takes it so.

        Where the template fails on null, or prints it as a word, it gets empty text instead.
        """
        given = job.conversation.form(nulls=True, texts=False)
        try:
            run = self._follow(job, given, result, nulls=False)
            if not run.nones:
                return run, given
        except (NotTraced, RowError, NullPrinted):
            pass  # `suppress` would take longer than all else here
        messages = job.conversation.messages
        return self._follow(job, messages, result), messages

    def _in_another_form(
        self, job: Job, error: NotTraced | RowError, result: Rendering
    ) -> Settled | None:
        """A conversation whose calls the template does not take, or prints nowhere, as objects.

        Some want the arguments as JSON text, some print calls where the content is null.
        """
        refused = isinstance(error, NotTraced) or error.reason == "template_error"
        lost = isinstance(error, RowError) and error.reason == "template_drops_content"
        if not job.conversation.calls or not (refused or lost):
            return None
        for nulls, texts in ((True, False), (True, True), (False, True)):
            messages = job.conversation.form(nulls=nulls, texts=texts)
            try:
                run = self._follow(job, messages, result, nulls=not nulls)
            except (NotTraced, RowError, NullPrinted):
                continue
            if nulls and run.nones:
                continue
            try:
                settled = job.template.judge.settle(run, messages, job.trained)
            except RowError:
                if refused and texts:
                    raise  # it is rendered so, and this is what is wrong with it
                continue
            if refused:
                self._count(result)
            if texts:
                result.note("arguments_as_text")
            job.rendered = messages
            return settled
        return None

    def _in_parts(self, job: Job, error: Exception | None, result: Rendering) -> Settled | None:
        """A conversation whose texts the template takes as parts only, as it takes pictures."""
        messages = job.conversation.in_parts()
        try:
            run = self._follow(job, messages, result)
            settled = job.template.judge.settle(run, messages, job.trained)
        except (NotTraced, RowError):
            return None
        if isinstance(error, NotTraced):
            self._count(result)
        result.note("texts_as_parts")
        job.rendered = messages
        return settled

    def _follow(
        self, job: Job, messages: list[dict[str, Any]], result: Rendering, *, nulls: bool = True
    ) -> Run:
        """Along a known path, or one that is admitted now; compared where it is this row's turn."""
        if self.renderer != "auto":
            return self._compared(job, messages)
        traced = job.template.traced
        start = time.perf_counter()
        try:
            run = traced.follow(messages, job.conversation.tools, nulls=nulls)
        except (NotTraced, RowError) as error:
            if traced.differed:
                raise Differs from error
            raise
        finally:
            self.engine_seconds += time.perf_counter() - start
        self._audit(job, messages, run.text, result)
        return run

    def _audit(
        self, job: Job, messages: list[dict[str, Any]], text: str, result: Rendering
    ) -> None:
        """Compare with the reference where it is this row's turn."""
        known = self._digests
        digest = digest_of(text) if known is None else known[job.source] + job.part
        if audited(len(result.texts), digest):
            result.note("audited")
            if self._rendered(job, messages) != text:
                job.template.traced.ban("a row that both rendered")
                raise Differs

    def _rendered(self, job: Job, messages: list[dict[str, Any]]) -> str | None:
        """The reference's render of a row that a path rendered; None where it refuses."""
        try:
            return job.template.reference.render(messages, job.conversation.tools)
        except RowError:
            return None

    def _compared(self, job: Job, messages: list[dict[str, Any]]) -> Run:
        """A run that printed exactly what the reference did for this very row."""
        traced, tools = job.template.traced, job.conversation.tools
        text = job.template.reference.render(messages, tools)
        try:
            run = traced.follow(messages, tools)
        except (NotTraced, RowError):
            if not traced.differed:
                raise
        else:
            if run.text == text:
                return run
            traced.ban("a row that both rendered")
        # Something remembered was wrong: a trace of this row alone remembers nothing.
        return TracedTemplate(job.template.reference).follow(messages, tools)

    def _untraced(self, job: Job, error: NotTraced, result: Rendering) -> Settled:
        """A row that only the reference can render: its text is known, its turns are not."""
        text = job.template.reference.render(job.conversation.messages, job.conversation.tools)
        result.note("rows_reference")
        result.note(f"untraced:{error.cause}")
        if job.trained is None:
            return Settled(text, None, ("text",), [len(text)])
        raise unproven(f"which part of the text is whose cannot be told: {error}")

    def _plain(self, found: Plain) -> Settled:
        """A text that no template touches."""
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
            roles, ends = ["text"], [len(text)]
        else:
            roles, ends = ["prompt", "completion"], [len(found.prompt), len(text)]
        spans: list[Span] | None = None
        if everything == "completion":
            spans = [(len(found.prompt), len(text))]
        if len(text) == (len(found.prompt) if spans else 0):
            raise RowError("there is no text to train on", reason="no_trained_tokens")
        return Settled(text, spans, roles, ends, pictures=found.pictures)

    def _accept(self, result: Rendering, source: int, part: int, settled: Settled) -> None:
        if not settled.closed:
            result.note("rows_without_closer")
            result.unclosed.append(len(result.texts))
        if settled.weights:
            result.weights[len(result.texts)] = settled.weights
        if settled.pictures:
            result.pictures[len(result.texts)] = settled.pictures
        result.texts.append(settled.text)
        result.source.append(source)
        result.part.append(part)
        result.spans.append(settled.spans)
        result.roles.append(settled.roles)
        result.ends.append(settled.ends)

    def _jobs(self, index: int, found: Conversation, result: Rendering) -> list[Job]:
        """The texts that one conversation gives, and what is trained in each."""
        template = self._for(found.tools, found.variables)
        # Of a conversation that ends with an answer the outline says what is trained.
        plain = None
        outlined = _outlined(found)
        if outlined is not None and found.messages[-1]["role"] == "assistant":
            plain = (found.shape, found.completion, outlined[0])
            known = self._trained.get(plain)
            if known is not None:
                return [Job(index, 0, found, known, template, (), outlined)]
        train_on = self.spec.trained(found.shape)
        if train_on == "everything":
            return [Job(index, 0, found, None, template, (), outlined)]
        messages = found.messages
        _trim(found, self.spec.trailing, result)
        if found.messages is not messages:
            messages, outlined = found.messages, _outlined(found)
        assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        wanted = assistants
        weights: dict[int, float] = {}  # what messages count, where they may say so
        if train_on == "completion":
            wanted = [i for i in assistants if i >= found.completion]
        elif train_on == "last_assistant_message":
            wanted = assistants[-1:]
        if not found.simple:
            weights = {i: message_weight(messages[i]) for i in wanted}
            wanted = [i for i in wanted if weights[i]]
        if not wanted:
            raise RowError("no assistant turn of this row is to be trained",
                           reason="no_trained_tokens")  # fmt: skip
        if self.spec.expand == "none":
            if plain is not None and len(self._trained) < ROLES_KNOWN:
                self._trained[plain] = tuple(wanted)
            counted = tuple([weights[i] for i in wanted]) if weights else ()
            return [Job(index, 0, found, tuple(wanted), template, counted, outlined)]
        chosen = set(wanted)
        jobs = []
        for turn, i in enumerate(assistants):
            if i in chosen:
                part = dataclasses.replace(found, messages=messages[: i + 1])
                counted = (weights[i],) if weights else ()
                jobs.append(Job(index, turn, part, (i,), template, counted, _outlined(part)))
        return jobs

    def _accept_settled(self, job: Job, settled: Settled, result: Rendering, weight: float) -> None:
        self._trained_settled(job, settled)
        if weight != 1:
            _scaled(settled, weight)
        self._accept(result, job.source, job.part, settled)

    def _trained_settled(self, job: Job, settled: Settled) -> Settled:
        if job.trained is not None and not settled.spans:
            raise RowError("the template prints nothing of what is to be trained",
                           reason="no_trained_tokens")  # fmt: skip
        if job.weights and any(weight != 1 for weight in job.weights):
            settled.weights = self._of_turns(job, settled)
        known = job.conversation.pictures
        if known:
            settled.pictures = [known[id(p)] for p in image_parts(job.conversation.messages)]
        return settled

    def _of_turns(self, job: Job, settled: Settled) -> list[float]:
        assert job.trained is not None
        if len(settled.ends) != len(job.conversation.messages):
            raise unproven("which weight is whose cannot be told: not every message is a turn")
        return of_turns(dict(zip(job.trained, job.weights, strict=True)), len(settled.ends))


def _outlined(found: Conversation) -> tuple[Outline, list[Any]] | None:
    """Outline and leaves of a conversation, where it has one."""
    if found.simple:
        messages = found.messages
        return tuple([m["role"] for m in messages]), [m["content"] for m in messages]
    return outline_of(found.messages, found.nulls)


def _scaled(settled: Settled, weight: float) -> Settled:
    """The same in a row that counts so much."""
    settled.weights = scaled(settled.weights, weight, len(settled.ends))
    return settled


def _trim(found: Conversation, trailing: str, result: Rendering) -> None:
    """Cut what follows the last assistant turn, as far as the spec says."""
    messages = found.messages
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
        found.messages = messages[:end]
