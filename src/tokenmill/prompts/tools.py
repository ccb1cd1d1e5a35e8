"""Tools as miles hands them to a template: through the `Tool` class of its inference server.

miles wraps bare functions, has sglang's class validate every tool and writes out what the class
made of it. So which keys a tool has, in which order and with which defaults is that class's affair,
and it has changed between versions of sglang. `ServedTools`, which the ``miles`` convention of
prompts uses, asks the installed class. Where there is no sglang (and so no miles) tools get the
four keys that its class had until April 2026.

What becomes of tools is part of the key of a length index: `ServedTools.form` is a digest of the
answers to `PROBES`, so another class that answers alike finds what is there.
"""

from __future__ import annotations

import importlib
import json
import logging
from functools import cache, cached_property
from typing import Any

from tokenmill import fingerprint
from tokenmill.errors import RowError, UsageError

logger = logging.getLogger(__name__)

PROTOCOL = "sglang.srt.entrypoints.openai.protocol"
"""Where miles itself takes the class from."""

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
    {"function": dict(reversed(_FUNCTION.items()))},  # does the row's order stay?
)
"""Tools whose answers tell one class from another: order, defaults, additions, refusals."""


class ServedTools:
    """What becomes of a row's tools.

    Raises:
        UsageError: sglang is there, but not its class.
    """

    def __init__(self) -> None:
        self._tool: Any = _installed_class()

    def __call__(self, tools: list[Any]) -> list[dict[str, Any]]:
        """Tools as the template gets them.

        Raises:
            RowError: The class refuses one.
        """
        if self._tool is None:
            _warn_once()
        return [self._written(_wrapped(tool)) for tool in tools]

    def _written(self, tool: dict[str, Any]) -> dict[str, Any]:
        if self._tool is None:
            return _with_four_keys(tool)
        try:
            written: dict[str, Any] = self._tool.model_validate(tool).model_dump()
        except ValueError as error:  # pydantic's
            raise RowError(f"sglang refuses a tool: {error}") from error
        return written

    @cached_property
    def form(self) -> str:
        """A digest of what is done."""
        answers = []
        for probe in PROBES:
            try:
                answers.append(json.dumps(self._written(probe)))  # in the order of its keys
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
        f"sglang is installed, but {PROTOCOL}.Tool, which says how tools reach a template in miles,"
        f" cannot be imported: {reason}"
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
