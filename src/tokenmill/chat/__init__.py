"""From rows to rendered text and proven spans.

`ChatSpec` says how rows are shaped and what is trained. `Renderer` turns parsed rows into texts
with the character spans that are trained, or rejects them with a reason, and renders conversations
for a model to continue. Nothing here reads a file or knows a token.

Importing this package loads no template engine: a parent that only plans needs `ChatSpec` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill._core.optional import first_use
from tokenmill.chat.spec import GROUPED, RENDERER_VERSION, ChatSpec

if TYPE_CHECKING:
    from tokenmill.chat.render import Renderer, Rendering

__all__ = ["GROUPED", "RENDERER_VERSION", "ChatSpec", "Renderer", "Rendering"]

__getattr__ = first_use(__name__, render="Renderer Rendering")
