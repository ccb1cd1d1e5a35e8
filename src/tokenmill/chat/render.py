"""Render rows to texts with trained spans, and conversations to prompts.

A row is read (`shapes`), rendered along a traced path (`trace`) in the first form that passes, and
its trained spans are checked (`turns`); a step that fails rejects the row. The reference also
renders a sample of the rows, chosen by content. After one difference it renders every row.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash

from tokenmill._core.options import Variables
from tokenmill.chat.append import join, sampled
from tokenmill.chat.pictures import (
    MediaTokens,
    Picture,
    image_parts,
    refuse_pictures,
    refuse_tokens,
    take_pictures,
)
from tokenmill.chat.planted import plant
from tokenmill.chat.prefix import prove_by_prompts
from tokenmill.chat.program import NotTraced, Run, Untraceable
from tokenmill.chat.shapes import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    NULL_AS_EMPTY,
    AnswerGroup,
    Conversation,
    Message,
    Plain,
    incomparable,
    message_weight,
    read_row,
    row_weight,
)
from tokenmill.chat.spec import TURNS_OF_GROUPS, ChatSpec
from tokenmill.chat.template import ReferenceTemplate
from tokenmill.chat.thinking import any_of, before_thinking, literals, thinking_tags
from tokenmill.chat.trace import Differs, TracedTemplate
from tokenmill.chat.turns import Openings, Settled, Span, TurnJudge, unproven
from tokenmill.errors import RowError, UsageError

RENDERERS = ("auto", "jinja2")
FIRST_AUDITED = 2  # rows at the start of every batch that the reference renders, too
AUDIT_ONE_IN = 512  # of the other rows, by content
TEMPLATES_KNOWN = 8  # per thread
# Length of the untrained part of a generation prompt, by `ChatSpec.thinking_opener`.
UNTRAINED: dict[str, Callable[[str], int]] = {"prompt": len, "trained": before_thinking}


Failure = TypeVar("Failure", NotTraced, RowError, NotTraced | RowError)


class Asked(NamedTuple):
    """A conversation to be continued by a model."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    variables: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The labels of an `AnswerGroup`, and whether its texts share their prompt."""

    labels: tuple[int, ...]
    scores: tuple[float, ...] | None
    margin: float | None
    one_prompt: bool  # some templates print a prompt differently for different answers


@dataclass(slots=True)
class Rendering:
    """The outcome of one batch.

    A row gives one text, or several numbered by `part`: one for each assistant turn
    (``expand="turns"``), each piece of a rollout (``expand="append"``), each answer of a group.
    """

    texts: list[str] = field(default_factory=list)
    source: list[int] = field(default_factory=list)  # number of the row
    part: list[int] = field(default_factory=list)
    spans: list[list[Span] | None] = field(default_factory=list)  # None: everything is trained
    roles: list[Sequence[str]] = field(default_factory=list)  # of turns
    ends: list[list[int]] = field(default_factory=list)  # of turns
    rejected: list[tuple[int, int, RowError]] = field(default_factory=list)  # row, part, reason
    notes: dict[str, int | str] = field(default_factory=dict)
    # By the number of the text, where there is something to say:
    clipped: list[int] = field(default_factory=list)  # a generation block held the prompt
    unclosed: list[int] = field(default_factory=list)  # nothing closes some assistant turn
    groups: dict[int, GroupFacts] = field(default_factory=dict)  # of the first text of each group
    weights: dict[int, Sequence[float]] = field(default_factory=dict)  # of turns in the loss
    pictures: dict[int, Sequence[Picture]] = field(default_factory=dict)  # in order

    @property
    def turns(self) -> list[list[tuple[str, int]]]:
        """Role and end of the turns of every text."""
        pairs = zip(self.roles, self.ends, strict=True)
        return [list(zip(roles, ends, strict=True)) for roles, ends in pairs]

    def note(self, name: str, count: int = 1) -> None:
        self.notes[name] = int(self.notes.get(name, 0)) + count

    def accept(self, source: int, part: int, settled: Settled) -> None:
        number = len(self.texts)
        if not settled.closed:
            self.note("rows_without_closer")
            self.unclosed.append(number)
        if settled.clipped:
            self.note("generation_clipped")
            self.clipped.append(number)
        if settled.weights:
            self.weights[number] = settled.weights
        if settled.pictures:
            self.pictures[number] = settled.pictures
        self.texts.append(settled.text)
        self.source.append(source)
        self.part.append(part)
        self.spans.append(settled.spans)
        self.roles.append(settled.roles)
        self.ends.append(settled.ends)


@dataclass(slots=True)
class Sample:
    """One text to render: a conversation and its trained messages."""

    source: int
    part: int
    conversation: Conversation
    trained: tuple[int, ...] | None  # None: everything
    template: Template
    weights: tuple[float, ...] = ()  # of the messages in `trained`; empty where each is 1


def audited(position: int, digest: int) -> bool:
    """Whether the reference renders this row, too; depends on its place and content alone."""
    return position < FIRST_AUDITED or digest % AUDIT_ONE_IN == 0


def digest_of(text: str) -> int:
    """Return the digest that chooses a text for an audit if its row's bytes are not known."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace"))


class Template:
    """One template: its reference, its traced paths and its turns."""

    def __init__(self, source: str, spec: ChatSpec, variables: Mapping[str, Any]) -> None:
        self.reference = ReferenceTemplate(source, variables, spec.date)
        self.traced = TracedTemplate(self.reference)
        self.judge = TurnJudge(
            Openings(
                self._follow,
                UNTRAINED[spec.thinking_opener],
                self._prompt_depends_on_row(),
            ),
            spec.turn_end,
            any_of(thinking_tags(literals(self.reference.tree))),
            self.reference.has_generation,
        )

    def _prompt_depends_on_row(self) -> bool:
        try:
            return self.reference.names.prompt_depends_on_row()
        except Untraceable:
            return True

    def text(self, messages: list[Message], tools: list[Any] | None, *, prompt: bool) -> str:
        """Render a conversation along a traced path, or by the reference where there is none."""
        try:
            return (self.asking if prompt else self.traced).follow(messages, tools).text
        except NotTraced:
            return self.reference.render(messages, tools, add_generation_prompt=prompt)

    @cached_property
    def asking(self) -> TracedTemplate:
        """The traced paths with the generation prompt after the conversation."""
        return TracedTemplate(self.reference, add_generation_prompt=True)

    @property
    def differed(self) -> bool:
        """Whether a traced path and the reference printed different texts."""
        return bool(self.traced.differed or ("asking" in vars(self) and self.asking.differed))

    def _follow(self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool) -> Run:
        traced = self.asking if prompt else self.traced
        try:
            return traced.follow(messages, tools)
        except NotTraced as error:
            raise unproven(str(error)) from error


_known = threading.local()  # templates by what they depend on, the least recently used first


def forget() -> None:
    vars(_known).clear()


def template_of(source: str, spec: ChatSpec, variables: Mapping[str, Any]) -> Template:
    """Return a template, with its paths if this thread has used it before.

    Compiling one takes longer than rendering a small file, and its paths change no outcome. One
    that differed from the reference is compiled again.
    """
    try:
        given = msgspec.json.encode(dict(variables))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return Template(source, spec, variables)
    known: dict[Any, Template] = vars(_known).setdefault("templates", {})
    key = (source, given, spec.date, spec.turn_end, spec.thinking_opener)
    found = known.pop(key, None)
    if found is None or found.differed:
        found = Template(source, spec, variables)
    known[key] = found
    if len(known) > TEMPLATES_KNOWN:
        del known[next(iter(known))]
    return found


class Renderer:
    """Turns parsed rows into texts with proven spans.

    Args:
        spec: Options of the rows.
        template: Jinja source, several by name (``default``, ``tool_use``), or None for rows of
            plain text and of prompt and completion strings.
        special_tokens: Texts of the tokenizer's special tokens by the names that templates read.
        renderer: ``auto``, or ``jinja2`` to render every row by the reference; same results.
        media: Tokens that stand for images; without it rows with images are rejected.
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
        named = {"default": template} if isinstance(template, str) else template
        self._sources = dict(named or {})
        self._templates: dict[str, Template] = {}
        self._printed = 0
        self.engine_seconds = 0.0  # spent in templates, not reading or checking rows
        if "default" in self._sources and spec.format != "text":
            self._template("default")  # raises here if it does not compile

    def _template(self, name: str, variables: Variables | None = None) -> Template:
        if variables is None and name in self._templates:
            return self._templates[name]
        given = {**self.special_tokens, **(self.spec.template_kwargs or {}), **(variables or {})}
        found = template_of(self._sources[name], self.spec, given)
        if variables is None:
            self._templates[name] = found
        return found

    def _for(self, tools: list[Any] | None, variables: Variables | None = None) -> Template:
        """Return the template of a conversation, chosen as transformers chooses it."""
        if not self._sources:
            raise UsageError(
                "these rows are conversations and the tokenizer has no chat template: give one "
                "with ",
                ("chat_template",),
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
        return self._for(tools, variables).reference

    def judge(self, tools: list[Any] | None = None) -> TurnJudge:
        return self._for(tools).judge

    def prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        variables: Variables | None = None,
    ) -> str:
        """Render a conversation and the generation prompt with the reference."""
        reference = self.reference(tools, variables)
        return reference.render(messages, tools, add_generation_prompt=True)

    def prompts(self, conversations: Sequence[Asked]) -> list[str | RowError]:
        """Return `prompt` of many conversations, along traced paths; errors take their place."""
        if self.renderer == "auto":
            try:
                return [self._prompt(number, one) for number, one in enumerate(conversations)]
            except Differs:
                self.renderer = "jinja2"  # for this batch and all later ones
        return [self._reference_prompt(one) for one in conversations]

    def _prompt(self, number: int, asked: Asked) -> str | RowError:
        paths = self._for(asked.tools, asked.variables).asking
        try:
            run = self._follow(paths, asked.messages, asked.tools)
        except NotTraced:
            return self._reference_prompt(asked)
        except RowError as error:
            return error
        if audited(number, digest_of(run.text)):
            paths.audit(run, asked.messages, asked.tools)
        return run.text

    def _reference_prompt(self, asked: Asked) -> str | RowError:
        try:
            return self.prompt(*asked)
        except RowError as error:
            return error

    def printed(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, *, prompt: bool
    ) -> tuple[str, Run | None]:
        """Render one conversation, with the generation prompt or without.

        Returns:
            The text, and the run that assigns its parts to messages, None if it was not traced.
        """
        template = self._for(tools)
        paths = template.asking if prompt else template.traced
        try:
            run = self._follow(paths, messages, tools)
            if self.renderer == "auto":
                self._printed += 1
                if audited(self._printed - 1, digest_of(run.text)):
                    paths.audit(run, messages, tools)
            return run.text, run
        except NotTraced:
            pass
        except Differs:
            self.renderer = "jinja2"
        return template.reference.render(messages, tools, add_generation_prompt=prompt), None

    def _follow(
        self, paths: TracedTemplate, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> Run:
        start = time.perf_counter()
        try:
            if self.renderer != "auto":
                return paths.compared(messages, tools)
            return paths.follow(messages, tools)
        except (NotTraced, RowError) as error:
            if self.renderer == "auto" and paths.differed:
                raise Differs from error
            raise
        finally:
            self.engine_seconds += time.perf_counter() - start

    def render(self, rows: Iterable[Any], digests: Sequence[int] | None = None) -> Rendering:
        """Render a batch of parsed rows.

        Args:
            rows: The rows, or the RowError of the parser in place of a row. They are iterated
                again if the reference must render them all.
            digests: Digests of the rows' bytes, if known; they choose the audited rows.
        """
        result = Rendering()
        try:
            self._render(rows, digests, result)
        except Differs:
            # The reference renders this batch and all later ones.
            audits = int(result.notes.get("audited", 0))
            result = Rendering()
            result.note("mismatches")
            result.note("audited", audits)
            self.renderer = "jinja2"
            self._render(rows, digests, result)
        result.notes["renderer"] = "traced" if "rows_traced" in result.notes else "jinja2"
        return result

    def _render(
        self, rows: Iterable[Any], digests: Sequence[int] | None, result: Rendering
    ) -> None:
        for index, row in enumerate(rows):
            digest = None if digests is None else digests[index]
            try:
                found = self.read(row)
                weight = row_weight(row)
                if isinstance(found, Plain):
                    result.accept(index, 0, _scaled(self._plain(found), weight))
                    continue
                if isinstance(found, AnswerGroup):
                    self._group(index, found, weight, digest, result)
                    continue
                samples = self._samples(index, found, result)
            except RowError as error:
                result.rejected.append((index, 0, error))
                continue
            if self.spec.expand == "append":
                self._append(samples, weight, digest, result)
                continue
            for sample in samples:
                try:
                    settled, _ = self._settle(sample, digest, result)
                    result.accept(index, sample.part, _scaled(settled, weight))
                except RowError as error:
                    result.rejected.append((index, sample.part, error))

    def read(self, row: Any) -> Conversation | Plain | AnswerGroup:
        """Read one row, with its images if there is a processor."""
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

    def _samples(self, index: int, found: Conversation, result: Rendering) -> list[Sample]:
        """Return the texts to render for one conversation, with their trained messages."""
        template = self._for(found.tools, found.variables)
        train_on = self.spec.trained(found.shape)
        if train_on == "everything":
            return [Sample(index, 0, found, None, template)]
        _trim(found, self.spec.trailing, result)
        messages = found.messages
        assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        trained = assistants
        if train_on == "completion":
            trained = [i for i in assistants if i >= found.completion]
        elif train_on == "last_assistant_message":
            trained = assistants[-1:]
        weights: dict[int, float] = {}
        if not found.simple:
            weights = {i: message_weight(messages[i]) for i in trained}
            trained = [i for i in trained if weights[i]]
            if all(weights[i] == 1 for i in trained):
                weights = {}
        if not trained:
            raise RowError("no assistant turn of this row is to be trained",
                           reason="no_trained_tokens")  # fmt: skip
        if self.spec.expand == "none":
            counted = tuple([weights[i] for i in trained]) if weights else ()
            return [Sample(index, 0, found, tuple(trained), template, counted)]
        chosen = set(trained)
        return [
            Sample(
                index,
                turn,
                dataclasses.replace(found, messages=messages[: i + 1]),
                (i,),
                template,
                (weights[i],) if weights else (),
            )
            for turn, i in enumerate(assistants)
            if i in chosen
        ]

    def _append(
        self, samples: Sequence[Sample], weight: float, digest: int | None, result: Rendering
    ) -> None:
        """Render each turn, and join turns where one continues another."""
        held: list[Sample] = []
        turns: list[tuple[str, Settled]] = []
        for sample in samples:
            try:
                settled, messages = self._settle(sample, digest, result)
                found = sample.conversation
                asked = Asked(messages[:-1], found.tools, found.variables)
                by_paths = self.renderer == "auto"
                number = len(result.texts)
                prompt = self._prompt(number, asked) if by_paths else self._reference_prompt(asked)
                if isinstance(prompt, RowError):
                    raise prompt
                turns.append((prompt, sampled(settled, prompt, len(messages) - 1)))
                held.append(sample)
            except RowError as error:
                result.rejected.append((sample.source, sample.part, error))
        for numbers, settled in join(turns):
            members = [held[number] for number in numbers]
            whole = dataclasses.replace(
                members[-1],
                part=members[0].part,
                trained=tuple(k for sample in members for k in sample.trained or ()),
                weights=tuple(each for sample in members for each in sample.weights),
            )
            try:
                settled = _scaled(_finished(whole, settled), weight)
                result.accept(whole.source, whole.part, settled)
            except RowError as error:
                result.rejected.append((whole.source, whole.part, error))

    def _group(
        self, index: int, group: AnswerGroup, weight: float, digest: int | None, result: Rendering
    ) -> None:
        """Render every side of a group; all of them are accepted, or none."""
        if self.spec.expand != "none":
            raise incomparable(f"expand={self.spec.expand!r}{TURNS_OF_GROUPS}")
        sides: list[Settled] = []
        for number, side in enumerate(group.sides):
            try:
                if isinstance(side, Plain):
                    sides.append(self._plain(side))
                    continue
                [sample] = self._samples(index, side, result)
                sample.part = number
                sides.append(self._settle(sample, digest, result)[0])
            except RowError as error:
                raise RowError(
                    f"{group.name(number)}: {error.message}", reason=error.reason
                ) from error
        if len(sides) > 1 and len({side.text for side in sides}) == 1:
            raise incomparable("the answers do not differ")
        begin = min(start for side in sides for start, _ in side.spans or [(0, 0)])
        # Texts with different images are different prompts.
        prompts = {
            (side.text[:begin], repr([one.value for one in side.pictures])) for side in sides
        }
        if len(prompts) > 1:
            result.note("prompts_differ")
        sides = [_scaled(side, weight) for side in sides]  # all of them before one is accepted
        result.groups[len(result.texts)] = GroupFacts(
            group.labels, group.scores, group.margin, one_prompt=len(prompts) == 1
        )
        for number, settled in enumerate(sides):
            result.accept(index, number, settled)

    def _settle(
        self, sample: Sample, digest: int | None, result: Rendering
    ) -> tuple[Settled, list[Message]]:
        """Render a sample in the first form that the template prints with a proven mask.

        Returns:
            The render, and the messages in the chosen form.

        Raises:
            RowError: No form passes. The error is that of the first form that was printed, else
                the template's refusal.
        """
        conversation, paths = sample.conversation, sample.template.traced
        refused: NotTraced | RowError | None = None
        failed: RowError | None = None
        for form in conversation.forms(parts=self.media is not None):
            if failed is not None and form.note == NULL_AS_EMPTY:
                continue  # only for templates that refuse null
            try:
                run = self._follow(paths, form.messages, conversation.tools)
            except (NotTraced, RowError) as error:
                refused = refused or _bare(error)
                continue
            if self.renderer == "auto":
                self._audit(sample, form.messages, run, digest, result)
            if failed is None:  # a row counts once, in whichever form
                result.note("rows_traced" if self.renderer == "auto" else "rows_reference")
            try:
                settled = self._proven(sample, form.messages, run)
                if self.media is not None and sample.trained is not None and not settled.spans:
                    raise _nothing_trained()
            except RowError as error:
                failed = failed or _bare(error)
                if self.media is None and error.reason != "template_drops_content":
                    break  # no other form would change that
                continue
            if form.note:
                result.note(form.note)
            if settled.dropped:
                result.note("generation_drops")
            if sample.trained is not None:
                blocks = sample.template.judge.generation
                result.note("proven_by_generation_blocks" if blocks else "proven_by_trace")
            return _finished(sample, settled), form.messages
        if sample.trained is None:
            if failed is None and isinstance(refused, NotTraced):
                return self._untraced(sample, refused, result), conversation.messages
        elif isinstance(refused, NotTraced) or (failed and failed.reason == "mask_unproven"):
            return self._by_prompts(sample, failed or refused, result)
        if failed is not None:
            raise failed
        assert isinstance(refused, RowError)
        raise refused

    def _proven(self, sample: Sample, messages: list[Message], run: Run) -> Settled:
        """Find the trained spans of a run, and check that their words come from the right fields.

        Where words alone do not say that, the same conversation is checked with unique words.
        """
        judge, tools = sample.template.judge, sample.conversation.tools
        settled = judge.settle(run, messages, sample.trained, tools)
        if sample.trained is not None and not judge.generation and not settled.certain:
            planted = plant(messages, judge.thinking)
            try:
                judge.check(self._follow(sample.template.traced, planted, tools), planted)
            except NotTraced as error:
                raise unproven(
                    f"the same row with unique words cannot be traced: {error}"
                ) from error
        return settled

    def _by_prompts(
        self, sample: Sample, failed: NotTraced | RowError | None, result: Rendering
    ) -> tuple[Settled, list[Message]]:
        """Prove a row by its own generation prompts where its trace does not prove it."""
        template, tools = sample.template, sample.conversation.tools
        assert sample.trained is not None
        if isinstance(failed, NotTraced):
            result.note("rows_reference")
            result.note(f"untraced:{failed.cause}")

        def render(messages: list[Message], prompt: bool) -> str:
            if self.renderer == "auto":
                return template.text(messages, tools, prompt=prompt)
            return template.reference.render(messages, tools, add_generation_prompt=prompt)

        unproved: RowError | None = None
        for form in sample.conversation.forms(parts=self.media is not None):
            if unproved is not None and form.note == NULL_AS_EMPTY:
                continue
            try:
                settled = prove_by_prompts(render, form.messages, sample.trained, template.judge)
            except RowError as error:
                if error.reason in ("template_error", "limit"):
                    refused = _bare(error)
                else:
                    unproved = unproved or _bare(error)
                continue
            result.note("proven_by_prompts")
            if form.note:
                result.note(form.note)
            return _finished(sample, settled), form.messages
        if unproved is None:
            raise refused
        raise RowError(f"{failed}; {unproved.message}", reason="mask_unproven")

    def _audit(
        self,
        sample: Sample,
        messages: list[Message],
        run: Run,
        digest: int | None,
        result: Rendering,
    ) -> None:
        digest = digest_of(run.text) if digest is None else digest + sample.part
        if audited(len(result.texts), digest):
            result.note("audited")
            sample.template.traced.audit(run, messages, sample.conversation.tools)

    def _untraced(self, sample: Sample, error: NotTraced, result: Rendering) -> Settled:
        """Render a row that cannot be traced with the reference; everything is trained."""
        conversation = sample.conversation
        text = sample.template.reference.render(conversation.messages, conversation.tools)
        result.note("rows_reference")
        result.note(f"untraced:{error.cause}")
        return _finished(sample, Settled(text, None, ("text",), [len(text)]))

    def _plain(self, found: Plain) -> Settled:
        everything = self.spec.trained(found.shape)
        eos = ""
        if self.spec.append_eos:
            eos = self.special_tokens.get("eos_token", "")
            if not eos:
                raise UsageError(
                    ("append_eos",),
                    " needs an eos token and the tokenizer has none: turn it off",
                )
        if everything not in ("everything", "completion"):
            raise UsageError(
                ("train_on", everything),
                " needs messages; the prompts and completions of these rows are strings",
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


def _finished(sample: Sample, settled: Settled) -> Settled:
    """Add the weights and images of the sample; reject it if nothing of it is trained."""
    if sample.trained is not None:
        if not settled.spans:
            raise _nothing_trained()
        if any(weight != 1 for weight in sample.weights):
            turns = len(settled.ends)
            if turns != len(sample.conversation.messages):
                raise unproven("which weight is whose cannot be told: not every message is a turn")
            trained = dict(zip(sample.trained, sample.weights, strict=True))
            settled.weights = _turn_weights(trained, turns)
    known = sample.conversation.pictures
    if known:
        settled.pictures = [known[id(p)] for p in image_parts(sample.conversation.messages)]
    return settled


def _bare(error: Failure) -> Failure:
    """Drop traceback and cause: their frames hold the row, and would hold the error, too."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _nothing_trained() -> RowError:
    message = "the template prints nothing of what is to be trained"
    return RowError(message, reason="no_trained_tokens")


def _turn_weights(trained: Mapping[int, float], turns: int) -> list[float]:
    """Return the weight of each turn.

    An untrained turn has the weight of the next trained one, whose first token may begin in it.
    """
    each, weight = [1.0] * turns, trained[max(trained)]
    for number in reversed(range(turns)):
        weight = trained.get(number, weight)
        each[number] = weight
    return each


def _scaled(settled: Settled, weight: float) -> Settled:
    """Multiply the weights of the turns by that of the row."""
    if weight == 1:
        return settled
    each = [weight * turn for turn in settled.weights or [1.0] * len(settled.ends)]
    if not all(MIN_WEIGHT <= one <= MAX_WEIGHT for one in each):
        raise RowError(
            f"the weights of the row and of its messages come to {min(each):.1g} to "
            f"{max(each):.1g}; they must be from {MIN_WEIGHT:.1g} to {MAX_WEIGHT:.1g}"
        )
    settled.weights = [] if all(one == 1 for one in each) else each
    return settled


def _trim(found: Conversation, trailing: str, result: Rendering) -> None:
    """Remove what follows the last assistant turn, as `ChatSpec.trailing` says."""
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
