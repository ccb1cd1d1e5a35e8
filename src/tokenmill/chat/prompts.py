"""Conversations that a model is to go on with: rendered with the generation prompt at the end.

`PromptRenderer` holds a tokenizer's templates. Messages go into them as they are, list contents
included; whoever wants them rewritten does that before. `render` is the reference for one
conversation, `render_many` its batched twin along traced paths (`traced`), a sample of which, by
content, the reference renders, too. One difference, and the paths are out: the batch and all later
ones are the reference's. A conversation that a template refuses is a `RowError` in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.chat.render import RENDERERS, Differs, audited, digest_of
from tokenmill.chat.template import ReferenceTemplate
from tokenmill.chat.traced import NotTraced, TracedTemplate
from tokenmill.errors import RowError, UsageError

Messages = list[dict[str, Any]]
WithTools = tuple[Messages, list[Any] | None]
"""A conversation and its tools."""


class PromptRenderer:
    """Renders conversations for generation.

    Args:
        template: Jinja source, several by name, or None, which renders nothing.
        special_tokens: Named special tokens as text.
        template_kwargs: Further template variables.
        date: The pinned day, None where none is pinned.
        renderer: ``auto`` or ``jinja2``, the reference for every row; never changes the result.
    """

    def __init__(
        self,
        template: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        date: str | None = None,
        renderer: str = "auto",
    ) -> None:
        if renderer not in RENDERERS:
            raise UsageError(f"renderer={renderer!r}: choose one of {', '.join(RENDERERS)}")
        self._sources = {"default": template} if isinstance(template, str) else dict(template or {})
        self._variables = {**(special_tokens or {}), **(template_kwargs or {})}
        self._date = date
        self._renderer = renderer
        self._templates: dict[str, TracedTemplate] = {}
        self.notes = {"traced": 0, "reference": 0, "audited": 0, "mismatches": 0}

    def _for(self, tools: list[Any] | None) -> TracedTemplate:
        """The template of a conversation, chosen as transformers chooses it."""
        name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        if name not in self._sources:
            known = ", ".join(sorted(self._sources))
            has = f"no default chat template, only {known}" if known else "no chat template"
            raise UsageError(f"the tokenizer has {has}: give one with chat_template=")
        if name not in self._templates:
            reference = ReferenceTemplate(self._sources[name], self._variables, self._date)
            self._templates[name] = TracedTemplate(reference, add_generation_prompt=True)
        return self._templates[name]

    def render(self, messages: Messages, tools: list[Any] | None = None) -> str:
        """One conversation with the generation prompt after it, by the reference.

        Raises:
            RowError: The template refuses it.
            TemplateError: It asks for a date that is not pinned.
        """
        return self._for(tools).reference.render(messages, tools, add_generation_prompt=True)

    def render_many(self, conversations: Sequence[WithTools]) -> list[str | RowError]:
        """Many conversations; one that is refused is the error in its place."""
        if self._renderer == "auto":
            try:
                return self._render_many(conversations, self._traced)
            except Differs:
                self.notes["mismatches"] += 1
                self._renderer = "jinja2"
        return self._render_many(conversations, self._by_reference)

    def _render_many(self, conversations: Sequence[WithTools], one: Any) -> list[str | RowError]:
        made: list[str | RowError] = []
        for number, (messages, tools) in enumerate(conversations):
            try:
                made.append(one(number, messages, tools))
            except RowError as error:
                made.append(error)
        return made

    def _by_reference(self, _: int, messages: Messages, tools: list[Any] | None) -> str:
        self.notes["reference"] += 1
        return self.render(messages, tools)

    def _traced(self, number: int, messages: Messages, tools: list[Any] | None) -> str:
        template = self._for(tools)
        try:
            text = template.follow(messages, tools).text
        except NotTraced as error:
            if template.differed:
                raise Differs from error
            return self._by_reference(number, messages, tools)
        if audited(number, digest_of(text)):
            self.notes["audited"] += 1
            try:
                same = self.render(messages, tools) == text
            except RowError:
                same = False
            if not same:
                template.ban("a prompt that both rendered")
                raise Differs
        self.notes["traced"] += 1
        return text
