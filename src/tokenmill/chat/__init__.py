"""Render rows to text and find the characters to train.

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
