"""From rows to rendered text and proven spans.

`ChatSpec` says how rows are shaped and what is trained; `Renderer` turns parsed rows into texts
with the character spans that are to be trained, or rejects them with a reason; `PromptRenderer`
renders conversations that a model is to go on with. The rooms above
hand over plain values and get plain values back; nothing here reads a file or knows a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.chat.prompts import PromptRenderer
    from tokenmill.chat.render import Renderer, Rendering
    from tokenmill.chat.spec import RENDERER_VERSION, ChatSpec

_HOMES = {
    "RENDERER_VERSION": "spec",
    "ChatSpec": "spec",
    "PromptRenderer": "prompts",
    "Renderer": "render",
    "Rendering": "render",
}

__all__ = ["RENDERER_VERSION", "ChatSpec", "PromptRenderer", "Renderer", "Rendering"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
