"""The one definition of a prompt's text: from a shaped row to what is served and measured.

`PromptMaker` joins the spec's convention with the chat room's renderer. `text` makes one prompt,
when it is served; `texts` makes many, when they are measured; both go through `_talk`, which says
what of a row's messages and tools reaches the template:

* ``default``: a null content becomes empty text and JSON text of tool-call arguments is decoded;
* ``slime``: messages and tools exactly as the row has them;
* ``miles``: the default's rewriting, and tools in the form of its inference server (wrapped as
  ``{"type": "function", "function": …}`` with description, name, parameters and strict, in that
  order); where the template refuses them, bare functions are tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.chat import PromptRenderer
from tokenmill.chat.calls import call_list
from tokenmill.errors import RowError
from tokenmill.prompts.shaping import Messages, Shaped
from tokenmill.prompts.spec import PromptSpec


class PromptMaker:
    """Makes prompts' texts.

    Args:
        spec: The row-shaping arguments.
        template: The chat template, several by name, or None.
        special_tokens: Named special tokens as text.
        renderer: ``auto`` or ``jinja2``; it never changes the result.
    """

    def __init__(
        self,
        spec: PromptSpec,
        template: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None,
        *,
        renderer: str = "auto",
    ) -> None:
        self.spec = spec
        self._renderer = PromptRenderer(
            template, special_tokens, spec.template_kwargs, date=spec.date, renderer=renderer
        )

    @property
    def notes(self) -> dict[str, int]:
        """How many prompts each engine made."""
        return self._renderer.notes

    def text(self, shaped: Shaped) -> str | Messages:
        """What is served as the prompt of a row.

        Raises:
            RowError: The template refuses the row.
        """
        if not self.spec.apply_chat_template:
            return shaped.prompt
        messages, tools = self._talk(shaped)
        try:
            return self._renderer.render(messages, tools)
        except RowError as error:
            return self._with_bare_functions(messages, tools, error)

    def texts(self, rows: Sequence[Shaped]) -> list[str | Messages | RowError]:
        """`text` for many rows; a refused one is the error in its place."""
        if not self.spec.apply_chat_template:
            return [shaped.prompt for shaped in rows]
        talks: list[tuple[Messages, list[Any] | None]] = []
        errors: dict[int, RowError] = {}
        for number, shaped in enumerate(rows):
            try:
                talks.append(self._talk(shaped))
            except RowError as error:
                errors[number] = error
        rendered = iter(zip(talks, self._renderer.render_many(talks), strict=True))
        made: list[str | Messages | RowError] = []
        for number in range(len(rows)):
            if number in errors:
                made.append(errors[number])
                continue
            (messages, tools), text = next(rendered)
            if isinstance(text, RowError):
                try:
                    text = self._with_bare_functions(messages, tools, text)
                except RowError as error:
                    text = error
            made.append(text)
        return made

    def _talk(self, shaped: Shaped) -> tuple[Messages, list[Any] | None]:
        assert isinstance(shaped.prompt, list)
        messages, tools = shaped.prompt, shaped.tools
        if self.spec.convention == "slime":
            return messages, tools
        messages = [_rewritten(message) for message in messages]
        if self.spec.convention == "miles":
            tools = [_served_tool(tool) for tool in tools] if tools else None
        return messages, tools

    def _with_bare_functions(
        self, messages: Messages, tools: list[Any] | None, error: RowError
    ) -> str:
        """The second try of the ``miles`` convention."""
        if self.spec.convention != "miles" or not tools or error.reason != "template_error":
            raise error
        return self._renderer.render(messages, [tool["function"] for tool in tools])


def _rewritten(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if message.get("content") is None:
        message = {**message, "content": ""}
    if calls:
        message = {**message, "tool_calls": call_list(calls)}
    return message


def _served_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise RowError(f"a tool must be an object, not {type(tool).__name__}")
    function = tool["function"] if isinstance(tool.get("function"), dict) else tool
    return {
        "type": tool.get("type", "function") if function is not tool else "function",
        "function": {
            "description": function.get("description"),
            "name": function.get("name"),
            "parameters": function.get("parameters"),
            "strict": function.get("strict", False),
        },
    }
