"""Conversations that a model is to go on with: rendered with the generation prompt at the end.

`PromptRenderer` holds a tokenizer's templates, opened: an `OpenTemplate` is the reference that ends
every render with the generation prompt. Messages go into it as they are, list contents included;
whoever wants them rewritten does that before. `render` is the reference for one conversation,
`render_many` its batched twin: plain conversations are rendered by the fast engine, each compared
with the glue that the reference printed around the texts of one such conversation (`layout`), and
a sample by content is rendered by both. One difference, and the batch is made again by the
reference. A conversation that a template refuses is a `RowError` in its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from tokenmill.chat.fast import AUDIT_ONE_IN, FIRST_AUDITED, LONGEST, FastTemplate
from tokenmill.chat.layout import Layout, Signatures, learnable
from tokenmill.chat.spans import Prover
from tokenmill.chat.template import ReferenceTemplate
from tokenmill.errors import RowError, UsageError

LAYOUTS_KEPT = 2048  # signatures remembered per template; real data sets have a few hundred

Messages = list[dict[str, Any]]
Talk = tuple[Messages, list[Any] | None]
"""A conversation and its tools."""


class OpenTemplate(ReferenceTemplate):
    """The reference whose every render ends with the generation prompt."""

    def render(
        self,
        messages: Messages,
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        generation_marks: tuple[str, str] = ("", ""),
    ) -> str:
        """As `ReferenceTemplate.render`."""
        return super().render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            generation_marks=generation_marks,
        )


class _Engine:
    """One template: its reference, its fast twin, and the glue learned so far."""

    def __init__(self, source: str, variables: Mapping[str, Any], date: str | None, fast: bool):
        self.reference = OpenTemplate(source, variables, date)
        self.fast = None
        if fast:
            self.fast = FastTemplate.of(self.reference, date, add_generation_prompt=True)
        if self.fast is not None:
            self.prover = Prover(self.reference, "stop", self.fast)
            self.signatures = Signatures(self.prover.tags)
        self.layouts: OrderedDict[Any, Layout | None] = OrderedDict()

    def render_checked(self, messages: Messages, fast: str) -> str:
        """The render of a plain conversation, shown to be the reference's."""
        signature, texts = self.signatures.read(messages)
        layout = self.layouts.get(signature)
        if layout is not None and layout.expected(texts) == fast:
            return fast
        proof = self.prover.follow(messages, None)
        if signature not in self.layouts:
            self.layouts[signature] = Layout(proof) if proof.hits and learnable(proof) else None
            if len(self.layouts) > LAYOUTS_KEPT:
                self.layouts.popitem(last=False)
        return proof.text


class _Differs(Exception):
    """The fast engine was seen to differ from the reference."""


class PromptRenderer:
    """Renders conversations for generation.

    Args:
        template: Jinja source, several by name, or None, which renders nothing.
        special_tokens: Named special tokens as text.
        template_kwargs: Further template variables.
        date: The pinned day, None where none is pinned.
        fast: Whether the fast engine may be used; it never changes the result.
    """

    def __init__(
        self,
        template: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        date: str | None = None,
        fast: bool = True,
    ) -> None:
        self._sources = {"default": template} if isinstance(template, str) else dict(template or {})
        self._variables = {**(special_tokens or {}), **(template_kwargs or {})}
        self._date = date
        self._fast = fast
        self._engines: dict[str, _Engine] = {}
        self.notes = {"fast": 0, "reference": 0, "audited": 0, "mismatches": 0}

    def _for(self, tools: list[Any] | None) -> _Engine:
        """The template of a conversation, chosen as transformers chooses it."""
        name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        if name not in self._sources:
            known = ", ".join(sorted(self._sources))
            has = f"no default chat template, only {known}" if known else "no chat template"
            raise UsageError(f"the tokenizer has {has}: give one with chat_template=")
        if name not in self._engines:
            source = self._sources[name]
            self._engines[name] = _Engine(source, self._variables, self._date, self._fast)
        return self._engines[name]

    def render(self, messages: Messages, tools: list[Any] | None = None) -> str:
        """One conversation with the generation prompt after it, by the reference.

        Raises:
            RowError: The template refuses it.
            TemplateError: It asks for a date that is not pinned.
        """
        return self._for(tools).reference.render(messages, tools)

    def render_many(self, talks: Sequence[Talk]) -> list[str | RowError]:
        """Many conversations; one that is refused is the error in its place."""
        try:
            return self._render_many(talks, self._fast_texts(talks))
        except _Differs:
            self.notes["mismatches"] += 1
            return self._render_many(talks, {})

    def _fast_texts(self, talks: Sequence[Talk]) -> dict[int, str]:
        """What the fast engine makes of plain conversations, by their place."""
        if not self._fast or not talks:
            return {}
        engine = self._for(None) if any(tools is None for _, tools in talks) else None
        if engine is None or engine.fast is None:
            return {}
        plain = [
            n for n, (messages, tools) in enumerate(talks) if tools is None and _is_plain(messages)
        ]
        texts = engine.fast.render_many([talks[n][0] for n in plain])
        return {n: text for n, text in zip(plain, texts, strict=True) if text is not None}

    def _render_many(self, talks: Sequence[Talk], fast: dict[int, str]) -> list[str | RowError]:
        made: list[str | RowError] = []
        for number, (messages, tools) in enumerate(talks):
            try:
                made.append(self._one(number, messages, tools, fast.get(number)))
            except RowError as error:
                made.append(error)
        return made

    def _one(
        self, number: int, messages: Messages, tools: list[Any] | None, fast: str | None
    ) -> str:
        engine = self._for(tools)
        if fast is None:
            self.notes["reference"] += 1
            return engine.reference.render(messages, tools)
        text = engine.render_checked(messages, fast)
        if text == fast and _audited(number, text):
            self.notes["audited"] += 1
            if engine.reference.render(messages, tools) != text:
                raise _Differs
        self.notes["fast"] += 1
        return text


def _is_plain(messages: Messages) -> bool:
    """Each message holds a role and a text, nothing else, and not too much of it."""
    size = 0
    for message in messages:
        content = message.get("content")
        if len(message) != 2 or type(content) is not str:
            return False
        size += len(content)
    return size < LONGEST


def _audited(number: int, text: str) -> bool:
    """Whether both engines must agree on this one: a function of its place and content alone.

    All of the text counts: the last characters of prompts are the same generation prompt.
    """
    if number < FIRST_AUDITED:
        return True
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace")) % AUDIT_ONE_IN == 0
