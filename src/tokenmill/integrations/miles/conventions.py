"""How miles and slime render prompts, and the order in which they serve them.

slime passes messages and tools to the template unchanged. miles decodes tool-call arguments,
replaces null contents of assistant messages, and validates every tool with sglang's `Tool` class
and dumps it again. Keys, order and defaults depend on the installed sglang, so `ServedTools` uses
its class; without sglang, tools get the four keys that the class had until April 2026.
"""

from __future__ import annotations

import importlib
import json
import logging
import random
from functools import cache, cached_property
from typing import Any

import numpy as np

from tokenmill._core import fingerprint
from tokenmill.data.order import Int64Array, Order, Recent, check_seed
from tokenmill.data.prompt_rows import Conversation, PromptSpec, Shaped
from tokenmill.errors import RowError, UsageError
from tokenmill.integrations.trainers import Verbatim

logger = logging.getLogger(__name__)

PROTOCOL = "sglang.srt.entrypoints.openai.protocol"  # from which miles imports the class

_FUNCTION = {"name": "f", "description": "d", "parameters": {"b": 1, "a": {"z": None, "y": []}}}
PROBES: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": _FUNCTION},
    {"function": {"name": "f"}},
    {"function": {}},
    {"function": {**_FUNCTION, "strict": True}},
    {"function": {**_FUNCTION, "strict": None}},
    {"function": {**_FUNCTION, "strict": "true"}},
    {"function": {**_FUNCTION, "description": 1}},
    {"function": {**_FUNCTION, "parameters": "text"}},
    {"function": {**_FUNCTION, "defer_loading": True, "unknown": 1}, "unknown": 1},
    {"function": _FUNCTION, "defer_loading": True},
    {"type": "custom", "function": _FUNCTION},
    {"function": dict(reversed(_FUNCTION.items()))},  # is the order of keys kept?
)
"""Tools that the versions of the class treat differently."""


class ServedTools:
    """Rewrites a row's tools as miles does; `form`, a digest of samples, is part of index keys."""

    def __init__(self) -> None:
        self._tool: Any = _installed_class()

    def __call__(self, tools: list[Any]) -> list[dict[str, Any]]:
        if self._tool is None:
            _warn_once()
        return [self._written(_wrapped(tool)) for tool in tools]

    def _written(self, tool: dict[str, Any]) -> dict[str, Any]:
        if self._tool is None:
            return _with_four_keys(tool)
        try:
            written: dict[str, Any] = self._tool.model_validate(tool).model_dump()
        except ValueError as error:  # pydantic's
            raise RowError(f"sglang rejects a tool: {error}") from error
        return written

    @cached_property
    def form(self) -> str:
        answers = []
        for probe in PROBES:
            try:
                answers.append(json.dumps(self._written(probe)))  # keeps the order of keys
            except RowError:
                answers.append("refused")
        return fingerprint.key(answers)


def _installed_class() -> Any:
    try:
        importlib.import_module("sglang")
        return importlib.import_module(PROTOCOL).Tool
    except ModuleNotFoundError as error:
        if error.name == "sglang":
            return None
        reason = str(error)
    except Exception as error:  # of whatever a server imports
        reason = f"{type(error).__name__}: {error}"
    raise UsageError(
        f"sglang is installed, but {PROTOCOL}.Tool, with which miles formats tools, cannot be "
        f"imported: {reason}"
    )


@cache
def _warn_once() -> None:
    logger.warning("sglang is not installed: tools get the four keys of its older versions")


def _wrapped(tool: Any) -> dict[str, Any]:
    if isinstance(tool, dict) and "function" in tool:
        return tool
    return {"type": "function", "function": tool}


def _with_four_keys(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    if not isinstance(function, dict):
        raise RowError(f"a tool must be an object, not {type(function).__name__}")
    return {
        "type": tool.get("type", "function"),
        "function": {
            "description": function.get("description"),
            "name": function.get("name"),
            "parameters": function.get("parameters"),
            "strict": function.get("strict", False),
        },
    }


class Slime(Verbatim):
    vision_module = "slime.utils.processing_utils"


class Miles(Verbatim):
    version = 2  # raise it when prompts could come out differently
    vision_module = "miles.utils.processing_utils"

    @classmethod
    def form(cls, spec: PromptSpec) -> str | None:
        rewrites = spec.apply_chat_template and spec.tool_key is not None
        return ServedTools().form if rewrites else None

    @cached_property
    def _served_tools(self) -> ServedTools:
        served = ServedTools()
        if served.form != self.spec.tool_form:
            raise UsageError(
                "sglang formats tools differently here than in the process that requested these "
                "prompts. Install the same version in both."
            )
        return served

    def conversation(self, shaped: Shaped) -> Conversation:
        assert isinstance(shaped.prompt, list)
        tools = self._served_tools(shaped.tools) if shaped.tools else None
        return [_decoded(message) for message in shaped.prompt], tools, None

    def retry(self, conversation: Conversation, error: RowError) -> Conversation:
        messages, tools, _ = conversation
        if not tools or error.reason != "template_error":
            raise error
        return messages, [tool["function"] for tool in tools], None


def _decoded(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return message
    if message.get("content") is None:
        message = {**message, "content": ""}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message = {**message, "tool_calls": [_decoded_call(call) for call in calls]}
    return message


def _decoded_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else call
    if isinstance(call, dict) and not function:
        return call
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RowError(f"a tool call must be an object, not {type(function).__name__}")
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])  # miles' parser: it accepts NaN
    except (ValueError, RecursionError) as error:
        raise RowError(f"arguments of a tool call are not valid JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}


SLIME = f"{__name__}:{Slime.__name__}"
MILES = f"{__name__}:{Miles.__name__}"


class MilesOrder(Order):
    """The order of miles' own dataset: ``random.seed(seed + epoch)``, then one shuffle.

    It holds a whole permutation in memory (8 bytes per row), and seed 42 in epoch 1 is seed 43 in
    epoch 0.
    """

    def __init__(self, rows: int, seed: int) -> None:
        self.rows = rows
        self.seed = check_seed(seed)
        self._permutation = Recent(self._make)

    def _make(self, epoch: int) -> Int64Array:
        permutation = list(range(self.rows))
        random.Random(self.seed + epoch).shuffle(permutation)
        return np.asarray(permutation, dtype=np.int64)

    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        return self._permutation(epoch)[np.asarray(positions, dtype=np.int64)]
