"""From rows to rendered text and proven spans.

`ChatSpec` says how rows are shaped and what is trained; `Renderer` turns parsed rows into texts
with the character spans that are to be trained, or rejects them with a reason, and renders
conversations that a model is to go on with. The rooms above hand over plain values and get
plain values back; nothing here reads a file or knows a token.

Importing this package loads no template engine: a parent that only plans needs `ChatSpec` alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tokenmill.chat.spec import GROUPED, RENDERER_VERSION, ChatSpec

if TYPE_CHECKING:
    from tokenmill.chat.render import Renderer, Rendering

_HOMES = {"Renderer": "render", "Rendering": "render"}

__all__ = ["GROUPED", "RENDERER_VERSION", "ChatSpec", "Renderer", "Rendering"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
