"""A stand-in for sglang's `Tool` class, by version.

For the tools of these tests, the four return what the class itself returns at its commits of June
2025, of September 2025 (a function must have a name), of April 2026 (``defer_loading``) and in
release 0.5.23 (keys stay in the row's order, ``strict`` only where it is given).
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.openai")
PROTOCOL = "sglang.srt.entrypoints.openai.protocol"


class Tool:
    """Of June 2025."""

    needs_name = False
    strict_values: tuple[Any, ...] = (True, False, "true", "false")

    def __init__(self, dumped: dict[str, Any]) -> None:
        self.dumped = dumped

    def model_dump(self) -> dict[str, Any]:
        return self.dumped

    @classmethod
    def model_validate(cls, tool: Any) -> Tool:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or (cls.needs_name and "name" not in function):
            raise ValueError("1 validation error for Tool")
        if not isinstance(function.get("description"), str | None):
            raise ValueError("1 validation error for Tool: description")
        if function.get("strict", False) not in cls.strict_values:
            raise ValueError("1 validation error for Tool: strict")
        return cls({"type": tool.get("type", "function"), "function": cls.function(function)})

    @classmethod
    def function(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {
            "description": given.get("description"),
            "name": given.get("name"),
            "parameters": given.get("parameters"),
            "strict": given.get("strict", False) in (True, "true"),
        }


class NamedTool(Tool):
    """Of September 2025."""

    needs_name = True


class DeferredTool(NamedTool):
    """Of April 2026."""

    @classmethod
    def model_validate(cls, tool: Any) -> Tool:
        made = super().model_validate(tool)
        stated = tool.get("defer_loading")
        own = tool["function"].get("defer_loading")
        own = stated if own is None else own
        if own is not None:
            made.dumped["function"]["defer_loading"] = own
        made.dumped["defer_loading"] = stated
        return made


class OrderedTool(DeferredTool):
    """Of release 0.5.23."""

    strict_values = (*Tool.strict_values, None)

    @classmethod
    def model_validate(cls, tool: Any) -> Tool:
        made = super().model_validate(tool)
        given, written = tool["function"], made.dumped["function"]
        if given.get("strict") is None:
            del written["strict"]
        order = [*(name for name in given if name in written), *written]
        made.dumped["function"] = {name: written[name] for name in order}
        return made


def install(monkeypatch: pytest.MonkeyPatch, tool: Any) -> None:
    """Make sglang importable with this class; None: not importable."""
    for name in (*PACKAGES, PROTOCOL):
        module = None if tool is None else types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    if tool is not None:
        sys.modules[PROTOCOL].Tool = tool  # type: ignore[attr-defined]
