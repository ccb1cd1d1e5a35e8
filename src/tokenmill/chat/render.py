"""Render rows to texts with trained spans, and conversations to prompts.

Each row is read (`shapes`), rendered along a traced path (`trace`) in the first form that passes,
and its trained spans are checked (`turns`). A step that fails rejects the row. The reference also
renders a sample of the rows, chosen by content. After one difference it renders every row.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash

from tokenmill._core.encoders import EncoderSource, arguments_of
from tokenmill._core.id_text import IdText
from tokenmill._core.options import MAX_WEIGHT, MIN_WEIGHT, Variables
from tokenmill.chat.append import join, sampled
from tokenmill.chat.encoders import EncoderTemplate, UntracedEncoder
from tokenmill.chat.images import (
    Image,
    MediaTokens,
    image_parts,
    reject_images,
    reject_tokens,
    take_images,
)
from tokenmill.chat.prefix import prove_by_prompts
from tokenmill.chat.program import NotTraced, Run, TemplateFails, Untraceable
from tokenmill.chat.shapes import (
    KNOWN_ROLES,
    NULL_AS_EMPTY,
    AnswerGroup,
    Conversation,
    Message,
    Plain,
    incomparable,
    message_weight,
    misspelt_role,
    read_row,
    row_weight,
)
from tokenmill.chat.spec import ChatSpec
from tokenmill.chat.template import ReferenceTemplate
from tokenmill.chat.thinking import any_of, before_thinking, literals, thinking_tags
from tokenmill.chat.trace import AuditMismatch, TracedTemplate
from tokenmill.chat.turns import GenerationPrompts, RenderedRow, Span, SpanResolver, unproven
from tokenmill.chat.unique_words import with_unique_words
from tokenmill.errors import RowError, UsageError

_ROLE = itemgetter("role")
RENDERERS = ("auto", "jinja2")
PORTION = 256  # rows rendered together, see `Renderer._render`
TOOLS_SHARE = 8  # rows without tools that take as much of the processor's cache as one with tools
FIRST_AUDITED = 2  # rows at the start of every batch that the reference also renders
AUDIT_ONE_IN = 512  # other rows, chosen by content
MAX_TEMPLATES = 8  # cached per thread
# Length of the untrained part of a generation prompt, by `ChatSpec.thinking_opener`.
UNTRAINED: dict[str, Callable[[str], int]] = {"prompt": len, "trained": before_thinking}


Failure = TypeVar("Failure", bound=Exception)


class PromptRequest(NamedTuple):
    """A conversation to render with the generation prompt."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    variables: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The labels of an `AnswerGroup`, and whether its texts share their prompt."""

    labels: tuple[int, ...]
    scores: tuple[float, ...] | None
    margin: float | None
    one_prompt: bool  # some templates print the prompt differently for different answers


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
    # Indices in `texts`, or values by such an index:
    clipped: list[int] = field(default_factory=list)  # a generation block contained the prompt
    unclosed: list[int] = field(default_factory=list)  # an assistant turn has no end
    coded: list[int] = field(default_factory=list)  # the text is ids
    groups: dict[int, GroupFacts] = field(default_factory=dict)  # of the first text of each group
    weights: dict[int, Sequence[float]] = field(default_factory=dict)  # of turns in the loss
    images: dict[int, Sequence[Image]] = field(default_factory=dict)  # in order

    @property
    def turns(self) -> list[list[tuple[str, int]]]:
        """Role and end of the turns of every text."""
        pairs = zip(self.roles, self.ends, strict=True)
        return [list(zip(roles, ends, strict=True)) for roles, ends in pairs]

    def note(self, name: str, count: int = 1) -> None:
        self.notes[name] = self.notes.get(name, 0) + count  # type: ignore[operator]

    def accept(self, source: int, part: int, rendered: RenderedRow) -> None:
        number = len(self.texts)
        if not rendered.closed:
            self.note("rows_without_closer")
            self.unclosed.append(number)
        if rendered.clipped:
            self.note("generation_clipped")
            self.clipped.append(number)
        if rendered.coded:
            self.coded.append(number)
        if rendered.weights:
            self.weights[number] = rendered.weights
        if rendered.images:
            self.images[number] = rendered.images
        self.texts.append(rendered.text)
        self.source.append(source)
        self.part.append(part)
        self.spans.append(rendered.spans)
        self.roles.append(rendered.roles)
        self.ends.append(rendered.ends)


@dataclass(slots=True)
class Sample:
    """One text to render: a conversation and its trained messages."""

    source: int
    part: int
    conversation: Conversation
    trained: tuple[int, ...] | None  # None: everything
    template: Template
    weights: tuple[float, ...] = ()  # of the messages in `trained`; empty where each is 1
    run: Run | NotTraced | RowError | None = None  # of the first form, if it was rendered already


@dataclass(slots=True)
class _Read:
    """A row that was read but not rendered yet."""

    index: int
    content: Conversation | Plain | AnswerGroup | None = None
    weight: float = 1.0
    samples: Sequence[Sample] = ()
    error: RowError | None = None
    share: int = 1  # of a portion


def audited(position: int, digest: int, first: int = FIRST_AUDITED) -> bool:
    """Whether the reference also renders this row; depends on its position and content alone."""
    return position < first or digest % AUDIT_ONE_IN == 0


def digest_of(text: str) -> int:
    """Return the digest that selects a text for an audit if the row's bytes are not available."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace"))


class Template:
    """A template or encoder with its reference, its traced paths and its span resolver."""

    def __init__(
        self,
        source: str | EncoderSource,
        spec: ChatSpec,
        variables: Mapping[str, Any],
        tokenizer: Any = None,
        *,
        as_text: bool = False,
    ) -> None:
        self.encoder: EncoderTemplate | None = None
        self.reference: Any
        self.traced: Any
        if isinstance(source, EncoderSource):
            self.reference = self.encoder = EncoderTemplate(
                source, variables, tokenizer, as_text=as_text
            )
            self.traced = UntracedEncoder()
            strings = self.encoder.strings
        else:
            self.reference = ReferenceTemplate(source, variables, spec.date)
            self.traced = TracedTemplate(self.reference)
            strings = literals(self.reference.tree)
        self.resolver = SpanResolver(
            GenerationPrompts(
                self._follow,
                UNTRAINED[spec.thinking_opener],
                self._prompt_depends_on_row(),
            ),
            spec.turn_end,
            any_of(thinking_tags(strings)),
            self.reference.has_generation,
        )

    def _prompt_depends_on_row(self) -> bool:
        if self.encoder is not None:
            return True
        try:
            return bool(self.reference.names.prompt_depends_on_row())
        except Untraceable:
            return True

    def text(self, messages: list[Message], tools: list[Any] | None, *, prompt: bool) -> str:
        """Render a conversation along a traced path, or by the reference where there is none."""
        try:
            paths = self.with_generation_prompt if prompt else self.traced
            return str(paths.follow(messages, tools).text)
        except NotTraced:
            text: str = self.reference.render(messages, tools, add_generation_prompt=prompt)
            return text

    @cached_property
    def with_generation_prompt(self) -> Any:
        """The traced paths with the generation prompt after the conversation."""
        if self.encoder is not None:
            return self.traced
        return TracedTemplate(self.reference, add_generation_prompt=True)

    @property
    def differed(self) -> bool:
        """Whether a traced path and the reference printed different texts."""
        return bool(
            self.traced.differed
            or ("with_generation_prompt" in vars(self) and self.with_generation_prompt.differed)
        )

    def _follow(self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool) -> Run:
        traced = self.with_generation_prompt if prompt else self.traced
        try:
            run: Run = traced.follow(messages, tools)
            return run
        except NotTraced as error:
            raise unproven(str(error)) from error


_cache = threading.local()  # templates, the least recently used first


def clear_templates() -> None:
    vars(_cache).clear()


def template_of(source: str, spec: ChatSpec, variables: Mapping[str, Any]) -> Template:
    """Return a template, with its paths if this thread has used it before.

    Compiling one takes longer than rendering a small file, and cached paths change no result. A
    template that differed from the reference is compiled again.
    """
    try:
        variables_json = msgspec.json.encode(dict(variables))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return Template(source, spec, variables)
    templates: dict[Any, Template] = vars(_cache).setdefault("templates", {})
    key = (source, variables_json, spec.date, spec.turn_end, spec.thinking_opener)
    template = templates.pop(key, None)
    if template is None or template.differed:
        template = Template(source, spec, variables)
    templates[key] = template
    if len(templates) > MAX_TEMPLATES:
        del templates[next(iter(templates))]
    return template


class Renderer:
    """Renders parsed rows to texts with proven spans.

    Args:
        spec: Options of the rows.
        template: Jinja source, several by name (``default``, ``tool_use``), an encoder, or None for
            rows of plain text and of prompt and completion strings.
        special_tokens: Special tokens of the tokenizer by the names that templates read.
        renderer: ``auto``, or ``jinja2`` to render every row by the reference; same results.
        media: Tokens that represent images; without it rows with images are rejected.
        tokenizer: Encodes the segments of an encoder, and decodes its ids.
        as_text: Return text for the ids of an encoder, or reject the row.
    """

    def __init__(
        self,
        spec: ChatSpec,
        template: str | Mapping[str, Any] | EncoderSource | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        renderer: str = "auto",
        media: MediaTokens | None = None,
        tokenizer: Any = None,
        as_text: bool = False,
    ) -> None:
        if renderer not in RENDERERS:
            raise UsageError(f"renderer must be one of {', '.join(RENDERERS)}, got {renderer!r}")
        self.spec = spec
        self.special_tokens = dict(special_tokens or {})
        self.renderer = renderer
        self.media = media
        self.tokenizer, self.as_text = tokenizer, as_text
        hint = getattr(tokenizer, "notes", {}).get("no_template")
        self.hint = () if hint is None else (", or ", *arguments_of(hint))
        if isinstance(template, str | EncoderSource):
            template = {"default": template}
        self._sources: dict[str, Any] = dict(template or {})
        if isinstance(self._sources.get("default"), EncoderSource):
            _refuse_options(spec, media)
        self._templates: dict[str, Template] = {}
        self._printed = 0
        self._prefixes: dict[bool, dict[tuple[int, bool], str]] = {}  # of the row, see `prefix`
        self.first_audited = FIRST_AUDITED
        self.engine_seconds = 0.0  # time spent in templates
        if "default" in self._sources and spec.format != "text":
            self._template("default")  # raises here if it does not compile

    def _template(self, name: str, variables: Variables | None = None) -> Template:
        if variables is None and name in self._templates:
            return self._templates[name]
        source = self._sources[name]
        if isinstance(source, EncoderSource):
            template = Template(
                source, self.spec, variables or {}, self.tokenizer, as_text=self.as_text
            )
        else:
            values = {
                **self.special_tokens,
                **(self.spec.chat_template_kwargs or {}),
                **(variables or {}),
            }
            template = template_of(source, self.spec, values)
        if variables is None:
            self._templates[name] = template
        return template

    def _for(self, tools: list[Any] | None, variables: Variables | None = None) -> Template:
        """Return the template of a conversation, chosen as transformers chooses it."""
        if not self._sources:
            raise UsageError(
                "These rows are conversations, and the tokenizer has no chat template. Set ",
                ("chat_template",),
                *self.hint,
                ".",
            )
        if tools is not None and "tool_use" in self._sources:
            return self._template("tool_use", variables)
        if "default" in self._sources:
            return self._template("default", variables)
        names = ", ".join(sorted(self._sources))
        raise UsageError(
            f"The tokenizer has no default chat template, only {names}. Set ",
            ("chat_template",),
            ".",
        )

    def reference(self, tools: list[Any] | None = None, variables: Variables | None = None) -> Any:
        """Return the `ReferenceTemplate` or `EncoderTemplate` of a conversation."""
        return self._for(tools, variables).reference

    @property
    def template(self) -> Any:
        """The default template or encoder."""
        self._for(None)
        return self._sources["default"]

    def resolver(self, tools: list[Any] | None = None) -> SpanResolver:
        return self._for(tools).resolver

    def prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        variables: Variables | None = None,
    ) -> str:
        """Render a conversation and the generation prompt with the reference."""
        reference = self.reference(tools, variables)
        text: str = reference.render(messages, tools, add_generation_prompt=True)
        return text

    def prompts(self, conversations: Sequence[PromptRequest]) -> list[str | RowError]:
        """Return `prompt` of many conversations, along traced paths, or the error of each."""
        if self.renderer == "auto":
            try:
                return [self._prompt(number, one) for number, one in enumerate(conversations)]
            except AuditMismatch:
                self.renderer = "jinja2"  # for this batch and all later ones
        return [self._reference_prompt(one) for one in conversations]

    def _prompt(self, number: int, request: PromptRequest) -> str | RowError:
        paths = self._for(request.tools, request.variables).with_generation_prompt
        try:
            run = self._follow(paths, request.messages, request.tools)
        except NotTraced:
            return self._reference_prompt(request)
        except RowError as error:
            return error
        if audited(number, digest_of(run.text)):
            paths.audit(run, request.messages, request.tools)
        return run.text

    def _reference_prompt(self, request: PromptRequest) -> str | RowError:
        try:
            return self.prompt(*request)
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
        paths = template.with_generation_prompt if prompt else template.traced
        try:
            run = self._follow(paths, messages, tools)
            if self.renderer == "auto":
                self._printed += 1
                if audited(self._printed - 1, digest_of(run.text)):
                    paths.audit(run, messages, tools)
            return run.text, run
        except NotTraced:
            pass
        except AuditMismatch:
            self.renderer = "jinja2"
        return template.reference.render(messages, tools, add_generation_prompt=prompt), None

    def conversation(
        self, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[RenderedRow, list[Message]]:
        """Render one conversation, which may end with any message, and train every answer.

        Returns:
            The render, and the messages in the form that the template accepts.
        """
        content = self.read({"messages": messages, "tools": tools})
        assert isinstance(content, Conversation)
        answers = [k for k, m in enumerate(content.messages) if m["role"] == "assistant"]
        template = self._for(content.tools)
        sample = Sample(0, 0, content, tuple(answers) or None, template)
        self._printed += 1
        if self._printed > FIRST_AUDITED:
            self.first_audited = 0
        try:
            return self._render_sample(sample, None, Rendering())
        except AuditMismatch:
            self.renderer = "jinja2"
            return self._render_sample(sample, None, Rendering())

    def _follow(
        self, paths: TracedTemplate, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> Run:
        if self.renderer != "auto":
            return paths.compared(messages, tools)
        try:
            return paths.follow(messages, tools)
        except (NotTraced, RowError) as error:
            if paths.differed:
                raise AuditMismatch from error
            raise

    def render(self, rows: Iterable[Any], digests: Sequence[int] | None = None) -> Rendering:
        """Render a batch of parsed rows.

        Args:
            rows: The rows, or the RowError of the parser in place of a row. They are iterated
                again if the reference must render them all.
            digests: Digests of the rows' bytes, if available; they select the audited rows.
        """
        result = Rendering()
        try:
            self._render(rows, digests, result)
        except AuditMismatch:
            # The reference renders this batch and all later ones.
            audits = int(result.notes.get("audited", 0))
            result = Rendering()
            result.note("mismatches")
            result.note("audited", audits)
            self.renderer = "jinja2"
            self._render(rows, digests, result)
        if "rows_encoder" in result.notes:
            result.notes["renderer"] = "encoder"
        else:
            result.notes["renderer"] = "traced" if "rows_traced" in result.notes else "jinja2"
        return result

    def _render(
        self, rows: Iterable[Any], digests: Sequence[int] | None, result: Rendering
    ) -> None:
        numbered = enumerate(rows)
        # One step for all rows, then the next step, takes a fifth less time than all steps of one
        # row after another: the processor caches the code of a step.
        while read := self._read_portion(numbered, result):
            if self.spec.expand != "append":
                start = time.perf_counter()
                for each in read:
                    for sample in each.samples:
                        sample.run = self._first_run(sample)
                self.engine_seconds += time.perf_counter() - start
            for each in read:
                self._render_row(each, None if digests is None else digests[each.index], result)

    def _read_portion(self, rows: Iterator[tuple[int, Any]], result: Rendering) -> list[_Read]:
        read: list[_Read] = []
        left = PORTION
        for index, row in rows:
            each = self._read_row(index, row, result)
            read.append(each)
            left -= each.share
            if left <= 0:
                break
        return read

    def _read_row(self, index: int, row: Any, result: Rendering) -> _Read:
        each = _Read(index)
        try:
            each.content = self.read(row)
            each.weight = row_weight(row, self.spec)
            if isinstance(each.content, Conversation):
                each.samples = self._samples(index, each.content, result)
                if each.content.tools:
                    each.share = TOOLS_SHARE
        except RowError as error:
            each.error = _without_traceback(error)
        return each

    def _first_run(self, sample: Sample) -> Run | NotTraced | RowError | None:
        """Render the first form of a conversation; the result of `_follow` or its error."""
        if sample.template.encoder is not None:
            return None
        conversation = sample.conversation
        try:
            return self._follow(sample.template.traced, conversation.messages, conversation.tools)
        except (NotTraced, RowError) as error:
            return _without_traceback(error)

    def _render_row(self, each: _Read, digest: int | None, result: Rendering) -> None:
        index, content, weight, self._prefixes = each.index, each.content, each.weight, {}
        try:
            if each.error is not None:
                raise each.error
            if isinstance(content, Plain):
                self._note_strings(content, result)
                result.accept(index, 0, _scaled(self._plain(content), weight))
            elif isinstance(content, AnswerGroup):
                self._group(index, content, weight, digest, result)
        except RowError as error:
            result.rejected.append((index, 0, _with_role(error, content)))
            return
        if self.spec.expand == "append":
            if each.samples:
                self._append(each.samples, weight, digest, result)
            return
        for sample in each.samples:
            try:
                rendered, _ = self._render_sample(sample, digest, result)
                result.accept(index, sample.part, _scaled(rendered, weight))
            except RowError as error:
                result.rejected.append((index, sample.part, _with_role(error, content)))

    def read(self, row: Any) -> Conversation | Plain | AnswerGroup:
        """Read one row, and its images if there is a processor."""
        if self.media is None:
            reject_images(row, self.spec)
            return read_row(row, self.spec)
        if not isinstance(row, dict):
            return read_row(row, self.spec)
        row, images = take_images(row, self.spec, self.media)
        content = read_row(row, self.spec)
        for side in content.sides if isinstance(content, AnswerGroup) else [content]:
            if isinstance(side, Plain):
                (side.prompt, side.text), side.images = images.replace_in(
                    (side.prompt, side.text), self.media.image
                )
                continue
            reject_tokens(
                [side.messages, side.tools, side.variables], self.media, placeholders=images
            )
            if images or not side.simple:
                side.attach_images(images)
        return content

    def _samples(self, index: int, conversation: Conversation, result: Rendering) -> list[Sample]:
        """Return the texts to render for one conversation, with their trained messages."""
        template = self._for(conversation.tools, conversation.variables)
        train_on = self.spec.trained(conversation.shape)
        roles = list(map(_ROLE, conversation.messages))
        if not KNOWN_ROLES.issuperset(roles) and misspelt_role(conversation.messages):
            result.note("misspelt_roles")
        for name in sorted(conversation.notes):
            result.note(name)
        if train_on == "everything":
            return [Sample(index, 0, conversation, None, template)]
        _trim(conversation, self.spec.trailing, result)
        messages = conversation.messages
        assistants = [i for i, role in enumerate(roles) if role == "assistant"]
        trained = assistants
        if train_on == "completion":
            trained = [i for i in assistants if i >= conversation.completion]
        elif train_on == "last_assistant_message":
            trained = assistants[-1:]
        weights: dict[int, float] = {}
        if not conversation.simple:
            weights = {i: message_weight(messages[i]) for i in trained}
            trained = [i for i in trained if weights[i]]
            if all(weights[i] == 1 for i in trained):
                weights = {}
        if not trained:
            raise RowError("no assistant turn of this row is trained", reason="no_trained_tokens")
        if self.spec.expand == "none":
            sample_weights = tuple([weights[i] for i in trained]) if weights else ()
            return [Sample(index, 0, conversation, tuple(trained), template, sample_weights)]
        chosen = set(trained)
        return [
            Sample(
                index,
                turn,
                dataclasses.replace(conversation, messages=messages[: i + 1]),
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
        """Render each turn, and join turns that continue one another."""
        accepted: list[Sample] = []
        turns: list[tuple[str, RenderedRow]] = []
        for sample in samples:
            try:
                rendered, messages = self._render_sample(sample, digest, result)
                conversation = sample.conversation
                request = PromptRequest(messages[:-1], conversation.tools, conversation.variables)
                by_paths = self.renderer == "auto"
                number = len(result.texts)
                prompt = (
                    self._prompt(number, request) if by_paths else self._reference_prompt(request)
                )
                if isinstance(prompt, RowError):
                    raise prompt
                turns.append((prompt, sampled(rendered, prompt, len(messages) - 1)))
                accepted.append(sample)
            except RowError as error:
                result.rejected.append((sample.source, sample.part, error))
        for numbers, rendered in join(turns):
            members = [accepted[number] for number in numbers]
            joined = dataclasses.replace(
                members[-1],
                part=members[0].part,
                trained=tuple(k for sample in members for k in sample.trained or ()),
                weights=tuple(each for sample in members for each in sample.weights),
            )
            try:
                rendered = _scaled(_finished(joined, rendered), weight)
                result.accept(joined.source, joined.part, rendered)
            except RowError as error:
                result.rejected.append((joined.source, joined.part, error))

    def _group(
        self, index: int, group: AnswerGroup, weight: float, digest: int | None, result: Rendering
    ) -> None:
        """Render every answer of a group; all are accepted, or none."""
        if self.spec.expand != "none":
            raise incomparable("a group of answers cannot be split into one row per turn")
        self._note_strings(group.sides[0], result)
        sides: list[RenderedRow] = []
        for number, side in enumerate(group.sides):
            try:
                if isinstance(side, Plain):
                    sides.append(self._plain(side))
                    continue
                [sample] = self._samples(index, side, result)
                sample.part = number
                sides.append(self._render_sample(sample, digest, result)[0])
            except RowError as error:
                raise RowError(
                    f"{group.name(number)}: {error.message}", reason=error.reason
                ) from error
        if len(sides) > 1 and len({side.text for side in sides}) == 1:
            raise incomparable("the answers are equal")
        begin = min(start for side in sides for start, _ in side.spans or [(0, 0)])
        # Texts with different images are different prompts.
        prompts = {(side.text[:begin], repr([one.value for one in side.images])) for side in sides}
        if len(prompts) > 1:
            result.note("prompts_differ")
        sides = [_scaled(side, weight) for side in sides]  # may raise, so before any is accepted
        result.groups[len(result.texts)] = GroupFacts(
            group.labels, group.scores, group.margin, one_prompt=len(prompts) == 1
        )
        for number, rendered in enumerate(sides):
            result.accept(index, number, rendered)

    def _render_sample(
        self, sample: Sample, digest: int | None, result: Rendering
    ) -> tuple[RenderedRow, list[Message]]:
        """Render a sample in the first form that the template prints with a proven mask.

        Returns:
            The render, and the messages in the chosen form.

        Raises:
            RowError: No form passes. The error of the first form that was rendered, else the
                template's own.
        """
        conversation, paths = sample.conversation, sample.template.traced
        if sample.template.encoder is not None:
            result.note("rows_encoder")
            if sample.trained is None:
                return self._untraced(sample, None, result), conversation.messages
            return self._by_prompts(sample, None, result)
        raised: TemplateFails | RowError | None = None
        untraced: NotTraced | None = None
        failed: RowError | None = None
        for form in conversation.forms(parts=self.media is not None):
            if failed is not None and form.note == NULL_AS_EMPTY:
                continue  # only for templates that raise an error on null
            try:
                run, sample.run = sample.run, None
                if run is None:
                    run = self._follow(paths, form.messages, conversation.tools)
                elif isinstance(run, Exception):
                    raise run
            except (TemplateFails, RowError) as error:
                raised = raised or _without_traceback(error)
                continue
            except NotTraced as error:
                untraced = untraced or _without_traceback(error)
                continue
            if self.renderer == "auto":
                chosen_by = digest_of(run.text) if digest is None else digest + sample.part
                if audited(len(result.texts), chosen_by, self.first_audited):
                    result.note("audited")
                    paths.audit(run, form.messages, conversation.tools)
            if failed is None:  # a row counts once, in any form
                result.note("rows_traced" if self.renderer == "auto" else "rows_reference")
            try:
                rendered = self._proven(sample, form.messages, run)
                if self.media is not None and sample.trained is not None and not rendered.spans:
                    raise _nothing_trained()
            except RowError as error:
                failed = failed or _without_traceback(error)
                if self.media is None and error.reason != "template_drops_content":
                    break  # another form would not change this
                continue
            if form.note:
                result.note(form.note)
            if rendered.dropped:
                result.note("generation_drops")
            if sample.trained is not None:
                blocks = sample.template.resolver.generation
                result.note("proven_by_generation_blocks" if blocks else "proven_by_trace")
            return _finished(sample, rendered), form.messages
        if sample.trained is None:
            if failed is None and untraced is not None:
                return self._untraced(sample, untraced, result), conversation.messages
        elif untraced is not None or (failed and failed.reason == "mask_unproven"):
            return self._by_prompts(sample, failed or untraced, result)
        if failed is None and isinstance(raised, TemplateFails):
            form = next(iter(conversation.forms(parts=self.media is not None)))
            sample.template.reference.render(form.messages, conversation.tools)  # raises its error
            failed = unproven("the template raises an error on its traced path only")
        outcome = failed or raised
        assert isinstance(outcome, RowError)
        raise outcome

    def _proven(self, sample: Sample, messages: list[Message], run: Run) -> RenderedRow:
        """Find the trained spans of a run, and check that their words come from the right fields.

        Where the words alone do not show this, check the same conversation with unique words.
        """
        resolver, tools = sample.template.resolver, sample.conversation.tools
        rendered = resolver.resolve_spans(run, messages, sample.trained, tools)
        if sample.trained is not None and not resolver.generation and not rendered.certain:
            unique = with_unique_words(messages, resolver.thinking)
            try:
                resolver.check(self._follow(sample.template.traced, unique, tools), unique)
            except NotTraced as error:
                raise unproven(
                    f"the same row with unique words cannot be traced: {error}"
                ) from error
        return rendered

    def _by_prompts(
        self, sample: Sample, failed: NotTraced | RowError | None, result: Rendering
    ) -> tuple[RenderedRow, list[Message]]:
        """Prove the spans of a row by its generation prompts if its trace does not."""
        template, tools = sample.template, sample.conversation.tools
        assert sample.trained is not None
        if isinstance(failed, NotTraced):
            result.note("rows_reference")
            result.note(f"untraced:{failed.cause}")

        encoder = template.encoder
        own_arguments: dict[int, Message] = {}  # the row's own text of calls, by `id` of messages

        def render(messages: list[Message], prompt: bool) -> str:
            if self.renderer == "auto" and encoder is None:
                return template.text(messages, tools, prompt=prompt)
            start = time.perf_counter()
            messages = [own_arguments.get(id(message), message) for message in messages]
            text_only = {"text_only": True} if printed else {}
            text: str = template.reference.render(
                messages, tools, add_generation_prompt=prompt, **text_only
            )
            self.engine_seconds += 0.0 if encoder is None else time.perf_counter() - start
            return text

        unproven_error: RowError | None = None
        raised: RowError | None = None
        if self.spec.expand != "turns":  # there, the first forms of all turns begin alike
            self._prefixes = {}
        for number, form in enumerate(sample.conversation.forms(parts=self.media is not None)):
            if unproven_error is not None and form.note == NULL_AS_EMPTY:
                continue
            if encoder is not None:
                written = sample.conversation.with_text_arguments(form.messages)
                own_arguments.update(zip(map(id, form.messages), written, strict=True))
            try:
                printed = encoder is not None and encoder.is_text(written, tools)
                known = {} if number else self._prefixes.setdefault(printed, {})
                rendered = prove_by_prompts(
                    render, form.messages, sample.trained, template.resolver, known, encoder, tools
                )
            except RowError as error:
                if error.reason in ("template_error", "limit"):
                    raised = raised or _without_traceback(error)
                else:
                    unproven_error = unproven_error or _without_traceback(error)
                continue
            result.note("proven_by_prompts")
            if form.note:
                result.note(form.note)
            return _finished(sample, rendered), form.messages
        failure = unproven_error or raised
        assert failure is not None
        if encoder is not None:
            raise RowError(encoder.remedy(failure), reason=failure.reason)
        if unproven_error is None:
            raise failure
        raise RowError(f"{failed}; {unproven_error.message}", reason="mask_unproven")

    def _untraced(self, sample: Sample, error: NotTraced | None, result: Rendering) -> RenderedRow:
        """Render a row that cannot be traced with the reference; everything is trained."""
        conversation = sample.conversation
        text = sample.template.reference.render(conversation.messages, conversation.tools)
        if error is not None:
            result.note("rows_reference")
            result.note(f"untraced:{error.cause}")
        coded = isinstance(text, IdText)
        return _finished(sample, RenderedRow(text, None, ("text",), [len(text)], coded=coded))

    def skips_template(self, content: Any) -> bool:
        """Return whether prompt and answers are strings, so that the template is not applied."""
        return isinstance(content, Plain) and content.shape != "text" and bool(self._sources)

    def _note_strings(self, content: Conversation | Plain, result: Rendering) -> None:
        if self.skips_template(content):
            result.note("plain_strings")

    def _plain(self, plain: Plain) -> RenderedRow:
        train_on = self.spec.trained(plain.shape)
        eos = ""
        if self.spec.append_eos:
            eos = self.special_tokens.get("eos_token", "")
            if not eos:
                raise UsageError(
                    ("append_eos",),
                    " needs an eos token, and the tokenizer has none. Turn it off.",
                )
        if train_on not in ("everything", "completion"):
            raise UsageError(
                ("train_on", train_on),
                " needs messages, but the prompts and completions of these rows are strings.",
            )
        end = "" if plain.text.endswith(eos) else eos
        text = f"{plain.prompt}{plain.text}{end}"
        if plain.shape == "text":
            roles, ends = ["text"], [len(text)]
        else:
            roles, ends = ["prompt", "completion"], [len(plain.prompt), len(text)]
        spans: list[Span] | None = None
        if train_on == "completion":
            spans = [(len(plain.prompt), len(text))]
        if len(text) == (len(plain.prompt) if spans else 0):
            raise RowError("the trained text is empty", reason="no_trained_tokens")
        return RenderedRow(text, spans, roles, ends, images=plain.images)


def _refuse_options(spec: ChatSpec, media: MediaTokens | None) -> None:
    """Raise for options of Jinja templates that an encoder would ignore."""
    if spec.chat_template_kwargs:
        raise UsageError(
            ("chat_template_kwargs",), " are variables of Jinja templates; use ",
            ("encoder_kwargs",), " with an encoder",
        )  # fmt: skip
    if spec.date is not None:
        raise UsageError(("date",), " is for Jinja templates; use ", ("encoder_kwargs",))
    if media is not None:
        raise UsageError(("processor",), " cannot be combined with ", ("encoder",))


def _with_role(error: RowError, content: Any) -> RowError:
    """Add a misspelt role of the row to an error that it may have caused."""
    if error.reason not in ("no_trained_tokens", "template_error", "mask_unproven"):
        return error
    sides = content.sides if isinstance(content, AnswerGroup) else [content]
    for side in sides:
        found = misspelt_role(side.messages) if isinstance(side, Conversation) else ""
        if found:
            return RowError(f"{error.message}; {found}", reason=error.reason)
    return error


def _finished(sample: Sample, rendered: RenderedRow) -> RenderedRow:
    """Add the weights and images of the sample; reject it if nothing of it is trained."""
    if sample.trained is not None:
        if not rendered.spans:
            raise _nothing_trained()
        if sample.weights and any(weight != 1 for weight in sample.weights):
            turns = len(rendered.ends)
            if turns != len(sample.conversation.messages):
                raise unproven(
                    "weights cannot be assigned: the template does not print every message"
                )
            trained = dict(zip(sample.trained, sample.weights, strict=True))
            rendered.weights = _turn_weights(trained, turns)
    images = sample.conversation.images
    if images:
        rendered.images = [images[id(p)] for p in image_parts(sample.conversation.messages)]
    return rendered


def _without_traceback(error: Failure) -> Failure:
    """Remove traceback and cause, because their frames keep the row alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _nothing_trained() -> RowError:
    message = "the template prints no trained text"
    return RowError(message, reason="no_trained_tokens")


def _turn_weights(trained: Mapping[int, float], turns: int) -> list[float]:
    """Return the weight of each turn.

    An untrained turn has the weight of the next trained one, because that one's first token may
    begin in it.
    """
    weights, weight = [1.0] * turns, trained[max(trained)]
    for number in reversed(range(turns)):
        weight = trained.get(number, weight)
        weights[number] = weight
    return weights


def _scaled(rendered: RenderedRow, weight: float) -> RenderedRow:
    """Multiply the weights of the turns by the row's weight."""
    if weight == 1.0:
        return rendered
    weights = [weight * turn for turn in rendered.weights or [1.0] * len(rendered.ends)]
    if not all(MIN_WEIGHT <= value <= MAX_WEIGHT for value in weights):
        raise RowError(
            f"the weights of the row times those of its messages are {min(weights):.1g} to "
            f"{max(weights):.1g}; they must be from {MIN_WEIGHT:.1g} to {MAX_WEIGHT:.1g}"
        )
    rendered.weights = [] if all(value == 1 for value in weights) else weights
    return rendered


def _trim(conversation: Conversation, trailing: str, result: Rendering) -> None:
    """Remove the messages after the last assistant turn according to `ChatSpec.trailing`."""
    messages = conversation.messages
    end = len(messages)
    if messages[-1]["role"] == "assistant":
        return
    while end and messages[end - 1]["role"] in ("tool", "function", "ipython"):
        end -= 1
    if end < len(messages):
        result.note("trimmed_tool_turns")
    if end and messages[end - 1]["role"] == "user":
        result.note("trailing_user")
        if trailing == "reject":
            raise RowError(
                f"turn {end - 1}: the conversation ends with a user turn", reason="trailing_user"
            )
        result.note("trimmed_trailing")
        while end and messages[end - 1]["role"] in ("user", "tool", "function", "ipython"):
            end -= 1
    if end < len(messages):
        conversation.messages = messages[:end]
