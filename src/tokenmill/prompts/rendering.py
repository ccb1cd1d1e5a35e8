"""The one definition of a prompt's text: from a shaped row to what is served and measured.

`PromptMaker` joins the spec's convention with the chat room's renderer. `text` makes one prompt,
when it is served; `texts` makes many, when they are measured; both go through `_conversation`,
which says what of a row's messages and tools reaches the template:

* ``default``: a null content becomes empty text and JSON text of tool-call arguments is decoded;
  the row's own variables (``chat_template_kwargs``) reach it as well;
* ``slime``: messages and tools exactly as the row has them;
* ``miles``: of an assistant's messages null contents become empty text and arguments are decoded,
  everything else stays as it is; tools are in the form that its inference server gives them
  (`tools`); where the template refuses them, bare functions are tried.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenmill.chat import ChatSpec, Renderer
from tokenmill.chat.calls import call_list
from tokenmill.chat.render import Asked
from tokenmill.errors import RowError, UsageError
from tokenmill.prompts.shaping import Messages, Shaped
from tokenmill.prompts.spec import PromptSpec
from tokenmill.prompts.tools import ServedTools


class PromptMaker:
    """Makes prompts' texts."""

    def __init__(
        self,
        spec: PromptSpec,
        template: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None,
    ) -> None:
        self.spec = spec
        # What is served as it is meets no template, not even one that does not compile.
        used = template if spec.apply_chat_template else None
        shape = ChatSpec(template_kwargs=spec.template_kwargs, date=spec.date)
        self._renderer = Renderer(shape, used, special_tokens)

    def text(self, shaped: Shaped) -> str | Messages:
        """What is served as the prompt of a row.

        Raises:
            RowError: The template refuses the row.
        """
        if not self.spec.apply_chat_template:
            return shaped.prompt
        asked = self._conversation(shaped)
        try:
            return self._renderer.prompt(*asked)
        except RowError as error:
            return self._with_bare_functions(asked, error)

    def texts(self, rows: Sequence[Shaped]) -> list[str | Messages | RowError]:
        """`text` for many rows; a refused one is the error in its place."""
        if not self.spec.apply_chat_template:
            return [shaped.prompt for shaped in rows]
        conversations: list[Asked] = []
        errors: dict[int, RowError] = {}
        for number, shaped in enumerate(rows):
            try:
                conversations.append(self._conversation(shaped))
            except RowError as error:
                errors[number] = error
        rendered = iter(zip(conversations, self._renderer.prompts(conversations), strict=True))
        made: list[str | Messages | RowError] = []
        for number in range(len(rows)):
            if number in errors:
                made.append(errors[number])
                continue
            asked, text = next(rendered)
            if isinstance(text, RowError):
                try:
                    text = self._with_bare_functions(asked, text)
                except RowError as error:
                    text = error
            made.append(text)
        return made

    def _conversation(self, shaped: Shaped) -> Asked:
        assert isinstance(shaped.prompt, list)
        messages, tools = shaped.prompt, shaped.tools
        if self.spec.convention == "slime":
            return Asked(messages, tools)
        if self.spec.convention == "miles":
            tools = self._served_tools(tools) if tools else None
            return Asked([_as_in_miles(message) for message in messages], tools)
        return Asked([_rewritten(message) for message in messages], tools, shaped.variables)

    @cached_property
    def _served_tools(self) -> ServedTools:
        served = ServedTools()
        if served.form != self.spec.tool_form:
            raise UsageError(
                "the sglang here writes tools another way than that of the process that asked for "
                "these prompts; install the same version in both"
            )
        return served

    def _with_bare_functions(self, asked: Asked, error: RowError) -> str:
        """The second try of the ``miles`` convention."""
        if self.spec.convention != "miles" or not asked.tools or error.reason != "template_error":
            raise error
        return self._renderer.prompt(asked.messages, [tool["function"] for tool in asked.tools])


def _rewritten(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if message.get("content") is None:
        message = {**message, "content": ""}
    if calls:
        message = {**message, "tool_calls": call_list(calls)}
    return message


def _as_in_miles(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return message
    if message.get("content") is None:
        message = {**message, "content": ""}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message = {**message, "tool_calls": [_call_in_miles(call) for call in calls]}
    return message


def _call_in_miles(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else call
    if isinstance(call, dict) and not function:
        return call
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RowError(f"a tool call must be an object, not {type(function).__name__}")
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])  # the host's parser: it takes NaN
    except (ValueError, RecursionError) as error:
        raise RowError(f"arguments of a tool call are no JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}
